"""Spans: named, nested, timed phases, and who listens to them.

Invariants:
1. A span ends also when its body raises; listeners see starts and ends in order, innermost first to end.
2. Durations come from the monotonic clock; start times are wall clock, so that timelines of several hosts line up.
3. Without listeners a span costs microseconds and keeps nothing.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

_PHASE = "_megarl_phase"

IDLE = "idle"
"""What ``current_phase`` says outside every span."""


@dataclass(frozen=True, slots=True)
class Span:
    """One timed phase; ``duration_s`` is None while it runs."""

    name: str
    path: tuple[str, ...]
    """Names from the outermost span to this one."""
    start_s: float
    """Wall clock, seconds since the epoch."""
    started: float
    """Monotonic clock of this process, seconds."""
    thread: int
    duration_s: float | None = None

    @property
    def depth(self) -> int:
        """0 for an outermost span."""
        return len(self.path) - 1


class Listener(Protocol):
    """Told of every span of the process, in the thread it runs in."""

    def span_started(self, span: Span) -> None: ...

    def span_ended(self, span: Span) -> None: ...


_current: ContextVar[Span | None] = ContextVar("megarl_span", default=None)
_open: list[Span] = []
_listeners: tuple[Listener, ...] = ()
_lock = threading.Lock()


@contextmanager
def span(name: str) -> Iterator[Span]:
    """Time a phase."""
    parent = _current.get()
    path = (*parent.path, name) if parent else (name,)
    running = Span(name, path, time.time(), time.monotonic(), threading.get_ident())
    token = _current.set(running)
    with _lock:
        _open.append(running)
    for listener in _listeners:
        listener.span_started(running)
    try:
        yield running
    except BaseException as error:
        if phase_of(error) is None:
            setattr(error, _PHASE, "/".join(path))
        raise
    finally:
        with _lock:
            _open.remove(running)
        _current.reset(token)
        duration_s = time.monotonic() - running.started
        ended = Span(name, path, running.start_s, running.started, running.thread, duration_s)
        for listener in _listeners:
            listener.span_ended(ended)


def phase_of(error: BaseException) -> str | None:
    """Names of the spans in which an error was first seen, outermost first and joined by ``/``; None outside of all."""
    phase: str | None = getattr(error, _PHASE, None)
    return phase


def forget_phase(error: BaseException) -> None:
    """Take away what ``phase_of`` says: the error comes from another process, whose phases are not ours."""
    error.__dict__.pop(_PHASE, None)


def current_span() -> Span | None:
    """The innermost span of this thread or task; from a thread without one, the latest one open in the process."""
    own = _current.get()
    if own is not None:
        return own
    with _lock:
        return _open[-1] if _open else None


def current_phase() -> str:
    """Name of ``current_span``, or ``idle``."""
    running = current_span()
    return running.name if running else IDLE


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tell a listener of the spans of this process while the body runs."""
    global _listeners
    with _lock:
        _listeners = (*_listeners, listener)
    try:
        yield
    finally:
        with _lock:
            _listeners = tuple(other for other in _listeners if other is not listener)


class Timeline:
    """Finished spans of one process; picklable, so that workers can send theirs to the driver.

    Args:
        role: row group in the trace.
        rank: row in it.
    """

    def __init__(self, role: str = "controller", rank: int = 0) -> None:
        self.role = role
        self.rank = rank
        self.spans: list[Span] = []

    def span_started(self, span: Span) -> None:
        """Nothing is kept of a running span."""

    def span_ended(self, span: Span) -> None:
        """Keep it."""
        self.spans.append(span)

    def take(self) -> Timeline:
        """The spans so far; this timeline goes on empty."""
        taken = Timeline(self.role, self.rank)
        taken.spans, self.spans = self.spans, []
        return taken

    def seconds(self, depth: int = 0) -> dict[str, float]:
        """Total seconds of each phase at a depth, in the order the phases first ended."""
        totals: dict[str, float] = {}
        for span in self.spans:
            if span.depth == depth and span.duration_s is not None:
                totals[span.name] = totals.get(span.name, 0.0) + span.duration_s
        return totals


def chrome_trace(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Timelines in Chrome's trace event format (ui.perfetto.dev opens it): one process a role, one thread a rank."""
    roles = list(dict.fromkeys(timeline.role for timeline in timelines))
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": role}} for pid, role in enumerate(roles)
    ]
    for timeline in timelines:
        pid = roles.index(timeline.role)
        name = {"name": f"rank {timeline.rank}"}
        events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": timeline.rank, "args": name})
        events += [_event(span, pid, timeline.rank) for span in timeline.spans]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_chrome_trace(path: Path, timelines: Iterable[Timeline]) -> None:
    """Write ``chrome_trace`` of the timelines, all at once or not at all."""
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_text(json.dumps(chrome_trace(list(timelines))))
    partial.replace(path)


def _event(span: Span, pid: int, tid: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.name,
        "cat": "/".join(span.path[:-1]) or "phase",
        "pid": pid,
        "tid": tid,
        "ts": span.start_s * 1e6,
        "dur": (span.duration_s or 0.0) * 1e6,
    }
