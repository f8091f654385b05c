"""Settings every test process shares."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from typing import Any

import pytest

# Spinning OpenMP threads starve the other ranks of a test on a few cores; children inherit these.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Nothing a test leaves behind outlives the session.
os.environ["MEGARL_CACHE"] = tempfile.mkdtemp(prefix="megarl-cache-")
atexit.register(shutil.rmtree, os.environ["MEGARL_CACHE"], ignore_errors=True)
# No test reaches for a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

WITH_PROCESSES = ("tests/distributed/", "tests/integration/", "tests/gpu/")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where tests run side by side, those that start processes of their own take turns, and share what they start."""
    from xdist.scheduler import LoadScopeScheduling

    class Turns(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "processes" if nodeid.startswith(WITH_PROCESSES) else nodeid

    return Turns(config, log)
