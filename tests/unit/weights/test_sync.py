from __future__ import annotations

import time

import pytest
import torch

from megarl.errors import SyncError
from megarl.weights.sync import SyncSession
from tests.unit.weights.sync_ends import HOST, Engine, Trainer, invoke


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (12,), "b": (40, 12), "c": (7, 12), "d": (3, 12)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


class Run:
    """Two trainer ranks, two engines, small buckets."""

    def __init__(self, *, timeout_s: float = 20.0, dtype: str = "float32", bucket_bytes: int = 400) -> None:
        self.tensors = weights(0)
        self.trainers = [Trainer(0, self.tensors, 0, 5), Trainer(1, self.tensors, 5, 12)]
        self.engines = [Engine(0), Engine(1)]
        self.session = SyncSession(
            self.trainers,
            self.engines,
            invoke,
            hosts=[HOST, HOST],
            ranks_per_receiver=1,
            dtype=dtype,
            bucket_bytes=bucket_bytes,
            timeout_s=timeout_s,
        )

    def update(self, seed: int) -> None:
        for name, tensor in weights(seed).items():
            self.tensors[name].copy_(tensor)

    def check(self, version: int, dtype: torch.dtype = torch.float32) -> None:
        for engine in self.engines:
            assert engine.version == version and not engine.poisoned
            assert engine.received.keys() == self.tensors.keys()
            for name, tensor in self.tensors.items():
                assert torch.equal(engine.received[name], tensor.to(dtype)), name


@pytest.mark.parametrize("bucket_bytes", [1, 400, 1 << 20])
def test_three_updates_in_a_row_bring_every_value_to_every_engine(bucket_bytes):
    run = Run(bucket_bytes=bucket_bytes)
    for version in range(3):
        run.update(version)
        report = run.session.publish(version)
        run.check(version)
        assert report.version == version and report.num_bytes >= 4 * sum(t.numel() for t in run.tensors.values())


def test_the_sender_converts_the_dtype():
    run = Run(dtype="bfloat16")
    run.session.publish(0)
    run.check(0, torch.bfloat16)


@pytest.mark.parametrize(
    ("fault", "where", "words"),
    [
        ("connect", "engine", r"rollout replica 1 in phase connect: it was not there"),
        ("load", "engine", r"rollout replica 1 in phase load.*the loader does not know it"),
        ("flip", "engine", r"rollout replica 1 rank 0 in phase verify at b: checksums of version 1 differ"),
        ("raise", "trainer", r"actor rank 1 in phase transfer at b: RuntimeError"),
    ],
)
def test_a_failure_is_named_commits_nowhere_and_heals(fault, where, words):
    run = Run()
    run.session.publish(0)
    faulty = run.engines[1] if where == "engine" else run.trainers[1]
    if fault == "connect":  # connections are made anew after a failure only
        run.engines[0].fault = "load"
        with pytest.raises(SyncError):
            run.session.publish(1)
        run.engines[0].fault = ""
    faulty.fault = fault
    run.update(1)
    started = time.monotonic()
    # A rank that waits to be joined by one that is not there ends at the time-out.
    run.session._timeout_s = 3.0 if fault == "connect" else 20.0
    with pytest.raises(SyncError, match=words):
        run.session.publish(1)
    assert time.monotonic() - started < 10
    assert [engine.version for engine in run.engines] == [0, 0]
    assert all("version 1 failed" in engine.poisoned for engine in run.engines)
    faulty.fault = ""
    run.session.publish(2)
    run.check(2)


def test_a_sender_that_does_not_come_ends_the_update_at_its_time_out():
    run = Run(timeout_s=4.0)
    run.session.publish(0)
    run.trainers[0].fault = "absent"
    started = time.monotonic()
    with pytest.raises(SyncError, match="no data within the time-out"):
        run.session.publish(1)
    assert time.monotonic() - started < 20
    assert [engine.version for engine in run.engines] == [0, 0]
    run.trainers[0].fault = ""
    run.session.publish(2)
    run.check(2)


def test_received_tensors_keep_their_values_when_buffers_are_used_again():
    run = Run(bucket_bytes=1)
    run.session.publish(0)
    first = {name: tensor.clone() for name, tensor in run.engines[0].received.items()}
    kept = dict(run.engines[0].received)
    run.update(1)
    run.session.publish(1)
    assert all(torch.equal(kept[name], first[name]) for name in kept)
