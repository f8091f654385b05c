"""Packs cut over context-parallel ranks, without any: what each would compute, put together."""

from __future__ import annotations

import pytest
import torch

from megarl.train.megatron.attention import _block_attention, _SlotsToTokens, _TokensToSlots, packed_attention
from megarl.train.megatron.blocks import plan_blocks
from megarl.train.megatron.context import plan_context, zigzag

SCALE = 0.3


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_hold_every_token_once_and_as_many_each(size: int) -> None:
    lengths = [6 * size, 2 * size, 0, 10 * size]
    parts = [zigzag(lengths, rank, size) for rank in range(size)]
    assert {len(part) for part in parts} == {sum(lengths) // size}
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(sum(lengths)))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_attend_to_as_many_tokens_each(size: int) -> None:
    """Of a long sequence; the cut is for this."""
    totals = [int((zigzag([40 * size], rank, size) + 1).sum()) for rank in range(size)]
    assert max(totals) == min(totals)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_slices_attend_as_the_whole_pack_does(size: int) -> None:
    """Short, long and similar sequences, so that there are several blocks with padding."""
    lengths = [2 * size * n for n in (3, 1, 20, 2, 19, 40)]
    generator = torch.Generator().manual_seed(size)
    query, key, value = (torch.randn(sum(lengths), heads, 8, generator=generator) for heads in (4, 2, 2))
    expected = packed_attention(query, key, value, plan_blocks(lengths), SCALE)
    everyone = torch.cat([zigzag(lengths, rank, size) for rank in range(size)])
    for rank in range(size):
        plan, mine = plan_context(lengths, rank, size), zigzag(lengths, rank, size)
        gathered = (_TokensToSlots.apply(tensor[everyone][plan.gathered], plan.keys) for tensor in (key, value))
        keys, values = gathered
        queries = _TokensToSlots.apply(query[mine], plan.queries)
        blocks = zip(plan.queries.blocks, plan.keys.blocks, plan.masks, strict=True)
        outputs = [_block_attention(queries, keys, values, own, SCALE, other, mask) for own, other, mask in blocks]
        assert len(outputs) > 1
        found = _SlotsToTokens.apply(torch.cat(outputs), plan.queries.slot_of_token)
        torch.testing.assert_close(found, expected[mine], rtol=0, atol=1e-5)
