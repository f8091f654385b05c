from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from megarl.errors import SyncError
from megarl.weights import checksum, sender
from megarl.weights.row_sums import ALL, Share
from megarl.weights.schedule import HOST, WIRE
from megarl.weights.sync import SyncOptions, SyncSession
from tests.unit.weights.sync_ends import HOST_NAME, Engine, Trainer, invoke


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (12,), "b": (40, 12), "c": (7, 12), "d": (3, 12)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


class Run:
    """Two trainer ranks and a replica of the second, two engines of two ranks, small buckets.

    Args:
        transport: ``mixed`` puts the second engine on another machine.
    """

    def __init__(
        self,
        *,
        transport: str = "auto",
        timeout_s: float = 20.0,
        dtype: torch.dtype = torch.float32,
        bucket_bytes: int = 400,
        verify: bool = True,
    ) -> None:
        self.tensors = weights(0)
        self.trainers = [
            Trainer(0, self.tensors, 0, 5),
            Trainer(1, self.tensors, 5, 12),
            Trainer(2, self.tensors, 5, 12, replica=1),
        ]
        self.engines = [Engine(0, 2, dtype), Engine(1, 2, dtype, "elsewhere" if transport == "mixed" else "")]
        self.session = SyncSession(
            self.trainers,
            self.engines,
            invoke,
            host=HOST_NAME,
            ranks_per_receiver=2,
            options=SyncOptions(
                bucket_bytes, timeout_s, verify, transport="auto" if transport == "mixed" else transport
            ),
        )

    def close(self) -> None:
        for trainer in self.trainers:
            trainer.sender.close()
        for engine in self.engines:
            engine.close()

    def update(self, seed: int) -> None:
        for name, tensor in weights(seed).items():
            self.tensors[name].copy_(tensor)

    def check(self, version: int, dtype: torch.dtype = torch.float32) -> None:
        for engine in self.engines:
            assert engine.version == version and not engine.poisoned
            for name, tensor in self.tensors.items():
                assert torch.equal(engine.whole(name), tensor.to(dtype)), name
            for rank in engine.ranks:
                assert rank.num_written == sum(region.numel for region in rank.regions)


@pytest.fixture
def make() -> Iterator[Callable[..., Run]]:
    """Makes runs and closes them."""
    runs: list[Run] = []

    def one(**settings: Any) -> Run:
        runs.append(Run(**settings))
        return runs[-1]

    yield one
    for run in runs:
        run.close()


@pytest.mark.parametrize("transport", ["auto", "network", "mixed"])
@pytest.mark.parametrize("bucket_bytes", [16, 400, 1 << 20])
def test_three_updates_in_a_row_bring_every_value_to_every_engine(make, transport, bucket_bytes):
    run = make(transport=transport, bucket_bytes=bucket_bytes)
    for version in range(3):
        run.update(version)
        report = run.session.publish(version)
        run.check(version)
        needed = sum(region.numel for engine in run.engines for rank in engine.ranks for region in rank.regions)
        assert report.version == version and report.num_bytes == 4 * needed
    links = {kind: run.session.schedule.num_links(kind) for kind in (HOST, WIRE)}
    assert (links[HOST] > 0, links[WIRE] > 0) == {"auto": (True, False), "network": (False, True)}.get(
        transport, (True, True)
    )


def test_a_process_with_thousands_of_open_files_is_served(make):
    """File numbers above 1,023, which select() cannot take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(2048, hard)), hard))
        files.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            files.enter_context(open(os.devnull))
        run = make()
        run.session.publish(0)
        run.check(0)


def test_no_end_holds_more_than_two_buckets(make):
    run = make(bucket_bytes=64, transport="mixed")
    run.session.publish(0)
    for trainer in run.trainers:
        session = trainer.sender._session
        assert session is not None and sum(buffer.numel() for buffer in session.buffers) <= 128
    for engine in run.engines:
        for rank in engine.ranks:
            assert rank.intake._buffers.numel() <= 128


def test_replicas_share_the_sending(make):
    run = make()
    run.session.publish(0)
    senders = run.session.schedule.senders
    assert senders.keys() == {0, 1, 2}
    assert 0.3 < senders[1].num_bytes / (senders[1].num_bytes + senders[2].num_bytes) < 0.7


def test_the_sender_converts_the_dtype(make):
    run = make(dtype=torch.bfloat16)
    run.session.publish(0)
    run.check(0, torch.bfloat16)


def test_updates_without_checksums_bring_the_same_values(make):
    run = make(verify=False)
    run.session.publish(0)
    run.check(0)


def test_checksums_cover_all_of_the_first_update_and_of_one_after_a_failure(make, monkeypatch):
    run, shares = make(), []
    monkeypatch.setattr(sender, "move", lambda *args: (shares.append(args[-1]), checksum.move(*args))[1])
    for version in (1, 2, 3):
        run.session.publish(version)
        assert set(shares) == {ALL if version == 1 else Share(16, version)}
        shares.clear()
    run.engines[0].fault = "commit"
    with pytest.raises(SyncError, match="caches"):
        run.session.publish(4)
    run.engines[0].fault = ""
    shares.clear()
    run.session.publish(5)
    run.check(5)
    assert set(shares) == {ALL}


def test_a_buffer_that_changes_after_it_was_summed_is_seen_in_every_update(make, monkeypatch):
    run = make(bucket_bytes=1 << 20)
    for version in range(1, 4):
        run.update(version)
        run.session.publish(version)

    def late(place: torch.Tensor, *args: object) -> object:
        total = checksum.move(place, *args)
        place += 1
        return total

    monkeypatch.setattr(sender, "move", late)
    for version in range(18, 20):
        run.session._has_committed = True
        with pytest.raises(SyncError, match=f"checksums of version {version} differ"):
            run.session.publish(version)
        assert all(engine.poisoned for engine in run.engines)


def test_what_lies_in_one_run_goes_over_the_network_unpacked(make, monkeypatch):
    run = make(transport="network", bucket_bytes=64)
    packed: list[int] = []
    monkeypatch.setattr(
        sender, "move", lambda place, *rest: packed.append(place.numel()) or checksum.move(place, *rest)
    )
    run.session.publish(0)
    run.check(0)
    buckets = [bucket for program in run.session.schedule.senders.values() for bucket in program.buckets]
    shared = [len(bucket.items) for bucket in buckets if len(bucket.items) > 1]
    assert len(packed) == sum(shared) < sum(len(bucket.items) for bucket in buckets)


def test_memory_that_is_asked_for_and_not_shared_is_refused(make):
    run = make(transport="host")
    run.engines[1].place = "elsewhere"
    with pytest.raises(SyncError, match="share no memory"):
        run.session.publish(0)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("offer", r"actor rank 1 in phase offer: it was told to fail"),
        ("layout", r"replica 1 in phase prepare: it has no"),
    ],
)
def test_a_failure_before_there_is_a_plan_is_named_and_heals(make, fault, words):
    run = make()
    faulty = run.trainers[1] if fault == "offer" else run.engines[1]
    faulty.fault = fault
    with pytest.raises(SyncError, match=words):
        run.session.publish(1)
    assert [engine.version for engine in run.engines] == [None, None]
    faulty.fault = ""
    run.session.publish(2)
    run.check(2)


@pytest.mark.parametrize("transport", ["auto", pytest.param("network", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("fault", "where", "words"),
    [
        ("open", "trainer", r"actor rank 1 in phase open: it was told to fail"),
        ("connect", "trainer", r"actor rank 1 in phase connect: it was told to fail"),
        ("connect", "engine", r"rollout replica 1 in phase connect: it was not there"),
        ("write", "engine", r"rollout replica 1 rank 1 in phase transfer at b: the loader does not know it"),
        ("flip", "engine", r"rollout replica 1 rank 1 in phase verify at b: checksums of version 1 differ"),
        ("raise", "trainer", r"actor rank 1 in phase transfer at b: LayoutError"),
        ("commit", "engine", r"rollout replica 1 in phase commit: its caches are in use"),
    ],
)
def test_a_failure_is_named_commits_nowhere_and_heals(make, fault, where, words, transport):
    run = make(transport=transport)
    run.session.publish(0)
    faulty = run.engines[1] if where == "engine" else run.trainers[1]
    if fault in ("open", "connect"):  # connections are made anew after a failure only
        run.engines[0].fault = "write"
        with pytest.raises(SyncError):
            run.session.publish(1)
        run.engines[0].fault = ""
        # Ends that wait for one that does not come end at the time-out.
        run.session.options = replace(run.session.options, timeout_s=3.0)
    faulty.fault = fault
    run.update(1)
    started = time.monotonic()
    with pytest.raises(SyncError, match=words):
        run.session.publish(1)
    assert time.monotonic() - started < 10
    # A commit that one engine missed does not stay in force at the others.
    assert all("version 1 failed" in engine.poisoned for engine in run.engines)
    faulty.fault = ""
    run.session.options = replace(run.session.options, timeout_s=20.0)
    run.update(2)
    run.session.publish(2)
    run.check(2)


@pytest.mark.parametrize("transport", ["auto", pytest.param("network", marks=pytest.mark.slow)])
@pytest.mark.parametrize("slow", ["trainer", "engine"])
def test_an_end_that_is_too_slow_ends_the_update_at_its_time_out(make, transport, slow):
    run = make(transport=transport)
    run.session.publish(0)
    run.session.options = replace(run.session.options, timeout_s=1.0)
    faulty = run.trainers[0] if slow == "trainer" else run.engines[1]
    faulty.fault = "absent" if slow == "trainer" else "slow"
    started = time.monotonic()
    # Named by one who waits for it, or for one who waits for it.
    late = "actor rank 0" if slow == "trainer" else "rollout replica 1 rank 1"
    with pytest.raises(SyncError, match=f"no answer from .*{late}.* within the time-out"):
        run.session.publish(1)
    assert time.monotonic() - started < 20
    assert [engine.version for engine in run.engines] == [0, 0]
    faulty.fault = ""
    run.session.options = replace(run.session.options, timeout_s=20.0)
    run.session.publish(2)
    run.check(2)


def test_ends_that_were_given_different_plans_do_not_start(make):
    run = make()
    run.session.publish(0)
    run.session._is_connected = False
    senders = run.session.schedule.senders
    bucket = senders[0].buckets[0]
    item = bucket.items[0]._replace(start=bucket.items[0].start + 16)
    wrong = bucket._replace(items=(item, *bucket.items[1:]))
    object.__setattr__(senders[0], "buckets", (wrong, *senders[0].buckets[1:]))
    with pytest.raises(SyncError, match="were given different plans"):
        run.session.publish(1)
