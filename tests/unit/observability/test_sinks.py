"""Metric sinks: nothing of a step that is done again survives a resume."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

from megarl.errors import SetupError
from megarl.observability.sinks import JsonlSink, TensorBoardSink, WandbSink, open_sinks, read_metrics


def _log(path, steps, **options):
    sink = JsonlSink(path, **options)
    for step in steps:
        sink.log(step, {"reward": step / 2})
    sink.close()


def test_a_line_is_one_step(tmp_path):
    sink = JsonlSink(tmp_path / "run" / "metrics.jsonl")
    sink.log(1, {"reward": 0.5, "kl": math.nan, "top": math.inf})
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())  # before close: it is flushed
    assert line["step"] == 1 and line["metrics"] == {"reward": 0.5, "kl": None, "top": None} and line["time"] > 1e9
    sink.close()


def test_resuming_removes_the_steps_that_are_done_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    _log(path, range(1, 6))
    path.write_text(path.read_text() + '{"step": 6, "met')  # killed while it wrote
    _log(path, [4, 5], resume_step=3)
    assert [entry["step"] for entry in read_metrics(path)] == [1, 2, 3, 4, 5]
    _log(path, [1], resume_step=0)
    assert [entry["step"] for entry in read_metrics(path)] == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_tensorboard_reads_what_was_written_and_resumed(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, resume in ((1, None), (3, 2)):
        sink = TensorBoardSink(tmp_path, resume_step=resume)
        for step in range(first, first + 3):
            sink.log(step, {"reward": step * 10.0 + first})
        sink.close()
    reader = EventAccumulator(str(tmp_path))
    reader.Reload()
    assert [(event.step, event.value) for event in reader.Scalars("reward")] == [
        (1, 11.0),
        (2, 21.0),
        (3, 33.0),
        (4, 43.0),
        (5, 53.0),
    ]


def test_tensorboard_brings_neither_torch_nor_tensorflow(tmp_path):
    code = (
        "import sys; from pathlib import Path; from megarl.observability.sinks import TensorBoardSink; "
        f"sink = TensorBoardSink(Path({str(tmp_path)!r})); sink.log(1, {{'a': 1.0}}); sink.close(); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'tensorflow')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("module", "sink", "fix"),
    [
        ("wandb", lambda path: WandbSink("project", "run", path, {}, 5.0), "unset logging.wandb_project"),
        ("tensorboard.compat.proto", lambda path: TensorBoardSink(path), "logging.tensorboard=false"),
    ],
)
def test_a_tracker_that_is_not_installed_is_named_with_the_fix(tmp_path, monkeypatch, module, sink, fix):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SetupError, match=fix):
        sink(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_wandb_gets_steps_and_the_run_to_continue(tmp_path, monkeypatch):
    calls = []

    class Run:
        def log(self, values, step):
            calls.append(("log", step, values))

        def finish(self):
            calls.append(("finish",))

    fake = type(sys)("wandb")
    fake.Error, fake.Settings = RuntimeError, dict
    fake.init = lambda **options: calls.append(("init", options)) or Run()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    options = {"tensorboard": False, "wandb_project": "p", "wandb_timeout_s": 7}
    sinks = open_sinks(tmp_path, **options, name="r", config={"a": 1}, resume_step=4)
    sinks.log(5, {"reward": 1.0})
    sinks.close()
    assert calls[0][1]["id"] == "r" and calls[0][1]["resume"] == "allow" and calls[0][1]["config"] == {"a": 1}
    assert calls[0][1]["settings"] == {"init_timeout": 7, "finish_timeout": 7}
    assert calls[1:] == [("log", 5, {"reward": 1.0}), ("finish",)]
    assert [entry["step"] for entry in read_metrics(tmp_path / "metrics.jsonl")] == [5]


def test_a_wandb_that_does_not_answer_is_named_with_what_to_do(tmp_path, monkeypatch):
    def init(**options):
        raise RuntimeError("Run initialization has timed out after 7.0 sec")

    fake = type(sys)("wandb")
    fake.Error, fake.Settings, fake.init = RuntimeError, dict, init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with pytest.raises(SetupError, match=r"has timed out after 7\.0 sec.*logging\.wandb_timeout_s"):
        WandbSink("p", "r", tmp_path, {}, 7.0)


@pytest.mark.parametrize("refusal", [TypeError, ValueError])
def test_a_wandb_without_the_time_out_is_named_with_the_version_it_takes(tmp_path, monkeypatch, refusal):
    """Older ones refuse an unknown setting as an argument, or as pydantic does."""

    def settings(*, init_timeout, **others):
        raise refusal(f"{', '.join(others)}: extra inputs are not permitted")

    fake = type(sys)("wandb")
    fake.Error, fake.Settings, fake.__version__ = type("Error", (Exception,), {}), settings, "0.21.0"
    fake.init = lambda **options: pytest.fail("begun without its settings")
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with pytest.raises(SetupError, match=r"wandb 0\.21\.0 does not take.*finish_timeout.*wandb>=0\.27"):
        WandbSink("p", "r", tmp_path, {}, 7.0)
