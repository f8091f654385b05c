"""Stacks of threads that wait."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megarl.observability.stacks import Frame, Stack, parse_py_spy, stacks_of_process, text, thread_stacks


def test_a_thread_that_waits_is_found_with_its_own_innermost_call():
    ready, end = threading.Event(), threading.Event()

    def wait_here() -> None:
        ready.set()
        end.wait()

    thread = threading.Thread(target=wait_here, name="waiting")
    thread.start()
    ready.wait()
    try:
        (stack,) = [stack for stack in thread_stacks() if stack.thread == "waiting"]
        assert stack.collective is None
        assert stack.call.endswith("wait_here")
        assert "wait_here" in text([stack]) and "threading.py" not in text([stack])
        assert "waiting" not in [stack.thread for stack in thread_stacks(ignore=[thread.ident or 0])]
    finally:
        end.set()
        thread.join()


def test_the_collective_is_the_public_function_and_paths_are_short():
    c10d = "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
    stack = Stack(
        "main",
        (Frame("/checkout/megarl/train/step.py", 3, "run"), Frame(c10d, 9, "all_gather"), Frame(c10d, 1, "_wait")),
    )
    assert stack.collective == "all_gather"
    assert str(stack.frames[0]) == "megarl/train/step.py:3 run"
    assert stack.call == "torch/distributed/distributed_c10d.py:1 _wait"


DUMP = """\
Process 7: python
Python v3.11.7 (/usr/bin/python)

Thread 7 (idle): "MainThread"
    _wait (/site-packages/torch/distributed/distributed_c10d.py:12)
    all_reduce (/site-packages/torch/distributed/distributed_c10d.py:9)
    <module> (run.py:4)

Thread 8 (idle): "pool"
    wait (/usr/lib/python3.11/threading.py:331)
"""


def test_what_py_spy_prints_is_read_outermost_first():
    (stack,) = parse_py_spy(DUMP, "rank 0")
    assert (stack.thread, stack.collective) == ("rank 0", "all_reduce")
    assert [frame.function for frame in stack.frames] == ["<module>", "all_reduce", "_wait"]


@pytest.mark.skipif(
    shutil.which("py-spy", path=str(Path(sys.executable).parent)) is None, reason="py-spy is not installed"
)
def test_another_process_is_read_from_outside(tmp_path):
    (tmp_path / "sleeper.py").write_text(
        "import time\ndef doze():\n    print('up', flush=True)\n    time.sleep(60)\ndoze()\n"
    )
    with subprocess.Popen([sys.executable, str(tmp_path / "sleeper.py")], stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        found = stacks_of_process(process.pid, "sleeper", timeout_s=30)
        process.kill()
    assert [frame.function for frame in found[0].frames] == ["<module>", "doze"]
    assert stacks_of_process(process.pid, "gone") == []
