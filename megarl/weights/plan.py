"""The plan: which boxes go from which rank to which, between any two layouts of one model. Loads no torch.

Trainer to engine, checkpoint to shards, layout to layout: source regions and destination regions of the same canonical
tensors are intersected, tensor by tensor; ``check.check_plan`` proves the result without trusting it.

Invariants:
1. Every element of every destination region is in exactly one copy.
2. Every element of every source region is in a copy or counted in ``dropped``, with the reason.
3. The plan is a function of its arguments: neither the order of ranks nor that of tensors matters. Two processes hold
   the same plan if and only if the digests agree.
4. Replicas of a box share the sending: a sender is on the destination's host where one is, and has the least to send;
   a box that is a large part of a sender's share is cut by rows.
"""

from __future__ import annotations

import gc
import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple

from megarl.errors import PlanError
from megarl.weights.partition import Partition
from megarl.weights.region import Box, Region, part_of, union_volume, volume

_SHOWN = 20

# A box is cut where it is more than an eighth of a sender's even share, and not below 64 Ki elements.
_PARTS_OF_A_SHARE = 8
_LEAST_PART = 1 << 16

PADDING, REPLICA, TIED = "padding", "replica", "tied copy"


Holder = tuple[int, int]
"""Rank and index of one of its regions."""

Held = dict[str, dict[Box, list[Holder]]]
"""Holders by tensor and box."""


class Copy(NamedTuple):
    """One box of one canonical tensor, from the rank that sends it to the rank that needs it.

    Args:
        tensor: canonical name.
        box: in coordinates of the whole tensor, inside both regions.
        source: rank among the sources.
        source_region: index into that rank's regions.
        destination: rank among the destinations.
        destination_region: index into that rank's regions.
    """

    tensor: str
    box: Box
    source: int
    source_region: int
    destination: int
    destination_region: int


class Dropped(NamedTuple):
    """Elements of a source parameter that are not sent.

    Args:
        rank: among the sources.
        local_name: the parameter.
        tensor: canonical name; empty for padding.
        num_elements: how many.
        reason: ``padding`` (rows beyond the vocabulary), ``replica`` (another rank sends them), ``tied copy`` (another
            parameter sends them), or the reason the caller gave for a tensor that no destination wants.
    """

    rank: int
    local_name: str
    tensor: str
    num_elements: int
    reason: str


@dataclass(frozen=True)
class Plan:
    """Copies between two sets of regions.

    Args:
        sources: every source rank's regions.
        destinations: every destination rank's regions.
        copies: in loading order of their tensors (layer by layer), then by destination rank, region and rows.
        dropped: what of the sources is not sent.
    """

    sources: Mapping[int, Sequence[Region]]
    destinations: Mapping[int, Sequence[Region]]
    copies: tuple[Copy, ...]
    dropped: tuple[Dropped, ...]

    def sends(self, rank: int) -> Sequence[Copy]:
        """A source's copies in the order of the plan."""
        return self._sends.get(rank, ())

    def receives(self, rank: int) -> Sequence[Copy]:
        """A destination's copies in the order of the plan."""
        return self._receives.get(rank, ())

    def source_of(self, copy: Copy) -> Region:
        """Where a copy lies at its source: ``pieces.region_view`` of it is the tensor to read."""
        return part_of(self.sources[copy.source][copy.source_region], copy.box)

    def destination_of(self, copy: Copy) -> Region:
        """Where a copy goes at its destination: ``pieces.region_view`` of it is the tensor to write."""
        return part_of(self.destinations[copy.destination][copy.destination_region], copy.box)

    @cached_property
    def digest(self) -> str:
        """Of the regions of both sides and of all copies, 16 hexadecimal digits."""
        hasher = hashlib.sha256()
        for line in _lines(self):
            hasher.update(line.encode())
        return hasher.hexdigest()[:16]

    @cached_property
    def _sends(self) -> dict[int, list[Copy]]:
        return _grouped(self.copies, lambda copy: copy.source)

    @cached_property
    def _receives(self) -> dict[int, list[Copy]]:
        return _grouped(self.copies, lambda copy: copy.destination)


def plan(
    sources: Mapping[int, Sequence[Region]],
    destinations: Mapping[int, Sequence[Region]],
    *,
    source_hosts: Mapping[int, str] | None = None,
    destination_hosts: Mapping[int, str] | None = None,
    unwanted: Mapping[str, str] | None = None,
) -> Plan:
    """The copies that fill every destination region from the sources.

    Args:
        sources: regions that each rank holds, replicas included.
        destinations: regions that each rank needs.
        source_hosts: where the sources run; a rank without a host is on none of the destinations'.
        destination_hosts: where the destinations run.
        unwanted: canonical tensors that need no destination, each with the reason.

    Raises:
        PlanError: listing destinations that no source fills, tensors of two shapes, sources that overlap without being
            replicas, and source tensors that no destination wants and ``unwanted`` does not name.
    """
    with collector_paused():
        return _plan(sources, destinations, source_hosts or {}, destination_hosts or {}, unwanted or {})


@contextmanager
def collector_paused() -> Iterator[None]:
    """Makes millions of tuples without Python's collector looking through them again and again: half the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _plan(
    sources: Mapping[int, Sequence[Region]],
    destinations: Mapping[int, Sequence[Region]],
    source_hosts: Mapping[int, str],
    destination_hosts: Mapping[int, str],
    unwanted: Mapping[str, str],
) -> Plan:
    problems: list[str] = []
    held, shapes = _held(sources, problems)
    wanted = _wanted(destinations, shapes, problems)
    problems += [f"{name} has no destination" for name in held if name not in wanted and name not in unwanted]
    requests = _requests(held, wanted, unwanted, problems)
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise PlanError("the two layouts do not meet: " + "; ".join(problems[:_SHOWN]) + more)
    copies = _assigned(requests, source_hosts, destination_hosts)
    sources = {rank: tuple(regions) for rank, regions in sorted(sources.items())}
    destinations = {rank: tuple(regions) for rank, regions in sorted(destinations.items())}
    return Plan(sources, destinations, copies, tuple(_dropped(sources, held, copies, unwanted)))


@lru_cache(maxsize=1 << 17)
def loading_order(name: str) -> tuple[tuple[bool, int, str], ...]:
    """Sort key that keeps a layer together and layers in numeric order, so that an engine finishes layer by layer."""
    return tuple((part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"[._]", name))


class _Request(NamedTuple):
    """A copy without its sender, and who could send it, in order of rank."""

    tensor: str
    box: Box
    holders: Sequence[Holder]
    destination: int
    destination_region: int


def holders(sources: Mapping[int, Sequence[Region]]) -> Held:
    """Who holds each distinct box of each tensor, in order of rank; more than one are replicas.

    Raises:
        PlanError: listing tensors of two shapes.
    """
    problems: list[str] = []
    held, _ = _held(sources, problems)
    if problems:
        raise PlanError("the ranks disagree about tensors: " + "; ".join(problems[:_SHOWN]))
    return held


def _held(sources: Mapping[int, Sequence[Region]], problems: list[str]) -> tuple[Held, dict[str, tuple[int, ...]]]:
    """Who holds which distinct boxes of each tensor, in order of rank, and the tensors' shapes."""
    held: Held = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for rank, regions in sorted(sources.items()):
        for index, region in enumerate(regions):
            if shapes.setdefault(region.tensor, region.tensor_shape) != region.tensor_shape:
                problems.append(f"source rank {rank} has {region.tensor} with shape {region.tensor_shape}")
            boxes = held.setdefault(region.tensor, {})
            if region.numel:
                boxes.setdefault(region.box, []).append((rank, index))
    return held, shapes


def _wanted(
    destinations: Mapping[int, Sequence[Region]], shapes: Mapping[str, tuple[int, ...]], problems: list[str]
) -> dict[str, list[tuple[int, int, Box]]]:
    """The boxes that each tensor's destinations need, in order of rank and region."""
    wanted: dict[str, list[tuple[int, int, Box]]] = defaultdict(list)
    unknown: set[str] = set()
    for rank, regions in sorted(destinations.items()):
        for index, region in enumerate(regions):
            expected = shapes.get(region.tensor)
            if expected == region.tensor_shape:
                wanted[region.tensor].append((rank, index, region.box))
            elif expected is not None:
                problems.append(
                    f"{region.tensor} has shape {region.tensor_shape} at destination rank {rank}, "
                    f"{expected} at its source"
                )
            elif region.tensor not in unknown:
                unknown.add(region.tensor)
                problems.append(f"{region.tensor} has no source")
    return wanted


def _requests(
    held: Held, wanted: Mapping[str, list[tuple[int, int, Box]]], unwanted: Mapping[str, str], problems: list[str]
) -> list[_Request]:
    """The copies to be made, in the order of the plan; gaps and overlaps of either side go to ``problems``."""
    partitions: dict[tuple[Box, ...], Partition] = {}
    requests: list[_Request] = []
    for name in sorted(wanted, key=loading_order):
        boxes = tuple(held[name])
        partition = partitions.get(boxes)
        if partition is None:
            partition = partitions[boxes] = Partition(boxes)
        problems += [f"{name}: sources hold {one} and {other}, which overlap" for one, other in partition.overlaps]
        holders = list(held[name].values())
        for rank, index, box in wanted[name]:
            if not volume(box):
                continue
            parts, missing = partition.parts(box)
            if missing:
                problems.append(f"{name}: no source holds {missing} elements of {box}, for destination rank {rank}")
            requests += [_Request(name, part, holders[source], rank, index) for source, part in parts]
        left = partition.num_elements - partition.covered(frozenset(box for _, _, box in wanted[name] if volume(box)))
        if left and name not in unwanted:
            problems.append(f"{name}: no destination wants {left} of its sources' elements")
    return requests


def _assigned(
    requests: Sequence[_Request], source_hosts: Mapping[int, str], destination_hosts: Mapping[int, str]
) -> tuple[Copy, ...]:
    """Every request with its sender: those without a choice first, then the largest, each to the least loaded."""
    requests = list(_shared(requests, source_hosts, destination_hosts))
    loads: dict[int, int] = defaultdict(int)
    chosen: list[Holder | None] = [None] * len(requests)
    open_requests: list[tuple[int, int]] = []
    for index, request in enumerate(requests):
        size = volume(request.box)
        if len(request.holders) == 1:
            chosen[index] = request.holders[0]
            loads[request.holders[0][0]] += size
        else:
            open_requests.append((-size, index))
    for size, index in sorted(open_requests):
        request = requests[index]
        holder = min(request.holders, key=lambda holder: (loads[holder[0]], holder))
        chosen[index] = holder
        loads[holder[0]] -= size
    return tuple(
        Copy(request.tensor, request.box, *holder, request.destination, request.destination_region)
        for request, holder in zip(requests, chosen, strict=True)
        if holder is not None
    )


def _shared(
    requests: Sequence[_Request], source_hosts: Mapping[int, str], destination_hosts: Mapping[int, str]
) -> Iterator[_Request]:
    """Requests with the holders that may send them, those on the destination's host where there are any.

    What is a large part of a sender's even share is cut by rows, so that several can have a part of it: a small model's
    embedding is a quarter of it.
    """
    senders = {holder[0] for request in requests for holder in request.holders}
    total = sum(volume(request.box) for request in requests)
    most = max(_LEAST_PART, total // (max(1, len(senders)) * _PARTS_OF_A_SHARE))
    for request in requests:
        if len(request.holders) == 1:
            yield request
            continue
        host = destination_hosts.get(request.destination)
        near = [holder for holder in request.holders if host is not None and source_hosts.get(holder[0]) == host]
        able = near or request.holders
        rows = request.box[0][1] - request.box[0][0] if len(request.box) > 1 else 1
        parts = min(len(able), rows, -(-volume(request.box) // most))
        start = request.box[0][0] if request.box else 0
        for part in range(parts):
            box = request.box
            if parts > 1:
                box = ((start + rows * part // parts, start + rows * (part + 1) // parts), *request.box[1:])
            yield request._replace(box=box, holders=able)


def _dropped(
    sources: Mapping[int, Sequence[Region]], held: Held, copies: Sequence[Copy], unwanted: Mapping[str, str]
) -> Iterator[Dropped]:
    """What of each source region no copy takes, and each parameter's elements in no region."""
    sent: dict[Holder, set[Box]] = defaultdict(set)
    for copy in copies:
        sent[copy.source, copy.source_region].add(copy.box)
    for rank, regions in sources.items():
        padding: dict[str, int] = {}
        for index, region in enumerate(regions):
            padding.setdefault(region.local_name, prod(region.local_shape))
            padding[region.local_name] -= region.numel
            left = region.numel - union_volume(sent.get((rank, index), ()))
            if left:
                yield Dropped(rank, region.local_name, region.tensor, left, _reason(region, sources, held, unwanted))
        yield from (Dropped(rank, name, "", count, PADDING) for name, count in padding.items() if count)


def _reason(region: Region, sources: Mapping[int, Sequence[Region]], held: Held, unwanted: Mapping[str, str]) -> str:
    names = {sources[rank][index].local_name for rank, index in held[region.tensor][region.box]}
    if region.tensor in unwanted:
        return unwanted[region.tensor]
    return REPLICA if len(names) == 1 else TIED


def _grouped(copies: Sequence[Copy], key: Callable[[Copy], int]) -> dict[int, list[Copy]]:
    groups: dict[int, list[Copy]] = defaultdict(list)
    for copy in copies:
        groups[key(copy)].append(copy)
    return dict(groups)


def _lines(plan: Plan) -> Iterator[str]:
    """Text that names every region and copy; equal boxes and shapes are spelled once."""
    known: dict[object, int] = {}

    def number(content: object) -> str:
        found = known.get(content)
        if found is not None:
            return str(found)
        known[content] = len(known)
        return f"{len(known) - 1}={content}"

    for side in (plan.sources, plan.destinations):
        for rank, regions in side.items():
            yield f"\n{rank}"
            for r in regions:
                place = number((r.tensor_shape, r.box, r.local_shape, r.offset, r.strides))
                yield f"\n{r.tensor} {r.local_name} {place}"
    for copy in plan.copies:
        yield f"\n{number(copy.box)} {copy.source} {copy.source_region} {copy.destination} {copy.destination_region}"
