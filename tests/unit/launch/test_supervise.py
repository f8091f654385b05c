"""Processes that end together."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil

# It runs in a process of its own: a reaper of descendants must not be the test runner.
PARENT = """
import sys, time
from pathlib import Path
from megarl.launch.supervise import Children
children = Children()
folder = Path(sys.argv[1])
script = sys.argv[2]
child = children.start("child", ["bash", "-c", script, "child", str(folder)], environment={"PATH": "/usr/bin:/bin"})
while not (folder / "ready").exists():
    time.sleep(0.02)
children.end_all(grace_s=0.5)
"""


def end_of(script: str, folder: Path) -> list[int]:
    """Run the script as a supervised child, end it, and return the process ids it wrote down."""
    subprocess.run([sys.executable, "-c", PARENT, str(folder), script], check=True, timeout=60)
    return [int(line) for line in (folder / "pids").read_text().split()]


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_child_and_its_children_end(tmp_path):
    pids = end_of('sleep 300 & echo $! $$ > "$1/pids"; touch "$1/ready"; wait', tmp_path)
    assert len(pids) == 2
    assert not any(is_running(pid) for pid in pids)


def test_a_daemon_whose_parent_died_ends_too(tmp_path):
    script = '(setsid sleep 300 & echo $! > "$1/pids"); touch "$1/ready"; sleep 0.2'
    pids = end_of(script, tmp_path)
    assert not any(is_running(pid) for pid in pids)


def test_a_child_that_ignores_sigterm_is_killed(tmp_path):
    begin = time.monotonic()
    pids = end_of('trap "" TERM; echo $$ > "$1/pids"; touch "$1/ready"; while true; do sleep 0.1; done', tmp_path)
    assert not any(is_running(pid) for pid in pids)
    assert time.monotonic() - begin < 30


# A signal that comes between the start of the child and the moment from which it is passed on.
BETWEEN = """
import os, signal, sys, time
from pathlib import Path
from megarl.launch.supervise import Children
children = Children()
children.forward([signal.SIGUSR1], None)
script = 'trap "exit 7" USR1; touch "$1/ready"; while true; do sleep 0.05; done'
child = children.start("child", ["bash", "-c", script, "child", sys.argv[1]], environment={"PATH": "/usr/bin:/bin"})
while not (Path(sys.argv[1]) / "ready").exists():
    time.sleep(0.02)
os.kill(os.getpid(), signal.SIGUSR1)
children.forward([signal.SIGUSR1], child)
ended = children.first_exit([child], deadline_s=20.0)
print(None if ended is None else ended.process.returncode)
children.end_all(grace_s=0.5)
"""


def test_a_signal_that_comes_while_a_child_starts_reaches_it(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", BETWEEN, str(tmp_path)], check=True, timeout=60, capture_output=True, text=True
    )
    assert run.stdout.split() == ["7"]
