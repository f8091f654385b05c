"""Both ends of an update in one process, each on a thread: real groups and stores, plain tensors instead of models."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from megarl.errors import MegarlError, SyncError
from megarl.weights.checksum import checksum
from megarl.weights.intake import Intake
from megarl.weights.manifest import Manifest
from megarl.weights.region import Region, whole
from megarl.weights.sync import Call, ReceiverReport, WeightSender, sync_failure
from megarl.weights.transport.group import Address, TransportError

HOST = "127.0.0.1"


class Trainer:
    """One rank: columns ``[start, stop)`` of every tensor."""

    def __init__(self, rank: int, tensors: dict[str, Tensor], start: int, stop: int) -> None:
        self.tensors, self.bounds = tensors, (start, stop)
        self.sender = WeightSender(rank, self.pieces)
        self.fault = ""

    def pieces(self) -> list[tuple[Region, Tensor]]:
        found = []
        for name, tensor in self.tensors.items():
            box = (*whole(tuple(tensor.shape))[:-1], self.bounds)
            part = tensor[..., slice(*self.bounds)]
            found.append((Region(name, tuple(tensor.shape), box, name, tuple(part.shape), 0, part.stride()), part))
        if self.fault == "raise" and len(found) > 1:
            found[1] = (found[1][0], torch.empty(7))
        return found

    def call(self, method: str, *args: Any) -> Any:
        if self.fault == "absent" and method == "send":
            time.sleep(args[1] + 1)
            raise SyncError("woke up too late")
        return getattr(self.sender, method)(*args)


class Engine:
    """A receiver that keeps whole tensors; ``fault`` makes it fail."""

    def __init__(self, replica: int) -> None:
        self.replica = replica
        self.fault = ""
        self.version: int | None = None
        self.poisoned = ""
        self.received: dict[str, Tensor] = {}
        self._intake: Intake | None = None

    def connect(
        self, addresses: Mapping[int, Address], manifest: Manifest, first_rank: int, num: int, timeout_s: float
    ) -> None:
        if self.fault == "connect":
            raise sync_failure(f"rollout replica {self.replica}", "connect", None, "it was not there")
        try:
            self._intake = Intake(manifest, addresses, first_rank, 1 + num, device="cpu", timeout_s=timeout_s)
        except TransportError as error:
            raise SyncError(error.cause) from error

    def receive(self, version: int, timeout_s: float, digest: str, with_checksums: bool) -> ReceiverReport:
        assert self._intake is not None and self._intake.manifest.digest == digest
        self.poisoned, self.received = "in update", {}
        try:
            for tensors in self._intake.rounds(time.monotonic() + timeout_s):
                self.received |= tensors
                if self.fault == "load":
                    raise RuntimeError("the loader does not know it")
        except (RuntimeError, TransportError) as error:
            is_transport = isinstance(error, TransportError)
            failure = sync_failure(f"rollout replica {self.replica}", "load", self._intake.tensor, str(error))
            self._intake.fail(str(failure))
            self._intake.close()
            raise SyncError(error.cause) if is_transport else failure from error
        if self.fault == "flip":
            self.received["b"][0, 0] += 1
        sums = {name: checksum(t, whole(tuple(t.shape))) for name, t in self.received.items() if with_checksums}
        return ReceiverReport(self.replica, (sums,), 0.0)

    def commit(self, version: int) -> None:
        self.version, self.poisoned = version, ""

    def poison(self, reason: str) -> None:
        self.poisoned = reason

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self, method)(*args)


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
