"""How a run ended when it did not end well, as data: for `megarl status`, and for the launcher that starts it again.

A run that ends well writes ``summary.json`` instead.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megarl.errors import MegarlError
from megarl.observability.logs import context
from megarl.observability.trace import phase_of

UNFORESEEN = 1
ENDING_VARIABLE = "MEGARL_ENDING"
"""File into which a command writes how it ended, if it did not end well."""
_FIELDS = ("role", "rank", "node")


@dataclass(frozen=True, slots=True)
class Ending:
    """The failure that ended a run.

    Args:
        kind: class of the error, or name of the signal.
        exit_code: of the command.
        problem: what happened, in one line, with where.
        fix: what to do about it.
        role: role of the process that failed first; None where it was no worker.
        rank: its rank.
        node: its node, in a run on several.
        phase: phases of the controller at that time, outermost first, joined by ``/``.
        step: controller step.
        time: seconds since the epoch.
    """

    kind: str
    exit_code: int
    problem: str
    fix: str | None
    role: str | None
    rank: int | None
    node: str | None
    phase: str | None
    step: int | None
    time: float

    @property
    def account(self) -> str:
        """What happened and where: kind, problem, role, rank, node, phase, step."""
        who = "" if self.role is None else f"{self.role} rank {'?' if self.rank is None else self.rank}"
        who += f" on {self.node}" if self.node else ""
        where = [who, f"phase {self.phase}" if self.phase else "", f"step {self.step}" if self.step else ""]
        place = ", ".join(part for part in where if part)
        return f"{self.kind}: {self.problem}" + (f" ({place})" if place else "")

    def line(self) -> str:
        """The ending in one line: the account, what to do about it, the exit code."""
        fix = f" | do: {self.fix}" if self.fix else ""
        return f"{self.account}{fix} | exit code {self.exit_code}"


def ending_of(error: BaseException, exit_code: int) -> Ending:
    """What is known of an error when it ends the command with this exit code."""
    phase, fields = phase_of(error), {name: getattr(error, name, None) for name in _FIELDS}
    if isinstance(error, MegarlError):
        problem = getattr(error, "cause", error.problem) + (f" [{error.where}]" if error.where else "")
        problem = " ".join([problem, *getattr(error, "violations", ())])
        return _ending(type(error).__name__, exit_code, problem, error.fix, phase, fields)
    if isinstance(error, KeyboardInterrupt):
        return _ending("SIGINT", exit_code, "interrupted", None, phase, fields)
    number = getattr(error, "signal", None)
    if isinstance(number, signal.Signals):
        return _ending(number.name, exit_code, f"terminated by {number.name}", None, phase, fields)
    first = (str(error).splitlines() or [""])[0]
    fix = "it was not foreseen: the traceback is in crash.log in the run directory"
    return _ending(type(error).__name__, exit_code, first or "no message", fix, phase, fields)


def _ending(
    kind: str, exit_code: int, problem: str, fix: str | None, phase: str | None, fields: Mapping[str, Any]
) -> Ending:
    problem = " ".join(problem.split())
    return Ending(kind, exit_code, problem, fix, phase=phase, step=context().step, time=time.time(), **fields)


def write_ending(path: Path, ending: Ending) -> None:
    """Write it, as a whole or not at all. Raises OSError."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(asdict(ending)) + "\n")
    partial.replace(path)


def read_ending(path: Path) -> Ending | None:
    """What was written there; None where nothing was."""
    try:
        return Ending(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
