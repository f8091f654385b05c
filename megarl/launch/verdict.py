"""Why a job ended, whether it is worth another attempt, and the last line of its output.

A job is requeued only for a cause that another attempt may not meet again: it was told to stop before its time limit,
it lost a node, a call of it hung. What the configuration, the data or the code is wrong about stays wrong.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from megarl.errors import ConfigError, HangError, NodeError, SetupError, StoppedError
from megarl.observability.ending import Ending

DEFAULT_REQUEUES = 10
DEFAULT_CAUSES = "stop,node,hang"


class Cause(Enum):
    """What ended a job; the values are the words of MEGARL_REQUEUE_ON."""

    DONE = "done"
    STOP = "stop"  # told to stop, before the time limit or by a preemption
    NODE = "node"  # a node was lost
    HANG = "hang"  # a call did not end within its time
    PREFLIGHT = "preflight"  # every node was found wanting before Ray started
    JOIN = "join"  # the cluster did not come up
    CONFIG = "config"  # the configuration, found before anything started
    RUN = "run"  # anything else the run itself failed at
    CANCEL = "cancel"  # SIGTERM or SIGINT


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended.

    Args:
        code: exit code of the job.
        cause: what kind of thing ended it.
        text: the cause in words.
        bad_nodes: nodes that another attempt should not get.
    """

    code: int
    cause: Cause
    text: str
    bad_nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Requeue:
    """Whether the job is put into the queue again, and why."""

    wanted: bool
    text: str


def of_driver(code: int, ending: Ending | None) -> Outcome:
    """The outcome of an attempt whose driver ended by itself.

    Args:
        code: exit code of the driver; negative for the signal that killed it.
        ending: what the driver wrote about its end, if it did.
    """
    if code == 0:
        return Outcome(0, Cause.DONE, "finished")
    if code < 0:
        number = signal.Signals(-code)
        # Before the driver is ready for it, SIGUSR1 simply ends it; nothing is lost by that.
        cause = Cause.STOP if number is signal.SIGUSR1 else Cause.RUN
        text = "the driver was told to stop before it was up" if cause is Cause.STOP else f"killed by {number.name}"
        return Outcome(StoppedError.exit_code if cause is Cause.STOP else 128 + number, cause, text)
    kinds = {
        StoppedError.exit_code: Cause.STOP,
        NodeError.exit_code: Cause.NODE,
        HangError.exit_code: Cause.HANG,
        ConfigError.exit_code: Cause.CONFIG,
        128 + signal.SIGINT: Cause.CANCEL,
        128 + signal.SIGTERM: Cause.CANCEL,
    }
    text = f"the driver ended with exit code {code}" if ending is None else ending.line()
    return Outcome(code, kinds.get(code, Cause.RUN), text)


def requeue(outcome: Outcome, restarts: int, settings: Mapping[str, str]) -> Requeue:
    """Whether another attempt follows.

    Args:
        outcome: of this attempt.
        restarts: how often the job has been requeued already.
        settings: MEGARL_REQUEUES, the most restarts; MEGARL_REQUEUE_ON, the causes that are worth one.

    Raises:
        SetupError: a setting is not what it should be.
    """
    budget, causes = limits(settings)
    if outcome.cause in (Cause.DONE, Cause.CANCEL):
        return Requeue(False, "")
    if outcome.cause not in causes:
        return Requeue(False, f"not requeued: cause '{outcome.cause.value}' is none of MEGARL_REQUEUE_ON")
    if restarts >= budget:
        return Requeue(False, f"not requeued: {restarts} of {budget} restarts are used (MEGARL_REQUEUES)")
    return Requeue(True, f"requeued: restart {restarts + 1} of {budget}")


def limits(settings: Mapping[str, str]) -> tuple[int, frozenset[Cause]]:
    """The most restarts, and the causes that are worth one. Raises SetupError."""
    count, words = settings.get("MEGARL_REQUEUES"), settings.get("MEGARL_REQUEUE_ON", DEFAULT_CAUSES)
    if count is not None and not count.isdigit():
        raise SetupError(f"MEGARL_REQUEUES={count} is no number of restarts", fix="give 0 or more, or unset it")
    possible = {cause.value: cause for cause in Cause if cause not in (Cause.DONE, Cause.CANCEL)}
    chosen = [word for word in words.replace(" ", "").split(",") if word]
    if unknown := [word for word in chosen if word not in possible]:
        raise SetupError(
            f"MEGARL_REQUEUE_ON={words}: {', '.join(unknown)} is no cause", fix=f"choose among {', '.join(possible)}"
        )
    return DEFAULT_REQUEUES if count is None else int(count), frozenset(possible[word] for word in chosen)


def last_line(job: str, outcome: Outcome, after: Requeue) -> str:
    """The last line of the job's output.

    Args:
        job: name, id and attempt.
        outcome: of the attempt.
        after: what follows.
    """
    text = outcome.text if f"exit code {outcome.code}" in outcome.text else f"{outcome.text} | exit code {outcome.code}"
    parts = [f"megarl: {job}", text, after.text]
    return " | ".join(part for part in parts if part)
