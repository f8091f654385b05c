"""An estimator and a loss of a user's own, by import path."""

from __future__ import annotations

import torch

from megarl.algorithms.advantages import Advantages, TokenInputs, custom_estimator
from megarl.algorithms.policy_losses import PolicyInputs, TokenLoss
from megarl.observability.metrics import Mean


def centered(inputs: TokenInputs, *, scale: float = 1.0) -> Advantages:
    """Scores less their mean over the batch, on every token."""
    scores = inputs.rows.scores
    per_row = (scores - scores.mean()).float() * scale
    return Advantages(per_row[:, None].expand_as(inputs.rewards).clone(), None, {"adv/own": Mean(scale, 1.0)})


@custom_estimator(needs=frozenset({"greedy_baseline"}))
def above_greedy(inputs: TokenInputs) -> Advantages:
    """Scores less that of the greedy response."""
    assert inputs.greedy_scores is not None
    per_row = (inputs.rows.scores - inputs.greedy_scores).float()
    return Advantages(per_row[:, None].expand_as(inputs.rewards).clone(), None, {})


def squared(inputs: PolicyInputs, *, clip_high: float, pull: float) -> TokenLoss:
    """Policy gradient with a pull of log-ratios to 0."""
    ratio = (inputs.log_probs - inputs.old_log_probs).clamp(max=clip_high)
    loss = -inputs.advantages * inputs.log_probs + pull * ratio.square()
    count = float(inputs.response_mask.sum())
    return TokenLoss(loss, {"actor/own_ratio": Mean(float(torch.where(inputs.response_mask, ratio, 0.0).sum()), count)})
