"""Signals of a command: those that end it, and those that ask it for something.

SIGINT (Ctrl-C), SIGTERM and SIGHUP end the work; none interrupts the clean-up that follows. SIGUSR1 asks the run to
save and stop, SIGUSR2 to save and go on: they are noted here, and the run looks.

Invariants:
1. A signal that the parent had set to be ignored (``nohup``, a background job of a shell) stays ignored.
2. What a library swallowed that was raised inside a callback of its own is raised again, after ``REPEAT_S``.
3. From ``hold`` on signals do nothing, so that what is being closed is closed to its end. A clean-up that hangs can be
   interrupted again after ``PATIENCE_S``.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ASKING = (signal.SIGUSR1, signal.SIGUSR2)

# Handlers that were in place before ``handled``; empty outside it.
_previous: dict[signal.Signals, Any] = {}
_held_since: float | None = None
_ended_by: int | None = None
_stop_asked: float | None = None
_save_asked = False

INTERRUPTED = 128 + signal.SIGINT
"""What a shell reports for Ctrl-C."""
REPEAT_S = 10.0
"""When a signal is raised again after which no clean-up has begun."""
PATIENCE_S = 30.0
"""Longest clean-up that signals do not interrupt."""


class Terminated(SystemExit):
    """SIGTERM or SIGHUP arrived. ``code`` is what a shell reports for the signal, 128 and its number."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.signal = signal.Signals(number)


@contextmanager
def handled() -> Iterator[None]:
    """Within it SIGINT raises KeyboardInterrupt, and SIGTERM and SIGHUP raise Terminated, in the main thread.

    SIGUSR1 and SIGUSR2 raise nothing: ``stop_asked`` and ``take_save`` tell of them.

    Does nothing when entered from another thread, where Python allows no handlers.
    """
    global _held_since, _ended_by, _stop_asked, _save_asked
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _held_since = _ended_by = _stop_asked = None
    _save_asked = False
    _previous.update({number: signal.getsignal(number) for number in (*ENDING, *ASKING, signal.SIGALRM)})
    install()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in _previous.items():
            signal.signal(number, handler)
        _previous.clear()


def install() -> None:
    """Put the handlers in place again after a library has installed its own; does nothing outside ``handled``."""
    for number, handler in _previous.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _HANDLERS[number])


def hold() -> None:
    """From now on signals do nothing: the clean-up has begun."""
    global _held_since
    _held_since = time.monotonic()
    if _previous:
        signal.setitimer(signal.ITIMER_REAL, 0)


def stop_asked() -> float | None:
    """When SIGUSR1 came first, in seconds of the monotonic clock; None if it did not."""
    return _stop_asked


def take_save() -> bool:
    """Whether SIGUSR2 has come since this was last called."""
    global _save_asked
    asked, _save_asked = _save_asked, False
    return asked


def _on_request(number: int, _: FrameType | None) -> None:
    global _stop_asked, _save_asked
    if number == signal.SIGUSR2:
        _save_asked = True
    elif _stop_asked is None:
        _stop_asked = time.monotonic()


def _on_signal(number: int, _: FrameType | None) -> None:
    global _ended_by
    if _held_since is not None and time.monotonic() < _held_since + PATIENCE_S:
        return
    if _held_since is None:
        _ended_by = number
        signal.setitimer(signal.ITIMER_REAL, REPEAT_S)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise Terminated(number)


def _on_repeat(_: int, frame: FrameType | None) -> None:
    if _ended_by is not None:
        _on_signal(_ended_by, frame)


_HANDLERS = {
    **dict.fromkeys(ENDING, _on_signal),
    **dict.fromkeys(ASKING, _on_request),
    signal.SIGALRM: _on_repeat,
}
