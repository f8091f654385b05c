"""The optimal token baseline: a baseline of its own for each group and position."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.advantages.base import Advantages, TokenInputs
from megarl.algorithms.advantages.row_scores import group_statistics
from megarl.algorithms.advantages.token_scans import discounted_returns
from megarl.algorithms.masking import bits_of, blocks, keep_bits, widen
from megarl.errors import DataError

_EPS = 1e-8


def optimal_token_baseline(inputs: TokenInputs) -> Advantages:
    """G_t - B_t with B_t = sum_group(G W m) / (sum_group(W m) + 1e-8) (optimal token baseline, arXiv:2602.07078).

    w = 1 - 2 pi + sum_v pi_v^2, times the squared importance weight if there are any; W = cumsum(w m) along the row; G
    is the undiscounted reward to go. Sums run over the counted rows of the group at the same position. Rows of a group
    with fewer than two counted rows get 0.

    Raises:
        DataError: old_log_probs missing.
    """
    if inputs.old_log_probs is None:
        raise DataError("estimator 'optimal_token_baseline' needs old_log_probs")
    kept, rows = inputs.kept, inputs.rows
    returns = discounted_returns(inputs, 1.0)
    groups = group_statistics(rows, rows.scores)
    numerator_GT = returns.new_zeros(rows.num_groups, returns.shape[1])
    denominator_GT = torch.zeros_like(numerator_GT)
    for block in blocks(kept.shape[0], kept.shape[1], kept.device):
        bits = bits_of(kept[block], returns.dtype)
        keep_bits(bits, returns[block], out=returns[block])
        weight = _cumulative_energy(inputs, block, bits).mul_(rows.counted[block, None])
        denominator_GT.index_add_(0, rows.group[block], weight)
        numerator_GT.index_add_(0, rows.group[block], weight.mul_(returns[block]))
    baseline_GT = numerator_GT.div_(denominator_GT.add_(_EPS))

    advantages = torch.empty_like(returns)
    has_baseline = (groups.size >= 2).to(returns.dtype)[:, None]
    for block in blocks(kept.shape[0], kept.shape[1], kept.device):
        lead = (returns[block] - baseline_GT[rows.group[block]]).mul_(has_baseline[block])
        keep_bits(bits_of(kept[block], returns.dtype), lead, out=advantages[block])
    return Advantages(advantages, returns, groups.metrics)


def _cumulative_energy(inputs: TokenInputs, block: slice, bits: Tensor) -> Tensor:
    """W of some rows [b, T], 0 off the mask that ``bits`` stand for."""
    assert inputs.old_log_probs is not None and inputs.sum_pi_squared is not None  # the latter is declared in needs
    dtype = widen(inputs.rewards[:0]).dtype

    def valid(values: Tensor) -> Tensor:
        return keep_bits(bits, widen(values[block]).to(dtype))

    energy = valid(inputs.old_log_probs).exp_().mul_(-2).add_(1).add_(valid(inputs.sum_pi_squared))
    if inputs.importance_weights is not None:
        energy.mul_(valid(inputs.importance_weights).square_())
    total = keep_bits(bits, energy, out=energy).cumsum_(-1)
    return keep_bits(bits, total, out=total)
