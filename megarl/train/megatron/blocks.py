"""Sequences of a pack side by side in padded blocks: which token stands in which slot.

Sequences of similar length share a block, so that many short ones cost one kernel call, and no score matrix spans the
pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SHORT_TOKENS = 64
"""Sequences up to this length share a block whatever their lengths: the kernel call costs more than their padding."""
LENGTH_RATIO = 0.7
"""In a block of longer sequences the shortest has at least this share of the longest's length."""


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive padded slots: ``count`` sequences of ``length`` slots each, from slot ``start``."""

    start: int
    count: int
    length: int

    @property
    def slots(self) -> slice:
        """The slots of the block."""
        return slice(self.start, self.start + self.count * self.length)


@dataclass(frozen=True, slots=True)
class PackPlan:
    """Where the N tokens of a pack stand in padded blocks of S slots.

    Attributes:
        blocks: the blocks, in order of their slots.
        token_of_slot: [S] int64; padding slots repeat the sequence's first token.
        slot_of_token: [N] int64, its inverse on tokens; of a token with several slots the first.
        is_identity: tokens are their own slots, so nothing has to be moved.
        copies: where tokens have several slots, the slots of all tokens [E] int64, one token's after another's, and
            where each token's begin [N] int64.
    """

    blocks: tuple[Block, ...]
    token_of_slot: Tensor
    slot_of_token: Tensor
    is_identity: bool
    copies: tuple[Tensor, Tensor] | None = None


def plan_blocks(lengths: Sequence[int], groups: Sequence[Sequence[int]] | None = None) -> PackPlan:
    """Blocks for sequences of these lengths standing one after another in a pack. Empty sequences take no slot.

    Args:
        lengths: tokens of each sequence.
        groups: sequences (indices) of each block; None puts those of similar length together.
    """
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    members = group_by_length(lengths) if groups is None else groups
    blocks: list[Block] = []
    slots: list[Tensor] = []
    slot_of_token = torch.empty(starts[-1], dtype=torch.int64)
    start = 0
    for group in members:
        length = max(lengths[index] for index in group)
        blocks.append(Block(start, len(group), length))
        first = torch.tensor([starts[index] for index in group])[:, None]
        size = torch.tensor([lengths[index] for index in group])[:, None]
        place = torch.arange(length)[None]
        is_token = place < size
        tokens = torch.where(is_token, first + place, first)
        slot_of_token[tokens[is_token]] = start + is_token.flatten().nonzero().flatten()
        slots.append(tokens.flatten())
        start += len(group) * length
    token_of_slot = torch.cat(slots) if slots else torch.empty(0, dtype=torch.int64)
    is_identity = len(token_of_slot) == starts[-1] and torch.equal(token_of_slot, torch.arange(starts[-1]))
    return PackPlan(tuple(blocks), token_of_slot, slot_of_token, is_identity)


def share_tokens(plan: PackPlan, token_of_place: Tensor, num_tokens: int) -> PackPlan:
    """The plan of sequences that have tokens in common.

    Args:
        plan: of the sequences, as if each token of each of them stood in the pack (a place).
        token_of_place: [E] int64 tokens of the pack that stand in those places; every token has one at least.
        num_tokens: N, tokens of the pack.
    """
    order = token_of_place.argsort(stable=True)
    counts = token_of_place.bincount(minlength=num_tokens)
    slots, starts = plan.slot_of_token[order], counts.cumsum(0) - counts
    return PackPlan(plan.blocks, token_of_place[plan.token_of_slot], slots[starts], False, (slots, starts))


def group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Sequences (indices) of each block, those of a block in the order of the pack; empty ones are in none."""
    order = [index for index, length in enumerate(lengths) if length]
    groups: list[list[int]] = []
    longest = 0
    for index in sorted(order, key=lambda index: -lengths[index]):
        if not groups or (longest > SHORT_TOKENS and lengths[index] < LENGTH_RATIO * longest):
            groups.append([])
            longest = lengths[index]
        groups[-1].append(index)
    return [sorted(group) for group in groups]
