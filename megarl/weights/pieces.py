"""Regions met with real tensors: views into a rank's parameters, filling them, handing them out.

Invariants:
1. A view shares memory with its parameter: filling it fills the model, reading it copies nothing.
2. Filling checks first that regions and parameters name each other exactly, then zeroes padding, then writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megarl.errors import LayoutError
from megarl.weights.check import check_names
from megarl.weights.layout import parameter_shapes
from megarl.weights.plan import holders
from megarl.weights.region import Region


def region_view(region: Region, parameter: Tensor) -> Tensor:
    """The region's elements of its parameter, shaped like its box, sharing memory.

    Raises:
        LayoutError: a parameter of another shape, or one that is not contiguous.
    """
    if tuple(parameter.shape) != region.local_shape:
        raise LayoutError(
            f"{region.local_name} has shape {tuple(parameter.shape)}, expected {region.local_shape}",
            where=region.tensor,
        )
    if not parameter.is_contiguous():
        raise LayoutError(f"{region.local_name} is not contiguous, so that regions of it cannot be addressed")
    # as_strided counts from the storage, and a parameter may lie inside a larger buffer.
    return parameter.detach().as_strided(region.shape, region.strides, parameter.storage_offset() + region.offset)


def pieces(
    regions: Iterable[Region], params: Mapping[str, Tensor], *, owned_only: bool = True
) -> Iterator[tuple[Region, Tensor]]:
    """The regions with their views, in the order of the regions; empty ones are left out.

    Args:
        regions: one rank's regions.
        params: its parameters by Megatron's name.
        owned_only: leave out replicas that another rank stands for.
    """
    for region in regions:
        if region.numel and (region.is_owner or not owned_only):
            yield region, region_view(region, params[region.local_name])


@torch.no_grad()
def fill(regions: Sequence[Region], params: Mapping[str, Tensor], source: Callable[[Region], Tensor]) -> None:
    """Writes ``source(region)`` into every region and zero into the padding; dtype and device are converted.

    Raises:
        LayoutError: parameters and regions do not name each other exactly.
    """
    check_names(regions, {name: tuple(tensor.shape) for name, tensor in params.items()})
    filled: dict[str, int] = {}
    for region in regions:
        filled[region.local_name] = filled.get(region.local_name, 0) + region.numel
    for name in parameter_shapes(regions):
        if filled[name] < params[name].numel():
            params[name].zero_()
    for region in regions:
        if region.numel:
            region_view(region, params[region.local_name]).copy_(source(region))


def check_replicas(
    sources: Mapping[int, Sequence[Region]], params: Mapping[int, Mapping[str, Tensor]], *, most: int = 20
) -> None:
    """Compares what several ranks hold of one box bit for bit: of unequal replicas none may stand for the others.

    Args:
        sources: the regions of each rank.
        params: the parameters of each rank by Megatron's name.
        most: how many are named.

    Raises:
        LayoutError: naming the tensors, boxes and ranks that differ from the first holder.
    """
    problems: list[str] = []
    for name, boxes in holders(sources).items():
        for box, held in boxes.items():
            first, *others = (
                (rank, region_view(region, params[rank][region.local_name]))
                for rank, region in ((rank, sources[rank][index]) for rank, index in held)
            )
            for rank, view in others:
                if not _equal_bits(first[1], view):
                    problems.append(f"{name} {box} on rank {rank} differs from rank {first[0]}")
    if problems:
        more = f"; and {len(problems) - most} more" if len(problems) > most else ""
        raise LayoutError("replicas are unequal: " + "; ".join(problems[:most]) + more)


def _equal_bits(one: Tensor, other: Tensor) -> bool:
    """Like ``torch.equal``, for which NaN differs from itself and both zeros are one."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return one.dtype == other.dtype and torch.equal(one.contiguous().view(bits), other.contiguous().view(bits))


def assemble(parts: Iterable[tuple[Region, Tensor]], *, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Full canonical tensors from pieces, for tests and small models.

    The caller proves completeness (``check.check_complete``); here a tensor's elements are only counted.

    Raises:
        LayoutError: a tensor whose pieces have fewer or more elements than it.
    """
    full: dict[str, Tensor] = {}
    filled: dict[str, int] = {}
    for region, piece in parts:
        if region.tensor not in full:
            full[region.tensor] = torch.empty(region.tensor_shape, dtype=dtype or piece.dtype)
        full[region.tensor][region.slices].copy_(piece)
        filled[region.tensor] = filled.get(region.tensor, 0) + region.numel
    wrong = [name for name, tensor in full.items() if filled[name] != tensor.numel()]
    if wrong:
        raise LayoutError("pieces do not fill their tensors once: " + ", ".join(wrong))
    return full
