"""The critic's loss."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.masking import attach, blocks, count_below, num_tokens, select, to_floats, widen
from megarl.algorithms.policy_losses.base import TokenLoss
from megarl.observability.metrics import Mean


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, response_mask: Tensor, *, clip: float | None
) -> TokenLoss:
    """Clipped squared error, 0.5 max((v - R)^2, (clip(v, V - clip, V + clip) - R)^2) (PPO2; arXiv:2006.05990, eq. 9).

    The factor 0.5 is part of the token loss. ``clip`` None leaves the second term out.
    Shapes: all [B, T], response_mask bool; differentiable in values. Metrics: critic/vf_clipfrac, critic/vpred_mean.
    """
    loss = torch.empty(values.shape, dtype=widen(values[:0]).dtype, device=values.device)
    slope = torch.empty_like(loss)
    with torch.no_grad():
        sums = {"vf_clipfrac": loss.new_zeros((), dtype=torch.float64), "vpred_mean": loss.new_zeros(()).double()}
        for rows in blocks(values.shape[0], values.shape[1], values.device):
            mask = response_mask[rows]
            value = select(mask, values[rows])
            target = select(mask, returns[rows])
            error = value - target
            free = error.square()
            larger = free
            if clip is not None:
                old = select(mask, old_values[rows])
                # Two-sided minimum: a value inside the bounds comes out bit for bit, so that free and clipped compare
                # equal.
                clipped = torch.minimum(torch.maximum(value, old - clip), old + clip).sub_(target).square_()
                larger = torch.maximum(free, clipped)
                sums["vf_clipfrac"] += count_below(free, clipped)
                # Where the clipped term is the larger one, the clip acts and the value has no influence.
                error.mul_(torch.eq(larger, free, out=torch.empty_like(free)))
            sums["vpred_mean"] += value.sum()
            torch.mul(larger, 0.5, out=loss[rows])
            slope[rows] = error
        totals = to_floats({**sums, "tokens": num_tokens(response_mask)})
    tokens = totals.pop("tokens")
    metrics = {f"critic/{name}": Mean(total, tokens) for name, total in totals.items()}
    return TokenLoss(attach(values, loss, slope), dict(metrics))
