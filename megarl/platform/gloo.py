"""Collectives of expert layers that gloo refuses, made of ones it has.

Megatron-Core's dispatcher names split sizes by tensors and gathers parts of unequal length; NCCL takes both.
``cpu.ADAPTATIONS`` puts these in their places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def with_integer_splits(all_to_all: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Megatron-Core's all-to-all, its split sizes read into integers first."""

    def call(group: Any, tensor: Tensor, output_splits: Any = None, input_splits: Any = None, **options: Any) -> Tensor:
        return all_to_all(group, tensor, _integers(output_splits), _integers(input_splits), **options)

    return call


def _integers(splits: Any) -> list[int] | None:
    return splits.tolist() if isinstance(splits, Tensor) else splits


def with_uneven_gather(gather: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Megatron-Core's gather along the first dim, of parts that differ in length too."""

    def call(tensor: Tensor, group: Any, output_split_sizes: Sequence[int] | None = None, *rest: Any, **kw: Any) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather(tensor, group, output_split_sizes, *rest, **kw)
        longest = max(output_split_sizes)
        padded = _padded(tensor, longest)
        parts = padded.new_empty(group.size() * longest, *tensor.shape[1:])
        dist.all_gather_single(parts, padded, group=group)
        return torch.cat([parts[rank * longest :][:size] for rank, size in enumerate(output_split_sizes)])

    return call


def with_uneven_reduce_scatter(reduce_scatter: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Megatron-Core's reduce-scatter along the first dim, into parts that differ in length too."""

    def call(tensor: Tensor, group: Any, input_split_sizes: Sequence[int] | None = None, *rest: Any, **kw: Any) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(tensor, group, input_split_sizes, *rest, **kw)
        longest = max(input_split_sizes)
        parts = torch.cat([_padded(part, longest) for part in tensor.split(list(input_split_sizes))])
        mine = parts.new_empty(longest, *tensor.shape[1:])
        dist.reduce_scatter_single(mine, parts, group=group)
        return mine[: input_split_sizes[group.rank()]].contiguous()

    return call


def _padded(tensor: Tensor, length: int) -> Tensor:
    """Rows of zeros behind a tensor, to this length."""
    missing = length - tensor.shape[0]
    return tensor.contiguous() if not missing else torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
