"""The receiving end of a transfer: buckets of all senders in, whole tensors out, round by round.

Invariants:
1. A tensor handed out lies in memory of its own and stays as it is, whatever arrives later.
2. Each sender's next bucket is under way while one is unpacked; two buffers a sender, used in turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megarl.weights.manifest import Bucket, Manifest
from megarl.weights.sync import piece_view
from megarl.weights.transport.group import Address, Backend, Channel, byte_buffer


class Intake:
    """One receiver's groups with all senders.

    Args:
        manifest: what comes, in every update of the session.
        addresses: of the senders' stores, by rank.
        rank: of this receiver in every group, from 1.
        size: of the groups.
        device: where tensors are wanted.
        timeout_s: to join.

    Raises:
        TransportError: a group did not come together.
    """

    def __init__(
        self,
        manifest: Manifest,
        addresses: Mapping[int, Address],
        rank: int,
        size: int,
        *,
        device: torch.device | str,
        timeout_s: float,
    ) -> None:
        self.manifest = manifest
        self.tensor: str | None = None
        """The tensor being received or put together, for messages."""
        self._device = torch.device(device)
        self._buffers: dict[tuple[int, int], Tensor] = {}
        self._channels: dict[int, Channel] = {}
        backend: Backend = "nccl" if self._device.type == "cuda" else "gloo"
        # In the order of the senders' ranks at every receiver, since joining waits for all members.
        for sender, address in sorted(addresses.items()):
            self._channels[sender] = Channel(address, rank, size, backend=backend, timeout_s=timeout_s)

    def rounds(self, deadline: float) -> Iterator[dict[str, Tensor]]:
        """The whole tensors of each round.

        Raises:
            TransportError: a sender failed, is gone, or was not done by ``deadline`` (of ``time.monotonic``).
        """
        manifest, dtype = self.manifest, getattr(torch, self.manifest.dtype)
        queues = {sender: enumerate(manifest.buckets_of(sender)) for sender in manifest.senders}
        ahead = {sender: self._start(sender, queue) for sender, queue in queues.items()}
        for item in manifest.rounds:
            tensors = {
                name: torch.empty(manifest.shapes[name], dtype=dtype, device=self._device) for name in item.tensors
            }
            for bucket in item.buckets:
                self.tensor = bucket.pieces[0].tensor
                work, buffer = ahead[bucket.sender]
                self._channels[bucket.sender].wait(work, deadline=deadline)
                ahead[bucket.sender] = self._start(bucket.sender, queues[bucket.sender])
                for piece in bucket.pieces:
                    self.tensor = piece.tensor
                    place = tensors[piece.tensor][tuple(slice(*bounds) for bounds in piece.box)]
                    place.copy_(piece_view(buffer, piece, dtype))
            self.tensor = None
            yield tensors

    def fail(self, reason: str) -> None:
        """Tell all senders, and through them all receivers, why this one gives up."""
        for channel in self._channels.values():
            channel.fail(reason)

    def close(self) -> None:
        """Leave all groups."""
        for channel in self._channels.values():
            channel.close()
        self._channels = {}

    def _start(self, sender: int, queue: Iterator[tuple[int, Bucket]]) -> tuple[Any, Tensor]:
        """Begin to receive a sender's next bucket."""
        index, bucket = next(queue, (0, None))
        if bucket is None:
            return None, torch.empty(0)
        key = (sender, index % 2)
        if key not in self._buffers or self._buffers[key].numel() < bucket.num_bytes:
            self._buffers[key] = byte_buffer(bucket.num_bytes, self._device)
        buffer = self._buffers[key][: bucket.num_bytes]
        return self._channels[sender].broadcast(buffer), buffer
