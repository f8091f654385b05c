"""A job from its first process to its outcome, with shell commands in the place of Ray and the driver."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# In a process of its own: the launcher adopts and ends its descendants, and takes signals.
JOB = """
import json, os, sys
from pathlib import Path
from megarl.launch.plan import Plan
from megarl.launch.ray_cluster import run
from megarl.launch.slurm import Allocation
folder, given = Path(sys.argv[1]), json.loads(sys.argv[2])
def shell(name):
    return ("bash", "-c", given[name], name, str(folder))
plan = Plan(Allocation(7, "try", ("n1", "n2"), cpus=1, gpus=0), "10.0.0.1:20000", folder / "logs", ("true",),
            head=shell("head"), workers=shell("workers"), barrier=shell("barrier"), driver=shell("driver"),
            stop_within_s=given["stop_within_s"])
outcome = run(plan, dict(os.environ), grace_s=1.5, loss_s=given["loss_s"])
print(json.dumps([outcome.code, outcome.cause.value, outcome.text]))
"""

# As node.py does: end on the signals that end a node.
NODE = "trap 'exit 0' TERM USR1; while true; do sleep 0.05; done"
READY = 'touch "$1/ready"; '
WAIT = "while true; do sleep 0.05; done"


class Job:
    def __init__(self, folder: Path, **commands: object) -> None:
        self.folder = folder
        given = {
            "head": NODE,
            "workers": NODE,
            "barrier": "echo 2 nodes joined",
            "driver": "true",
            "stop_within_s": None,
            "loss_s": 0.2,
        }
        arguments = [sys.executable, "-c", JOB, str(folder), json.dumps(given | commands)]
        self.process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)

    def send(self, number: signal.Signals) -> None:
        end = time.monotonic() + 30
        while not (self.folder / "ready").exists():
            assert time.monotonic() < end
            time.sleep(0.02)
        self.process.send_signal(number)

    def outcome(self) -> tuple[int, str, str]:
        output, _ = self.process.communicate(timeout=60)
        code, cause, text = json.loads(output.splitlines()[-1])
        return code, cause, text


@pytest.fixture
def start(tmp_path: Path):
    jobs = []

    def begin(**commands: object) -> Job:
        jobs.append(Job(tmp_path, **commands))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.process.kill()
        job.process.wait()


def test_the_drivers_own_account_is_the_outcome(start):
    account = {
        "kind": "TrainError", "exit_code": 11, "problem": "loss is nan", "fix": None, "role": "actor", "rank": 0,
        "node": "n1", "phase": "step/update_actor", "step": 4, "time": 0.0,
    }  # fmt: skip
    driver = f"echo '{json.dumps(account)}' > \"$MEGARL_ENDING\"; exit 11"
    assert start(driver=driver).outcome() == (
        11, "run", "TrainError: loss is nan (actor rank 0 on n1, phase step/update_actor, step 4) | exit code 11",
    )  # fmt: skip


def test_a_lost_node_is_named_by_srun_and_the_driver_gets_time_to_say_what_it_saw(start):
    workers = READY + "sleep 0.3; echo 'srun: error: n2: task 0: Exited with exit code 1' >&2; exit 1"
    driver = f"trap 'exit 0' TERM; {WAIT}"
    code, cause, text = start(workers=workers, driver=driver).outcome()
    assert (code, cause) == (13, "node")
    assert text.startswith("lost node n2: its Ray ended (exit code 1); see its log")


# What srun says of a node without a daemon, and of one that is there.
SRUN = """#!/bin/bash
[[ "$*" == *--nodelist=n2* ]] || exit 0
echo 'srun: error: Task launch for StepId=7.9 failed on node n2: refused' >&2
exit 1
"""


@pytest.mark.parametrize(("node", "code", "cause"), [("n2", 13, "node"), ("n1", 12, "run")])
def test_a_process_that_died_with_its_node_is_the_nodes_failure(
    start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: str, code: int, cause: str
):
    """srun keeps silent about the step there for minutes; asked for another one it says what is wrong."""
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    account = {
        "kind": "WorkerError", "exit_code": 12, "problem": "killed", "fix": None, "role": "actor", "rank": 1,
        "node": node, "phase": "save", "step": 4, "time": 0.0,
    }  # fmt: skip
    driver = f"echo '{json.dumps(account)}' > \"$MEGARL_ENDING\"; exit 12"
    found = start(driver=driver).outcome()
    assert found[:2] == (code, cause)
    assert (f"lost node {node}: " in found[2]) == (cause == "node")
    assert f"WorkerError: killed (actor rank 1 on {node}, phase save, step 4)" in found[2]
    assert ("exit code" in found[2]) == (cause == "run")  # the job's is another one where its node was lost


def test_a_driver_that_fails_because_its_node_is_going_is_the_nodes_failure(start):
    workers = 'while [[ ! -e "$1/failed" ]]; do sleep 0.05; done; sleep 0.5; exit 1'
    code, cause, text = start(workers=workers, driver='touch "$1/failed"; exit 12', loss_s=10.0).outcome()
    assert (code, cause) == (13, "node") and text.startswith("lost a node among n2")


def test_a_run_that_finished_before_its_node_went_has_finished(start):
    workers = 'while [[ ! -e "$1/failed" ]]; do sleep 0.05; done; exit 1'
    assert start(workers=workers, driver='touch "$1/failed"; sleep 0.5').outcome()[:2] == (0, "done")


def test_sigusr1_goes_to_the_driver_whose_code_is_the_outcome(start):
    job = start(driver=f"trap 'exit 75' USR1; {READY}{WAIT}", stop_within_s=30.0)
    job.send(signal.SIGUSR1)
    assert job.outcome()[:2] == (75, "stop")


def test_sigusr1_before_the_driver_stops_the_launch(start):
    job = start(barrier=READY + WAIT)
    job.send(signal.SIGUSR1)
    assert job.outcome() == (75, "stop", "told to stop before the driver started")


def test_a_driver_that_does_not_answer_to_sigusr1_is_ended_in_time(start):
    job = start(driver=f"trap '' USR1; {READY}{WAIT}", stop_within_s=-10.0)
    job.send(signal.SIGUSR1)
    code, cause, text = job.outcome()
    assert (code, cause) == (75, "stop") and "was killed" in text


@pytest.mark.parametrize(("within_s", "code"), [(0.0, 75), (60.0, 7)])
def test_an_error_is_the_stops_only_once_the_time_is_over(start, within_s: float, code: int):
    job = start(driver=f"trap 'sleep 0.2; exit 7' USR1; {READY}{WAIT}", stop_within_s=within_s)
    job.send(signal.SIGUSR1)
    assert job.outcome()[0] == code


def test_a_signal_to_end_is_the_drivers_and_after_a_grace_the_launchers(start):
    job = start(driver=f"trap '' INT TERM; {READY}{WAIT}")
    job.send(signal.SIGTERM)
    code, cause, text = job.outcome()
    assert (code, cause) == (143, "cancel") and "SIGTERM" in text


@pytest.mark.parametrize("code", [143, 15])
def test_a_cancelled_job_has_lost_no_node_though_the_node_ends_first(start, code: int):
    workers = f'while [[ ! -e "$1/up" ]]; do sleep 0.05; done; {READY}exit 1'
    job = start(workers=workers, driver=f"trap 'exit {code}' TERM; touch \"$1/up\"; {WAIT}", loss_s=10.0)
    time.sleep(0.5)
    job.send(signal.SIGTERM)
    assert job.outcome()[:2] == (143, "cancel")


def test_a_driver_that_fails_on_the_signal_that_ends_it_was_cancelled(start):
    job = start(driver=f"trap 'exit 15' TERM; {READY}{WAIT}")
    job.send(signal.SIGTERM)
    assert job.outcome() == (143, "cancel", "SIGTERM | the driver ended with exit code 15")


@pytest.mark.parametrize(("state", "code"), [("DOWN*", 13), ("MIXED", 143)])
def test_a_job_that_slurm_ends_because_it_gave_a_node_up_has_lost_the_node(
    start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, code: int
):
    (tmp_path / "scontrol").write_text(f'#!/bin/bash\necho "NodeName=$4 Arch=x86_64 State={state} Weight=1"\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    job = start(driver=f"trap 'exit 143' TERM; {READY}{WAIT}")
    job.send(signal.SIGTERM)
    found = job.outcome()
    assert found[:2] == (code, "cancel") and "the driver ended with exit code 143" in found[2]
    assert found[2].startswith("lost node n2: Slurm calls it down") == (code == 13)


def test_a_cluster_that_does_not_come_up_says_what_the_barrier_said(start):
    code, cause, text = start(barrier="echo 1 of 2 nodes did not join within 8 s: n2 >&2; exit 3").outcome()
    assert (code, cause) == (3, "join")
    assert text.startswith("1 of 2 nodes did not join within 8 s: n2 | do: ")
    code, cause, text = start(barrier=WAIT, head="exit 9").outcome()
    assert (code, cause) == (3, "join") and text.startswith("the head node: Ray ended before the cluster was up")
