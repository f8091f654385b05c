"""float32 weights in the bits of bfloat16 ones and a remainder."""

from __future__ import annotations

import torch

from megarl.train.megatron.precision import join, split


def test_a_weight_is_the_nearest_bfloat16_and_what_it_lacks():
    torch.manual_seed(1)
    weights = torch.cat(
        [torch.randn(10_000) * 10.0 ** torch.randint(-30, 30, (10_000,)), torch.zeros(1), -torch.zeros(1)]
    )
    rounded, remainder = split(weights)
    assert (rounded.dtype, remainder.dtype) == (torch.bfloat16, torch.int16)
    assert torch.equal(join(rounded, remainder).view(torch.int32), weights.view(torch.int32))  # every bit
    assert torch.equal(rounded, weights.bfloat16())


def test_a_tie_is_rounded_away_from_zero_and_comes_back():
    ties = torch.tensor([0x3F80_8000, 0x3F81_8000, -0x407F_8000], dtype=torch.int32).view(torch.float32)
    rounded, remainder = split(ties)
    assert remainder.tolist() == [-(1 << 15)] * 3
    assert torch.equal(rounded.float().abs(), torch.tensor([1.0078125, 1.015625, 1.0078125]))
    assert torch.equal(join(rounded, remainder), ties)


def test_weights_alone_have_no_remainder():
    weights = torch.randn(100).bfloat16()
    assert torch.equal(join(weights, torch.zeros(100, dtype=torch.int16)), weights.float())
