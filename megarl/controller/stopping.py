"""When a run that was told to stop (SIGUSR1) gives up what it is doing, so that saving still fits into its time.

The step under way is finished where the forecast, the median of the latest steps, leaves time to save afterwards;
otherwise it is abandoned, as late as saving allows, and what is saved is the state after the step before.

Invariants:
1. A step is abandoned only before its first update: from then on the actor's state belongs to no step.
2. At the deadline everything ends, saving included; the checkpoints that are complete by then stay.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from megarl.errors import StoppedError
from megarl.observability.trace import Span, current_span
from megarl.platform import signals

STEP, SAVE, START = "step", "save", "start"
UPDATES = frozenset({"update", "update_critic", "update_actor", "weight_sync", "export", SAVE})
"""Phases that are not abandoned: they change what a checkpoint holds, or write it."""

# Steps that the forecast of the running one is made from.
_REMEMBERED = 5


class AbandonedError(Exception):
    """The running step or evaluation is given up; the run saves the state before it and stops."""


class Stopping:
    """Listens to the phases of a run and decides, while the run waits, whether it has to give up.

    Args:
        within_s: seconds from SIGUSR1 to the deadline.
        clock: monotonic seconds.
    """

    def __init__(self, within_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._within_s = within_s
        self._clock = clock
        self._steps: deque[float] = deque(maxlen=_REMEMBERED)
        self._save_s = within_s / 3  # until one was measured
        self._step_started: float | None = None
        self._is_updated = False

    @property
    def is_asked(self) -> bool:
        """Whether the run was told to stop."""
        return signals.stop_asked() is not None

    # -- a listener of spans -----------------------------------------------------------------------------------------

    def span_started(self, span: Span) -> None:
        """Note when a step starts, and that it updates."""
        if span.name == STEP:
            self._step_started, self._is_updated = span.started, False
        elif span.name in UPDATES:
            self._is_updated = True

    def span_ended(self, span: Span) -> None:
        """Note how long steps take."""
        assert span.duration_s is not None
        if span.name == STEP:
            self._steps.append(span.duration_s)
            self._step_started = None

    def note_save(self, seconds: float) -> None:
        """Note how long a save took, the part behind the steps included."""
        self._save_s = seconds

    # -- an observer of waiting ----------------------------------------------------------------------------------------

    def check(self, pending: Mapping[Any, Any] | None = None) -> None:
        """Called while the run waits, whatever for.

        Raises:
            AbandonedError: the step cannot be finished in time, or there is none.
            StoppedError: the run has not begun its first step, or the deadline has passed.
        """
        asked = signals.stop_asked()
        if asked is None:
            return
        now = self._clock()
        running = current_span()
        phases = () if running is None else running.path
        if START in phases:
            raise StoppedError("told to stop before the first step", fix="start it again to go on")
        if now >= asked + self._within_s:
            raise StoppedError(
                f"told to stop, and did not save within {self._within_s:.0f} s",
                where=f"phase {'/'.join(phases) or 'between steps'}",
                fix="it goes on from its last checkpoint; give more time with a longer lead of --signal and "
                "run.stop_within_s, or save more often (checkpoint.every_steps)",
            )
        if not phases or UPDATES & set(phases) or (phases[0] == STEP and self._is_updated):
            return
        if now + self._left_s(phases, now) + self._save_s > asked + self._within_s:
            raise AbandonedError

    def _left_s(self, phases: tuple[str, ...], now: float) -> float:
        """Forecast of what is left of the running step; 0 where it is late or nothing is known."""
        if phases[0] != STEP or self._step_started is None or not self._steps:
            return 0.0
        return max(0.0, statistics.median(self._steps) - (now - self._step_started))
