"""Child processes that end together.

Invariants:
1. Every child has its own process group; ending it ends what it started: asked first, killed after a grace.
2. A process adopted after its parent died is ended too: this process is the reaper of its descendants (Linux).
3. Nothing is killed by name.
"""

from __future__ import annotations

import ctypes
import logging
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

logger = logging.getLogger(__name__)

PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Child:
    """A started process, what it is for, and the signal that asks it to end."""

    name: str
    process: subprocess.Popen[bytes]
    end_signal: signal.Signals


class Children:
    """Processes started here, and the signals that reach them."""

    def __init__(self) -> None:
        self._children: list[Child] = []
        self.received: signal.Signals | None = None
        """The latest signal."""
        self.first_s: dict[signal.Signals, float] = {}
        """When each signal came first, in seconds of the monotonic clock."""
        self._kept: list[signal.Signals] = []
        # Daemons whose parent dies are re-parented to us instead of to init, so that the end of the run finds them.
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: Path | None = None,
        end_signal: signal.Signals = signal.SIGTERM,
    ) -> Child:
        """Start a process in its own group; without a log it writes where this process writes."""
        logger.info("starting %s: %s", name, " ".join(command))
        output = log.open("ab") if log is not None else None
        try:
            process = subprocess.Popen(
                list(command),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if output is not None else None,
                start_new_session=True,
            )
        finally:
            if output is not None:
                output.close()
        child = Child(name, process, end_signal)
        self._children.append(child)
        return child

    def forward(self, signals: Sequence[signal.Signals], target: Child | None) -> None:
        """Pass these signals on to a child as they come; without one they are kept, and a later child gets them."""

        def handler(number: int, frame: FrameType | None) -> None:
            self.received = signal.Signals(number)
            self.first_s.setdefault(self.received, time.monotonic())
            if target is None:
                self._kept.append(self.received)
            elif target.process.poll() is None:
                target.process.send_signal(number)

        for number in signals:
            signal.signal(number, handler)
        # Between the start of a child and here lies time in which a signal may have come.
        while target is not None and self._kept:
            target.process.send_signal(self._kept.pop(0))

    def first_exit(self, children: Sequence[Child], *, deadline_s: float | None = None) -> Child | None:
        """Wait until one of the children ends; None when the deadline passes first."""
        end = None if deadline_s is None else time.monotonic() + deadline_s
        while True:
            for child in children:
                if child.process.poll() is not None:
                    return child
            if end is not None and time.monotonic() > end:
                return None
            time.sleep(POLL_S)

    def end_all(self, *, grace_s: float = 10.0) -> None:
        """End every child and every descendant; returns when none is left."""
        for child in reversed(self._children):
            if child.process.poll() is None:
                logger.info("ending %s", child.name)
                child.process.send_signal(child.end_signal)
        end = time.monotonic() + grace_s
        while time.monotonic() < end and any(child.process.poll() is None for child in self._children):
            time.sleep(POLL_S)
        for process in (left := psutil.Process().children(recursive=True)):
            _signal(process, signal.SIGTERM)
        _, alive = psutil.wait_procs(left, timeout=2.0)
        for process in alive:
            logger.warning("killing process %s (%s), which did not end by itself", process.pid, _name(process))
            _signal(process, signal.SIGKILL)
        psutil.wait_procs(psutil.Process().children(recursive=True), timeout=5.0)


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        logger.debug("process %s ended by itself", process.pid)


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.NoSuchProcess:
        return "gone"
