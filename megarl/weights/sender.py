"""The trainer's end of a weight update, in the process that holds the parameters.

Invariants:
1. Beside the parameters a sender holds two buckets: one is packed while the other is under way. What lies in one run
   goes over the network without being packed.
2. dtype is converted here; checksums cover what travels.
3. Whatever fails here is told to all other ends before it is raised.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megarl.errors import SyncError
from megarl.platform.device import MemorySharing
from megarl.weights.checksum import Sum, checksum_sum, move, numbers
from megarl.weights.failure import sync_failure
from megarl.weights.pieces import region_view
from megarl.weights.region import Region
from megarl.weights.row_sums import ALL, MODULUS, Share
from megarl.weights.schedule import HOST, WIRE, Bucket, Item, Program
from megarl.weights.transport.board import Address, Board, TransportError, machine
from megarl.weights.transport.host import Outlet, Slots
from megarl.weights.transport.network import Backend, Network, Transfer


@dataclass(frozen=True, slots=True)
class Offer:
    """What a trainer rank could send.

    Args:
        regions: of its parameters, replicas included.
        machine: where it runs, see ``transport.board.machine``.
        device_id: of its device; empty for the CPU.
    """

    regions: tuple[Region, ...]
    machine: str
    device_id: str = ""


@dataclass(frozen=True, slots=True)
class Membership:
    """How an end takes part in a session.

    Args:
        board: where all meet.
        network_rank: in the group of all ends with network links; None for an end without.
        network_ranks: of the peers, by their rank among the sources or destinations.
        network_size: of that group.
        names: of the peers, for messages.
        timeout_s: to connect.
    """

    board: Address
    network_rank: int | None
    network_ranks: Mapping[int, int]
    network_size: int
    names: Mapping[int, str]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class SenderReport:
    """What one trainer rank sent.

    Args:
        rank: its rank in the role.
        checksums: for each destination, its share of each tensor's checksum; empty where checksums are off.
        seconds: from the call until the last reader was done.
    """

    rank: int
    checksums: Mapping[int, Mapping[str, int]]
    seconds: float


@dataclass
class _Session:
    """What is open between ``open`` and ``close``."""

    program: Program
    buffers: tuple[Tensor, Tensor]
    outlet: Outlet | None
    board: Board | None = None
    network: Network | None = None
    network_ranks: Mapping[int, int] = field(default_factory=dict)
    names: Mapping[int, str] = field(default_factory=dict)


class WeightSender:
    """See the module's docstring.

    Args:
        rank: of this process in its role.
        regions: where its parameters lie in canonical tensors.
        parameters: its parameters by name; asked for anew in every update, on ranks that send something only, so that
            it must not be a collective: weights are whole before the session's update starts.
        device: where they live.
        sharing: how device memory is shown to other processes; None in host memory.
        role: for messages.
    """

    def __init__(
        self,
        rank: int,
        regions: Callable[[], Sequence[Region]],
        parameters: Callable[[], Mapping[str, Tensor]],
        *,
        device: torch.device | str = "cpu",
        sharing: MemorySharing | None = None,
        role: str = "actor",
    ) -> None:
        self.rank = rank
        self.role = role
        self._regions, self._parameters = regions, parameters
        self._device, self._sharing = torch.device(device), sharing
        self._session: _Session | None = None
        self._tensor: str | None = None  # at hand, for messages

    @property
    def name(self) -> str:
        """How messages call this end."""
        return f"{self.role} rank {self.rank}"

    def offer(self) -> Offer:
        """What this rank could send. Raises SyncError."""
        with self._phase("prepare"):
            regions = tuple(region for region in self._regions() if region.numel)
        return Offer(regions, machine(), "" if self._sharing is None else self._sharing.device_id)

    def open(self, program: Program, on_device: bool = False) -> bytes | None:
        """Make the buffers of a new session; an old session is dropped.

        Args:
            program: what this rank sends.
            on_device: readers of this machine use this rank's device, so that they can read its memory.

        Returns:
            the name of this rank's socket for readers of its machine; None where there are none.

        Raises:
            SyncError: there is no memory for the buffers, or no place to listen.
        """
        self.close()
        outlet = None
        with self._phase("connect"):
            if program.peers(HOST, sends=True):
                outlet = Outlet(Slots(program.slot_bytes, self._device, self._sharing if on_device else None))
                buffers = outlet.slots.buffers
            else:
                both = torch.empty(2, program.slot_bytes, dtype=torch.uint8, device=self._device)
                buffers = (both[0], both[1])
            self._session = _Session(program, buffers, outlet)
        return None if outlet is None else outlet.name

    def connect(self, membership: Membership) -> None:
        """Meet all ends this rank sends to, and compare what both were given. Raises SyncError."""
        session, timeout_s = self._session, membership.timeout_s
        assert session is not None, "open comes first"
        deadline = time.monotonic() + timeout_s
        session.names = membership.names
        with self._phase("connect"):
            session.board = Board.join(membership.board, timeout_s)
            session.board.name = self.name
            if session.outlet is not None:
                readers = session.program.peers(HOST, sends=True)
                names = {reader: session.names[reader] for reader in readers}
                session.outlet.accept(names, session.board, deadline=deadline)
            # Before the group is joined, which could not be left if another end failed meanwhile.
            agree(session.board, session.program, self.rank, session.names, sends=True, deadline=deadline)
            if membership.network_rank is not None:
                session.network = Network(
                    session.board,
                    membership.network_rank,
                    membership.network_size,
                    backend=backend_of(self._device),
                    timeout_s=max(1.0, deadline - time.monotonic()),
                )
                session.network_ranks = membership.network_ranks

    def send(self, version: int, timeout_s: float, digest: str, share: Share | None = ALL) -> SenderReport:
        """Send all of this rank's buckets, packing one while the one before is under way.

        Args:
            version: of the weights.
            timeout_s: for all of it.
            digest: of the plan that receivers go by.
            share: of every box that checksums cover; None for no checksums.

        Raises:
            SyncError: naming the tensor being packed, or what another end reported.
        """
        started = time.monotonic()
        deadline = started + timeout_s
        session = self._session
        if session is None or session.board is None or session.program.plan_digest != digest:
            raise self._failure("transfer", None, f"version {version} goes by another plan than this rank has")
        checksums: dict[int, dict[str, int]] = {}
        with self._phase("transfer"):
            self._send_buckets(session, deadline, checksums, share)
        return SenderReport(self.rank, checksums, time.monotonic() - started)

    def close(self) -> None:
        """Leave the session."""
        session, self._session = self._session, None
        if session is not None:
            if session.network is not None:
                session.network.close()
            if session.outlet is not None:
                session.outlet.close()

    def _send_buckets(
        self, session: _Session, deadline: float, checksums: dict[int, dict[str, int]], share: Share | None
    ) -> None:
        parameters = self._parameters()
        if session.outlet is not None:
            session.outlet.begin()
        under_way: list[tuple[Bucket, Transfer | None]] = []
        sums: list[Sum] = []  # of all items in turn; put together at the end, when no cache is full of weights
        for bucket in session.program.buckets:
            if len(under_way) == 2:
                self._settle(session, *under_way.pop(0), deadline)
            payload = self._payload(bucket, parameters, session.buffers[bucket.slot], share, sums)
            if bucket.kind == HOST:
                assert session.outlet is not None
                session.outlet.publish(bucket.number, bucket.destinations)
                under_way.append((bucket, None))
            else:
                assert session.network is not None
                (to,) = bucket.destinations
                peer, name = session.network_ranks[to], session.names[to]
                sent = session.network.send(payload, peer, bucket.number, name=name, deadline=deadline)
                under_way.append((bucket, sent))
        for bucket, transfer in under_way:
            self._tensor = bucket.items[0].region.tensor
            self._settle(session, bucket, transfer, deadline)
        if share is not None:
            _add_up(checksums, session.program.buckets, sums)

    def _settle(self, session: _Session, bucket: Bucket, transfer: Transfer | None, deadline: float) -> None:
        """Wait until a bucket's buffer may be written again."""
        if transfer is None:
            assert session.outlet is not None
            session.outlet.wait(bucket.number, bucket.destinations, deadline=deadline)
        else:
            assert session.network is not None
            session.network.wait(transfer)

    @torch.no_grad()
    def _payload(
        self, bucket: Bucket, parameters: Mapping[str, Tensor], slot: Tensor, share: Share | None, sums: list[Sum]
    ) -> Tensor:
        """The bytes of a bucket; the checksums of its items go to the end of ``sums``.

        What the network can send from where it lies is not copied: a bucket of one item, in one run, in its dtype.
        """
        if bucket.kind == WIRE and len(bucket.items) == 1:
            (item,) = bucket.items
            self._tensor = item.region.tensor
            view = region_view(item.region, parameters[item.region.local_name]).detach()
            if view.is_contiguous() and view.dtype == getattr(torch, item.dtype):
                sums.append(0 if share is None else checksum_sum(view, item.region.box, share))
                return view.reshape(-1).view(torch.uint8)
        payload = slot[: bucket.num_bytes]
        for item in bucket.items:
            self._tensor = item.region.tensor
            sums.append(self._pack(item, parameters, payload, share))
        return payload

    def _pack(self, item: Item, parameters: Mapping[str, Tensor], buffer: Tensor, share: Share | None) -> Sum:
        """Copy an item into its place in the bucket, converting the dtype; returns the checksum of that place."""
        view = region_view(item.region, parameters[item.region.local_name])
        return move(item_view(buffer, item), view, item.region.box, share)

    @contextmanager
    def _phase(self, phase: str) -> Iterator[None]:
        """What fails inside is told to all other ends, which must not wait for the rest, and raised as a SyncError."""
        self._tensor = None
        try:
            yield
        except Exception as error:  # whatever it is: see above
            cause = error.cause if isinstance(error, TransportError) else f"{type(error).__name__}: {error}"
            from_peer = isinstance(error, TransportError) and error.from_peer
            failure = self._failure(phase, self._tensor, cause, from_peer=from_peer)
            if self._session is not None and self._session.board is not None:
                self._session.board.fail(str(failure))
            self.close()
            raise failure from error

    def _failure(self, phase: str, tensor: str | None, cause: str, *, from_peer: bool = False) -> SyncError:
        if from_peer:  # the peer's words name rank, phase and tensor already
            return SyncError(cause)
        return sync_failure(self.name, phase, tensor, cause)


def agree(board: Board, program: Program, rank: int, names: Mapping[int, str], *, sends: bool, deadline: float) -> None:
    """Compare the digest of each of this end's links with the other end's. Raises TransportError."""
    for kind in (HOST, WIRE):
        for peer in program.peers(kind, sends=sends):
            link = (rank, peer) if sends else (peer, rank)
            digest = program.link_digest(*link)
            side = 0 if sends else 1
            board.agree(f"link {link[0]}-{link[1]}", digest, names[peer], side=side, deadline=deadline)


def item_view(buffer: Tensor, item: Item) -> Tensor:
    """An item's place in a bucket, shaped like its box."""
    dtype: torch.dtype = getattr(torch, item.dtype)
    flat = buffer[item.start : item.start + item.region.numel * dtype.itemsize]
    return flat.view(dtype).view(item.region.shape)


def backend_of(device: torch.device) -> Backend:
    """The backend that moves memory of a device."""
    return "nccl" if device.type == "cuda" else "gloo"


def _add_up(checksums: dict[int, dict[str, int]], buckets: Sequence[Bucket], sums: Sequence[Sum]) -> None:
    """Add the checksums of all items to the totals of all who read them."""
    items = (item for bucket in buckets for item in bucket.items)
    for item, value in zip(items, numbers(sums), strict=True):
        for reader in item.readers:
            totals = checksums.setdefault(reader, {})
            totals[item.region.tensor] = (totals.get(item.region.tensor, 0) + value) % MODULUS
