"""Settings every test process shares."""

from __future__ import annotations

import os

# Spinning OpenMP threads starve the other ranks of a test on a few cores; children inherit these.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test reaches for a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
