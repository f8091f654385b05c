"""Both ends of an update in one process, each on a thread: real links and boards, plain tensors instead of models."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from megarl.errors import MegarlError, SyncError
from megarl.weights.failure import sync_failure
from megarl.weights.intake import Intake
from megarl.weights.pieces import region_view
from megarl.weights.region import Region, Shape, contiguous_strides
from megarl.weights.row_sums import Share
from megarl.weights.sender import Membership, WeightSender
from megarl.weights.sync import DIRECT, Call, RankConnection, RankLayout, ReceiverReport
from megarl.weights.transport.board import TransportError, machine

HOST_NAME = "127.0.0.1"


def columns(tensors: Mapping[str, Tensor], start: int, stop: int, replica: int = 0) -> list[Region]:
    """Regions of columns ``[start, stop)`` of every tensor, each a parameter of its own."""
    return [
        _part(name, tuple(tensor.shape), tensor.dim() - 1, start, stop, replica) for name, tensor in tensors.items()
    ]


def rows(shapes: Mapping[str, Shape], index: int, count: int) -> list[Region]:
    """Regions of the ``index``-th of ``count`` parts of the rows of every tensor; vectors are replicated."""
    found = []
    for name, shape in shapes.items():
        if len(shape) == 1:
            found.append(_part(name, shape, 0, 0, shape[0], 0))
        else:
            cuts = [shape[0] * part // count for part in range(count + 1)]
            found.append(_part(name, shape, 0, cuts[index], cuts[index + 1], 0))
    return found


def _part(name: str, shape: Shape, dim: int, start: int, stop: int, replica: int) -> Region:
    box = tuple((start, stop) if d == dim else (0, size) for d, size in enumerate(shape))
    local = tuple(stop - start for start, stop in box)
    return Region(name, shape, box, f"local.{name}", local, 0, contiguous_strides(local), replica)


class Trainer:
    """One rank: columns ``[start, stop)`` of every tensor."""

    def __init__(self, rank: int, tensors: dict[str, Tensor], start: int, stop: int, replica: int = 0) -> None:
        self.tensors, self.bounds = tensors, (start, stop)
        self.regions = columns(tensors, start, stop, replica)
        self.sender = WeightSender(rank, lambda: self.regions, self.parameters)
        self.fault = ""

    def parameters(self) -> dict[str, Tensor]:
        found = {f"local.{name}": t[..., slice(*self.bounds)].contiguous() for name, t in self.tensors.items()}
        if self.fault == "raise":
            found["local.b"] = torch.empty(7)
        return found

    def call(self, method: str, *args: Any) -> Any:
        if self.fault == "absent" and method == "send":
            time.sleep(args[1] + 3)
            raise SyncError("woke up too late")
        if self.fault == method:
            raise sync_failure(self.sender.name, method, None, "it was told to fail")
        return getattr(self.sender, method)(*args)


class Rank:
    """One rank of an engine: a part of the rows of every tensor, in plain tensors. A target for an ``Intake``."""

    def __init__(self, regions: Sequence[Region], dtype: torch.dtype) -> None:
        self.regions = regions
        self.tensors = {r.local_name: torch.full(r.local_shape, float("nan"), dtype=dtype) for r in regions}
        self.num_written = 0
        self.intake: Intake | None = None
        self.fault = ""

    def place(self, region: Region) -> Tensor:
        if self.fault == "write" and region.tensor == "b":
            raise RuntimeError("the loader does not know it")
        if self.fault == "slow":
            time.sleep(0.7)
        return region_view(region, self.tensors[region.local_name])

    def written(self, region: Region) -> None:
        self.num_written += region.numel


class Engine:
    """A receiver of ``tp`` ranks that keeps plain tensors; ``fault`` makes its last rank fail."""

    def __init__(self, replica: int, tp: int = 1, dtype: torch.dtype = torch.float32, place: str = "") -> None:
        self.replica, self.tp, self.dtype, self.place = replica, tp, dtype, place
        self.fault = ""
        self.version: int | None = None
        self.poisoned = ""
        self.ranks: list[Rank] = []

    def layout(self, shapes: Mapping[str, Shape]) -> list[RankLayout]:
        if self.fault == "layout":
            raise sync_failure(f"rollout replica {self.replica}", "prepare", None, "it has no model yet")
        self.ranks = [Rank(rows(shapes, index, self.tp), self.dtype) for index in range(self.tp)]
        dtypes = {f"local.{name}": str(self.dtype).removeprefix("torch.") for name in shapes}
        where = self.place or machine()
        return [RankLayout(tuple(rank.regions), dtypes, where, "", DIRECT) for rank in self.ranks]

    def connect(self, connections: Sequence[RankConnection]) -> None:
        if self.fault == "connect":
            raise sync_failure(f"rollout replica {self.replica}", "connect", None, "it was not there")
        with ThreadPoolExecutor(self.tp) as pool:
            list(pool.map(self._connect, self.ranks, connections))

    def _connect(self, rank: Rank, told: RankConnection) -> None:
        if rank.intake is not None:
            rank.intake.close()
        who = f"rollout replica {self.replica} rank {self.ranks.index(rank)}"
        membership: Membership = told.membership
        try:
            rank.intake = Intake(told.program, told.rank, who, membership, told.sockets)
        except TransportError as error:
            raise SyncError(error.cause) from error

    def receive(
        self, version: int, timeout_s: float, digest: str, share: Share | None, in_flight: str
    ) -> ReceiverReport:
        self.poisoned = "in update"
        self.ranks[-1].fault = self.fault

        def one(rank: Rank) -> dict[str, int]:
            intake = rank.intake
            assert intake is not None and intake.program.plan_digest == digest
            rank.num_written = 0
            try:
                sums = intake.run(rank, deadline=time.monotonic() + timeout_s, share=share)
            except (RuntimeError, TransportError) as error:
                who = f"rollout replica {self.replica} rank {self.ranks.index(rank)}"
                cause = error.cause if isinstance(error, TransportError) else str(error)
                failure = sync_failure(who, "transfer", intake.tensor, cause)
                is_from_peer = isinstance(error, TransportError) and error.from_peer
                intake.fail(cause if is_from_peer else str(failure))
                intake.close()
                raise SyncError(cause) if is_from_peer else failure from error
            if rank.fault == "flip":
                sums["b"] += 1
            return sums

        with ThreadPoolExecutor(self.tp) as pool:
            sums = tuple(pool.map(one, self.ranks))
        return ReceiverReport(self.replica, sums, 0.0)

    def commit(self, version: int) -> None:
        if self.fault == "commit":
            raise sync_failure(f"rollout replica {self.replica}", "commit", None, "its caches are in use")
        self.version, self.poisoned = version, ""

    def poison(self, reason: str) -> None:
        self.poisoned = reason

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self, method)(*args)

    def close(self) -> None:
        for rank in self.ranks:
            if rank.intake is not None:
                rank.intake.close()

    def whole(self, name: str) -> Tensor:
        """A tensor put together from its ranks' parts."""
        parts = [rank.tensors[f"local.{name}"] for rank in self.ranks]
        return torch.cat(parts) if parts[0].dim() > 1 else parts[-1]


def invoke(calls: Sequence[Call], timeout_s: float) -> list[Any]:
    """All calls at once; the first error in the order of their ends."""
    errors: list[BaseException] = []

    def one(call: Call) -> Any:
        try:
            return call.target.call(call.method, *call.args)
        except MegarlError as error:
            errors.append(error)
            return None

    with ThreadPoolExecutor(len(calls)) as pool:
        results = list(pool.map(one, calls))
    if errors:
        raise errors[0]
    return results
