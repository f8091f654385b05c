"""Ray for one run, as far as it can be tested without starting it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.controller.cluster import RUN_MARK, Cluster, marked_processes
from megarl.controller.shared_memory import PLACE
from megarl.errors import SetupError

SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); time.sleep(60)",
]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.close()


def test_what_is_started_for_a_run_is_found_and_ended_and_nothing_else(cluster: Cluster):
    other = {name: value for name, value in os.environ.items() if name != RUN_MARK}
    foreign = subprocess.Popen(SLEEPER, env=other)
    own = [subprocess.Popen(SLEEPER), subprocess.Popen(STUBBORN, stdout=subprocess.PIPE)]
    try:
        assert own[1].stdout is not None and own[1].stdout.readline() == b"on\n"
        assert {process.pid for process in marked_processes(cluster.run_id)} == {process.pid for process in own}
        cluster.close()
        assert marked_processes(cluster.run_id) == []
        assert foreign.poll() is None
    finally:
        for process in [foreign, *own]:
            process.kill()
            process.communicate()


def test_the_environment_is_as_before_once_the_run_is_closed():
    before = dict(os.environ)
    cluster = Cluster()
    assert os.environ[RUN_MARK] == cluster.run_id
    cluster.close()
    assert dict(os.environ) == before


def test_a_place_that_ray_cannot_use_is_named_with_the_fix(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Paths of sockets are limited to 107 bytes."""
    place = tmp_path / ("long" * 20)
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    with pytest.raises(SetupError, match=r"Ray did not start: .*107 bytes.*TMPDIR"):
        cluster.open(None, num_slots=1, num_gpus=0)
    assert marked_processes(cluster.run_id) == []
    cluster.close()
    assert list(place.iterdir()) == []


MAPPER = """
import sys, time
from multiprocessing import resource_tracker, shared_memory
resource_tracker.register = lambda *_: None  # as after a kill of the process that would clean up
memory = shared_memory.SharedMemory(name=sys.argv[1], create=sys.argv[2] == "create", size=4096)
print("on", flush=True)
time.sleep(60)
"""


def mapper(name: str, how: str, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", MAPPER, name, how], stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None and process.stdout.readline() == b"on\n"
    return process


def test_shared_memory_of_the_run_is_removed_unless_somebody_else_uses_it(cluster: Cluster):
    """Also if the process that made it has died before the end; not what was there before the run."""
    own, other = dict(os.environ), {name: value for name, value in os.environ.items() if name != RUN_MARK}
    names = [f"megarl-test-{os.getpid()}-{what}" for what in ("dead", "alive", "foreign", "early")]
    dead, alive, foreign, early = [PLACE / name for name in names]
    early.write_bytes(bytes(4096))
    os.utime(early)
    cluster._started_s = time.time()
    time.sleep(0.05)  # the clock of a file system ticks in milliseconds
    started = [mapper(names[0], "create", own), mapper(names[1], "create", own), mapper(names[2], "create", own)]
    started += [mapper(names[2], "attach", other), mapper(names[3], "attach", own)]
    try:
        cluster.note_shared_memory()
        started[0].kill()
        started[0].wait()
        cluster.close()
        assert [file.exists() for file in (dead, alive, foreign, early)] == [False, False, True, True]
    finally:
        for process in started:
            process.kill()
            process.communicate()
        for file in (dead, alive, foreign, early):
            file.unlink(missing_ok=True)


def test_an_address_where_nobody_listens_is_refused_at_once(cluster: Cluster):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(SetupError, match=f"no Ray cluster answers at 127.0.0.1:{port}: .*refused"):
        cluster.open(f"127.0.0.1:{port}", num_slots=1, num_gpus=0)
    assert time.monotonic() - began < 20
