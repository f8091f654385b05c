"""What several modules of long tests start from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration import slurm_cluster
from tests.integration.runs import ROOT, finished


@pytest.fixture(scope="session")
def warm_start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quick start's: a tiny model that has seen sums answered in two styles."""
    place = tmp_path_factory.mktemp("sums")
    subprocess.run([sys.executable, "-m", "megarl.models.tiny", str(place / "model")], cwd=ROOT, check=True)
    chats = place / "chats.jsonl"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # the checkout, whether it is installed or not
    script = [sys.executable, "scripts/arithmetic_chats.py", str(chats)]
    subprocess.run(script, cwd=ROOT, env=environment, check=True)
    options = [f"model.path={place / 'model'}", f"data.train.0.path={chats}", "logging.console=plain"]
    return finished("sft", "sft_tiny", place / "sft", *options, timeout_s=500).directory / "hf"


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory):
    """A real Slurm of two nodes; each test's jobs have folders of their own."""
    if reason := slurm_cluster.why_not():
        pytest.skip(reason)
    with slurm_cluster.SlurmCluster(tmp_path_factory.mktemp("slurm"), nodes=2) as cluster:
        yield cluster
