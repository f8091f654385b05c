"""The receiving end of a transfer: every box goes from its bucket straight to where the engine wants it.

Invariants:
1. Beside what the engine holds there are at most two buckets, and none where the source is on the same machine.
2. The next bucket from the network is under way while one is unpacked.
3. Checksums are read back from where the values were written.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from megarl.platform.device import MemorySharing
from megarl.weights.checksum import Sum, move, numbers
from megarl.weights.region import Region
from megarl.weights.row_sums import ALL, MODULUS, Share
from megarl.weights.schedule import HOST, WIRE, Bucket, Item, Program
from megarl.weights.sender import Membership, agree, backend_of, item_view
from megarl.weights.transport.board import Board, TransportError
from megarl.weights.transport.host import Inlet
from megarl.weights.transport.network import Network, Transfer


class Target(Protocol):
    """What an engine offers to write into."""

    def place(self, region: Region) -> Tensor:
        """The memory of a region, shaped like its box."""
        ...

    def written(self, region: Region) -> None:
        """All of the region, which ``place`` gave, has its values."""
        ...


class Intake:
    """One receiver's links to all senders.

    Args:
        program: what comes, in every update of the session.
        rank: of this receiver among the destinations.
        who: how messages call it.
        membership: of the session.
        sockets: of senders on this machine, by their rank.
        device: where the engine's memory is.
        sharing: how device memory of other processes is attached to; None in host memory.

    Raises:
        TransportError: an end is not there or was given another plan.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        who: str,
        membership: Membership,
        sockets: Mapping[int, bytes],
        *,
        device: torch.device | str = "cpu",
        sharing: MemorySharing | None = None,
    ) -> None:
        self.program = program
        self.tensor: str | None = None
        """The tensor being received or written, for messages."""
        self._inlets: dict[int, Inlet] = {}
        self._network: Network | None = None
        self._ranks, self._names = membership.network_ranks, membership.names
        timeout_s = membership.timeout_s
        deadline = time.monotonic() + timeout_s
        self._board = Board.join(membership.board, timeout_s)
        self._board.name = who
        try:
            for source in program.peers(HOST, sends=False):
                name = membership.names[source]
                self._inlets[source] = Inlet(sockets[source], rank, name, self._board, sharing, timeout_s=timeout_s)
            # Before the group is joined, which could not be left if another end failed meanwhile.
            agree(self._board, program, rank, membership.names, sends=False, deadline=deadline)
            if membership.network_rank is not None:
                self._network = Network(
                    self._board,
                    membership.network_rank,
                    membership.network_size,
                    backend=backend_of(torch.device(device)),
                    timeout_s=max(1.0, deadline - time.monotonic()),
                )
        except Exception as error:  # whatever it is, the others must not wait for the rest
            cause = error.cause if isinstance(error, TransportError) else f"{type(error).__name__}: {error}"
            if not (isinstance(error, TransportError) and error.from_peer):
                self._board.fail(f"weight update failed on {who} in phase connect: {cause}")
            self.close()
            raise
        self._remote = [bucket for bucket in program.buckets if bucket.kind == WIRE]
        most = max((bucket.num_bytes for bucket in self._remote), default=0)
        self._buffers = torch.empty(2, most, dtype=torch.uint8, device=device)

    def run(self, target: Target, *, deadline: float, share: Share | None = ALL) -> dict[str, int]:
        """Take all buckets, and return this receiver's part of each tensor's checksum.

        Args:
            target: where values go.
            deadline: of ``time.monotonic``.
            share: of every box that checksums cover, the senders' own; None for no checksums.

        Raises:
            TransportError: a sender failed, is gone, or was not done by ``deadline``.
        """
        sums: list[Sum] = []  # of all items in turn; put together at the end, when no cache is full of weights
        remote = iter(enumerate(self._remote))
        ahead = self._start(remote, deadline)
        for bucket in self.program.buckets:
            self.tensor = bucket.items[0].region.tensor
            if bucket.kind == HOST:
                inlet = self._inlets[bucket.source]
                inlet.wait(bucket.number, deadline=deadline)
                buffer = inlet.buffers[bucket.slot]
            else:
                assert self._network is not None and ahead is not None
                transfer, buffer = ahead
                self._network.wait(transfer)
                ahead = self._start(remote, deadline)
            for item in bucket.items:
                self.tensor = item.region.tensor
                sums.append(_unpack(item, buffer, target, share))
            if bucket.kind == HOST:
                self._inlets[bucket.source].release(bucket.number)
            for item in bucket.items:
                target.written(item.region)
        self.tensor = None
        totals: dict[str, int] = {}
        if share is not None:
            items = (item for bucket in self.program.buckets for item in bucket.items)
            for item, value in zip(items, numbers(sums), strict=True):
                totals[item.region.tensor] = (totals.get(item.region.tensor, 0) + value) % MODULUS
        return totals

    def fail(self, reason: str) -> None:
        """Tell all other ends why this one gives up."""
        self._board.fail(reason)

    def close(self) -> None:
        """Leave all links."""
        for inlet in self._inlets.values():
            inlet.close()
        if self._network is not None:
            self._network.close()
        self._inlets, self._network = {}, None

    def _start(self, remote: Iterator[tuple[int, Bucket]], deadline: float) -> tuple[Transfer, Tensor] | None:
        """Begin to receive the next bucket from the network."""
        following = next(remote, None)
        if following is None:
            return None
        index, bucket = following
        assert self._network is not None
        buffer = self._buffers[index % 2, : bucket.num_bytes]
        peer, name = self._ranks[bucket.source], self._names[bucket.source]
        return self._network.receive(buffer, peer, bucket.number, name=name, deadline=deadline), buffer


@torch.no_grad()
def _unpack(item: Item, buffer: Tensor, target: Target, share: Share | None) -> Sum:
    return move(target.place(item.region), item_view(buffer, item), item.region.box, share)
