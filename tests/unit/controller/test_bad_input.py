"""What a user can get wrong ends with one message and its own exit code before any process starts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megarl import cli
from megarl.models import load_spec
from megarl.models.tiny import write_tiny
from megarl.weights.files.safetensors_writer import table_of, write_hf
from megarl.weights.layout import canonical_shapes

PRESET = """\
run: {{name: bad, steps: 1, dir: {root}/run}}
cluster: {{device: cpu, gpus_per_node: 0}}
model: {{path: {root}/model, init: random}}
data:
  train: [{{kind: file, path: {root}/rows.jsonl, answer_column: answer}}]
  validation: [{{kind: file, path: {root}/held_out.jsonl, answer_column: answer}}]
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run that would start: preset, model, data."""
    write_tiny(tmp_path / "model")
    for name in ("rows", "held_out"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": "1 + 1 =", "answer": "2"}) + "\n")
    (tmp_path / "preset.yaml").write_text(PRESET.format(root=tmp_path))
    return tmp_path


def write_weights(root: Path) -> Path:
    """The model's random weights; returns their file."""
    spec = load_spec(root / "model")
    shapes = canonical_shapes(spec)
    tensors = [(name, torch.zeros(shape)) for name, shape in shapes.items()]
    write_hf(root / "weights", tensors, table_of(shapes, torch.float32), copy_from=root / "model")
    return next((root / "weights").glob("*.safetensors"))


def no_tokenizer(root: Path) -> list[str]:
    for file in (root / "model").glob("tokenizer*"):
        file.unlink()
    return []


def no_model(root: Path) -> list[str]:
    return [f"model.path={root / 'absent'}"]


def no_weights(root: Path) -> list[str]:
    return ["model.init=checkpoint"]


def truncated_weights(root: Path) -> list[str]:
    file = write_weights(root)
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 100)
    return ["model.init=checkpoint", f"model.path={root / 'weights'}"]


def no_rows(root: Path) -> list[str]:
    (root / "rows.jsonl").write_text("")
    return []


def no_file(root: Path) -> list[str]:
    (root / "rows.jsonl").unlink()
    return []


def no_prompt_column(root: Path) -> list[str]:
    (root / "rows.jsonl").write_text(json.dumps({"question": "1 + 1 =", "answer": "2"}) + "\n")
    return []


def broken_row(root: Path) -> list[str]:
    (root / "rows.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n{"prompt": "1 +')
    return []


def overrides(*texts: str) -> Callable[[Path], list[str]]:
    return lambda root: list(texts)


CASES: dict[str, tuple[Callable[[Path], list[str]], int, tuple[str, ...]]] = {
    "unknown key": (overrides("run.stepz=2"), 2, ("ConfigError", "run.stepz", "did you mean run.steps?")),
    "wrong type": (overrides("run.steps=many"), 2, ("ConfigError", "run.steps", "expected", "'many'")),
    "layout": (overrides("actor.layout.tp=3"), 2, ("ConfigError", "actor.layout.tp", "divisor", "found 3")),
    "no model": (no_model, 5, ("ModelError", "absent")),
    "no tokenizer": (no_tokenizer, 4, ("DataError", "no tokenizer", "tokenizer.json")),
    "no weights": (no_weights, 5, ("ModelError", "safetensors")),
    "truncated weights": (truncated_weights, 5, ("ModelError", "truncated", "safetensors")),
    "empty data": (no_rows, 4, ("DataError", "rows.jsonl")),
    "no data": (no_file, 4, ("DataError", "rows.jsonl")),
    "no prompt column": (no_prompt_column, 4, ("DataError", "prompt", "question", "rows.jsonl")),
    "broken row": (broken_row, 4, ("DataError", "rows.jsonl")),
}


@pytest.mark.parametrize("command", ["train", "sft"])
@pytest.mark.parametrize("case", CASES)
def test_one_message_an_exit_code_and_nothing_written(
    root: Path, command: str, case: str, capsys: pytest.CaptureFixture[str]
):
    arrange, code, said = CASES[case]
    fitting = {"train": "reward.kind=math_verify", "sft": "data.max_tokens=64"}[command]
    assert cli.main([command, str(root / "preset.yaml"), fitting, *arrange(root)]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("megarl: ") and "Traceback" not in captured.err
    for text in said:
        assert text in captured.err
    assert not (root / "run").exists()


def test_a_module_of_ones_own_is_found_where_the_run_is_started(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    (root / "own_estimator_here.py").write_text("def mine(inputs, *, scale=1.0):\n    return None\n")
    monkeypatch.chdir(root)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path not in ("", str(Path.cwd()))])
    own = ["algorithm.advantage.kind='own_estimator_here:mine'", "algorithm.advantage.options={size: 2}"]
    assert cli.main(["train", str(root / "preset.yaml"), "reward.kind=math_verify", *own]) == 2
    assert "does not take 'size'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("no_such_module:score", ("loading the reward failed", "no_such_module")),
        ("{root}/rewards.py:skore", ("no function 'skore'", "score")),
        ("{root}/absent.py:score", ("the reward's file does not exist",)),
    ],
)
def test_a_reward_that_cannot_be_loaded_ends_the_run_before_workers_start(
    root: Path, path: str, said: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    (root / "rewards.py").write_text("def score(**_):\n    return 1.0\n")
    monkeypatch.setattr("megarl.controller.cluster.Cluster.open", lambda *_, **__: pytest.fail("Ray was started"))
    reward = ["reward.kind=function", f"reward.path={path.format(root=root)}", "logging.console=off"]
    assert cli.main(["train", str(root / "preset.yaml"), *reward]) == 10
    err = capsys.readouterr().err
    assert err.startswith("megarl: RewardError: ") and all(text in err for text in said)
    # The configuration is there, to see what was asked for; nothing says that the run went anywhere.
    assert (root / "run" / "resolved.yaml").is_file()
    assert not (root / "run" / "summary.json").exists()
    assert not (root / "run" / "checkpoints").exists()
