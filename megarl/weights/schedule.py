"""What each end of a weight update does: links between ends, and buckets in order, cut from a plan. Loads no torch.

A link leads from one source to the destinations that read what it sends: over the network to one destination, inside a
host to all of that host at once. A bucket is what travels over a link at once.

Invariants:
1. Every copy of the plan is in the items of one link, whole or cut along a dim; equal boxes on their way to several
   readers of a host are packed once.
2. A bucket holds at most ``bucket_bytes``. Its items start at multiples of ``ALIGNMENT``.
3. Buckets are numbered over all links, and every end takes its own in increasing order: however they wait for each
   other, the one with the smallest number can always move.
4. Both ends of a link compute its digest from what they were given, and compare before the first byte.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, Literal, NamedTuple

from megarl.errors import PlanError
from megarl.weights.plan import Copy, Plan
from megarl.weights.region import Box, Region, part_of, volume

ALIGNMENT = 16

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

LinkKind = Literal["host", "network"]

WIRE: Final = "network"
HOST: Final = "host"


class Item(NamedTuple):
    """A box inside a bucket, as one end sees it.

    Args:
        region: what is read at the source, what is written at the destination.
        dtype: of the bytes, as torch spells it.
        start: first byte in the bucket.
        readers: destinations it goes to.
    """

    region: Region
    dtype: str
    start: int
    readers: tuple[int, ...]


class Bucket(NamedTuple):
    """What travels at once.

    Args:
        number: of this bucket among those of all links.
        kind: how it travels.
        source: who sends it.
        destinations: who reads it.
        slot: which of the source's two buffers it is packed in.
        num_bytes: its size.
        items: in order of their places.
    """

    number: int
    kind: LinkKind
    source: int
    destinations: tuple[int, ...]
    slot: int
    num_bytes: int
    items: tuple[Item, ...]


@dataclass(frozen=True)
class Program:
    """Everything one end does in an update, in order.

    Args:
        plan_digest: of the plan it was cut from.
        buckets: by increasing number.
    """

    plan_digest: str
    buckets: tuple[Bucket, ...]

    def peers(self, kind: LinkKind, *, sends: bool) -> tuple[int, ...]:
        """Who is at the other end of this end's links."""
        found = {
            peer
            for bucket in self.buckets
            if bucket.kind == kind
            for peer in (bucket.destinations if sends else (bucket.source,))
        }
        return tuple(sorted(found))

    @property
    def slot_bytes(self) -> int:
        """The largest bucket."""
        return max((bucket.num_bytes for bucket in self.buckets), default=0)

    @property
    def num_bytes(self) -> int:
        """Bytes of all items, alignment aside, once for each reader."""
        return sum(_bytes(item) * len(item.readers) for bucket in self.buckets for item in bucket.items)

    def link_digest(self, source: int, destination: int) -> str:
        """Of what goes from one to the other, the same at both ends."""
        hasher = hashlib.sha256(self.plan_digest.encode())
        for bucket in self.buckets:
            if bucket.source == source and destination in bucket.destinations:
                hasher.update(f"\n{bucket.number} {bucket.kind} {bucket.slot} {bucket.num_bytes}".encode())
                for item in bucket.items:
                    if destination in item.readers:
                        hasher.update(f"\n{item.region.tensor} {item.region.box} {item.dtype} {item.start}".encode())
        return hasher.hexdigest()[:16]

    def to_json(self) -> str:
        """Text that ``from_json`` reads."""
        buckets = [[*bucket[:-1], [[region_fields(i.region), *i[1:]] for i in bucket.items]] for bucket in self.buckets]
        return json.dumps([self.plan_digest, buckets], separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Program:
        """What ``to_json`` wrote."""
        digest, rows = json.loads(text)
        buckets = []
        for *head, items in rows:
            number, kind, source, destinations, slot, num_bytes = head
            parsed = tuple(Item(region_of(f), dtype, start, tuple(readers)) for f, dtype, start, readers in items)
            buckets.append(Bucket(number, kind, source, tuple(destinations), slot, num_bytes, parsed))
        return cls(digest, tuple(buckets))


@dataclass(frozen=True)
class Schedule:
    """The programs of all ends.

    Args:
        plan: what they carry out.
        senders: program of each source that sends something.
        receivers: program of each destination that receives something.
    """

    plan: Plan
    senders: Mapping[int, Program]
    receivers: Mapping[int, Program]

    @property
    def num_bytes(self) -> int:
        """Bytes written into engines by one update."""
        return sum(program.num_bytes for program in self.receivers.values())

    def num_links(self, kind: LinkKind) -> int:
        """Pairs of ends joined by links of a kind."""
        return sum(len(program.peers(kind, sends=False)) for program in self.receivers.values())


def region_fields(region: Region) -> list[object]:
    """A region as plain values, for JSON."""
    return [
        region.tensor,
        region.tensor_shape,
        region.box,
        region.local_name,
        region.local_shape,
        region.offset,
        region.strides,
        region.replica,
    ]


def region_of(fields: Sequence[object]) -> Region:
    """What ``region_fields`` took apart."""
    tensor, shape, box, name, local_shape, offset, strides, replica = fields
    bounds = tuple(tuple(pair) for pair in box)  # type: ignore[attr-defined]
    return Region(tensor, tuple(shape), bounds, name, tuple(local_shape), offset, tuple(strides), replica)  # type: ignore[arg-type]


def schedule(
    plan: Plan,
    dtypes: Mapping[int, Mapping[str, str]],
    kind_of: Callable[[int, int], LinkKind],
    *,
    bucket_bytes: int,
) -> Schedule:
    """Cut a plan into the programs of its ends.

    Args:
        plan: the copies.
        dtypes: of every destination's parameters, by their local name; what travels has the dtype it is stored in.
        kind_of: how a source reaches a destination.
        bucket_bytes: most bytes of a bucket.

    Raises:
        PlanError: a dtype does not travel.
    """
    waves: list[tuple[tuple[int, int, int], _Draft]] = []
    for source in sorted(plan.sources):
        for draft in _drafts(plan, source, dtypes, kind_of, bucket_bytes):
            # Ends turn by one with every wave, so that sources do not queue before one destination.
            waves.append(((draft.wave, (draft.destinations[0] - source) % len(plan.destinations), source), draft))
    senders: dict[int, list[Bucket]] = {}
    receivers: dict[int, list[Bucket]] = {}
    for number, (_, draft) in enumerate(sorted(waves, key=lambda entry: entry[0])):
        mine = senders.setdefault(draft.source, [])
        head = (number, draft.kind, draft.source, draft.destinations, len(mine) % 2, draft.num_bytes)
        mine.append(Bucket(*head, tuple(item for item, _ in draft.items)))
        for destination in draft.destinations:
            items = tuple(
                item._replace(region=region, readers=(destination,))
                for item, targets in draft.items
                for reader, region in targets
                if reader == destination
            )
            receivers.setdefault(destination, []).append(Bucket(*head, items))
    return Schedule(
        plan,
        {rank: Program(plan.digest, tuple(buckets)) for rank, buckets in senders.items()},
        {rank: Program(plan.digest, tuple(buckets)) for rank, buckets in receivers.items()},
    )


Target = tuple[int, Region]
"""A destination and its region."""


@dataclass
class _Draft:
    """A bucket without a number: items with the regions they fill."""

    wave: int
    kind: LinkKind
    source: int
    destinations: tuple[int, ...]
    num_bytes: int
    items: list[tuple[Item, tuple[Target, ...]]]


def _drafts(
    plan: Plan,
    source: int,
    dtypes: Mapping[int, Mapping[str, str]],
    kind_of: Callable[[int, int], LinkKind],
    bucket_bytes: int,
) -> Iterator[_Draft]:
    """The buckets of one source, link by link, filled in the order of the plan."""
    links: dict[int, list[Copy]] = {}
    for copy in plan.sends(source):
        is_near = kind_of(source, copy.destination) == HOST
        links.setdefault(-1 if is_near else copy.destination, []).append(copy)
    for link, copies in links.items():
        kind: LinkKind = HOST if link == -1 else WIRE
        pending: list[tuple[Item, tuple[Target, ...]]] = []
        fill, wave = 0, 0
        for region, dtype, targets in _entries(plan, copies, dtypes):
            readers = tuple(sorted({reader for reader, _ in targets}))
            for box in cut(region.box, bucket_bytes // DTYPE_BYTES[dtype]):
                size = volume(box) * DTYPE_BYTES[dtype]
                if pending and fill + size > bucket_bytes:
                    yield _draft(wave, kind, source, pending, fill)
                    pending, fill, wave = [], 0, wave + 1
                item = Item(part_of(region, box), dtype, fill, readers)
                pending.append((item, tuple((reader, part_of(target, box)) for reader, target in targets)))
                fill = _padded(fill + size)
        if pending:
            yield _draft(wave, kind, source, pending, fill)


def _draft(wave: int, kind: LinkKind, source: int, items: list[tuple[Item, tuple[Target, ...]]], fill: int) -> _Draft:
    destinations = sorted({reader for item, _ in items for reader in item.readers})
    return _Draft(wave, kind, source, tuple(destinations), fill, items)


def _entries(
    plan: Plan, copies: Iterable[Copy], dtypes: Mapping[int, Mapping[str, str]]
) -> Iterator[tuple[Region, str, tuple[Target, ...]]]:
    """Boxes to be packed once: where they lie at the source, their dtype, and all places they go to."""
    for _, group in groupby(copies, key=lambda copy: copy.tensor):
        entries: dict[tuple[int, Box, str], list[Copy]] = {}
        for copy in group:
            target = plan.destinations[copy.destination][copy.destination_region]
            dtype = dtypes[copy.destination][target.local_name]
            if dtype not in DTYPE_BYTES:
                raise PlanError(
                    f"dtype {dtype!r} of {target.local_name} does not travel",
                    fix="use one of " + ", ".join(DTYPE_BYTES),
                )
            entries.setdefault((copy.source_region, copy.box, dtype), []).append(copy)
        for (_, _, dtype), same in entries.items():
            targets = tuple((copy.destination, plan.destination_of(copy)) for copy in same)
            yield plan.source_of(same[0]), dtype, targets


def cut(box: Box, most: int) -> Iterator[Box]:
    """Parts of a box of at most ``most`` elements, cut along its leading dims; single elements at the least."""
    if volume(box) <= most or not box:
        yield box
        return
    inner = volume(box[1:])
    start, stop = box[0]
    if inner > most:
        for row in range(start, stop):
            yield from (((row, row + 1), *rest) for rest in cut(box[1:], most))
        return
    step = max(1, most // inner)
    for first in range(start, stop, step):
        yield ((first, min(first + step, stop)), *box[1:])


def _bytes(item: Item) -> int:
    return item.region.numel * DTYPE_BYTES[item.dtype]


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
