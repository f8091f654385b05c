from __future__ import annotations

import errno
import os
import signal
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from megarl import cli
from megarl.errors import ModelError, WorkerError
from megarl.planning.finding import Finding

CONFIG = """\
# A test configuration
run: {name: mini, steps: 4, dir: RUN_DIR}
cluster: {device: cpu, gpus_per_node: 0}
model: {path: models/mini}
data:
  train: [{kind: reasoning_gym, task: chain_sum, seed: 1}]
  validation: [{kind: reasoning_gym, task: chain_sum, seed: 2}]
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "mini.yaml"
    path.write_text(CONFIG.replace("RUN_DIR", str(tmp_path / "run")), encoding="utf-8")
    return str(path)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Stands for ``controller/loop.py``, whose imports (torch, ray) these tests do not need."""
    module = ModuleType("megarl.controller.loop")
    module.train = lambda loaded, forecast: 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megarl.controller.loop", module)
    monkeypatch.setattr("megarl.planning.model_fit.check_model", lambda config: [])
    monkeypatch.setattr(cli, "_forecast", lambda config: {"phases": {}})
    return module


def raising(error: BaseException):
    def train(loaded: object, forecast: object) -> int:
        raise error

    return train


def test_train_passes_the_loaded_configuration(config: str, loop: ModuleType):
    seen = []
    loop.train = lambda loaded, forecast: seen.append(loaded) or 7
    assert cli.main(["train", config, "run.steps=9", "actor.layout.tp=2"]) == 7
    assert (seen[0].config.run.steps, seen[0].config.actor.layout.tp) == (9, 2)
    assert seen[0].overrides == ("run.steps=9", "actor.layout.tp=2")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--show", "run.steps=9", "~rollout"],
        ["run.steps=9", "~rollout", "--show"],
        ["run.steps=9", "--show", "~rollout"],
    ],
)
def test_show_prints_the_resolved_configuration_and_runs_nothing(
    config: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
):
    Path(config).write_text(Path(config).read_text(encoding="utf-8") + "rollout: {tp: 2}\n", encoding="utf-8")
    assert cli.main(["train", config, *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  steps: 9  # command line: run.steps=9" in lines
    assert f"  name: mini  # {config}:2" in lines
    assert "  tp: 1  # default" in lines


def test_a_bad_configuration_is_one_message_and_exit_code_2(config: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["train", config, "run.stepz=9", "rollout.tp=0"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    assert captured.err.startswith("megarl: ConfigError: the configuration has 2 violations")
    assert "did you mean run.steps?" in captured.err and "rollout.tp: expected integer >= 1, found 0" in captured.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModelError("broken", where="x.safetensors"), 5),
        (WorkerError(role="actor", rank=3, phase="update_actor", cause="killed by signal 9"), 12),
    ],
)
def test_a_foreseen_error_gives_its_code_and_no_traceback(
    config: str, loop: ModuleType, error: Exception, code: int, capsys: pytest.CaptureFixture[str]
):
    loop.train = raising(error)
    assert cli.main(["train", config]) == code
    assert capsys.readouterr().err.splitlines() == [f"megarl: {type(error).__name__}: {error}"]


def test_an_interrupt_is_130(config: str, loop: ModuleType, capsys: pytest.CaptureFixture[str]):
    loop.train = raising(KeyboardInterrupt())
    assert cli.main(["train", config]) == 130
    assert capsys.readouterr().err == "megarl: interrupted\n"


def test_a_termination_is_143(config: str, loop: ModuleType, capsys: pytest.CaptureFixture[str]):
    loop.train = lambda loaded, forecast: os.kill(os.getpid(), signal.SIGTERM) or time.sleep(10)
    before = signal.getsignal(signal.SIGTERM)
    assert cli.main(["train", config]) == 143
    assert capsys.readouterr().err == "megarl: terminated by SIGTERM\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_unforeseen_error_leaves_its_traceback_in_the_run_and_names_the_cause_last(
    config: str, tmp_path: Path, loop: ModuleType, capsys: pytest.CaptureFixture[str]
):
    loop.train = raising(ZeroDivisionError("division by zero"))
    assert cli.main(["train", config]) == 1
    err = capsys.readouterr().err
    log = tmp_path / "run" / "crash.log"
    assert err.splitlines() == [f"megarl: ZeroDivisionError: division by zero (unforeseen; traceback: {log})"]
    assert "Traceback (most recent call last)" in log.read_text(encoding="utf-8")


@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, 3), (errno.EDQUOT, 3), (errno.EIO, 1)])
def test_a_full_disk_is_a_foreseen_end(
    config: str, tmp_path: Path, loop: ModuleType, capsys: pytest.CaptureFixture[str], number: int, code: int
):
    loop.train = raising(OSError(number, os.strerror(number)))
    assert cli.main(["train", config]) == code
    last = capsys.readouterr().err.splitlines()[-1]
    assert ("free space" in last and str(tmp_path / "run") in last) == (code == 3)


def test_without_a_run_directory_the_traceback_is_shown_first(
    config: str, tmp_path: Path, loop: ModuleType, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "run").write_text("a file is in the way", encoding="utf-8")
    loop.train = raising(ZeroDivisionError("division by zero"))
    assert cli.main(["train", config]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "megarl: ZeroDivisionError: division by zero (unforeseen; traceback: above)"


def test_a_model_that_does_not_fit_is_refused_before_the_run(
    config: str, loop: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    loop.train = raising(AssertionError("the run was started"))
    monkeypatch.setattr(
        "megarl.planning.model_fit.check_model",
        lambda config: [Finding("model", "actor.layout.tp", "expected a divisor", "set another")],
    )
    assert cli.main(["train", config]) == 2
    assert "  - actor.layout.tp: expected a divisor" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["fly"], ["train"], ["train", "x", "--shwo"], ["explain", "a", "b"]])
def test_a_bad_command_line_exits_2(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage: megarl" in capsys.readouterr().err


def test_explain_and_presets(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["explain", "rollout.tp"]) == 0
    assert "Tensor-parallel size of one engine." in capsys.readouterr().out
    assert cli.main(["explain"]) == 0
    assert "actor.layout.tp" in capsys.readouterr().out
    assert cli.main(["explain", "rolout.tp"]) == 2
    assert "did you mean" in capsys.readouterr().err
    assert cli.main(["presets"]) == 0
    printed = capsys.readouterr().out
    assert "megarl train grpo_tiny " in printed and "\n  algorithm=dapo " in printed


def test_version(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("megarl 0.")
