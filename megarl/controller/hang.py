"""The verdict on a phase that does not end: who waits where, in a file, and then the end of the run or not.

A phase is overdue at a multiple of what it took before. Every process that has not answered is then asked for its
stacks through a thread that the work does not block; of one that does not answer even there, the last heartbeat speaks.

Invariants:
1. A phase is reported once. Asking takes ``ANSWER_S`` at most, however many processes there are.
2. The suspect is who kept the others waiting: a process that does not answer, else one outside of the collective that
   most are in.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import ray
from ray.exceptions import RayError

from megarl.config.schema.run import HangConfig
from megarl.controller.dispatch import Member
from megarl.errors import HangError
from megarl.observability import stacks
from megarl.observability.heartbeat import read_beats
from megarl.observability.stacks import Stack
from megarl.observability.trace import Span, current_span

logger = logging.getLogger(__name__)

Who: TypeAlias = tuple[str, int]
"""Role and rank."""

ANSWER_S = 10.0

# Runs of a phase that its forecast is made from.
_REMEMBERED = 9


@dataclass(frozen=True, slots=True)
class Witness:
    """What is known of one process.

    Args:
        member: the process.
        stacks: of its threads; None if it did not answer.
        beat: its last heartbeat; None if there is none.
    """

    member: Member
    stacks: list[Stack] | None
    beat: Mapping[str, Any] | None

    @property
    def name(self) -> str:
        return f"{self.member.role} rank {self.member.rank}{f' on {self.member.node}' if self.member.node else ''}"

    @property
    def collective(self) -> str | None:
        """The collective it waits in."""
        return next((stack.collective for stack in self.stacks or () if stack.collective is not None), None)

    @property
    def place(self) -> str:
        """Where it is, in a few words."""
        if self.stacks is None:
            if self.beat is None:
                return "does not answer"
            return f"does not answer; last seen {self.beat['silent_s']:.0f} s ago in {self.beat['phase']}"
        if self.collective is not None:
            return f"waits in {self.collective}"
        return f"is in {self.stacks[-1].call}" if self.stacks else "does nothing"


class HangWatch:
    """Listens to the phases of a run and looks, while the run waits, whether one is overdue.

    Args:
        config: when a phase is overdue, and what follows.
        logs: the run's logs; heartbeats are there, and reports go there.
        ask: the stacks of each process that answers.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        config: HangConfig,
        logs: Path,
        ask: Callable[[Sequence[Member]], Mapping[Who, list[Stack]]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._logs = logs
        self._ask = ask_stacks if ask is None else ask
        self._clock = clock
        self._durations: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))
        self._reported: Span | None = None
        self._num_reports = 0

    def span_started(self, span: Span) -> None:
        """Nothing is known of a phase that starts."""

    def span_ended(self, span: Span) -> None:
        """Remember how long the phase took."""
        assert span.duration_s is not None
        self._durations[span.name].append(span.duration_s)

    def limit_s(self, phase: str) -> float:
        """Seconds after which the phase is overdue."""
        known = self._durations.get(phase)
        if not known:
            return self._config.timeout_s
        return min(self._config.timeout_s, max(self._config.after_s, self._config.factor * statistics.median(known)))

    def check(self, pending: Mapping[Any, Member]) -> None:
        """Called while the run waits.

        Raises:
            HangError: the phase is overdue and the run is to end.
        """
        running = current_span()
        if running is None or running is self._reported:
            return
        waited_s = self._clock() - running.started
        if waited_s <= self.limit_s(running.name):
            return
        self._reported = running
        witnesses = self._witnesses(list(pending.values()))
        path = self._write(running, waited_s, witnesses)
        suspect, why = suspect_of(witnesses)
        logger.warning("phase %s has been running for %.0f s: %s; see %s", running.name, waited_s, why, path)
        if self._config.action == "end":
            raise HangError(
                role=suspect.member.role,
                rank=suspect.member.rank,
                node=suspect.member.node,
                phase=running.name,
                cause=f"the phase did not end within {waited_s:.0f} s: {why}",
                fix=f"see {path}; if the phase is only slow, raise cluster.hang.factor or cluster.hang.after_s",
            )

    def _witnesses(self, members: Sequence[Member]) -> list[Witness]:
        answers = self._ask(members)
        beats = {(beat["role"], beat["rank"]): beat for beat in read_beats(self._logs)}
        return [Witness(member, answers.get(who := (member.role, member.rank)), beats.get(who)) for member in members]

    def _write(self, running: Span, waited_s: float, witnesses: Sequence[Witness]) -> Path:
        self._num_reports += 1
        path = self._logs / f"hang-{self._num_reports}.txt"
        lines = [f"phase {'/'.join(running.path)} has been running for {waited_s:.0f} s; waited for:"]
        lines += [f"{witness.name} {witness.place}" for witness in witnesses]
        for witness in witnesses:
            if witness.stacks:
                lines += ["", witness.name, stacks.text(witness.stacks)]
        try:
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        except OSError as error:  # a full disk must not hide who hangs
            logger.warning("cannot write %s: %s\n%s", path, error, "\n".join(lines[:20]))
        return path


def suspect_of(witnesses: Sequence[Witness]) -> tuple[Witness, str]:
    """Who kept the others waiting, and why one thinks so, in words."""
    silent = [witness for witness in witnesses if witness.stacks is None]
    if silent:
        return silent[0], f"{_names(silent)} {'does' if len(silent) == 1 else 'do'} not answer"
    waiting = Counter(witness.collective for witness in witnesses if witness.collective is not None)
    if waiting:
        common, count = waiting.most_common(1)[0]
        apart = [witness for witness in witnesses if witness.collective != common]
        if apart:
            return apart[0], f"{count} wait in {common}, and {apart[0].name} {apart[0].place}"
        return witnesses[0], f"all {count} wait in {common}"
    return witnesses[0], f"{witnesses[0].name} {witnesses[0].place}"


def _names(witnesses: Sequence[Witness]) -> str:
    names = [witness.name for witness in witnesses]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def ask_stacks(members: Sequence[Member]) -> dict[Who, list[Stack]]:
    """The stacks of every process that answers within ``ANSWER_S``."""
    calls = {member.handle.stacks.remote(): (member.role, member.rank) for member in members}
    ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=ANSWER_S)
    answers = {}
    for ref in ready:
        try:
            answers[calls[ref]] = ray.get(ref, timeout=ANSWER_S)
        except RayError as error:
            logger.warning("%s rank %d did not say where it is: %s", *calls[ref], error)
    return answers
