"""A weight update between two processes on one GPU: device memory is shared by handle."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.platform.device import memory_sharing
from megarl.weights.checksum import checksum, move, numbers
from megarl.weights.pieces import region_view
from megarl.weights.region import Region, whole
from megarl.weights.row_sums import ALL, Share
from megarl.weights.sender import WeightSender
from megarl.weights.sync import DIRECT, Call, RankConnection, RankLayout, ReceiverReport, SyncOptions, SyncSession
from megarl.weights.transport.board import machine
from tests.unit.weights.sync_ends import rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = {"a": (640,), "b": (4096, 640), "c": (70, 640)}


def draw(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


class Receiver:
    """An engine of one rank, in a process of its own."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        self.regions = rows(SHAPES, 0, 1)
        self.tensors = {
            region.local_name: torch.zeros(region.local_shape, dtype=torch.bfloat16, device=self.device)
            for region in self.regions
        }
        self.sharing = memory_sharing(self.device)

    def layout(self, shapes: Any) -> list[RankLayout]:
        assert self.sharing is not None
        dtypes = dict.fromkeys(self.tensors, "bfloat16")
        return [RankLayout(tuple(self.regions), dtypes, machine(), self.sharing.device_id, DIRECT)]

    def connect(self, connections: list[RankConnection]) -> None:
        from megarl.weights.intake import Intake

        (told,) = connections
        self.intake = Intake(
            told.program, told.rank, "engine", told.membership, told.sockets, device=self.device, sharing=self.sharing
        )

    def receive(
        self, version: int, timeout_s: float, digest: str, share: Share | None, in_flight: str
    ) -> ReceiverReport:
        found = self.intake.run(self, deadline=time.monotonic() + timeout_s, share=share)
        return ReceiverReport(0, (found,), 0.0)

    def place(self, region: Region) -> Tensor:
        return region_view(region, self.tensors[region.local_name])

    def written(self, region: Region) -> None:
        return None

    def commit(self, version: int) -> None:
        return None

    def poison(self, reason: str) -> None:
        return None

    def values(self) -> dict[str, Tensor]:
        return {name: tensor.cpu() for name, tensor in self.tensors.items()}


def serve(pipe: Connection) -> None:
    receiver = Receiver()
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        pipe.send(getattr(receiver, method)(*arguments))


def test_three_updates_through_device_memory_are_exact_and_copy_nothing_to_the_host():
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=serve, args=(other,), daemon=True)
    process.start()
    device = torch.device("cuda", 0)
    parameters = {f"local.{name}": tensor.to(device) for name, tensor in draw(0).items()}
    sender = WeightSender(
        0, lambda: rows(SHAPES, 0, 1), lambda: parameters, device=device, sharing=memory_sharing(device)
    )

    def call(made: Call) -> Any:
        if made.target is sender:
            return getattr(sender, made.method)(*made.args)
        pipe.send((made.method, made.args))
        return None

    def invoke(calls: list[Call], timeout_s: float) -> list[Any]:
        # The receiver works while the sender is called.
        ordered = sorted(range(len(calls)), key=lambda index: calls[index].target is sender)
        found: dict[int, Any] = {index: call(calls[index]) for index in ordered}
        return [found[i] if c.target is sender else pipe.recv() for i, c in enumerate(calls)]

    options = SyncOptions(bucket_bytes=1 << 20, timeout_s=60.0, transport="host")
    updates = SyncSession([sender], ["engine"], invoke, host="127.0.0.1", ranks_per_receiver=1, options=options)
    for version in range(3):
        for name, tensor in draw(version).items():
            parameters[f"local.{name}"].copy_(tensor)
        updates.publish(version)
        assert updates._on_device == {0}
        pipe.send(("values", ()))
        found = pipe.recv()
        assert all(torch.equal(found[f"local.{n}"], t.to(torch.bfloat16)) for n, t in draw(version).items())
    pipe.close()
    sender.close()
    process.join(20)


def test_a_checksum_does_not_depend_on_the_device():
    for tensor in draw(1).values():
        box = whole(tuple(tensor.shape))
        place = torch.empty_like(tensor, device="cuda", dtype=torch.bfloat16)
        for share in (ALL, Share(3, 1)):
            (found,) = numbers([move(place, tensor.cuda(), box, share)])
            assert found == checksum(tensor.to(torch.bfloat16), box, share)
