"""Two ranks that save without end are killed at random moments of a save: what is left is a whole checkpoint."""

from __future__ import annotations

import multiprocessing
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.controller.checkpoints import CheckpointStore, problems
from megarl.controller.state import RunState
from megarl.parallel.grid import ParallelLayout
from tests.distributed.engines import make_engine
from tests.distributed.models import QWEN2
from tests.distributed.ranks import PRELOAD, Rank

KILLS = 20
TIMEOUT_S = 120.0


def save_for_ever(number: int, port: int, call: int, root: Path, in_background: bool, reports: Any) -> None:
    """Continue from the newest checkpoint, whose weights are all its step, and save step after step."""
    torch.set_num_threads(1)
    rank = Rank(number, 2, port, call, TIMEOUT_S)
    engine = make_engine(QWEN2, rank.start(ParallelLayout(tp=2)), seed=call)
    store = CheckpointStore(root, keep=2)
    step = 0
    newest = store.newest()
    dist.barrier()  # before the first rank removes anything
    if newest is not None:
        step = engine.load(newest / "actor")["step"]
        assert newest.name == f"step_{step:06d}"
        assert all(bool((p == step).all()) for p in engine.parameters().values())
    reports.put(("loaded", step))
    while True:
        step += 1
        for parameter in engine.parameters().values():
            parameter.data.fill_(step)
        if number == 0:
            partial = store.begin(RunState(step, step))
            (partial.directory / "actor").mkdir()
            reports.put(("saving", step))
        dist.barrier()
        engine.save(root / f".step_{step:06d}.partial" / "actor", {"step": step}, background=in_background)
        if in_background:
            engine.finish_save()
        if number == 0:
            store.commit(partial)
            reports.put(("saved", step))
        dist.barrier()


def start(call: int, port: int, root: Path, in_background: bool, reports: Any) -> list[Any]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    arguments = (port, call, root, in_background, reports)
    processes = [context.Process(target=save_for_ever, args=(number, *arguments), daemon=True) for number in range(2)]
    for process in processes:
        process.start()
    return processes


def next_report(reports: Any, processes: list[Any], kind: str) -> int:
    """Step of the next report of a kind."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        assert all(process.is_alive() for process in processes), "a rank ended by itself: see its traceback"
        while not reports.empty():
            found, step = reports.get()
            if found == kind:
                return int(step)
        time.sleep(0.001)
    raise AssertionError(f"no rank was {kind} within {TIMEOUT_S} s")


@pytest.mark.slow
@pytest.mark.timeout(1800)  # each wait has a limit of its own
def test_after_a_kill_at_a_random_moment_of_a_save_the_latest_checkpoint_loads(tmp_path: Path) -> None:
    generator = random.Random(7)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    root = tmp_path / "checkpoints"
    root.mkdir()
    cut, last, took = 0, 0, 0.3
    for call in range(1, KILLS + 2):
        # A queue of its own: a process that is killed while it holds a queue's lock never gives it back.
        reports = multiprocessing.get_context("forkserver").Queue()
        processes = start(call, server.port, root, call % 2 == 0, reports)
        loaded = next_report(reports, processes, "loaded")
        assert loaded >= last
        if call <= KILLS:
            next_report(reports, processes, "saving")
            began = time.monotonic()
            next_report(reports, processes, "saved")
            took = time.monotonic() - began
            last = next_report(reports, processes, "saving") - 1
            time.sleep(generator.uniform(0, took))
        for process in processes:
            process.kill()
            process.join()
        newest = CheckpointStore(root, keep=2).newest()
        assert newest is not None and not problems(newest) and int(newest.name[5:]) >= last
        cut += any(root.glob(".step_*.partial"))
    assert cut >= KILLS // 2  # most kills fell into a save, not between two
