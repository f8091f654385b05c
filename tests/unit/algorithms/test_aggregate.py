from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

from megarl.algorithms.aggregate import Aggregation, Denominators, aggregate, count
from megarl.algorithms.masking import num_tokens, row_tokens
from megarl.config.schema.algorithm import LossAggregation
from megarl.errors import ConfigError
from tests.unit.algorithms import references as ref
from tests.unit.algorithms.batches import ragged

MODES = get_args(Aggregation)


def test_modes_are_those_of_the_configuration() -> None:
    assert get_args(LossAggregation) == MODES


@pytest.mark.parametrize("mode", MODES)
def test_value_and_gradient(mode: Any) -> None:
    b = ragged(1)
    leaf = b.rewards.clone().requires_grad_()
    total = aggregate(leaf, b.mask, mode, denominators=count(b.mask), length=7)
    assert total.item() == pytest.approx(ref.aggregate(b.rewards.numpy(), b.mask.numpy(), mode, 7), rel=1e-9)
    (gradient,) = torch.autograd.grad(total, leaf)
    assert (gradient[~b.mask] == 0).all() and (gradient[b.mask] > 0).all()
    assert float((gradient * torch.where(b.mask, b.rewards, 0.0)).sum()) == pytest.approx(total.item(), rel=1e-9)


@pytest.mark.parametrize("mode", MODES)
def test_contributions_of_any_split_add_up(mode: Any) -> None:
    b = ragged(2)
    parts = [slice(0, 1), slice(1, 5), slice(5, 12)]
    denominators = Denominators(0, 0)
    for rows in parts:
        denominators += count(b.mask[rows])
    assert denominators == count(b.mask)
    total = aggregate(b.rewards, b.mask, mode, denominators=denominators, length=7)
    split = sum(float(aggregate(b.rewards[r], b.mask[r], mode, denominators=denominators, length=7)) for r in parts)
    assert split == pytest.approx(float(total), rel=1e-12)


def test_length_and_mode_are_checked() -> None:
    b = ragged()
    with pytest.raises(ConfigError, match="aggregation_length"):
        aggregate(b.rewards, b.mask, "seq-mean-token-sum-norm", denominators=count(b.mask))
    with pytest.raises(ConfigError, match="unknown loss aggregation"):
        aggregate(b.rewards, b.mask, "mean", denominators=count(b.mask))  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [1, 7, 8, 64, 1984, 2048, 4160])
def test_tokens_are_counted_exactly_at_any_length(length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    for share in (0.0, 0.5, 1.0):
        mask = torch.rand(3, length, generator=generator) < share
        assert row_tokens(mask).tolist() == mask.long().sum(1).tolist()
        assert row_tokens(mask[:, 1:]).tolist() == mask[:, 1:].long().sum(1).tolist()
        assert row_tokens(mask[1:]).tolist() == mask[1:].long().sum(1).tolist()
        assert int(num_tokens(mask)) == int(mask.long().sum())
