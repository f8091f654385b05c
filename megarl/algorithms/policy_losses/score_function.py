"""Losses without a clipped ratio: gpg, reinforce, dro."""

from __future__ import annotations

from typing import Literal

import torch

from megarl.algorithms.correction import importance_weights
from megarl.algorithms.policy_losses.base import Block, Terms
from megarl.errors import ConfigError


def gpg(block: Block) -> Terms:
    """Group policy gradient (arXiv:2504.02546): -A lp."""
    slope = block.select(block.inputs.advantages, out=block.slope).neg_()
    return Terms(block.select(block.inputs.log_probs, out=block.loss).mul_(slope), slope, {})


def reinforce(
    block: Block,
    *,
    ratio_level: Literal["none", "token", "sequence"] = "token",
    ratio_cap: float = 2.0,
    ratio_floor: float | None = None,
) -> Terms:
    """REINFORCE (Williams 1992) with an importance weight: -A lp w, w = sg(truncated current/old ratio).

    In bypass mode old is the rollout policy, so w corrects for it (verl's bypass_pg_*). ratio_level token: exp(d);
    sequence: exp(clamp(sum of d over the row, -20, 20)) on each of its tokens; none: 1. w is capped at ratio_cap; with
    a
    ratio_floor, w is 0 outside [ratio_floor, ratio_cap] instead. Metric pg_clipfrac: tokens on which cap or floor act.
    """
    if ratio_level == "none":
        return gpg(block)
    weight, bound = importance_weights(
        block.free_log_ratio, block.mask, level=ratio_level, upper=ratio_cap, lower=ratio_floor
    )
    slope = torch.mul(-block.advantages, weight, out=block.slope)
    return Terms(torch.mul(slope, block.log_probs, out=block.loss), slope, {"pg_clipfrac": bound})


def dro(block: Block, *, dro_beta: float) -> Terms:
    """Direct reward optimization with a quadratic penalty (arXiv:2405.19107, eq. 6): -(A lp - dro_beta / 2 d^2)."""
    if dro_beta <= 0:
        raise ConfigError(f"dro_beta must be positive, found {dro_beta}")
    penalty = block.log_ratio.square().mul_(dro_beta / 2)
    loss = torch.sub(penalty, block.advantages * block.log_probs, out=block.loss)
    pull = (block.log_ratio * block.inside).mul_(dro_beta)
    return Terms(loss, torch.sub(pull, block.advantages, out=block.slope), {})
