"""Losses without a clipped ratio: gpg, reinforce, dro."""

from __future__ import annotations

from megarl.algorithms.policy_losses.base import Block, Terms
from megarl.errors import ConfigError


def gpg(block: Block) -> Terms:
    """Group policy gradient (arXiv:2504.02546): -A lp."""
    slope = -block.advantages
    return Terms(slope * block.log_probs, slope, {})


def reinforce(block: Block) -> Terms:
    """REINFORCE (Williams 1992) with importance weights: -A lp w.

    w is ``importance_weights``: in bypass mode the truncated current/rollout ratio, which ``PolicyObjective`` computes;
    without correction there is none and the loss is that of gpg.
    """
    return gpg(block)


def dro(block: Block, *, dro_beta: float) -> Terms:
    """Direct reward optimization with a quadratic penalty (arXiv:2405.19107, eq. 6): -(A lp - dro_beta / 2 d^2)."""
    if dro_beta <= 0:
        raise ConfigError(f"dro_beta must be positive, found {dro_beta}")
    loss = block.log_ratio.square().mul_(dro_beta / 2).sub_(block.advantages * block.log_probs)
    slope = (block.log_ratio * block.inside).mul_(dro_beta).sub_(block.advantages)
    return Terms(loss, slope, {})
