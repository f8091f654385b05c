"""A checkpoint as the planner sees it: ranks (or files) that hold regions, and the array in a file of each parameter.

Invariants:
1. Every region's parameter has one array of exactly its shape.
2. Hugging Face directories are one rank whose parameters are the canonical tensors themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from megarl.errors import PlanError
from megarl.weights.files.arrays import Array
from megarl.weights.region import Box, Region, Shape, contiguous_strides, local_box, overlap, whole


@dataclass
class Store:
    """Regions by rank and arrays by (rank, parameter)."""

    regions: dict[int, list[Region]] = field(default_factory=dict)
    arrays: dict[tuple[int, str], Array] = field(default_factory=dict)

    def add(self, rank: int, array: Array, regions: Iterable[Region]) -> None:
        """One parameter of a rank. Raises PlanError where a region is of another shape."""
        for region in regions:
            if region.local_shape != array.shape:
                raise PlanError(
                    f"{region.local_name} has shape {list(array.shape)}, expected {list(region.local_shape)}",
                    where=f"{array.path}, {region.tensor}",
                )
            self.regions.setdefault(rank, []).append(region)
            self.arrays[rank, region.local_name] = array

    def array(self, rank: int, region: Region) -> Array:
        """The array a region lies in."""
        return self.arrays[rank, region.local_name]


def whole_region(tensor: str, shape: Shape) -> Region:
    """A canonical tensor stored as it is."""
    return Region(tensor, shape, whole(shape), tensor, shape, 0, contiguous_strides(shape))


def prefixed(region: Region, prefix: str) -> Region:
    """The same region of another canonical tensor, named with a prefix (a slot of the optimizer)."""
    return replace(region, tensor=prefix + region.tensor) if prefix else region


def cut_to_chunk(region: Region, lead: tuple[int, ...], chunk: Box, name: str) -> Region | None:
    """The part of a region that lies in a chunk, in the chunk's own coordinates; None where they do not meet.

    Args:
        region: of a parameter; in the chunk's tensor that parameter is one entry of dims in front.
        lead: its index along them (layer, expert).
        chunk: a box of the tensor, dims in front included.
        name: the chunk's.
    """
    inside = local_box(region)
    front, tail = chunk[: len(lead)], chunk[len(lead) :]
    if inside is None or not all(start <= index < stop for index, (start, stop) in zip(lead, front, strict=True)):
        return None
    common = overlap(inside, tail)
    if common is None:
        return None
    shape = tuple(stop - start for start, stop in chunk)
    steps = contiguous_strides(shape)
    offset = sum((index - start) * step for index, (start, _), step in zip(lead, front, steps, strict=False))
    tail_steps = steps[len(lead) :]
    offset += sum((a - b) * step for (a, _), (b, _), step in zip(common, tail, tail_steps, strict=True))
    box, strides = [], []
    own_steps = contiguous_strides(region.local_shape)
    for (start, stop), stride in zip(region.box, region.strides, strict=True):
        if stop - start == 1:
            box.append((start, stop))
            strides.append(1)
            continue
        dim = next(d for d, step in enumerate(own_steps) if step == stride and region.local_shape[d] > 1)
        shift = start - inside[dim][0]
        box.append((common[dim][0] + shift, common[dim][1] + shift))
        strides.append(tail_steps[dim])
    return Region(region.tensor, region.tensor_shape, tuple(box), name, shape, offset, tuple(strides), region.replica)
