"""A job's attempt from the outside: its exit code, the last line of its output, and what Slurm is asked afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.config.load import load_train
from megarl.errors import SetupError
from megarl.launch import __main__ as launcher
from megarl.launch import slurm
from megarl.launch.slurm import Allocation
from megarl.launch.verdict import Cause, Outcome
from megarl.planning.doctor import Diagnosis
from megarl.planning.storage import check_resume
from tests.architecture.source import ROOT
from tests.unit.planning.models import write_checkpoint

SCRIPT = str(ROOT / "scripts/slurm/grpo_tiny.sh")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A job of two nodes, requeued twice before; requeues that Slurm is asked for."""
    calls: list[tuple[Any, ...]] = []
    job = Allocation(4711, "grpo_tiny", ("n1", "n2"), cpus=2, gpus=0, restarts=2)
    monkeypatch.setattr(slurm, "from_environment", lambda variables: job)
    monkeypatch.setattr(slurm, "requeue", lambda job_id, without=(): calls.append((job_id, *without)))
    return calls


def end_with(outcome: Outcome, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(launcher, "_attempt", lambda *unused: outcome)
    return launcher.main(["--script", SCRIPT, "exec", "true"])


def test_a_wrong_configuration_is_the_last_line_and_is_not_requeued(asked, capsys: pytest.CaptureFixture[str]):
    assert launcher.main(["--script", SCRIPT, "train", "grpo_tiny", "run.stepz=3"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("megarl: grpo_tiny (4711), attempt 3 | run.stepz: ")
    assert "did you mean run.steps" in last
    assert last.endswith("| exit code 2 | not requeued: cause 'config' is none of MEGARL_REQUEUE_ON")
    assert not asked


def test_a_cause_worth_it_is_requeued_without_the_bad_nodes(asked, monkeypatch, capsys: pytest.CaptureFixture[str]):
    assert end_with(Outcome(13, Cause.NODE, "node n2: 7 of 8 GPUs", bad_nodes=("n2",)), monkeypatch) == 13
    assert capsys.readouterr().err.splitlines()[-1] == (
        "megarl: grpo_tiny (4711), attempt 3 | node n2: 7 of 8 GPUs | exit code 13 | requeued: restart 3 of 10"
    )
    assert asked == [(4711, "n2")]


def test_what_slurm_refuses_is_said_last(asked, monkeypatch, capsys: pytest.CaptureFixture[str]):
    def refuse(job_id: int, without: Any = ()) -> None:
        raise SetupError("scontrol requeue 4711 does not answer")

    monkeypatch.setattr(slurm, "requeue", refuse)
    assert end_with(Outcome(75, Cause.STOP, "told to stop"), monkeypatch) == 75
    assert "| exit code 75 | not requeued: scontrol requeue 4711" in capsys.readouterr().err.splitlines()[-1]


def test_a_wrong_setting_ends_the_job_before_anything_starts(asked, monkeypatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("MEGARL_REQUEUE_ON", "often")
    assert end_with(Outcome(0, Cause.DONE, "finished"), monkeypatch) == SetupError.exit_code
    assert "MEGARL_REQUEUE_ON=often" in capsys.readouterr().err.splitlines()[-1]
    assert not asked


def test_a_job_that_slurm_queued_again_itself_stays_within_its_budget(asked, monkeypatch, capsys):
    monkeypatch.setenv("MEGARL_REQUEUES", "1")
    assert end_with(Outcome(0, Cause.DONE, "finished"), monkeypatch) == 13
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith("| exit code 13 | not requeued: 2 of 1 restarts are used (MEGARL_REQUEUES)")
    assert "attempt 3 | Slurm has queued the job again by itself" in last and not asked


def test_the_run_gets_the_nodes_it_wants_and_the_pre_flight_all(asked, monkeypatch, tmp_path: Path):
    seen: dict[str, tuple[str, ...]] = {}
    monkeypatch.setenv("MEGARL_NODES", "1")
    monkeypatch.setenv("MEGARL_LOG_DIR", str(tmp_path))
    monkeypatch.setattr(slurm, "address", lambda node: "127.0.0.1")

    def inspect(plan: Any, wanted: int, environment: Any) -> tuple[str, ...]:
        seen["inspected"] = plan.allocation.nodes
        return ("n1", "n2")

    def run(plan: Any, environment: Any) -> Outcome:
        seen["run"] = plan.allocation.nodes
        return Outcome(0, Cause.DONE, "finished")

    monkeypatch.setattr(launcher, "inspect_nodes", inspect)
    monkeypatch.setattr(launcher.ray_cluster, "run", run)
    assert launcher.main(["--script", SCRIPT, "exec", "true"]) == 0
    assert seen == {"inspected": ("n1", "n2"), "run": ("n1",)}
    monkeypatch.setenv("MEGARL_PREFLIGHT", "off")
    seen.clear()
    assert launcher.main(["--script", SCRIPT, "exec", "true"]) == 0
    assert seen == {"run": ("n1",)}


@pytest.mark.parametrize("resume", ["never", "gone/checkpoints/step_000001"])
def test_the_doctor_of_a_restart_judges_what_its_driver_is_given(asked, monkeypatch, tmp_path: Path, resume: str):
    """The words of the first attempt would be refused: there are checkpoints now, or that one is gone."""
    write_checkpoint(tmp_path / "run", step=1)
    given: dict[str, tuple[str, ...]] = {}

    def diagnose(preset: str, overrides: Any, **unused: Any) -> Diagnosis:
        given["doctor"] = tuple(overrides)
        config = load_train(preset, overrides).config
        return Diagnosis(preset, list(check_resume(config)))

    def run(plan: Any, environment: Any) -> Outcome:
        given["driver"] = tuple(plan.driver)
        return Outcome(0, Cause.DONE, "finished")

    monkeypatch.setattr(launcher, "diagnose", diagnose)
    monkeypatch.setattr(launcher.ray_cluster, "run", run)
    monkeypatch.setattr(slurm, "address", lambda node: "127.0.0.1")
    monkeypatch.setenv("MEGARL_PREFLIGHT", "off")
    monkeypatch.setenv("MEGARL_LOG_DIR", str(tmp_path))
    words = ["train", "grpo_tiny", f"run.dir={tmp_path / 'run'}", f"run.resume={resume}"]
    assert launcher.main(["--script", SCRIPT, *words]) == 0
    assert given["doctor"][-1] == "run.resume=auto" and "run.resume=auto" in given["driver"]
    assert given["driver"].index("run.resume=auto") > given["driver"].index(f"run.resume={resume}")
    job = Allocation(4711, "grpo_tiny", ("n1", "n2"), cpus=2, gpus=0)
    monkeypatch.setattr(slurm, "from_environment", lambda variables: job)
    given.clear()
    assert launcher.main(["--script", SCRIPT, *words]) in (2, 8) and "driver" not in given
