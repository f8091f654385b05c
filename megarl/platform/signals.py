"""Ctrl-C, SIGTERM and SIGHUP of a command: the first ends the work, none interrupts the clean-up that follows.

Invariants:
1. A signal that the parent had set to be ignored (``nohup``, a background job of a shell) stays ignored.
2. From ``hold`` on signals do nothing, so that what is being closed is closed to its end. A clean-up that hangs can be
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

# Handlers that were in place before ``handled``; empty outside it.
_previous: dict[signal.Signals, Any] = {}
_held_since: float | None = None

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

    Does nothing when entered from another thread, where Python allows no handlers.
    """
    global _held_since
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _held_since = None
    _previous.update({number: signal.getsignal(number) for number in ENDING})
    install()
    try:
        yield
    finally:
        for number, handler in _previous.items():
            signal.signal(number, handler)
        _previous.clear()


def install() -> None:
    """Put the handlers in place again after a library has installed its own; does nothing outside ``handled``."""
    for number, handler in _previous.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _on_signal)


def hold() -> None:
    """From now on signals do nothing: the clean-up has begun."""
    global _held_since
    _held_since = time.monotonic()


def _on_signal(number: int, _: FrameType | None) -> None:
    if _held_since is not None and time.monotonic() < _held_since + PATIENCE_S:
        return
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise Terminated(number)
