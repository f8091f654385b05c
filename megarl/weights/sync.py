"""A weight update from trainer ranks to engines: prepare, transfer, verify, commit.

``SyncSession.publish`` is the protocol; it runs on the driver and calls both ends by method name, through a function
that knows how to reach them. ``WeightSender`` is the trainer's end, ``intake.py`` and ``rollout/vllm/weights.py`` the
engine's.

    sender:   offer() -> regions        open() -> address    connect(manifest, ...)    send(version, ...) -> report
    receiver: connect(addresses, ...)   receive(version, ...) -> report   commit(version)   poison(reason)

Invariants:
1. One manifest is built on the driver and given to both ends; its digest is compared before the first byte moves.
2. An update is committed on every receiver after the checksums of all agree, or its version is poisoned: the receivers
   refuse to sample, connections are made anew, and the next update is again a full one. That heals.
3. An update ends within ``timeout_s`` and the time a failure needs to be reported, with rank, phase and, where there is
   one, the tensor named.
4. dtype is converted by the sender; checksums cover what travels.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megarl.errors import MegarlError, SyncError
from megarl.weights.checksum import add, checksum
from megarl.weights.manifest import Manifest, Piece, build_manifest
from megarl.weights.region import Box, Region
from megarl.weights.transport.group import Address, Backend, Channel, TransportError, byte_buffer, open_store

logger = logging.getLogger(__name__)

# Ranks that wait to be joined by one that failed to come learn of it by this only.
_CONNECT_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class SenderReport:
    """What one trainer rank sent.

    Args:
        rank: its rank in the role.
        checksums: its share of each tensor's checksum; empty where checksums are off.
        num_bytes: bytes broadcast.
        seconds: from the call to the last byte.
    """

    rank: int
    checksums: Mapping[str, int]
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ReceiverReport:
    """What one engine received.

    Args:
        replica: the engine.
        checksums: for each of its tensor-parallel ranks, the checksum of each whole tensor.
        seconds: from the call until the engine holds the weights.
    """

    replica: int
    checksums: tuple[Mapping[str, int], ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class SyncReport:
    """A committed update."""

    version: int
    num_bytes: int
    seconds: float
    send_seconds: float


@dataclass(frozen=True, slots=True)
class Call:
    """One method call on one end, to be made at the same time as the others of its list."""

    target: Any
    method: str
    args: tuple[Any, ...] = ()


Invoke = Callable[[Sequence[Call], float], list[Any]]
"""Makes all calls at once and returns their results in order; raises the first cause when one fails. Ends in the time
given, and the time a failure needs to be reported."""


class WeightSender:
    """The trainer's end, in the process that holds the parameters.

    Args:
        rank: of this process in its role.
        pieces: regions this rank owns with views of its parameters; asked for anew in every update.
        backend: gloo for parameters in host memory, nccl on devices.
        role: for messages.
    """

    def __init__(
        self,
        rank: int,
        pieces: Callable[[], Iterable[tuple[Region, Tensor]]],
        *,
        backend: Backend = "gloo",
        role: str = "actor",
    ) -> None:
        self.rank = rank
        self.role = role
        self._pieces = pieces
        self._backend: Backend = backend
        self._store: Any = None
        self._channel: Channel | None = None
        self._manifest: Manifest | None = None
        self._buffers: list[Tensor] = []

    def offer(self) -> list[Region]:
        """The regions this rank would send; a rank that owns none takes no part."""
        return [region for region, _ in self._pieces() if region.is_owner and region.numel]

    def open(self, host: str) -> Address:
        """Open the store at which receivers meet this sender, for a new session; the old one is dropped."""
        self.close()
        self._store = open_store(host)
        return Address(host, self._store.port)

    def connect(self, manifest: Manifest, num_receivers: int, timeout_s: float) -> None:
        """Wait for all receivers. Raises SyncError."""
        assert self._store is not None, "open comes first"
        self._manifest = manifest
        try:
            self._channel = Channel(self._store, 0, 1 + num_receivers, backend=self._backend, timeout_s=timeout_s)
        except TransportError as error:
            raise self._failure("connect", None, error.cause) from error

    def send(self, version: int, timeout_s: float, digest: str, with_checksums: bool = True) -> SenderReport:
        """Broadcast all of this rank's buckets, packing one while the one before is under way.

        Raises:
            SyncError: naming the tensor being packed, or what another rank reported.
        """
        started = time.monotonic()
        deadline = started + timeout_s
        if self._channel is None or self._manifest is None or self._manifest.digest != digest:
            raise self._failure("transfer", None, f"version {version} goes by another manifest than this rank has")
        buckets = list(self._manifest.buckets_of(self.rank))
        checksums: dict[str, int] = {}
        sent: list[Any] = []
        tensor: str | None = None
        try:
            views = {(region.tensor, region.box): view for region, view in self._pieces() if region.is_owner}
            for index, bucket in enumerate(buckets):
                if index >= 2:  # two buffers in turn: the one to be filled must have left
                    self._channel.wait(sent[index - 2], deadline=deadline)
                buffer = self._buffer(index % 2, bucket.num_bytes)
                for piece in bucket.pieces:
                    tensor = piece.tensor
                    packed = self._pack(piece, views, buffer)
                    if with_checksums:
                        _accumulate(checksums, piece, packed)
                tensor = bucket.pieces[0].tensor
                sent.append(self._channel.broadcast(buffer))
            for work in sent[-2:]:
                self._channel.wait(work, deadline=deadline)
        except TransportError as error:
            failure = self._failure("transfer", tensor, error.cause, from_peer=error.from_peer)
            self._abort(str(failure))
            raise failure from error
        except Exception as error:  # whatever it is, the others must not wait for the rest
            failure = self._failure("transfer", tensor, f"{type(error).__name__}: {error}")
            self._abort(str(failure))
            raise failure from error
        num_bytes = sum(bucket.num_bytes for bucket in buckets)
        return SenderReport(self.rank, checksums, num_bytes, time.monotonic() - started)

    def close(self) -> None:
        """Leave the session."""
        if self._channel is not None:
            self._channel.close()
        self._channel = self._store = None

    def _buffer(self, slot: int, num_bytes: int) -> Tensor:
        """A [num_bytes] part of one of the two send buffers, which grow once and stay: fresh memory is dear."""
        if not self._buffers:
            assert self._manifest is not None
            most = max(bucket.num_bytes for bucket in self._manifest.buckets_of(self.rank))
            device = next(view.device for _, view in self._pieces())
            self._buffers = [byte_buffer(most, device) for _ in range(2)]
        if self._buffers[slot].numel() < num_bytes:
            self._buffers[slot] = byte_buffer(num_bytes, self._buffers[slot].device)
        return self._buffers[slot][:num_bytes]

    def _pack(self, piece: Piece, views: Mapping[tuple[str, Box], Tensor], buffer: Tensor) -> Tensor:
        """Copy a piece into its place in the bucket, converting the dtype; returns that place shaped like the box."""
        assert self._manifest is not None
        place = piece_view(buffer, piece, getattr(torch, self._manifest.dtype))
        view = views[piece.tensor, piece.box]
        if view.shape != place.shape:  # copy_ would broadcast
            raise RuntimeError(f"the parameter's view has shape {tuple(view.shape)}, the piece {piece.shape}")
        place.copy_(view)
        return place

    def _abort(self, reason: str) -> None:
        if self._channel is not None:
            self._channel.fail(reason)
        self.close()

    def _failure(self, phase: str, tensor: str | None, cause: str, *, from_peer: bool = False) -> SyncError:
        if from_peer:  # the peer's words name rank, phase and tensor already
            return SyncError(cause)
        return sync_failure(f"{self.role} rank {self.rank}", phase, tensor, cause)


class SyncSession:
    """Updates from one actor to all engines, seen by the driver.

    Args:
        senders: trainer ranks, by what ``invoke`` can call; those that own nothing are left out later.
        receivers: engines, likewise.
        invoke: makes calls on them.
        hosts: address of each sender's machine at which engines reach it.
        ranks_per_receiver: tensor-parallel ranks of an engine.
        dtype: of the engines' weights.
        bucket_bytes: most bytes of a bucket.
        timeout_s: of one update.
        verify: compare checksums before the commit.
    """

    def __init__(
        self,
        senders: Sequence[Any],
        receivers: Sequence[Any],
        invoke: Invoke,
        *,
        hosts: Sequence[str],
        ranks_per_receiver: int,
        dtype: str,
        bucket_bytes: int,
        timeout_s: float,
        verify: bool = True,
    ) -> None:
        self._senders, self._receivers, self._invoke = list(senders), list(receivers), invoke
        self._hosts = list(hosts)
        self._ranks_per_receiver = ranks_per_receiver
        self._dtype, self._bucket_bytes = dtype, bucket_bytes
        self._timeout_s, self._verify = timeout_s, verify
        self._manifest: Manifest | None = None
        self._is_connected = False

    def publish(self, version: int) -> SyncReport:
        """Bring the actor's weights into every engine under ``version``; returns after every engine committed.

        Raises:
            SyncError: the update failed or did not verify; no engine samples until a later one succeeds.
            MegarlError: what ``invoke`` raises for a dead process.
        """
        started = time.monotonic()
        try:
            manifest = self._prepare()
            sent, received = self._transfer(version, manifest)
            if self._verify:
                verify(manifest, sent, received, version)
            self._invoke([Call(receiver, "commit", (version,)) for receiver in self._receivers], self._timeout_s)
        except MegarlError as error:
            self._is_connected = False
            self._poison(f"update to version {version} failed: {error.problem}")
            raise
        return SyncReport(
            version, manifest.num_bytes, time.monotonic() - started, max(report.seconds for report in sent)
        )

    def _prepare(self) -> Manifest:
        """The manifest, made once, and connections, made anew after a failure."""
        if self._manifest is None:
            offers = self._invoke([Call(sender, "offer") for sender in self._senders], self._timeout_s)
            self._manifest = build_manifest(dict(enumerate(offers)), dtype=self._dtype, bucket_bytes=self._bucket_bytes)
        manifest = self._manifest
        if not self._is_connected:
            senders = [self._senders[rank] for rank in manifest.senders]
            opened = self._invoke(
                [Call(self._senders[rank], "open", (self._hosts[rank],)) for rank in manifest.senders], self._timeout_s
            )
            addresses = dict(zip(manifest.senders, opened, strict=True))
            count = self._ranks_per_receiver
            total = count * len(self._receivers)
            timeout_s = min(self._timeout_s, _CONNECT_TIMEOUT_S)
            calls = [Call(sender, "connect", (manifest, total, timeout_s)) for sender in senders]
            calls += [
                Call(receiver, "connect", (addresses, manifest, 1 + index * count, total, timeout_s))
                for index, receiver in enumerate(self._receivers)
            ]
            self._invoke(calls, timeout_s)
            self._is_connected = True
        return manifest

    def _transfer(self, version: int, manifest: Manifest) -> tuple[list[SenderReport], list[ReceiverReport]]:
        calls = [
            Call(self._senders[rank], "send", (version, self._timeout_s, manifest.digest, self._verify))
            for rank in manifest.senders
        ]
        calls += [
            Call(receiver, "receive", (version, self._timeout_s, manifest.digest, self._verify))
            for receiver in self._receivers
        ]
        reports = self._invoke(calls, self._timeout_s)
        return reports[: len(manifest.senders)], reports[len(manifest.senders) :]

    def _poison(self, reason: str) -> None:
        """Best effort: an engine between ``receive`` and ``commit`` refuses to sample anyway."""
        for receiver in self._receivers:
            try:
                self._invoke([Call(receiver, "poison", (reason,))], self._timeout_s)
            except MegarlError as error:
                logger.warning("an engine could not be told that the update failed: %s", error)


def verify(manifest: Manifest, sent: Sequence[SenderReport], received: Sequence[ReceiverReport], version: int) -> None:
    """Compares what all senders sent together with what every engine rank holds.

    Raises:
        SyncError: naming engine, rank and tensors.
    """
    expected = add(dict(report.checksums) for report in sent)
    for report in received:
        for rank, checksums in enumerate(report.checksums):
            wrong = [name for name in manifest.shapes if expected.get(name) != checksums.get(name)]
            if wrong:
                raise sync_failure(
                    f"rollout replica {report.replica} rank {rank}",
                    "verify",
                    ", ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""),
                    f"checksums of version {version} differ from the trainer's",
                )


def sync_failure(who: str, phase: str, tensor: str | None, cause: str) -> SyncError:
    """The error every failed update ends in."""
    at = "" if tensor is None else f" at {tensor}"
    return SyncError(
        f"weight update failed on {who} in phase {phase}{at}: {cause}",
        fix="the logs of that rank have more; the next update starts from scratch",
    )


def piece_view(buffer: Tensor, piece: Piece, dtype: torch.dtype) -> Tensor:
    """A piece's place in a bucket, shaped like its box."""
    num_elements = 1
    for size in piece.shape:
        num_elements *= size
    flat = buffer[piece.start : piece.start + num_elements * dtype.itemsize]
    return flat.view(dtype).view(piece.shape)


def _accumulate(checksums: dict[str, int], piece: Piece, packed: Tensor) -> None:
    share = {piece.tensor: checksum(packed, piece.box)}
    checksums.update(add([{piece.tensor: checksums.get(piece.tensor, 0)}, share]))
