from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from megarl.observability import trace
from megarl.observability.logs import LogContext, set_context


class Clock:
    """Seconds that pass when a test says so, for phases too."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(trace.time, "monotonic", clock)
    return clock


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """A session opened in the test's process sends its logs to the terminal and a file; other tests get neither."""
    root, megarl = logging.getLogger(), logging.getLogger("megarl")
    handlers, level = list(root.handlers), megarl.level
    yield
    for handler in [handler for handler in root.handlers if handler not in handlers]:
        root.removeHandler(handler)
        handler.close()
    megarl.setLevel(level)
    set_context(**{name: getattr(LogContext(), name) for name in LogContext.__slots__})
