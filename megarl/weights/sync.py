"""A weight update from trainer ranks to engines: prepare, transfer, verify, commit.

``SyncSession.publish`` is the protocol; it runs on the driver and calls both ends by method name, through a function
that knows how to reach them. ``sender.py`` is the trainer's end, ``intake.py`` and ``rollout/vllm/weights.py`` the
engine's.

    sender:   offer() -> regions    open() -> socket  connect(membership)     send(version, ...) -> report
    receiver: layout(shapes) -> regions               connect(connection)     receive(version, ...) -> report
              commit(version)    poison(reason)

Invariants:
1. One plan is made on the driver, proved complete, and cut into what each end does; the two ends of every link compare
   what they were given before the first byte moves.
2. An update is committed on every receiver after the checksums of all agree, or its version is poisoned: the receivers
   refuse to sample, connections are made anew, and the next update is again a full one. That heals.
3. An update ends within ``timeout_s`` and the time a failure needs to be reported, with rank, phase and, where there is
   one, the tensor named.
4. The ends meet on a board of the driver's, which waits for all of them: no end's death or standstill keeps the others
   from learning of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from megarl.errors import MegarlError, SyncError
from megarl.weights.check import check_plan
from megarl.weights.checksum import add
from megarl.weights.failure import sync_failure
from megarl.weights.plan import plan
from megarl.weights.region import Region
from megarl.weights.row_sums import ALL, Share
from megarl.weights.schedule import HOST, WIRE, LinkKind, Program, Schedule, schedule
from megarl.weights.sender import Membership, Offer, SenderReport
from megarl.weights.transport.board import Address, Board

logger = logging.getLogger(__name__)

# Ends that wait for one that fails to come learn of it by this only.
_CONNECT_TIMEOUT_S = 60.0

# Between host memories a bucket is best so small that its reader finds it in a cache (benchmarks/sync.py).
_CACHED_BUCKET_BYTES = 8 << 20

DIRECT: Final = "direct"

Transport = Literal["auto", "network", "host"]
InFlight = Literal["finish", "abort", "continue"]


@dataclass(frozen=True, slots=True)
class RankLayout:
    """What one tensor-parallel rank of an engine needs.

    Args:
        regions: of its parameters.
        dtypes: of the parameters, by local name.
        machine: where it runs.
        device_id: of its device; empty for the CPU.
        way: ``direct`` if values are written where they belong, else why whole tensors go through the engine's loader.
    """

    regions: tuple[Region, ...]
    dtypes: Mapping[str, str]
    machine: str
    device_id: str
    way: str


@dataclass(frozen=True, slots=True)
class RankConnection:
    """What one rank of an engine is told when it connects.

    Args:
        program: what it receives.
        rank: its number among all destinations.
        membership: how it meets the senders.
        sockets: of the senders on its machine.
    """

    program: Program
    rank: int
    membership: Membership
    sockets: Mapping[int, bytes]


@dataclass(frozen=True, slots=True)
class ReceiverReport:
    """What one engine received.

    Args:
        replica: the engine.
        checksums: for each of its tensor-parallel ranks, its share of the checksum of each tensor.
        seconds: from the call until the engine holds the weights.
    """

    replica: int
    checksums: tuple[Mapping[str, int], ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class SyncReport:
    """A committed update.

    Args:
        version: in force now.
        num_bytes: written into engines.
        seconds: of the whole.
        send_seconds: of the slowest sender.
        load_seconds: of the slowest engine, from the call until it held the weights.
    """

    version: int
    num_bytes: int
    seconds: float
    send_seconds: float
    load_seconds: float


@dataclass(frozen=True, slots=True)
class Call:
    """One method call on one end, to be made at the same time as the others of its list."""

    target: Any
    method: str
    args: tuple[Any, ...] = ()


Invoke = Callable[[Sequence[Call], float], list[Any]]
"""Makes all calls at once and returns their results in order; raises the first cause when one fails. Ends in the time
given, and the time a failure needs to be reported."""


@dataclass(frozen=True, slots=True)
class SyncOptions:
    """How updates are made.

    Args:
        bucket_bytes: most bytes of a bucket, less between host memories; an end holds two.
        timeout_s: of one update.
        verify: compare checksums before the commit.
        checksum_every: of so many groups of 16 rows checksums cover one, another in each update; 1 covers all. The
            first update of a session covers all.
        transport: ``auto`` shares memory inside a machine and uses the network else; the others allow one way only.
        in_flight: what becomes of samples under way when an update begins.
    """

    bucket_bytes: int
    timeout_s: float
    verify: bool = True
    checksum_every: int = 16
    transport: Transport = "auto"
    in_flight: InFlight = "finish"


class SyncSession:
    """Updates from one actor to all engines, seen by the driver.

    Args:
        senders: trainer ranks, by what ``invoke`` can call.
        receivers: engines, likewise.
        invoke: makes calls on them.
        host: address of this machine at which both ends reach it.
        ranks_per_receiver: tensor-parallel ranks of an engine.
        options: how.
        role: of the senders, for messages.
    """

    def __init__(
        self,
        senders: Sequence[Any],
        receivers: Sequence[Any],
        invoke: Invoke,
        *,
        host: str,
        ranks_per_receiver: int,
        options: SyncOptions,
        role: str = "actor",
    ) -> None:
        self._senders, self._receivers, self._invoke = list(senders), list(receivers), invoke
        self._host = host
        self._board: Board | None = None  # of the session in force
        self._ranks_per_receiver = ranks_per_receiver
        self.options = options
        self._role = role
        self.schedule: Schedule | None = None
        """Made in the first update."""
        self._on_device: set[int] = set()
        self._is_connected = False
        self._has_committed = False

    def publish(self, version: int, check: Callable[[], None] | None = None) -> SyncReport:
        """Bring the actor's weights into every engine under ``version``; returns after every engine committed.

        Args:
            version: of the weights.
            check: a further proof between transfer and commit, which raises if it fails.

        Raises:
            SyncError: the update failed or did not verify; no engine samples until a later one succeeds.
            MegarlError: what ``invoke`` raises for a dead process.
        """
        started = time.monotonic()
        try:
            chosen = self._prepare()
            sent, received = self._transfer(version, chosen)
            if self.options.verify:
                verify(sent, received, self._ranks_per_receiver, version)
            if check is not None:
                check()
            self._all(self._receivers, "commit", (version,))
            self._has_committed = True
        except MegarlError as error:
            self._is_connected = self._has_committed = False
            self._poison(f"update to version {version} failed: {error.problem}")
            raise
        return SyncReport(
            version,
            chosen.num_bytes,
            time.monotonic() - started,
            max(report.seconds for report in sent),
            max(report.seconds for report in received),
        )

    def _all(self, targets: Sequence[Any], method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return self._invoke([Call(target, method, args) for target in targets], self.options.timeout_s)

    def _prepare(self) -> Schedule:
        """The plan, made once, and connections, made anew after a failure."""
        if self.schedule is None:
            self.schedule = self._planned()
        if not self._is_connected:
            self._connect(self.schedule)
            self._is_connected = True
        return self.schedule

    def _planned(self) -> Schedule:
        offers: list[Offer] = self._all(self._senders, "offer")
        shapes = {region.tensor: region.tensor_shape for offer in offers for region in offer.regions}
        engines: list[Sequence[RankLayout]] = self._all(self._receivers, "layout", (shapes,))
        layouts = dict(enumerate(layout for engine in engines for layout in engine))
        found = plan(
            {rank: offer.regions for rank, offer in enumerate(offers)},
            {rank: layout.regions for rank, layout in layouts.items()},
            source_hosts={rank: offer.machine for rank, offer in enumerate(offers)},
            destination_hosts={rank: layout.machine for rank, layout in layouts.items()},
        )
        check_plan(found)

        # Two ranks on one device cannot be in one NCCL group: where roles share devices, memory joins a whole machine.
        are_shared = bool({offer.device_id for offer in offers} & {layout.device_id for layout in layouts.values()})

        def kind_of(source: int, destination: int) -> LinkKind:
            offer, layout = offers[source], layouts[destination]
            is_near = offer.machine == layout.machine and (are_shared or offer.device_id == layout.device_id)
            return self._kind(source, destination, is_near)

        bucket_bytes = self.options.bucket_bytes
        if not any(offer.device_id for offer in offers):
            bucket_bytes = min(bucket_bytes, _CACHED_BUCKET_BYTES)
        dtypes = {rank: layout.dtypes for rank, layout in layouts.items()}
        chosen = schedule(found, dtypes, kind_of, bucket_bytes=bucket_bytes)
        self._on_device = {
            rank
            for rank, program in chosen.senders.items()
            if offers[rank].device_id
            and all(layouts[to].device_id == offers[rank].device_id for to in program.peers(HOST, sends=True))
        }
        logger.info(
            "weight updates: %.1f MB from %d trainer ranks to %d engine ranks, %d links inside machines and %d over "
            "the network, plan %s",
            chosen.num_bytes / 1e6,
            len(chosen.senders),
            len(chosen.receivers),
            chosen.num_links(HOST),
            chosen.num_links(WIRE),
            found.digest,
        )
        for rank, layout in layouts.items():
            if layout.way != DIRECT:
                logger.warning("%s takes whole tensors through its loader: %s", self._receiver_name(rank), layout.way)
        return chosen

    def _kind(self, source: int, destination: int, is_near: bool) -> LinkKind:
        transport = self.options.transport
        if transport == "host" and not is_near:
            raise SyncError(
                f"{self._role} rank {source} and {self._receiver_name(destination)} share no memory",
                where="sync.transport=host",
                fix="use sync.transport=auto",
            )
        return HOST if is_near and transport != "network" else WIRE

    def _connect(self, chosen: Schedule) -> None:
        options, count = self.options, self._ranks_per_receiver
        ranks = sorted(chosen.senders)
        opened: list[bytes | None] = self._invoke(
            [Call(self._senders[rank], "open", (chosen.senders[rank], rank in self._on_device)) for rank in ranks],
            options.timeout_s,
        )
        doors = dict(zip(ranks, opened, strict=True))
        self._board = self._new_board()
        memberships = self._memberships(chosen, self._board.address, min(options.timeout_s, _CONNECT_TIMEOUT_S))
        calls = [Call(self._senders[rank], "connect", (memberships[rank, True],)) for rank in ranks]
        for index, receiver in enumerate(self._receivers):
            connections = []
            for rank in range(index * count, (index + 1) * count):
                program = chosen.receivers.get(rank, Program(chosen.plan.digest, ()))
                sources = program.peers(HOST, sends=False)
                sockets = {source: name for source in sources if (name := doors[source]) is not None}
                connections.append(RankConnection(program, rank, memberships[rank, False], sockets))
            calls.append(Call(receiver, "connect", (connections,)))
        self._invoke(calls, options.timeout_s)

    def _new_board(self) -> Board:
        try:
            return Board.host(self._host)
        except RuntimeError as error:  # torch's store errors derive from it
            raise sync_failure("the driver", "connect", None, f"no place to meet at {self._host}: {error}") from error

    def _memberships(self, chosen: Schedule, board: Address, timeout_s: float) -> dict[tuple[int, bool], Membership]:
        """Of every end, by (rank, whether it sends). The group of network links holds senders first."""
        senders = [rank for rank, program in sorted(chosen.senders.items()) if program.peers(WIRE, sends=True)]
        receivers = [rank for rank, program in sorted(chosen.receivers.items()) if program.peers(WIRE, sends=False)]
        sender_places = {rank: place for place, rank in enumerate(senders)}
        receiver_places = {rank: len(senders) + place for place, rank in enumerate(receivers)}
        size = len(senders) + len(receivers)
        found: dict[tuple[int, bool], Membership] = {}
        for rank, program in chosen.senders.items():
            peers = {*program.peers(HOST, sends=True), *program.peers(WIRE, sends=True)}
            names = {peer: self._receiver_name(peer) for peer in peers}
            place = sender_places.get(rank)
            found[rank, True] = Membership(board, place, receiver_places, size, names, timeout_s)
        for rank in range(self._ranks_per_receiver * len(self._receivers)):
            names = {source: f"{self._role} rank {source}" for source in chosen.senders}
            place = receiver_places.get(rank)
            found[rank, False] = Membership(board, place, sender_places, size, names, timeout_s)
        return found

    def _transfer(self, version: int, chosen: Schedule) -> tuple[list[SenderReport], list[ReceiverReport]]:
        options, digest = self.options, chosen.plan.digest
        # Whatever is always wrong shows in an update that is summed whole; what comes and goes, by and by.
        share = Share(options.checksum_every, version) if self._has_committed else ALL
        sending = (version, options.timeout_s, digest, share if options.verify else None)
        calls = [Call(self._senders[rank], "send", sending) for rank in sorted(chosen.senders)]
        receiving = (*sending, options.in_flight)
        calls += [Call(receiver, "receive", receiving) for receiver in self._receivers]
        reports = self._invoke(calls, options.timeout_s)
        return reports[: len(chosen.senders)], reports[len(chosen.senders) :]

    def _poison(self, reason: str) -> None:
        """Best effort: an engine between ``receive`` and ``commit`` refuses to sample anyway."""
        for receiver in self._receivers:
            try:
                self._all([receiver], "poison", (reason,))
            except MegarlError as error:
                logger.warning("an engine could not be told that the update failed: %s", error)

    def _receiver_name(self, rank: int) -> str:
        return f"rollout replica {rank // self._ranks_per_receiver} rank {rank % self._ranks_per_receiver}"


def verify(
    sent: Sequence[SenderReport], received: Sequence[ReceiverReport], ranks_per_receiver: int, version: int
) -> None:
    """Compares what was sent to every engine rank with what it holds.

    Raises:
        SyncError: naming engine, rank and tensors.
    """
    for index, report in enumerate(received):
        for rank, checksums in enumerate(report.checksums):
            destination = index * ranks_per_receiver + rank
            expected = add(dict(sender.checksums.get(destination, {})) for sender in sent)
            wrong = [name for name in expected if expected[name] != checksums.get(name)]
            wrong += [name for name in checksums if name not in expected]
            if wrong:
                raise sync_failure(
                    f"rollout replica {report.replica} rank {rank}",
                    "verify",
                    ", ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""),
                    f"checksums of version {version} differ from the trainer's",
                )
