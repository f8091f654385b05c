"""Estimators on token tensors: gae, reinforce_plus_plus, remax."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.advantages.base import Advantages, TokenInputs
from megarl.algorithms.advantages.scan import Packing, discounted_reverse_sum
from megarl.algorithms.masking import blocks, select, widen
from megarl.algorithms.whitening import whiten


def gae(inputs: TokenInputs, *, gamma: float, lam: float, bootstrap_truncated: bool) -> Advantages:
    """Generalized advantage estimation (arXiv:1506.02438, eq. 16), whitened over the kept tokens; R before whitening.

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}, over the valid tokens of a row as if they
    followed one another (tool and user tokens between them are bridged). After the last token V and A are 0; with
    bootstrap_truncated a truncated row takes the critic's value at its last token for the V that follows. R = A + V.

    ``truncated`` None means that every row terminated.
    """
    assert inputs.values is not None  # declared in needs
    rewards, values = widen(inputs.rewards), widen(inputs.values)
    packing = Packing.of(inputs.response_mask)
    advantages, returns = torch.empty_like(rewards), torch.empty_like(rewards)
    for rows in blocks(rewards.shape[0], rewards.shape[1], rewards.device):
        part = packing.rows(rows)
        reward, value = part.pack(rewards[rows]), part.pack(values[rows])
        if bootstrap_truncated and inputs.truncated is not None:
            _bootstrap(reward, value, part.lengths, inputs.truncated[rows], gamma)
        delta = reward.sub_(value)
        delta[:, :-1].add_(value[:, 1:], alpha=gamma)
        advantage = discounted_reverse_sum(delta, gamma * lam)
        target = advantage + value
        advantages[rows] = part.unpack(advantage) if part.has_gaps else advantage
        returns[rows] = part.unpack(target) if part.has_gaps else target
    if inputs.kept is not inputs.response_mask:
        returns = select(inputs.kept, returns)
    whitened, metrics = whiten(advantages, inputs.kept, inputs.reduce)
    return Advantages(whitened, returns, metrics)


def _bootstrap(reward: Tensor, value: Tensor, lengths: Tensor, truncated: Tensor, gamma: float) -> None:
    """Adds gamma V_last to the reward of the last valid token of truncated rows, in place."""
    rows = (truncated.bool() & (lengths > 0)).nonzero()[:, 0]
    last = lengths[rows] - 1
    reward[rows, last] += gamma * value[rows, last]


def reinforce_plus_plus(inputs: TokenInputs, *, gamma: float) -> Advantages:
    """Discounted returns G_t = r_t + gamma G_{t+1} over the valid tokens, whitened (REINFORCE++, arXiv:2501.03262)."""
    returns = discounted_returns(inputs, gamma)
    whitened, metrics = whiten(returns, inputs.kept, inputs.reduce)
    return Advantages(whitened, returns, metrics)


def remax(inputs: TokenInputs) -> Advantages:
    """Undiscounted reward to go minus the score of the greedy response to the same prompt (ReMax, arXiv:2310.10505)."""
    assert inputs.greedy_scores is not None  # declared in needs
    returns = discounted_returns(inputs, 1.0)
    baseline = inputs.greedy_scores.to(returns)[:, None]
    return Advantages(torch.where(inputs.kept, returns - baseline, 0.0), returns, {})


def discounted_returns(inputs: TokenInputs, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_{t+1} over the valid tokens: [B, T], 0 off the kept tokens."""
    rewards = widen(inputs.rewards)
    packing = Packing.of(inputs.response_mask)
    returns = torch.empty_like(rewards)
    for rows in blocks(rewards.shape[0], rewards.shape[1], rewards.device):
        part = packing.rows(rows)
        summed = discounted_reverse_sum(part.pack(rewards[rows]), gamma)
        returns[rows] = part.unpack(summed) if part.has_gaps else summed
    return returns if inputs.kept is inputs.response_mask else select(inputs.kept, returns)
