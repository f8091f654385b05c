"""A region: one box of a canonical (Hugging Face named) tensor and where it lies in one rank's parameter.

Loads no torch: planning works on regions alone.

Invariants:
1. A box is half-open bounds per dim, in coordinates of the whole canonical tensor. It is empty only to name a
   parameter that is all padding.
2. Offset and strides count elements of the contiguous parameter; every element of the box has one place in it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import prod

from megarl.errors import LayoutError

Box = tuple[tuple[int, int], ...]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Region:
    """One rectangle, in both coordinate systems.

    Args:
        tensor: canonical name.
        tensor_shape: shape of the whole canonical tensor.
        box: the part of it, as (start, stop) per dim.
        local_name: the rank's parameter.
        local_shape: the parameter's shape, padding included.
        offset: first element in the flat parameter.
        strides: elements of the flat parameter between neighbours along each dim of the box.
        replica: 0 on the rank that stands for all that hold this box; others count up from 1.
    """

    tensor: str
    tensor_shape: Shape
    box: Box
    local_name: str
    local_shape: Shape
    offset: int
    strides: tuple[int, ...]
    replica: int = 0

    @property
    def shape(self) -> Shape:
        """Shape of the box."""
        return tuple(stop - start for start, stop in self.box)

    @property
    def numel(self) -> int:
        """Elements of the box."""
        return volume(self.box)

    @property
    def is_owner(self) -> bool:
        """Whether this rank's copy is the one that is sent and exported."""
        return self.replica == 0

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index of the canonical tensor."""
        return tuple(slice(start, stop) for start, stop in self.box)


@lru_cache(maxsize=1 << 16)
def volume(box: Box) -> int:
    """Elements of a box; 1 for a box of no dims."""
    return prod(stop - start for start, stop in box)


def whole(shape: Shape) -> Box:
    """The box that is the whole tensor."""
    return tuple((0, size) for size in shape)


def overlap(one: Box, other: Box) -> Box | None:
    """The intersection of two boxes of one tensor, None where they do not touch."""
    bounds = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return bounds if all(start < stop for start, stop in bounds) else None


@lru_cache(maxsize=1 << 16)
def contains(outer: Box, inner: Box) -> bool:
    """Whether ``inner`` is a box with elements, all of which lie in ``outer``; False for boxes of unequal dims."""
    return len(outer) == len(inner) and all(a <= c < d <= b for (a, b), (c, d) in zip(outer, inner, strict=True))


def part_of(region: Region, box: Box) -> Region:
    """The part of a region that a box inside it covers: the same parameter, another offset.

    Raises:
        LayoutError: the box is not inside the region.
    """
    if box == region.box:
        return region
    if not contains(region.box, box):
        raise LayoutError(f"{box} is not inside {region.box} of {region.tensor}", where=region.local_name)
    steps = zip(box, region.box, region.strides, strict=True)
    offset = region.offset + sum((inner[0] - outer[0]) * stride for inner, outer, stride in steps)
    return replace(region, box=box, offset=offset)


def union_volume(boxes: Collection[Box]) -> int:
    """Elements that lie in at least one of the boxes."""
    return _union_volume(frozenset(boxes))


@lru_cache(maxsize=1 << 12)
def _union_volume(boxes: frozenset[Box]) -> int:
    """By sweeping along the first dim; layers, experts and ranks are cut alike, so that few sets differ."""
    if len(boxes) <= 1 or not next(iter(boxes)):
        return max(map(volume, boxes), default=0)
    cuts = sorted({bound for box in boxes for bound in box[0]})
    total = 0
    for start, stop in pairwise(cuts):
        inner = frozenset(box[1:] for box in boxes if box[0][0] <= start and stop <= box[0][1])
        total += (stop - start) * _union_volume(inner)
    return total


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size
    return tuple(strides)


def local_box(region: Region) -> Box | None:
    """The region as a box of the parameter's own coordinates, None where it is none there (interleaved or empty).

    Dims of size 1 in the box may have any stride: they fix one coordinate, which the offset already holds.
    """
    if region.numel == 0:
        return None
    steps = contiguous_strides(region.local_shape)
    bounds: list[tuple[int, int]] = []
    rest = region.offset
    for step, size in zip(steps, region.local_shape, strict=True):
        start, rest = divmod(rest, step)
        if start >= size:
            return None
        bounds.append((start, start + 1))
    for size, stride in zip(region.shape, region.strides, strict=True):
        if size == 1:
            continue
        # A parameter's dim of size 1 has the stride of the dim after it; the sized one is meant.
        dims = [dim for dim, step in enumerate(steps) if step == stride and region.local_shape[dim] > 1]
        if not dims:
            return None
        start, stop = bounds[dims[0]]
        if stop != start + 1 or start + size > region.local_shape[dims[0]]:
            return None
        bounds[dims[0]] = (start, start + size)
    return tuple(bounds)


def overlapping_pairs(boxes: Sequence[Box]) -> Iterable[tuple[int, int]]:
    """Index pairs of boxes that intersect, by a sweep along the first dim."""
    order = sorted(range(len(boxes)), key=lambda index: boxes[index][:1])
    active: list[int] = []
    for index in order:
        box = boxes[index]
        if box:
            active = [other for other in active if boxes[other][0][1] > box[0][0]]
        for other in active:
            if overlap(boxes[other], box) is not None:
                yield (other, index)
        active.append(index)
