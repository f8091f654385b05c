"""Packs cut over context-parallel ranks: who holds which tokens, and attention over keys and values of all of them.

Of each sequence, padded to a multiple of ``2 * size`` tokens, rank r of ``size`` holds the chunks r and
``2 * size - 1 - r`` of equal length: early tokens attend to few others, late ones to many, so each rank has as much to
do. Transformer Engine's attention and Megatron-Core's rotary embeddings cut packs alike.

Invariants:
1. The slices of all ranks hold every token of a pack once.
2. Padding stands behind a sequence, so no token of it attends to padding.
3. A rank computes attention of its own queries; keys and values, and their gradients, are exchanged once a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.train.megatron.blocks import Block, PackPlan, group_by_length, plan_blocks


def zigzag(lengths: Sequence[int], rank: int, size: int) -> Tensor:
    """Tokens of a pack that a rank holds, in their order there, [N / size] int64.

    Args:
        lengths: tokens of each sequence of the pack, multiples of ``2 * size`` where there are ranks to share them.
        rank: of the context-parallel ranks.
        size: how many those are.
    """
    if size == 1:
        return torch.arange(sum(lengths))
    parts = []
    start = 0
    for length in lengths:
        chunk = length // (2 * size)
        for index in (rank, 2 * size - 1 - rank):
            parts.append(torch.arange(start + index * chunk, start + (index + 1) * chunk))
        start += length
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """How a rank's queries meet the keys of the whole pack.

    Attributes:
        queries: blocks of this rank's tokens.
        keys: blocks of the same sequences' tokens of all ranks.
        masks: of each block, [count, 1, query slots, key slots] bool: the keys up to the query's own token.
        gathered: [N] int64, where each token of the pack stands among those of all ranks, one rank's after another's.
    """

    queries: PackPlan
    keys: PackPlan
    masks: tuple[Tensor, ...]
    gathered: Tensor


def plan_context(lengths: Sequence[int], rank: int, size: int) -> ContextPlan:
    """The plan of one rank for sequences of these padded lengths; see ``zigzag``."""
    own = [length // size for length in lengths]
    groups = group_by_length(own)
    queries, keys = plan_blocks(own, groups), plan_blocks(lengths, groups)
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    places = zigzag(lengths, rank, size) - starts.repeat_interleave(torch.tensor(own, dtype=torch.int64))
    masks = tuple(
        _mask(query, key, places[queries.token_of_slot[query.slots]])
        for query, key in zip(queries.blocks, keys.blocks, strict=True)
    )
    everyone = torch.cat([zigzag(lengths, other, size) for other in range(size)])
    gathered = torch.empty_like(everyone)
    gathered[everyone] = torch.arange(len(everyone))
    return ContextPlan(queries, keys, masks, gathered)


def _mask(query: Block, key: Block, places: Tensor) -> Tensor:
    """Which keys a block's queries see; keys behind a sequence's end are later than all of its tokens."""
    rows = places.view(query.count, 1, query.length, 1)
    return torch.arange(key.length).view(1, 1, 1, -1) <= rows


class GatherContext(torch.autograd.Function):
    """Tokens [N / size, ...] of each rank -> those of the pack [N, ...]; gradients are summed back to their rank."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, gathered: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(gathered)
        ctx.group = group
        everyone = mine.new_empty(mine.shape[0] * group.size(), *mine.shape[1:])
        dist.all_gather_single(everyone, mine.contiguous(), group=group)
        return everyone.index_select(0, gathered)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (gathered,) = ctx.saved_tensors
        everyone = torch.empty_like(gradient)
        everyone[gathered] = gradient
        mine = gradient.new_empty(gradient.shape[0] // ctx.group.size(), *gradient.shape[1:])
        dist.reduce_scatter_single(mine, everyone, group=ctx.group)
        return mine, None, None
