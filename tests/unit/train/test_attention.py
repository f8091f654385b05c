"""Attention of packed sequences against plain causal attention of each sequence, by the formula."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import integers, lists
from torch import Tensor

from megarl.train.megatron.attention import packed_attention
from megarl.train.megatron.blocks import LENGTH_RATIO, SHORT_TOKENS, plan_blocks, share_tokens

HEADS, KV_HEADS, DIM = 4, 2, 8
SCALE = 1 / math.sqrt(DIM)


def tensors(num_tokens: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    return [torch.randn(num_tokens, n, DIM, generator=generator).to(dtype).requires_grad_() for n in heads]


def by_the_formula(query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
    """softmax(scale q k^T + causal mask) v, one sequence at a time, in float64."""
    outputs = []
    for q, k, v in zip(*(tensor.double().split(lengths) for tensor in (query, key, value)), strict=True):
        k, v = (tensor.repeat_interleave(HEADS // KV_HEADS, dim=1) for tensor in (k, v))
        scores = torch.einsum("shd,thd->hst", q, k) * SCALE
        future = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        outputs.append(torch.einsum("hst,thd->shd", scores.masked_fill(future, -torch.inf).softmax(-1), v))
    return torch.cat(outputs)


@pytest.mark.parametrize(
    "lengths",
    [
        [7],
        [5, 5, 5],
        [1, 1],
        [3, 9, 1, 6],
        [90, 3, 100, 40, 7],  # several blocks, order changes
        [4, 0, 6],  # an empty sequence takes no token
    ],
    ids=str,
)
def test_output_and_gradients_are_those_of_each_sequence(lengths: list[int]) -> None:
    query, key, value = tensors(sum(lengths))
    upstream = torch.randn(sum(lengths), HEADS, DIM, generator=torch.Generator().manual_seed(1))
    output = packed_attention(query, key, value, plan_blocks(lengths), SCALE)
    expected = by_the_formula(query, key, value, lengths)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-5)
    found = torch.autograd.grad(output, (query, key, value), upstream)
    wanted = torch.autograd.grad(expected, (query, key, value), upstream.double())
    for gradient, reference in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=0, atol=2e-5)


@pytest.mark.parametrize("prompt", [3, 80], ids=str)
def test_a_shared_prompt_is_as_good_as_a_copy_for_each_sequence(prompt: int) -> None:
    """Output, and gradients summed over the copies; the responses have 4, 1 and 30 tokens."""
    shared, token_of_place, start = list(range(prompt)), [], prompt
    for response in (4, 1, 30):
        token_of_place += [*shared, *range(start, start + response)]
        start += response
    places = torch.tensor(token_of_place)
    query, key, value = tensors(start)
    upstream = torch.randn(len(places), HEADS, DIM, generator=torch.Generator().manual_seed(1))
    upstream[prompt + 4 : 2 * prompt + 4] = upstream[2 * prompt + 5 : 3 * prompt + 5] = 0  # the copies are not read
    lengths = [prompt + 4, prompt + 1, prompt + 30]
    output = packed_attention(query, key, value, share_tokens(plan_blocks(lengths), places, start), SCALE)
    expected = by_the_formula(query[places], key[places], value[places], lengths)
    torch.testing.assert_close(output[places].double(), expected, rtol=0, atol=1e-5)
    found = torch.autograd.grad(output[places], (query, key, value), upstream)
    wanted = torch.autograd.grad(expected, (query, key, value), upstream.double())
    for gradient, reference in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=0, atol=5e-5)


def test_other_sequences_of_the_pack_change_nothing() -> None:
    lengths = [6, 11, 3]
    query, key, value = (tensor.detach() for tensor in tensors(sum(lengths)))
    before = packed_attention(query, key, value, plan_blocks(lengths), SCALE)[6:17]
    for tensor in (query, key, value):
        tensor[:6], tensor[17:] = 100.0, -100.0
    after = packed_attention(query, key, value, plan_blocks(lengths), SCALE)[6:17]
    assert torch.equal(before, after)


def test_bfloat16_keeps_its_dtype() -> None:
    query, key, value = tensors(9, torch.bfloat16)
    output = packed_attention(query, key, value, plan_blocks([4, 5]), SCALE)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.double(), by_the_formula(query, key, value, [4, 5]), rtol=0, atol=0.03)


@settings(max_examples=50, deadline=None)
@given(lists(integers(0, 300), max_size=12))
def test_every_token_has_one_slot_and_blocks_waste_little(lengths: list[int]) -> None:
    plan = plan_blocks(lengths)
    num_tokens, num_slots = sum(lengths), sum(block.count * block.length for block in plan.blocks)
    assert len(plan.token_of_slot) == num_slots
    assert torch.equal(plan.token_of_slot[plan.slot_of_token], torch.arange(num_tokens))
    assert plan.is_identity == torch.equal(plan.token_of_slot, torch.arange(num_tokens))
    for block in plan.blocks:
        slots = torch.arange(block.start, block.start + block.count * block.length)
        sizes = [int(torch.isin(plan.slot_of_token, row).sum()) for row in slots.view(block.count, block.length)]
        assert block.length <= SHORT_TOKENS or min(sizes) >= LENGTH_RATIO * block.length


def test_equal_lengths_move_nothing() -> None:
    assert plan_blocks([4, 4, 4]).is_identity
    assert plan_blocks([9]).is_identity
    assert not plan_blocks([4, 5]).is_identity
