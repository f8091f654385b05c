"""Core attention over packed sequences for devices without Transformer Engine.

Megatron-Core's own ``DotProductAttention`` refuses packed sequences (transformer/dot_product_attention.py:153). This
takes its place in the layer specification. Sequences of similar length are put side by side in a padded block, so that
many short sequences cost one kernel call, and no score matrix spans the pack.

Invariants:
1. A token attends to the tokens up to itself of its own sequence, and to nothing else.
2. Padding behind a sequence is never attended by it (the mask is causal), and its results and gradients are dropped.
3. A layer's output for a sequence does not depend on what it is packed with, up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import embedding_bag, scaled_dot_product_attention

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


def plan_blocks(lengths: Sequence[int]) -> PackPlan:
    """Blocks for sequences of these lengths standing one after another in a pack. Empty sequences take no slot."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    order = [index for index, length in enumerate(lengths) if length]
    members = _group_by_length(lengths, order)
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


def _group_by_length(lengths: Sequence[int], order: Sequence[int]) -> list[list[int]]:
    """Sequences (indices) of each block; those of a block in the order of the pack."""
    groups: list[list[int]] = []
    longest = 0
    for index in sorted(order, key=lambda index: -lengths[index]):
        if not groups or (longest > SHORT_TOKENS and lengths[index] < LENGTH_RATIO * longest):
            groups.append([])
            longest = lengths[index]
        groups[-1].append(index)
    return [sorted(group) for group in groups]


class SharedSequences(PackedSeqParams):
    """Megatron's packing parameters of sequences that share tokens: ``cu_seqlens`` counts places, not tokens.

    Args:
        token_of_place: [E] int64, token of each place.
        num_tokens: N, tokens of the pack.
        sequences: Megatron's parameters.
    """

    def __init__(self, token_of_place: Tensor, num_tokens: int, **sequences: Any) -> None:
        super().__init__(**sequences)
        self.token_of_place = token_of_place
        self.num_tokens = num_tokens


class PlannedSequences(PackedSeqParams):
    """Megatron's packing parameters with the block plan, made once per microbatch and used by every layer.

    ``qkv_format`` is ``sbhd``: Megatron then keeps tensors as [N, 1, heads, d] and rotates each token by its own row of
    the rotary table, instead of looping over the sequences.
    """

    def __init__(self, packed: PackedSeqParams) -> None:
        super().__init__(
            qkv_format="sbhd",
            cu_seqlens_q=packed.cu_seqlens_q,
            cu_seqlens_kv=packed.cu_seqlens_kv,
            max_seqlen_q=packed.max_seqlen_q,
            max_seqlen_kv=packed.max_seqlen_kv,
        )
        self.plan = plan_blocks(packed.cu_seqlens_q.diff().tolist())
        if isinstance(packed, SharedSequences):
            self.plan = share_tokens(self.plan, packed.token_of_place, packed.num_tokens)


class _TokensToSlots(torch.autograd.Function):
    """Rows of tokens [N, ...] at their slots [S, ...]. A gather in both directions."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, plan: PackPlan) -> Tensor:
        ctx.plan = plan
        return tokens.index_select(0, plan.token_of_slot)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        plan: PackPlan = ctx.plan
        if plan.copies is None:
            return gradient.index_select(0, plan.slot_of_token), None
        # The sum over a token's slots: an order of magnitude faster than adding rows one by one.
        slots, starts = plan.copies
        summed = embedding_bag(slots, gradient.flatten(1), starts, mode="sum")
        return summed.view(-1, *gradient.shape[1:]), None


class _SlotsToTokens(torch.autograd.Function):
    """Rows of slots [S, ...] back at their tokens [N, ...]; padding gets no gradient."""

    @staticmethod
    def forward(ctx: Any, slots: Tensor, slot_of_token: Tensor) -> Tensor:
        ctx.save_for_backward(slot_of_token)
        ctx.num_slots = slots.shape[0]
        return slots.index_select(0, slot_of_token)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (slot_of_token,) = ctx.saved_tensors
        slots = gradient.new_zeros((ctx.num_slots, *gradient.shape[1:]))
        return slots.index_copy_(0, slot_of_token, gradient), None


def packed_attention(query: Tensor, key: Tensor, value: Tensor, plan: PackPlan, scale: float) -> Tensor:
    """Causal attention of each sequence of a pack.

    ``softmax(scale * q k^T) v`` per sequence and head, query head h using key-value head ``h // (heads / kv_heads)``.

    Args:
        query: [N, heads, d] float32 or bfloat16.
        key: [N, kv_heads, d].
        value: [N, kv_heads, d].
        plan: blocks of the pack's sequences.
        scale: factor of the scores.

    Returns:
        [N, heads, d] in the dtype of ``query``.
    """
    if not plan.is_identity:
        query, key, value = (_TokensToSlots.apply(tensor, plan) for tensor in (query, key, value))
    outputs = [_block_attention(query, key, value, block, scale) for block in plan.blocks]
    slots = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if plan.is_identity:
        return slots
    tokens: Tensor = _SlotsToTokens.apply(slots, plan.slot_of_token)
    return tokens


def _block_attention(query: Tensor, key: Tensor, value: Tensor, block: Block, scale: float) -> Tensor:
    """Attention of one block, [count * length, heads, d]."""
    stop = block.start + block.count * block.length
    # [count * length, heads, d] -> [count, heads, length, d], strides only
    query, key, value = (
        tensor[block.start : stop].view(block.count, block.length, *tensor.shape[1:]).transpose(1, 2)
        for tensor in (query, key, value)
    )
    grouped = query.shape[1] != key.shape[1]
    output = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
    return output.transpose(1, 2).reshape(block.count * block.length, *output.shape[1::2])


class PackedAttention(MegatronModule):
    """Megatron-Core's core-attention slot with ``packed_attention``; causal, without dropout, without parameters.

    Takes the arguments that Megatron's ``SelfAttention`` builds its core attention with.
    """

    def __init__(self, config: TransformerConfig, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__(config=config)
        self.scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attention output [S, B, heads * d] of query [S, B, heads, d], key and value [S, B, kv_heads, d].

        With ``packed_seq_params`` B is 1 and S the tokens of the pack; without, B whole sequences of S tokens.
        """
        del attention_mask, attn_mask_type, attention_bias
        length, batch = query.shape[:2]
        dtype = query.dtype
        # The CPU's bfloat16 kernel is four times slower backwards than its float32 one, and less exact.
        query, key, value = query.float(), key.float(), value.float()
        if isinstance(packed_seq_params, PlannedSequences):
            plan = packed_seq_params.plan
            output = packed_attention(query.squeeze(1), key.squeeze(1), value.squeeze(1), plan, self.scale)
            return output.reshape(length, 1, -1).to(dtype)
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        grouped = query.shape[1] != key.shape[1]
        output = scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale, enable_gqa=grouped)
        return output.permute(2, 0, 1, 3).reshape(length, batch, -1).to(dtype)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Nothing to save."""
        return {}
