"""Core attention over packed sequences for devices without Transformer Engine.

Megatron-Core's own ``DotProductAttention`` refuses packed sequences (transformer/dot_product_attention.py:153). This
takes its place in the layer specification, over blocks of sequences (``blocks.py``). Under context parallelism a rank
has the queries of its own tokens (``context.py``).

Invariants:
1. A token attends to the tokens up to itself of its own sequence, and to nothing else.
2. Padding behind a sequence is never attended by it (the mask is causal), and its results and gradients are dropped.
3. A layer's output for a sequence does not depend on what it is packed with, up to rounding.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import embedding_bag, pad, scaled_dot_product_attention

from megarl.errors import ModelError
from megarl.train.megatron.blocks import Block, PackPlan, plan_blocks, share_tokens
from megarl.train.megatron.context import ContextPlan, GatherContext, plan_context


def shares_prompts(wanted: bool | None, *, own_attention: bool, cp: int) -> bool:
    """Whether rows with a prompt in common share its tokens: as ``engine.share_prompts`` says, or where they can.

    Our core attention takes ``SharedSequences``. Transformer Engine's takes sequences one after another only, and
    context-parallel ranks share out the tokens of each.

    Raises:
        ModelError: wanted where they cannot.
    """
    can = own_attention and cp == 1
    if wanted and not can:
        what = (
            f"context-parallel ranks (cp={cp}) share out" if own_attention else "Transformer Engine's attention takes"
        )
        raise ModelError(
            f"samples cannot share the tokens of their prompt: {what} whole sequences",
            where="engine.share_prompts=true",
            fix="set engine.share_prompts=false, or null to share where it can be done",
        )
    return can if wanted is None else wanted


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

    Args:
        packed: Megatron's parameters of the whole pack.
        positions: [n] int64 of this rank's tokens, from 0 in each sequence.
        cp_rank: this rank among those that share the pack's tokens.
        cp_size: how many those are.
    """

    def __init__(self, packed: PackedSeqParams, positions: Tensor, *, cp_rank: int = 0, cp_size: int = 1) -> None:
        super().__init__(
            qkv_format="sbhd",
            cu_seqlens_q=packed.cu_seqlens_q,
            cu_seqlens_kv=packed.cu_seqlens_kv,
            max_seqlen_q=packed.max_seqlen_q,
            max_seqlen_kv=packed.max_seqlen_kv,
        )
        self.packed = packed
        self.positions = positions
        lengths = packed.cu_seqlens_q.diff().tolist()
        self.plan: PackPlan | ContextPlan
        if cp_size > 1:
            self.plan = plan_context(lengths, cp_rank, cp_size)
            return
        self.plan = plan_blocks(lengths)
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


def context_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: ContextPlan, scale: float, group: dist.ProcessGroup
) -> Tensor:
    """``packed_attention`` of this rank's tokens, with keys and values of all context-parallel ranks; collective.

    Args:
        query: [N / size, heads, d] float32 or bfloat16.
        key: [N / size, kv_heads, d].
        value: [N / size, kv_heads, d'].
        plan: of this rank.
        scale: factor of the scores.
        group: the context-parallel ranks.

    Returns:
        [N / size, heads, d'] in the dtype of ``query``.
    """
    size = key.shape[-1]
    whole = GatherContext.apply(torch.cat([key, value], dim=-1), plan.gathered, group)
    query = _TokensToSlots.apply(query, plan.queries)
    key, value = _TokensToSlots.apply(whole, plan.keys).tensor_split([size], dim=-1)
    blocks = zip(plan.queries.blocks, plan.keys.blocks, plan.masks, strict=True)
    outputs = [_block_attention(query, key, value, own, scale, other, mask) for own, other, mask in blocks]
    tokens: Tensor = _SlotsToTokens.apply(torch.cat(outputs), plan.queries.slot_of_token)
    return tokens


def _block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block: Block,
    scale: float,
    keys: Block | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Attention of one block, [count * length, heads, d]; causal, unless keys have a block of their own and a mask."""
    keys = block if keys is None else keys
    # [count * length, heads, d] -> [count, heads, length, d], strides only
    query, key, value = (
        tensor[at.slots].view(at.count, at.length, *tensor.shape[1:]).transpose(1, 2)
        for tensor, at in ((query, block), (key, keys), (value, keys))
    )
    grouped = query.shape[1] != key.shape[1]
    output = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
    return output.transpose(1, 2).reshape(block.count * block.length, *output.shape[1::2])


class PackedAttention(MegatronModule):
    """Megatron-Core's core-attention slot with ``packed_attention``; causal, without dropout, without parameters.

    Takes the arguments that Megatron's ``SelfAttention`` builds its core attention with.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *_: Any,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **__: Any,
    ) -> None:
        super().__init__(config=config)
        self.cp_group: dist.ProcessGroup | None = None if pg_collection is None else pg_collection.cp
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
        """Attention output [S, B, heads * d'] of query [S, B, heads, d], key [S, B, kv_heads, d], value [.., d'].

        With ``packed_seq_params`` B is 1 and S the tokens of the pack; without, B whole sequences of S tokens.
        """
        del attention_mask, attn_mask_type, attention_bias
        length, batch = query.shape[:2]
        dtype, value_size = query.dtype, value.shape[-1]
        if value_size != query.shape[-1]:
            # The CPU's kernel that keeps no scores takes one size only; zeros change neither scores nor results.
            size = max(value_size, query.shape[-1])
            query, key, value = (pad(tensor, (0, size - tensor.shape[-1])) for tensor in (query, key, value))
        # The CPU's bfloat16 kernel is four times slower backwards than its float32 one, and less exact.
        query, key, value = query.float(), key.float(), value.float()
        if isinstance(packed_seq_params, PlannedSequences):
            plan = packed_seq_params.plan
            query, key, value = query.squeeze(1), key.squeeze(1), value.squeeze(1)
            if isinstance(plan, PackPlan):
                output = packed_attention(query, key, value, plan, self.scale)
            else:
                output = context_attention(query, key, value, plan, self.scale, self.cp_group)
            return output[..., :value_size].reshape(length, 1, -1).to(dtype)
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        grouped = query.shape[1] != key.shape[1]
        output = scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale, enable_gqa=grouped)
        return output[..., :value_size].permute(2, 0, 1, 3).reshape(length, batch, -1).to(dtype)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Nothing to save."""
        return {}
