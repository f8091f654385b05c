"""Trainer ranks in processes of their own, one of which stands still in the middle of an update."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest
import torch

from megarl.errors import SyncError
from megarl.weights.sync import SyncOptions, SyncSession, Transport
from tests.integration.sync_ends import invoke
from tests.unit.weights.sync_ends import HOST_NAME, Engine, Trainer

TIMEOUT_S, SHORT_S, REPORT_S = 60.0, 2.0, 10.0
BOUNDS = [(0, 5), (5, 12)]


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(40, 12, generator=generator) for name in "abcd"}


class Freezing(Trainer):
    """A trainer rank that stops at a tensor if it is told to."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, weights(0), *BOUNDS[rank])
        self.is_to_freeze = False
        payload = self.sender._payload

        def at_tensor(bucket: Any, *args: Any) -> Any:
            if self.is_to_freeze and bucket.items[0].region.tensor == "c":
                self.is_to_freeze = False
                os.kill(os.getpid(), signal.SIGSTOP)
            return payload(bucket, *args)

        self.sender._payload = at_tensor  # type: ignore[method-assign]

    def draw(self, seed: int, is_to_freeze: bool) -> None:
        self.is_to_freeze = is_to_freeze
        for name, tensor in weights(seed).items():
            self.tensors[name].copy_(tensor)


def serve(pipe: Connection, rank: int) -> None:
    torch.set_num_threads(1)
    trainer = Freezing(rank)
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(trainer if method == "draw" else trainer.sender, method)(*args)))
        except SyncError as error:
            pipe.send((False, error))


class Remote:
    """The other process, one call at a time."""

    def __init__(self, rank: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._one_call = threading.Lock()
        self.process = context.Process(target=serve, args=(other, rank), daemon=True)
        self.process.start()
        other.close()

    def call(self, method: str, *args: Any) -> Any:
        with self._one_call:
            self._pipe.send((method, args))
            is_fine, result = self._pipe.recv()
        if not is_fine:
            raise result
        return result

    def wake(self) -> None:
        psutil.Process(self.process.pid).send_signal(signal.SIGCONT)

    def stop(self) -> None:
        self.wake()
        self._pipe.close()
        self.process.join(10)


@pytest.fixture(scope="module")
def trainers() -> Iterator[list[Remote]]:
    made = [Remote(rank) for rank in range(2)]
    yield made
    for trainer in made:
        trainer.stop()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("transport", ["host", "network"])
def test_a_frozen_rank_is_named_in_time_and_the_update_after_it_woke_heals(
    trainers: list[Remote], transport: Transport, rank: int
) -> None:
    engine = Engine(0, 2)
    options = SyncOptions(400, TIMEOUT_S, transport=transport)
    session = SyncSession(
        trainers,
        [engine],
        partial(invoke, grace_s=0.5),
        host=HOST_NAME,
        ranks_per_receiver=2,
        options=options,
    )

    def publish(version: int, freezes: int | None = None) -> None:
        for number, trainer in enumerate(trainers):
            trainer.call("draw", version, number == freezes)
        session.publish(version)
        for name, tensor in weights(version).items():
            assert torch.equal(engine.whole(name), tensor)

    try:
        publish(1)
        session.options = SyncOptions(400, SHORT_S, transport=transport)
        started = time.monotonic()
        with pytest.raises(SyncError, match=f"no answer from (actor rank {rank}) within"):
            publish(2, freezes=rank)
        assert time.monotonic() - started < SHORT_S + REPORT_S
        assert psutil.Process(trainers[rank].process.pid).status() == psutil.STATUS_STOPPED
        assert engine.poisoned and engine.version == 1
        trainers[rank].wake()
        session.options = options
        for version in (3, 4):
            publish(version)
    finally:
        trainers[rank].wake()
        engine.close()
