"""The barrier before a job's driver: it ends at its deadline, whatever the head does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from tests.architecture.source import ROOT


@pytest.mark.slow
def test_a_head_that_takes_connections_and_says_nothing_is_given_up_at_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        barrier = [sys.executable, "-m", "megarl.controller.membership", address, "--deadline-s=2", "slurm:n1"]
        variables = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "x" * 64, "PYTHONPATH": str(ROOT)}
        ended = subprocess.run(barrier, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 3
    assert f"no Ray head answered at {address} within 2 s" in ended.stderr
