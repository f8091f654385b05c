from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megarl.config.load import load_train
from megarl.errors import ConfigError, ModelError
from megarl.models import load_spec
from megarl.parallel.grid import ParallelLayout
from megarl.planning import published
from megarl.planning.gpus import GPUS, gpu_named
from megarl.planning.known_models import KNOWN, known_spec
from megarl.planning.memory import engine_bytes
from megarl.planning.step_time import (
    DECODE_SEQUENCE_S,
    DECODE_STEP_S,
    MATMUL_SHARE,
    Placement,
    StepTime,
    Workload,
    pass_s,
    response_lengths,
    rollout_s,
    step_time,
    sync_s,
    update_s,
)
from megarl.planning.sync_plan import plan_sync
from tests.unit.planning.models import write_model

SPEC = known_spec("Llama-3.1-8B")
H100 = GPUS["h100"]
WORK = Workload(64, 8, 500.0, 1500.0, 4000)
PLACE = Placement(ParallelLayout(dp=8), 8, 1)


@pytest.mark.parametrize(("mean", "longest"), [(100.0, 400), (1500.0, 4000), (3900.0, 4000)])
def test_lengths_have_the_mean_and_end_at_the_limit(mean: float, longest: int):
    lengths = response_lengths(512, mean, longest)
    assert sum(lengths) / 512 == pytest.approx(mean, rel=1e-3)
    assert lengths == sorted(lengths) and lengths[-1] <= longest
    assert response_lengths(4, 500.0, 400) == [400.0] * 4


def test_one_sequence_takes_its_tokens_in_turn():
    work = Workload(1, 1, 10.0, 1000.0, 1000)
    seconds = rollout_s(SPEC, H100, work, replace(PLACE, replicas=1))
    weights = 2 * SPEC.num_parameters()
    per_token = weights / (0.7 * H100.memory_bytes_per_s) + DECODE_STEP_S + DECODE_SEQUENCE_S
    assert seconds == pytest.approx(1000 * per_token, rel=0.02)


def test_the_longest_response_bounds_the_rollout_however_many_engines_there_are():
    few, many = (rollout_s(SPEC, H100, WORK, replace(PLACE, replicas=replicas)) for replicas in (8, 512))
    longest = response_lengths(WORK.sequences, WORK.response_tokens, WORK.longest_response)[-1]
    assert few > many > longest * DECODE_STEP_S


def test_fewer_slots_than_sequences_take_longer():
    assert rollout_s(SPEC, H100, WORK, replace(PLACE, max_num_seqs=8)) > 2 * rollout_s(SPEC, H100, WORK, PLACE)


def test_a_pass_is_its_operations():
    place = replace(PLACE, microbatch_tokens=10**9)
    expected = SPEC.flops_per_token(2000) * WORK.tokens / 8 / (H100.peak_flops * MATMUL_SHARE)
    assert pass_s(SPEC, H100, WORK, place) == pytest.approx(expected)


def test_the_pipeline_waits_for_its_ends():
    """With m microbatches and p stages a step takes (m + p - 1) / m of the work, exchanges aside."""
    gpu = replace(H100, link_bytes_per_s=1e18, network_bytes_per_s=1e18)
    place = replace(PLACE, layout=ParallelLayout(pp=4, dp=2), microbatch_tokens=round(WORK.tokens / 2 / 16) + 1)
    flat = pass_s(SPEC, gpu, WORK, replace(PLACE, microbatch_tokens=10**9))
    assert pass_s(SPEC, gpu, WORK, place) == pytest.approx(flat * (16 + 3) / 16)


def test_a_stage_has_the_layers_of_all_its_virtual_stages():
    """Spelled evenly or with the small ones first: 4 layers a stage, and 6 where they are not shared out evenly."""
    gpu = replace(H100, link_bytes_per_s=1e18, network_bytes_per_s=1e18)
    spec = replace(SPEC, num_layers=8)

    def seconds(pipeline: str | None) -> float:
        layout = ParallelLayout(pp=2, dp=4, vpp=2, pipeline=pipeline)
        return pass_s(spec, gpu, WORK, replace(PLACE, layout=layout))

    even = seconds(None)
    assert seconds("Ett|tt|tt|ttL") == pytest.approx(even)
    assert seconds("E|t|tttt|tttL") == pytest.approx(even)
    assert seconds("Et|t|ttttt|tL") == pytest.approx(even * 6 / 4)


def test_recomputing_layers_costs_a_forward_pass():
    gpu = replace(H100, link_bytes_per_s=1e18, network_bytes_per_s=1e18, memory_bytes_per_s=1e18)
    none, full = (update_s(SPEC, gpu, WORK, replace(PLACE, recompute=mode)) for mode in ("none", "full"))
    assert full == pytest.approx(none * 4 / 3)


def test_more_updates_reduce_gradients_more_often():
    assert update_s(SPEC, H100, replace(WORK, updates=8), PLACE) > update_s(SPEC, H100, WORK, PLACE)


def test_weights_cross_the_network_unless_all_is_inside_a_node():
    inside = sync_s(SPEC, H100, PLACE)
    apart = sync_s(SPEC, H100, replace(PLACE, colocated=False))
    assert apart == pytest.approx(inside * H100.link_bytes_per_s / H100.network_bytes_per_s)


def test_one_step_off_the_longer_side_counts():
    phases = {"rollout": 30.0, "update_actor": 20.0, "old_log_probs": 5.0, "weight_sync": 1.0}
    assert StepTime(phases).step_s == 56
    assert StepTime(phases, one_step_off=True).step_s == 31
    assert StepTime({**phases, "rollout": 10.0}, one_step_off=True).step_s == 26


def test_a_critic_and_a_reference_have_their_phases():
    plain = step_time(SPEC, H100, WORK, PLACE).phases
    full = step_time(SPEC, H100, replace(WORK, reference=True, critic=True), PLACE).phases
    assert full.keys() - plain.keys() == {"ref_log_probs", "values", "update_critic"}
    assert full["turns"] > plain["turns"]


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_every_gpu_kind_names_its_sources(gpu):
    assert gpu.sources and all(gpu.sources)
    assert gpu.peak_flops > 1e14 and gpu.memory_bytes_per_s > gpu.link_bytes_per_s > gpu.network_bytes_per_s


def test_an_unknown_gpu_or_model_is_refused_with_what_there_is():
    with pytest.raises(ConfigError, match="did you mean h100"):
        gpu_named("H1000")
    with pytest.raises(ModelError, match=r"Llama-3\.1-8B"):
        known_spec("nothing")


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Llama-3.3-70B-Instruct", 70.55), ("Llama-3.1-8B", 8.03), ("Qwen3-32B", 32.76), ("Qwen2.5-7B", 7.62)],
)
def test_known_models_have_the_parameters_they_are_known_for(name: str, billions: float):
    assert known_spec(name).num_parameters() / 1e9 == pytest.approx(billions, abs=0.01)
    assert set(KNOWN) >= {run.model for run in published.RUNS}


@pytest.mark.parametrize(
    ("group", "mean", "least", "most"),
    [
        (published.DENSE, 0.074, -0.146, -0.003),
        (published.EXPERTS, 0.3645, -0.522, 0.818),
        (published.ALIGNER, 0.663, -0.692, -0.599),
    ],
)
def test_the_error_on_published_runs_is_what_the_documents_say(group: str, mean: float, least: float, most: float):
    errors = [error for _, error in published.errors(group)]
    assert sum(map(abs, errors)) / len(errors) == pytest.approx(mean, abs=0.001)
    assert (min(errors), max(errors)) == pytest.approx((least, most), abs=0.001)
    assert f"{group}: mean absolute error {mean:.0%} over {len(errors)} runs" in published.table()


def test_every_published_run_is_in_a_group():
    assert {run.group for run in published.RUNS} == set(published.GROUPS)


def test_published_runs_use_the_gpus_they_say():
    for run in published.RUNS:
        assert run.place.num_gpus == run.num_gpus, run.name


def test_an_engine_receives_what_the_plan_of_the_update_says(tmp_path: Path):
    keys = [f"model.path={write_model(tmp_path / 'model')}", "actor.layout.tp=4", "rollout.tp=2", "rollout.replicas=4"]
    config = load_train("grpo_7b", keys).config
    made = plan_sync(
        config,
        actor_hosts=["node0"] * 8,
        engine_hosts=["node0"] * 8,
        bandwidth=1e9,
        local_bandwidth=1e9,
    )
    weights, _ = engine_bytes(load_spec(config.model.path), config.rollout.tp, "bfloat16")
    assert max(made.received) == pytest.approx(weights, rel=0.001)
