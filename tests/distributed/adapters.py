"""Factors of low-rank adapters in Hugging Face's coordinates, so that those of any layout can be compared.

The rows of a layer's ``B`` are those of the canonical weights that the layer holds; ``A`` is named after the first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from megarl.train.megatron.engine import MegatronEngine
from megarl.train.megatron.lora import Adapter
from megarl.weights.region import Region

FIRST = ("q_proj", "o_proj", "gate_proj", "down_proj")


@dataclass(frozen=True)
class Part:
    """A part of a factor, as ``assemble`` takes it."""

    tensor: str
    tensor_shape: tuple[int, ...]
    slices: tuple[slice, ...]

    @property
    def numel(self) -> int:
        return prod(len(range(*one.indices(size))) for one, size in zip(self.slices, self.tensor_shape, strict=True))


def adapted(engine: MegatronEngine) -> Iterator[tuple[Region, Adapter]]:
    """Regions of this rank's weights that have an adapter."""
    assert engine._adapters is not None
    for region in engine.regions():
        adapter = engine._adapters._adapters.get(region.local_name)
        if adapter is not None:
            yield region, adapter


def rows_of_b(region: Region, adapter: Adapter, tensor: Tensor) -> Tensor:
    """The region's rows [rows, rank] of ``tensor``, which is like the adapter's B."""
    start = region.offset // adapter.a.shape[1]
    return tensor[start : start + region.shape[0]]


def factors(engine: MegatronEngine, read: Callable[[Any], Tensor] = lambda parameter: parameter) -> list[Any]:
    """Parts of ``WEIGHT.a`` and ``WEIGHT.b`` that this rank stands for, of what ``read`` makes of a factor."""
    first_rank = engine.groups.coordinate.tp == 0
    found: list[Any] = []
    for region, adapter in adapted(engine):
        if not region.is_owner:
            continue
        rank, (rows, columns), (_, width) = adapter.a.shape[0], region.slices, region.tensor_shape
        if adapter.is_column or first_rank:
            part = Part(f"{region.tensor}.b", (region.tensor_shape[0], rank), (rows, slice(None)))
            found.append((part, rows_of_b(region, adapter, read(adapter.b)).detach().clone()))
        if region.tensor.endswith(tuple(f"{name}.weight" for name in FIRST)) and rows.start == 0:
            part = Part(f"{region.tensor}.a", (rank, width), (slice(None), columns))
            found.append((part, read(adapter.a).detach().clone()))
    return found


@torch.no_grad()
def draw_b(engine: MegatronEngine, scale: float = 0.05) -> None:
    """Give every B normal numbers that depend on the name of its weight alone, so that A has a gradient too."""
    for region, adapter in adapted(engine):
        digest = hashlib.blake2b(region.tensor.encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        drawn = scale * torch.randn(region.tensor_shape[0], adapter.a.shape[0], generator=generator)
        rows_of_b(region, adapter, adapter.b).copy_(drawn[region.slices[0]])
    if engine.optimizer is not None:
        engine.optimizer.megatron.reload_model_params()
