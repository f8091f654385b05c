"""Losses whose ratio belongs to a row: gspo and geo_mean. Both are defined as a mean over rows."""

from __future__ import annotations

import torch

from megarl.algorithms.masking import count_below
from megarl.algorithms.policy_losses.base import Block, Terms

_MAX_ROW_LOG_RATIO = 10.0


def gspo(block: Block, *, clip_low: float, clip_high: float) -> Terms:
    """Group sequence policy optimization (arXiv:2507.18071, eqs. 7 and 12, the token form of its gradient).

    g = row mean of d; s = exp(min(lp - sg(lp) + sg(g), 10)); max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high)).
    """
    free_log = block.row_mean(block.log_ratio)
    ratio = free_log.clamp(max=_MAX_ROW_LOG_RATIO).exp()
    advantages = block.advantages
    free = advantages * ratio
    clipped = advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    objective = torch.minimum(free, clipped)
    active = torch.eq(objective, free, out=torch.empty_like(free))
    active.mul_((free_log <= _MAX_ROW_LOG_RATIO).to(free.dtype))
    sums = {"pg_clipfrac": count_below(clipped, free)}
    return Terms(torch.neg(objective, out=block.loss), torch.neg(active.mul_(free), out=block.slope), sums)


def geo_mean(block: Block, *, clip_low: float, clip_high: float) -> Terms:
    """Geometric-mean policy optimization (GMPO, arXiv:2507.20673, eq. 4): -mean(A) rho_row for each row.

    rho_row = exp(row mean of the token log-ratios, clipped above clip_high where A > 0 and below -clip_low where A <
    0). The clips bound log-ratios here, not ratios. Every token of the row carries the row's loss, so that the row mean
    this loss forces gives it back. Importance weights enter as their geometric mean over the row.

    Metrics: pg_clipfrac counts the clipped tokens with A > 0, pg_clipfrac_lower those with A < 0 (verl's meaning).
    """
    d, advantages = block.log_ratio, block.advantages
    sign = advantages.sign()
    pushed = sign * d
    limited = sign * d.clamp(-clip_low, clip_high)
    bounded = torch.minimum(pushed, limited).mul_(sign)
    ratio = block.row_mean(bounded).exp()
    row_loss = -block.row_mean(advantages) * ratio
    loss = block.select(row_loss.expand_as(d).contiguous())
    active = torch.eq(bounded, d, out=torch.empty_like(d)).mul_(block.inside).mul_(sign.abs())
    clipped = torch.lt(limited, pushed, out=torch.empty_like(d))
    high = torch.gt(advantages, 0, out=torch.empty_like(d)).mul_(clipped).sum()
    return Terms(loss, active.mul_(loss), {"pg_clipfrac": high, "pg_clipfrac_lower": clipped.sum() - high})
