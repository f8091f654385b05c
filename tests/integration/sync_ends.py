"""Both ends of weight updates for tests: trainer ranks in processes of their own, an engine on a loop of its own."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from megarl.errors import MegarlError, SyncError
from megarl.models import load_spec
from megarl.parallel.grid import ParallelLayout
from megarl.weights.layout import megatron_regions, parameter_shapes
from megarl.weights.pieces import fill
from megarl.weights.sender import WeightSender
from megarl.weights.sync import Call

HOST = "127.0.0.1"


class TrainerRank:
    """Parameters of one Megatron rank, filled from whole tensors, and their sender."""

    def __init__(self, model_dir: Path, layout: ParallelLayout, rank: int) -> None:
        spec = load_spec(model_dir)
        self.regions = megatron_regions(spec, layout, layout.coordinate(rank))
        self.params = {name: torch.empty(shape) for name, shape in parameter_shapes(self.regions).items()}
        self.sender = WeightSender(rank, lambda: self.regions, self.parameters)
        self.fault: str | None = None

    def parameters(self) -> Mapping[str, Tensor]:
        """What the sender sends; ``fault`` spoils it."""
        if self.fault == "raise":
            raise RuntimeError("the trainer lost its parameters")
        return self.params

    def load(self, path: Path) -> None:
        """Hold these weights."""
        whole: Mapping[str, Tensor] = torch.load(path)
        fill(self.regions, self.params, lambda region: whole[region.tensor][region.slices])

    def set_fault(self, fault: str | None) -> None:
        self.fault = fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sender, name)


def _serve(kind: type[TrainerRank], model_dir: Path, layout: ParallelLayout, rank: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    trainer = kind(model_dir, layout, rank)
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(trainer, method)(*args)))
        except Exception as error:
            pipe.send((False, error))


class TrainerProcess:
    """A ``TrainerRank`` in another process, one call at a time."""

    def __init__(
        self, model_dir: Path, layout: ParallelLayout, rank: int, kind: type[TrainerRank] = TrainerRank
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._one_call = threading.Lock()
        self.process = context.Process(target=_serve, args=(kind, model_dir, layout, rank, other), daemon=True)
        self.process.start()
        other.close()

    def call(self, method: str, *args: Any) -> Any:
        with self._one_call:
            try:
                self._pipe.send((method, args))
                is_fine, result = self._pipe.recv()
            except (EOFError, OSError):
                raise SyncError("a trainer process died") from None
        if not is_fine:
            raise result
        return result

    def stop(self) -> None:
        self._pipe.close()
        self.process.join(10)


class LocalRank(TrainerRank):
    """A ``TrainerRank`` in this process; ``close_local_ranks`` ends the links of all."""

    made: ClassVar[list[LocalRank]] = []

    def __init__(self, model_dir: Path, layout: ParallelLayout, rank: int) -> None:
        super().__init__(model_dir, layout, rank)
        self.made.append(self)

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self, method)(*args)


def close_local_ranks() -> None:
    """At the end of a test."""
    while LocalRank.made:
        LocalRank.made.pop().sender.close()


class Loop:
    """An event loop in a thread of its own, on which an engine lives."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(300)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


class EngineOnLoop:
    """An engine whose methods are called from any thread."""

    def __init__(self, loop: Loop, engine: Any) -> None:
        self._loop, self.engine = loop, engine

    def call(self, method: str, *args: Any) -> Any:
        return self._loop.run(getattr(self.engine, method)(*args))


def invoke(calls: Sequence[Call], timeout_s: float, grace_s: float = 30.0) -> list[Any]:
    """Calls of a ``SyncSession`` on objects with a ``call`` method; a megarl error goes before others.

    After the first failure the other calls have ``grace_s`` to end; they are not waited for any longer, as by the
    driver of a run.
    """
    pool = ThreadPoolExecutor(len(calls))
    futures = [pool.submit(call.target.call, call.method, *call.args) for call in calls]
    wait(futures, return_when=FIRST_EXCEPTION)
    wait(futures, grace_s)
    pool.shutdown(wait=False)
    futures = [future for future in futures if future.done()]
    errors = [future.exception() for future in futures if future.exception() is not None]
    for error in sorted(errors, key=lambda error: not isinstance(error, MegarlError)):
        raise error
    return [future.result() for future in futures]
