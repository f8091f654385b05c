"""What a run's directory says of it."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import pytest

from megarl import cli
from megarl.errors import ConfigError, TrainError
from megarl.observability.console import Console
from megarl.observability.ending import ending_of, write_ending
from megarl.observability.status import attach, errors, look, status


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    (tmp_path / "resolved.json").write_text(json.dumps({"config": {"run": {"steps": 9}}}))
    return tmp_path


def beat(
    run: Path, role: str, rank: int, *, ago_s: float = 1.0, phase: str = "step/rollout", phase_s: float = 4.0,
    ended: bool = False,
) -> None:  # fmt: skip
    now = time.time() - ago_s
    record = {"role": role, "rank": rank, "pid": 7, "node": "n2", "step": 3, "version": 2, "phase": phase}
    record |= {"phase_s": phase_s, "phase_started": now - phase_s, "time": now, "ended": ended}
    (run / "logs" / f"{role}-{rank}.heartbeat.json").write_text(json.dumps(record))


def steps(run: Path, *numbers: int) -> None:
    lines = [{"step": n, "time": 0, "metrics": {"timing_s/step": 2.0, "critic/score/mean": n / 10}} for n in numbers]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_directory_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ConfigError, match=r"resolved\.json is missing"):
        look(tmp_path)
    assert cli.main(["status", str(tmp_path)]) == cli.main(["attach", str(tmp_path)]) == 2


def test_a_running_run_says_what_each_process_does(run: Path, capsys: pytest.CaptureFixture[str]):
    assert look(run).state == "starting"
    beat(run, "controller", 0)
    beat(run, "actor", 10, phase="idle", phase_s=0)
    beat(run, "actor", 9, ago_s=3, phase="update_policy", phase_s=7)
    steps(run, 1, 2)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "tim')
    (run / "logs" / "attempt-1").mkdir()
    assert cli.main(["status", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"run {run}: running, attempt 2, step 2 of 9"
    assert "seconds a step, latest 2: 2.0" in lines
    assert [line.split()[:2] for line in lines[-3:]] == [["controller", "0"], ["actor", "9"], ["actor", "10"]]
    assert lines[-2].split() == ["actor", "9", "n2", "update_policy", "10", "s", "3", "s"]


def test_a_controller_that_is_not_heard_is_not_running(run: Path):
    beat(run, "controller", 0, ago_s=100)
    assert "was last heard 100 s ago in step/rollout" in status(run)
    assert look(run).state == "silent"


def test_a_run_that_ended_says_why_and_one_that_finished_has_finished(run: Path):
    beat(run, "controller", 0, ago_s=100)
    (run / "summary.json").write_text("{}")
    assert look(run).state == "finished"
    write_ending(run / "ending.json", ending_of(TrainError("loss is nan"), 11))
    assert "ended: TrainError: loss is nan | exit code 11" in status(run)


def test_a_run_whose_controller_has_ended_has_finished_at_once(run: Path):
    beat(run, "controller", 0)
    (run / "summary.json").write_text("{}")
    assert look(run).state == "running"  # it is closing
    beat(run, "controller", 0, ended=True)
    assert look(run).state == "finished"


def test_a_run_that_goes_on_in_a_directory_with_an_older_summary_is_running(run: Path):
    (run / "summary.json").write_text("{}")
    beat(run, "controller", 0)
    assert look(run).state == "running"


LOG_0 = """\
2026-11-30 01:00:02,000 INFO    [actor 0 step 3] megarl.train: quiet
2026-11-30 01:00:03,000 ERROR   [actor 0 step 3] megarl.controller.dispatch: update_policy failed
Traceback (most recent call last):
  File "x.py", line 3, in f
RuntimeError: Connection closed by peer
2026-11-30 01:00:04,000 INFO    [actor 0] megarl.train: quiet
KeyError: printed by nobody
"""
LOG_1 = """\
2026-11-30 01:00:01,500 WARNING [actor 1 step 3] megarl.train.megarl: slow
2026-11-30 01:00:02,500 ERROR   [actor 1 step 3] megarl.controller.dispatch: update_policy failed
Traceback (most recent call last):
torch.OutOfMemoryError: CUDA out of memory
"""


def test_errors_of_all_processes_are_merged_by_time_with_their_exceptions(run: Path):
    (run / "logs" / "actor-0.log").write_text(LOG_0)
    (run / "logs" / "actor-1.log").write_text(LOG_1)
    assert errors(run / "logs") == [
        "2026-11-30 01:00:01,500 WARNING [actor 1 step 3] slow",
        "2026-11-30 01:00:02,500 ERROR [actor 1 step 3] update_policy failed | "
        "torch.OutOfMemoryError: CUDA out of memory",
        "2026-11-30 01:00:03,000 ERROR [actor 0 step 3] update_policy failed | RuntimeError: Connection closed by peer",
    ]
    shown = status(run, num_errors=1)
    assert "the latest 1 of 3" in shown and "CUDA out of memory" not in shown
    assert status(run, num_errors=0).endswith("the latest 0 of 3:")


def test_attached_one_sees_each_step_once_and_the_end(run: Path):
    beat(run, "controller", 0)
    steps(run, 1, 2)
    output = io.StringIO()
    moments = iter(
        [
            lambda: steps(run, 1, 2, 3),
            lambda: (run / "logs" / "actor-1.log").write_text(LOG_1),
            lambda: write_ending(run / "ending.json", ending_of(TrainError("loss is nan"), 11)),
        ]
    )
    last = attach(run, Console("plain", 9, stream=output), sleep=lambda _: next(moments)())
    assert last.state == "ended" and last.ending is not None
    lines = output.getvalue().splitlines()
    assert [line.split(" |")[0] for line in lines if line.startswith("step")] == ["step 1/9", "step 2/9", "step 3/9"]
    assert sum("CUDA out of memory" in line for line in lines) == 1


def test_attached_one_sees_a_line_that_comes_late_and_a_run_that_goes_back(run: Path):
    beat(run, "controller", 0)
    steps(run, 1, 2, 3)
    (run / "logs" / "actor-0.log").write_text(LOG_0)
    output = io.StringIO()

    def end() -> None:
        (run / "summary.json").write_text("{}")
        beat(run, "controller", 0, ended=True)

    moments = iter([lambda: (run / "logs" / "actor-1.log").write_text(LOG_1), lambda: steps(run, 1), end])
    assert attach(run, Console("plain", 9, stream=output), sleep=lambda _: next(moments)()).state == "finished"
    lines = output.getvalue().splitlines()
    assert [line.split(" |")[0] for line in lines if line.startswith("step")] == [
        "step 1/9", "step 2/9", "step 3/9", "step 1/9",
    ]  # fmt: skip
    assert sorted(line.split()[1] for line in lines if "[actor" in line) == [
        "01:00:01,500", "01:00:02,500", "01:00:03,000",
    ]  # fmt: skip


def test_attaching_to_a_run_whose_controller_fell_silent_is_a_failure(run: Path, capsys: pytest.CaptureFixture[str]):
    beat(run, "controller", 0, ago_s=100)
    assert cli.main(["attach", str(run)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == f"run {run}: silent"


def test_attaching_to_a_run_that_ended_has_its_exit_code(run: Path, capsys: pytest.CaptureFixture[str]):
    write_ending(run / "ending.json", ending_of(TrainError("loss is nan"), 11))
    assert cli.main(["attach", str(run)]) == 11
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == ["ended: TrainError: loss is nan | exit code 11", f"run {run}: ended"]
