"""Logging: one format, one context (role, rank, step, version), one file per process.

Invariants:
1. Rank 0 of a role speaks at INFO on the terminal, the others at WARNING; every process writes INFO to its own file.
2. Setting up twice replaces the first set-up: no line comes twice.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

_FORMAT = "%(asctime)s %(levelname)-7s %(where)s %(name)s: %(message)s"
_OURS = "megarl_handler"


@dataclass(frozen=True, slots=True)
class LogContext:
    """Where this process is: in every log line, heartbeat and blame report."""

    role: str = "controller"
    rank: int = 0
    step: int | None = None
    version: int | None = None
    node: str | None = None
    """Name of the node where it is not the host's own; not in log lines, since a process stays where it is."""

    def __str__(self) -> str:
        step = "" if self.step is None else f" step {self.step}"
        version = "" if self.version is None else f" v{self.version}"
        return f"[{self.role} {self.rank}{step}{version}]"


_context = LogContext()


def context() -> LogContext:
    """The context of this process."""
    return _context


def set_context(**changes: Any) -> LogContext:
    """Change fields of the context, such as ``step=3``."""
    global _context
    _context = replace(_context, **changes)
    return _context


def set_up_logging(role: str, rank: int, *, directory: Path | None = None, level: int = logging.INFO) -> None:
    """Send megarl's logs to the terminal and to ``directory/ROLE-RANK.log``.

    Args:
        role: role of this process.
        rank: rank inside the role.
        directory: where log files are, made if absent; None writes none.
        level: of rank 0 on the terminal, and of the file.
    """
    set_context(role=role, rank=rank)
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if getattr(handler, _OURS, False)]:
        root.removeHandler(handler)
        handler.close()
    terminal = _TerminalHandler()
    terminal.setLevel(level if rank == 0 else max(level, logging.WARNING))
    handlers: list[logging.Handler] = [terminal]
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(directory / f"{role}-{rank}.log", encoding="utf-8")
        file.setLevel(level)
        handlers.append(file)
    for handler in handlers:
        setattr(handler, _OURS, True)
        handler.setFormatter(logging.Formatter(_FORMAT))
        handler.addFilter(_add_context)
        root.addHandler(handler)
    # Libraries stay at the root's WARNING; ours speak at the level asked for.
    logging.getLogger("megarl").setLevel(level)


class _TerminalHandler(logging.StreamHandler[TextIO]):
    """Writes to what ``sys.stderr`` is now: a live console puts itself in its place while it redraws."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        raise AttributeError("the terminal handler follows sys.stderr")


def _add_context(record: logging.LogRecord) -> bool:
    record.where = str(_context)
    return True
