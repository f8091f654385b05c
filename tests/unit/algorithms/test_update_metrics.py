from __future__ import annotations

import math

import pytest
import torch

from megarl.algorithms.update_metrics import ratio_metrics
from megarl.observability.metrics import merge, values
from tests.unit.algorithms.batches import ragged


def test_sides_of_the_clip_and_the_estimate_of_the_kl():
    d = torch.tensor([[0.5, -0.5, 0.5, -0.5, 9.0]])
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0, 1.0]])
    mask = torch.tensor([[True, True, True, True, False]])
    numbers = values(ratio_metrics(d, torch.zeros(1, 5), advantages, mask, clip_low=0.2, clip_high=0.28))
    expected = (2 * (math.exp(0.5) - 1.5) + 2 * (math.exp(-0.5) - 0.5)) / 4
    assert numbers["actor/ppo_kl_k3"] == pytest.approx(expected)
    # Only where the objective would gain by going on: A > 0 above, A < 0 below.
    assert (numbers["actor/pg_clipfrac_above"], numbers["actor/pg_clipfrac_below"]) == (0.25, 0.25)


def test_no_bounds_no_sides_and_nothing_from_off_the_mask():
    batch = ragged(rows=9)
    names = ratio_metrics(batch.log_probs, batch.old, batch.advantages, batch.mask)
    assert list(names) == ["actor/ppo_kl_k3"]
    assert math.isfinite(names["actor/ppo_kl_k3"].value())


@pytest.mark.parametrize("cut", [1, 4, 8])
def test_any_cut_into_rows_gives_the_same(cut: int):
    batch = ragged(rows=9)

    def measured(rows: slice):
        tensors = (batch.log_probs[rows], batch.old[rows], batch.advantages[rows], batch.mask[rows])
        return ratio_metrics(*tensors, clip_low=0.1, clip_high=0.1)

    parts = merge([measured(slice(0, cut)), measured(slice(cut, None))])
    assert values(parts) == pytest.approx(values(measured(slice(None))))
