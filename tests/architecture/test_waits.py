"""Whatever waits has a time-out, or a line here that says what ends it.

A call of a library that can wait for another process must be given its ``timeout``; a wait without any argument
(``.join()``, ``.wait()``, ``.recv()`` …) must be one of those below.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.source import modules, relative, tree_of

WANT_TIMEOUT = {
    "ray.get", "ray.wait", "dist.new_group", "dist.init_process_group", "dist.TCPStore", "dist.monitored_barrier",
    "subprocess.run", "subprocess.call", "subprocess.check_call", "subprocess.check_output",
    "socket.create_connection", "urllib.request.urlopen", "asyncio.wait",
}  # fmt: skip
BARE = {"join", "wait", "communicate", "recv", "accept", "acquire"}

ENDED_BY = {
    ("controller/engines.py", "self._start_ended.wait"): "the start of the engine, which the caller gives up in time",
    ("controller/workers.py", "self._stopped.wait"): "a sentinel: lasts as long as the process on purpose",
    ("rewards/pool.py", "worker.connection.recv"): "called once something has arrived, which is written in one piece",
    ("rewards/worker.py", "connection.recv"): "a server; its connection ends with the process it serves",
    ("rollout/vllm/engine.py", "asyncio.wait"): "the death of a process of the engine, and the caller's time-out",
    ("train/megatron/checkpoint_writer.py", "self._thread.join"): "a thread that writes files; the caller's time-out",
    ("train/megatron/optimizer_state.py", "request.wait"): "messages between ranks; the time-out of their group",
    ("weights/conversion/copying.py", "thread.join"): "a thread of a command line tool that copies files",
    ("weights/transport/host.py", "self._listener.accept"): "called once a connection has come",
    (
        "weights/transport/network.py",
        "transfer.work.wait",
    ): "complete already, or a thread of its own; the group's time",
}


def waits(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Calls that may wait for ever: name and line."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name, keywords = ast.unparse(node.func), {keyword.arg for keyword in node.keywords}
        is_bare = isinstance(node.func, ast.Attribute) and node.func.attr in BARE and not node.args and not keywords
        # Options that are passed on as a whole (None here) are looked at where they are made.
        if is_bare or (name in WANT_TIMEOUT and not keywords & {"timeout", None}):
            yield name, node.lineno


@pytest.mark.parametrize("path", modules(), ids=relative)
def test_a_wait_has_a_time_out_or_a_reason(path: Path):
    found = [f"{relative(path)}:{line} {name}" for name, line in waits(tree_of(path))
             if (relative(path), name) not in ENDED_BY]  # fmt: skip
    assert found == []


def test_every_reason_is_needed():
    found = {(relative(path), name) for path in modules() for name, _ in waits(tree_of(path))}
    assert found == ENDED_BY.keys()


def test_waits_are_found():
    text = "ray.get(x)\nray.wait(x, timeout=1)\nthread.join()\n', '.join(names)\nevent.wait(3)\ndist.new_group([0])\n"
    assert [name for name, _ in waits(ast.parse(text))] == ["ray.get", "thread.join", "dist.new_group"]
