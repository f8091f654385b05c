"""What an engine's output says about why it did not start."""

from __future__ import annotations

import pytest

from megarl.controller.engines import first_error


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        ("", None),
        ("WARNING [x] no Error: here\nfine", None),
        (
            "(EngineCore pid=7) ERROR 11-29 18:58:34 [core.py:70] Traceback (most recent call last):\n"
            "(EngineCore pid=7) ERROR 11-29 18:58:34 [core.py:70]     raise ValueError(\n"
            "(EngineCore pid=7) ERROR 11-29 18:58:34 [core.py:70] ValueError: no memory for the cache blocks.\n"
            "RuntimeError: Engine core initialization failed. See root cause above.\n",
            "ValueError: no memory for the cache blocks.",
        ),
        ("Traceback\nOSError: [Errno 28] No space left on device", "OSError: [Errno 28] No space left on device"),
    ],
)
def test_the_first_exception_counts(output: str, cause: str | None):
    assert first_error(output) == cause
