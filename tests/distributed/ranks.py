"""A pool of rank processes that every distributed test of the session shares.

Starting Python, torch and Megatron-Core is most of what a small distributed test costs, so processes are forked from a
server that has imported them (about 0.1 s each) and kept for the next test.

    def check(rank: Rank, layout: ParallelLayout, value: float) -> float:      # module level: it travels by name
        groups = rank.start(layout)                       # gloo group and Megatron state of this call
        total = torch.tensor([value * rank.rank])
        torch.distributed.all_reduce(total, group=groups.world)
        return float(total)

    def test_sum(ranks: Ranks) -> None:                                        # fixture, once per session
        layout = ParallelLayout(tp=2, dp=2)
        assert ranks(layout.world_size).run(check, layout, 1.0) == [6.0] * 4   # results in rank order

- ``ranks(n).run(fn, *args, timeout_s=60, **kwargs)`` calls ``fn(rank, *args, **kwargs)`` on n processes. Arguments and
  results are pickled (tensors too: return small ones). Process groups and Megatron state are torn down after each call.
- Without Megatron: ``rank.join()`` makes the default process group only.
- On ranks, warnings that megarl's modules or tests give are errors; Megatron's and torch's are not.
- An exception on a rank is raised here as RankError with rank and traceback; the rest of the ranks are then stopped, as
  they may wait for that rank in a collective, and fresh ones take the next call.
- A call that does not return in time raises RankError naming the ranks that did not, each with its Python stack.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megarl.parallel.grid import ParallelLayout
from megarl.parallel.groups import ParallelGroups
from megarl.platform.device import get_device
from megarl.train.megatron import bootstrap

Result = TypeVar("Result")

PRELOAD = ["tests.distributed.preload"]
GRACE_S = 3.0
"""How long ranks may take to follow once one of them has failed."""
MOST_THREADS = 300
"""With more, a process takes no further call: engines of expert models are in cycles that Python's collector cannot see
through (autograd's graph in a module's attribute), and keep the threads of their gloo groups, three each."""


class RankError(AssertionError):
    """A call failed or did not return on some rank."""


@dataclass
class Rank:
    """What a function running on a rank is given."""

    rank: int
    world_size: int
    store_port: int
    call: int
    timeout_s: float
    groups: ParallelGroups | None = field(default=None)

    def store(self, name: str = "default") -> dist.Store:
        """A store shared by the ranks of this call."""
        server = dist.TCPStore("127.0.0.1", self.store_port, is_master=False, timeout=timedelta(seconds=self.timeout_s))
        return dist.PrefixStore(f"call-{self.call}/{name}", server)

    def join(self) -> None:
        """Make the default process group over gloo."""
        dist.init_process_group(
            "gloo",
            store=self.store(),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=self.timeout_s),
        )

    def start(self, layout: ParallelLayout, *, seed: int = 1) -> ParallelGroups:
        """Make the process group and Megatron-Core's state of a layout; may be repeated within a call."""
        if self.groups is not None:
            bootstrap.stop()
            self.call += 1_000_000
        self.groups = bootstrap.start(
            layout,
            device=get_device("cpu"),
            rank=self.rank,
            seed=seed,
            store=self.store(),
            timeout_s=self.timeout_s,
        )
        return self.groups


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    stack_file: Path
    is_busy: bool = False

    @property
    def is_worn(self) -> bool:
        return len(os.listdir(f"/proc/{self.process.pid}/task")) > MOST_THREADS

    def stop(self) -> None:
        """End the process: by itself if it is waiting for work, or with all that it has started."""
        self.pipe.close()
        self.process.join(0.0 if self.is_busy else 2.0)
        if self.process.is_alive():
            # The rank leads a session of its own, so that what it started does not outlive it.
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.join()


class RankPool:
    """Processes that run a function each, started when first needed and kept."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._workers: list[_Worker] = []
        self._scratch = tempfile.TemporaryDirectory(prefix="megarl-ranks-")
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._calls = 0
        atexit.register(self.shut_down)

    def __call__(self, world_size: int) -> Ranks:
        """The first ``world_size`` ranks of the pool."""
        return Ranks(self, world_size)

    def run(
        self, world_size: int, function: Callable[..., Result], args: Any, kwargs: Any, timeout_s: float
    ) -> list[Result]:
        self._calls += 1
        for index, worker in enumerate(self._workers[:world_size]):
            if worker.is_worn:
                worker.stop()
                self._workers[index] = self._start_worker(index)
        while len(self._workers) < world_size:
            self._workers.append(self._start_worker(len(self._workers)))
        workers = self._workers[:world_size]
        for index, worker in enumerate(workers):
            rank = Rank(index, world_size, self._store.port, self._calls, timeout_s)
            worker.pipe.send((function, rank, args, kwargs))
            worker.is_busy = True
        return self._collect(workers, function.__name__, timeout_s)

    def _collect(self, workers: list[_Worker], name: str, timeout_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        ranks = {worker.pipe: rank for rank, worker in enumerate(workers)}
        deadline = time.monotonic() + timeout_s
        while len(results) + len(failures) < len(workers) and (left := deadline - time.monotonic()) > 0:
            pending = [pipe for pipe, rank in ranks.items() if rank not in results and rank not in failures]
            for pipe in wait(pending, left):
                rank = ranks[pipe]  # type: ignore[index]
                workers[rank].is_busy = False
                try:
                    succeeded, value = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    workers[rank].process.join()
                    succeeded, value = False, f"the process ended with code {workers[rank].process.exitcode}"
                (results if succeeded else failures)[rank] = value
                if not succeeded:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        silent = [rank for rank in range(len(workers)) if rank not in results and rank not in failures]
        if not failures and not silent:
            return [results[rank] for rank in range(len(workers))]
        stacks = [(rank, self._stack(workers[rank])) for rank in silent]
        self.close(len(workers))
        report = [f"rank {rank} of {len(workers)} raised in {name}:\n{text}" for rank, text in failures.items()]
        if not failures:
            report += [
                f"rank {rank} did not return from {name} in {timeout_s} s; it was at:\n{s}" for rank, s in stacks
            ]
        elif silent:
            report.append(f"ranks {silent} had not returned by then")
        raise RankError("\n".join(report))

    def _start_worker(self, index: int) -> _Worker:
        ours, theirs = self._context.Pipe()
        stack_file = Path(self._scratch.name) / f"stack-{index}-{self._calls}"
        # No daemon, since Megatron's checkpoint writer starts processes; hence the pool must be shut down.
        process = self._context.Process(target=_serve, args=(theirs, str(stack_file)), name=f"rank-{index}")
        process.start()
        theirs.close()
        return _Worker(process, ours, stack_file)

    @staticmethod
    def _stack(worker: _Worker) -> str:
        """Python stack of a process that is stuck: it writes one when signalled."""
        if not worker.process.is_alive():
            return "the process is gone"
        worker.process.terminate()
        time.sleep(0.3)
        return worker.stack_file.read_text() if worker.stack_file.exists() else "no stack"

    def close(self, count: int | None = None) -> None:
        """Stop the first ``count`` processes, or all."""
        count = len(self._workers) if count is None else count
        for worker in self._workers[:count]:
            worker.stop()
        del self._workers[:count]

    def shut_down(self) -> None:
        """Stop all processes and remove the pool's files."""
        self.close()
        self._scratch.cleanup()


@dataclass(frozen=True)
class Ranks:
    """Some ranks of the pool."""

    pool: RankPool
    world_size: int

    def run(self, function: Callable[..., Result], *args: Any, timeout_s: float = 120.0, **kwargs: Any) -> list[Result]:
        """Results of ``function(rank, *args, **kwargs)`` on every rank, in rank order. Raises RankError."""
        return self.pool.run(self.world_size, function, args, kwargs, timeout_s)


def _serve(pipe: Connection, stack_file: str) -> None:
    """Run what arrives until the other end closes."""
    os.setsid()
    torch.set_num_threads(1)
    warnings.filterwarnings("error", module=r"(megarl|tests)\b")
    gc.freeze()  # what the server has loaded stays, so a collection need not look at it
    with open(stack_file, "w") as stacks:
        faulthandler.register(signal.SIGTERM, file=stacks, all_threads=False)
        while True:
            try:
                function, rank, args, kwargs = pipe.recv()
            except EOFError:
                return
            try:
                reply = (True, function(rank, *args, **kwargs))
            except BaseException:
                reply = (False, traceback.format_exc())
            try:
                _forget_groups()
            except Exception:
                reply = reply if not reply[0] else (False, traceback.format_exc())
            sys.stdout.flush()
            try:
                pipe.send(reply)
            except (TypeError, AttributeError, ValueError) as error:
                pipe.send((False, f"the result cannot be pickled: {error}"))


def _forget_groups() -> None:
    """Leave the process groups, and collect the engine that held them: each of its gloo groups has three threads."""
    if dist.is_initialized():
        bootstrap.stop()
        gc.collect()
