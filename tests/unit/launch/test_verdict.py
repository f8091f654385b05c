"""What ended a job, and what follows from it."""

from __future__ import annotations

import signal

import pytest

from megarl.errors import HangError, MegarlError, NodeError, SetupError, StoppedError, TrainError, WorkerError
from megarl.launch.verdict import Cause, Outcome, Requeue, last_line, limits, of_driver, requeue
from megarl.observability.ending import ending_of

LOST = {"role": "actor", "rank": 3, "node": "n2", "phase": "update_actor", "cause": "died with its node"}


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (0, Cause.DONE),
        (StoppedError.exit_code, Cause.STOP),
        (NodeError.exit_code, Cause.NODE),
        (HangError.exit_code, Cause.HANG),
        (2, Cause.CONFIG),
        (WorkerError.exit_code, Cause.RUN),
        (TrainError.exit_code, Cause.RUN),
        (1, Cause.RUN),
        (130, Cause.CANCEL),
        (143, Cause.CANCEL),
    ],
)
def test_the_drivers_code_says_the_cause_and_is_the_jobs(code: int, cause: Cause):
    outcome = of_driver(code, None)
    assert (outcome.code, outcome.cause) == (code, cause)


def test_a_driver_that_sigusr1_ended_before_it_was_up_was_told_to_stop():
    assert of_driver(-signal.SIGUSR1, None).cause is Cause.STOP
    assert of_driver(-signal.SIGUSR1, None).code == StoppedError.exit_code
    killed = of_driver(-signal.SIGKILL, None)
    assert (killed.code, killed.cause, killed.text) == (137, Cause.RUN, "killed by SIGKILL")


@pytest.mark.parametrize(
    ("cause", "restarts", "settings", "wanted", "text"),
    [
        (Cause.STOP, 0, {}, True, "requeued: restart 1 of 10"),
        (Cause.NODE, 9, {}, True, "requeued: restart 10 of 10"),
        (Cause.HANG, 10, {}, False, "not requeued: 10 of 10 restarts are used (MEGARL_REQUEUES)"),
        (Cause.STOP, 0, {"MEGARL_REQUEUES": "0"}, False, "not requeued: 0 of 0 restarts are used (MEGARL_REQUEUES)"),
        (Cause.RUN, 0, {}, False, "not requeued: cause 'run' is none of MEGARL_REQUEUE_ON"),
        (Cause.CONFIG, 0, {}, False, "not requeued: cause 'config' is none of MEGARL_REQUEUE_ON"),
        (Cause.JOIN, 0, {"MEGARL_REQUEUE_ON": "join, stop"}, True, "requeued: restart 1 of 10"),
        (
            Cause.NODE,
            0,
            {"MEGARL_REQUEUE_ON": "join"},
            False,
            "not requeued: cause 'node' is none of MEGARL_REQUEUE_ON",
        ),
        (Cause.DONE, 0, {}, False, ""),
        (Cause.CANCEL, 0, {}, False, ""),
    ],
)
def test_a_job_is_requeued_by_cause_and_within_its_budget(
    cause: Cause, restarts: int, settings: dict[str, str], wanted: bool, text: str
):
    assert requeue(Outcome(9, cause, "x"), restarts, settings) == Requeue(wanted, text)


@pytest.mark.parametrize(
    "settings", [{"MEGARL_REQUEUES": "many"}, {"MEGARL_REQUEUES": "-1"}, {"MEGARL_REQUEUE_ON": "stop,done"}]
)
def test_wrong_settings_are_refused_with_what_is_possible(settings: dict[str, str]):
    with pytest.raises(SetupError, match="MEGARL_REQUEUE"):
        limits(settings)


def test_the_last_line_names_job_role_rank_node_phase_error_fix_code_and_what_follows():
    error: MegarlError = NodeError(**LOST, fix="look at n2")  # type: ignore[arg-type]
    outcome = of_driver(error.exit_code, ending_of(error, error.exit_code))
    line = last_line("grpo_70b (12), attempt 1", outcome, requeue(outcome, 0, {}))
    assert line == (
        "megarl: grpo_70b (12), attempt 1 | NodeError: died with its node (actor rank 3 on n2) | do: look at n2"
        " | exit code 13 | requeued: restart 1 of 10"
    )


def test_a_finished_job_says_so():
    line = last_line("x (1), attempt 2", of_driver(0, None), Requeue(False, ""))
    assert line == "megarl: x (1), attempt 2 | finished | exit code 0"
