from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megarl import cli
from megarl.config.load import load_train
from megarl.config.schema import TrainConfig
from megarl.errors import PlanError, SetupError
from megarl.parallel.grid import ParallelLayout
from megarl.planning.finding import errors
from megarl.planning.forecast import check_memory, forecast
from megarl.planning.gpus import GPUS
from megarl.planning.known_models import known_spec
from megarl.planning.scaling import draw, scale, table
from megarl.planning.search import _outer, placement_of, search, workload

H100 = GPUS["h100"]
SMALL = known_spec("Qwen2.5-7B")


@pytest.fixture(scope="module")
def config() -> TrainConfig:
    return load_train("grpo_7b").config


def test_what_is_found_is_sorted_fits_and_is_the_configuration_with_its_overrides(config: TrainConfig):
    found = search(config, SMALL, H100, 8, workload(config))
    seconds = [candidate.time.step_s for candidate in found.candidates]
    assert len(seconds) > 5 and seconds == sorted(seconds)
    # 28 layers on 8 stages: fewer on the outer ones.
    outer = {(one.placement.layout.first_stage_layers, one.placement.layout.pp) for one in found.candidates}
    assert (2, 8) in outer and (None, 4) in outer
    for candidate in found.candidates[:3]:
        changed = load_train("grpo_7b", candidate.overrides).config
        assert placement_of(changed) == candidate.placement
        expected = forecast(changed, SMALL, SMALL, H100)
        assert not errors(check_memory(changed, expected, gpu=H100, host_bytes=None))


def test_what_does_not_fit_has_its_reason(config: TrainConfig):
    found = search(config, known_spec("Llama-3.1-70B"), H100, 8, workload(config))
    assert not found.candidates
    assert any("needs more than 95% of the device's memory" in reason for reason in found.rejected)
    uneven = search(config, SMALL, H100, 8, workload(config))
    assert any("28 attention heads, found 8" in reason for reason in uneven.rejected)


@pytest.mark.parametrize(
    ("num_layers", "pp", "outer"),
    [(94, 8, (11, 11)), (94, 4, (23, 23)), (61, 8, (7, 6)), (80, 8, None), (94, 2, None), (94, 6, None), (4, 16, None)],
)
def test_stages_that_do_not_divide_the_layers_are_smaller_outside(num_layers: int, pp: int, outer):
    assert _outer(num_layers, pp) == outer
    if outer is not None:
        layout = ParallelLayout(pp=pp, first_stage_layers=outer[0], last_stage_layers=outer[1])
        sizes = [len(layout.layers_of_stage(num_layers, stage)) for stage in range(pp)]
        assert sum(sizes) == num_layers and sizes[0] <= max(sizes) >= sizes[-1]


def test_split_and_one_step_off_are_looked_at(config: TrainConfig):
    found = search(config, SMALL, H100, 32, workload(config), one_step_off=True)
    modes = {(one.placement.colocated, one.placement.one_step_off) for one in found.candidates}
    assert modes == {(True, False), (False, False), (False, True)}


def test_a_scaling_table_has_the_best_of_each_size(config: TrainConfig):
    work = workload(config, mean_prompt=200, mean_response=1000)
    points = scale(config, SMALL, H100, [32, 8, 16], work)
    assert [point.num_gpus for point in points] == [8, 16, 32]
    seconds = [point.best.time.step_s for point in points]
    assert seconds == sorted(seconds, reverse=True)
    assert table(points).splitlines()[1].split()[3] == "100%"
    weak = scale(config, SMALL, H100, [8, 16], work, weak=True)
    assert weak[1].work.prompts == 2 * weak[0].work.prompts
    assert weak[1].best.time.step_s > points[1].best.time.step_s


def test_nothing_fits_says_why(config: TrainConfig):
    with pytest.raises(PlanError, match="no placement fits 8 GPUs: update_actor needs more than"):
        scale(config, known_spec("Llama-3.1-70B"), H100, [8], workload(config))


def test_the_drawing_is_written_twice(config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra plot)")
    points = scale(config, SMALL, H100, [8, 16], workload(config))
    png, svg = draw(points, tmp_path / "scaling", "title")
    assert png.read_bytes()[:4] == b"\x89PNG" and b"<svg" in svg.read_bytes()
    with pytest.raises(SetupError, match="cannot write"):
        draw(points, tmp_path / "nowhere" / "scaling", "title")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SetupError, match=r"megarl\[plot\]"):
        draw(points, tmp_path / "scaling", "title")


def test_plan_prints_placements_a_table_or_the_error(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert cli.main(["plan", "grpo_7b"]) == 0
    out = capsys.readouterr().out
    assert "placements fit" in out and "the first: cluster.num_nodes=1" in out
    assert cli.main(["plan", "grpo_7b", "data.prompts_per_step=256", "--gpus", "8,16", "--gpu", "h200"]) == 0
    assert "\n   16 " in capsys.readouterr().out
    assert cli.main(["plan", "--published"]) == 0
    assert "mean absolute error" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["plan", "grpo_7b", "--gpus", "12"], 2),
        (["plan", "grpo_7b", "--gpus", "eight"], 2),
        (["plan", "grpo_7b", "--gpu", "abacus"], 2),
        (["plan", "grpo_tiny"], 5),
        (["plan", "grpo_7b", "model.path=models/unknown"], 5),
    ],
)
def test_plan_refuses_what_it_cannot_plan(words: list[str], code: int, capsys: pytest.CaptureFixture[str]):
    assert cli.main(words) == code
    assert "Traceback" not in capsys.readouterr().err
