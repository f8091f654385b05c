"""Settings every test process shares."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

# Spinning OpenMP threads starve the other ranks of a test on a few cores; children inherit these.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Nothing a test leaves behind outlives the session.
os.environ["MEGARL_CACHE"] = tempfile.mkdtemp(prefix="megarl-cache-")
atexit.register(shutil.rmtree, os.environ["MEGARL_CACHE"], ignore_errors=True)
# No test reaches for a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
