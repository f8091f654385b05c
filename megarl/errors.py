"""The error tree: every failure a user can meet, with what was expected, what was found, where, and the fix.

    MegarlError                     exit code 1
    ├── ConfigError                 2   a key, value or combination of values in the configuration
    ├── SetupError                  3   a missing or wrong package, device, file system or port
    ├── DataError                   4   a dataset, prompt, tokenizer or batch field
    ├── ModelError                  5   a Hugging Face configuration or checkpoint that cannot be represented or read
    │   └── LayoutError             5   a model that does not divide into the layout, or a name that no rule matches
    ├── PlanError                   6   copies between two layouts that do not cover each other
    ├── SyncError                   7   a weight update that did not commit
    ├── CheckpointError             8   a checkpoint that cannot be written, read or trusted
    ├── RolloutError                9   generation
    ├── RewardError                10   scoring
    ├── TrainError                 11   forward, backward or optimizer step
    ├── WorkerError                12   a worker process died or raised something unforeseen
    │   ├── NodeError              13   a node of the job was lost
    │   └── HangError              14   a call did not end within its time
    └── StoppedError               75   the run was told to stop; the same command goes on where it stopped

Invariants:
1. Every class survives pickling with all its fields: a Ray error must not hide ours.
2. ``str(error)`` is the problem, then ``[where]``, then ``Fix: ...``; all on one line, so that logs stay greppable.
3. The class decides the exit code of the command.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar


class MegarlError(Exception):
    """A failure megarl foresaw.

    Args:
        problem: what was expected and what was found, in one sentence.
        where: file, key, tensor, or role and rank the problem was met at.
        fix: what the user can do about it.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, problem: str, *, where: str | None = None, fix: str | None = None) -> None:
        super().__init__(problem)
        self.problem = problem
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        text = self.problem
        if self.where:
            text += f" [{self.where}]"
        if self.fix:
            text += f" Fix: {self.fix}"
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's own __reduce__ replays positional arguments only and would lose the keyword fields.
        return (_rebuild, (type(self), self.__dict__))


def _rebuild(cls: type[MegarlError], state: dict[str, Any]) -> MegarlError:
    error = cls.__new__(cls)
    Exception.__init__(error, state["problem"])
    error.__dict__.update(state)
    return error


class ConfigError(MegarlError):
    """One or more violations of the configuration, all of them reported at once."""

    exit_code = 2

    def __init__(
        self, problem: str, *, where: str | None = None, fix: str | None = None, violations: Sequence[str] = ()
    ) -> None:
        super().__init__(problem, where=where, fix=fix)
        self.violations = tuple(violations)

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *(f"  - {violation}" for violation in self.violations)])


class SetupError(MegarlError):
    """The machine or its packages are not what the run needs."""

    exit_code = 3


class DataError(MegarlError):
    """A dataset, prompt, tokenizer or batch field is not what its consumer needs."""

    exit_code = 4


class ModelError(MegarlError):
    """A Hugging Face configuration or checkpoint cannot be represented or read."""

    exit_code = 5


class LayoutError(ModelError):
    """A model does not divide into a parallel layout, or a weight name is matched by no rule or by two."""


class PlanError(MegarlError):
    """Copies between two layouts leave a gap, overlap, or disagree about a shape."""

    exit_code = 6


class SyncError(MegarlError):
    """A weight update did not commit; the engines concerned refuse to sample until a full sync succeeds."""

    exit_code = 7


class CheckpointError(MegarlError):
    """A checkpoint cannot be written, read or trusted."""

    exit_code = 8


class RolloutError(MegarlError):
    """Generation failed or returned something inconsistent."""

    exit_code = 9


class RewardError(MegarlError):
    """A reward source cannot be loaded, or scoring failed beyond what the configuration tolerates."""

    exit_code = 10


class TrainError(MegarlError):
    """A forward pass, backward pass or optimizer step failed."""

    exit_code = 11


class WorkerError(MegarlError):
    """A worker process died or raised something unforeseen.

    Args:
        role: actor, critic, reference, rollout or reward.
        rank: rank inside the role.
        phase: phase of the step it happened in.
        cause: the root cause in one line.
        fix: what the user can do about it.
        node: the node it ran on, where there are several.
    """

    exit_code = 12

    def __init__(
        self, *, role: str, rank: int | None, phase: str, cause: str, fix: str | None = None, node: str | None = None
    ) -> None:
        who = f"{role} rank {rank if rank is not None else '?'}{f' on {node}' if node else ''}"
        super().__init__(f"{who} failed in phase {phase}: {cause}", fix=fix)
        self.role = role
        self.rank = rank
        self.phase = phase
        self.cause = cause
        self.node = node


class NodeError(WorkerError):
    """A process ended because its node was lost; the run itself may be sound."""

    exit_code = 13


class HangError(WorkerError):
    """A call on a process did not end within its time."""

    exit_code = 14


class StoppedError(MegarlError):
    """The run was told to stop (SIGUSR1) and has stopped; the same command goes on where it stopped.

    The code is EX_TEMPFAIL of sysexits.h: try again.
    """

    exit_code = 75
