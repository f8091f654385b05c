"""A file per process that says which phase runs since when: what a blame report reads when a run hangs.

Invariants:
1. The file is replaced as a whole; a reader never sees half of it.
2. The thread that writes it takes no lock of the code it watches and ends with the context.
3. The last beat of a context that is left says so: its process has ended what it did, and is not silent.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megarl.observability.logs import context
from megarl.observability.trace import current_span

_logger = logging.getLogger(__name__)

# Longest wait for a beat under way at the end: a file system that hangs must not hold the process.
_END_S = 10.0


@contextmanager
def heartbeat(path: Path, *, every_s: float = 10.0, slow_after_s: float = 300.0) -> Iterator[None]:
    """Write ``path`` every ``every_s`` seconds while the body runs, and warn once of each phase that takes long.

    Args:
        path: JSON file with role, rank, pid, node, step, version, phase, phase_s, time and ended.
        every_s: seconds between beats.
        slow_after_s: age of a phase at which it is warned of.
    """
    stop = start_heartbeat(path, every_s=every_s, slow_after_s=slow_after_s)
    try:
        yield
    finally:
        stop()


def start_heartbeat(path: Path, *, every_s: float = 10.0, slow_after_s: float = 300.0) -> Callable[[], None]:
    """Begin to write ``path`` as ``heartbeat`` does; the result stops it, as does the end of the process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stop = threading.Event()

    def beat() -> None:
        warned: float | None = None
        while True:
            now = write_beat(path)
            if now["phase_s"] > slow_after_s and warned != now["phase_started"]:
                warned = now["phase_started"]
                _logger.warning("phase %s has been running for %.0f s", now["phase"], now["phase_s"])
            if stop.wait(every_s):
                return

    thread = threading.Thread(target=beat, name="megarl-heartbeat", daemon=True)
    thread.start()

    def end() -> None:
        stop.set()
        thread.join(_END_S)
        if not thread.is_alive():
            write_beat(path, ended=True)

    return end


def write_beat(path: Path, *, ended: bool = False) -> dict[str, Any]:
    """Write one beat, the last one if ``ended``, and return it.

    A full disk or a vanished directory is logged, since it must not end a run.
    """
    running = current_span()
    now = time.time()
    record = {
        "role": context().role,
        "rank": context().rank,
        "pid": os.getpid(),
        "node": context().node or socket.gethostname(),
        "step": context().step,
        "version": context().version,
        "phase": "/".join(running.path) if running else "idle",
        "phase_started": running.start_s if running else now,
        "phase_s": time.monotonic() - running.started if running else 0.0,
        "time": now,
        "ended": ended,
    }
    partial = path.with_suffix(path.suffix + ".partial")
    try:
        partial.write_text(json.dumps(record))
        partial.replace(path)
    except OSError as error:
        _logger.warning("cannot write the heartbeat %s: %s", path, error)
    return record


def read_beats(directory: Path) -> list[dict[str, Any]]:
    """All beats in a directory, each with ``silent_s``, the seconds since it was written; the most silent first."""
    now = time.time()
    beats = []
    for path in sorted(directory.glob("*.json")):
        try:
            record = json.loads(path.read_text())
        except FileNotFoundError:  # set aside by a new attempt meanwhile
            continue
        record["silent_s"] = now - record["time"]
        beats.append(record)
    return sorted(beats, key=lambda record: -record["silent_s"])
