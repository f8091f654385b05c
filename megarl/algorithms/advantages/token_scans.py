"""Estimators on token tensors: gae, reinforce_plus_plus, remax."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.advantages.base import Advantages, TokenInputs
from megarl.algorithms.advantages.scan import Packing, ReverseSum, has_gaps
from megarl.algorithms.masking import bits_of, blocks, integer_like, keep_bits, row_tokens, select, widen
from megarl.algorithms.whitening import whiten_


def gae(inputs: TokenInputs, *, gamma: float, lam: float, bootstrap_truncated: bool) -> Advantages:
    """Generalized advantage estimation (arXiv:1506.02438, eq. 16), whitened over the kept tokens; R before whitening.

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}, over the valid tokens of a row as if they
    followed one another (tool and user tokens between them are bridged). After the last token V and A are 0; with
    bootstrap_truncated a truncated row takes the critic's value at its last token for the V that follows. R = A + V.

    ``truncated`` None means that every row terminated.
    """
    assert inputs.values is not None  # declared in needs
    rewards = widen(inputs.rewards)
    values = inputs.values.to(rewards.dtype)
    packing = Packing.of(inputs.response_mask)
    reverse_sum = ReverseSum(rewards.shape[1], gamma * lam, rewards)
    advantages, returns = torch.empty_like(rewards), torch.empty_like(rewards)
    for rows in blocks(rewards.shape[0], rewards.shape[1], rewards.device):
        part = packing.rows(rows)
        reward, value = part.pack(rewards[rows], values[rows])
        if bootstrap_truncated and inputs.truncated is not None:
            _bootstrap(reward, value, part.lengths, inputs.truncated[rows], gamma)
        delta = reward.sub_(value)
        delta[:, :-1].add_(value[:, 1:], alpha=gamma)
        advantage = reverse_sum(delta, out=advantages[rows])
        target = torch.add(advantage, value, out=returns[rows])
        part.unpack_(advantage)
        part.unpack_(target)
    return _whitened(inputs, advantages, returns)


def _bootstrap(reward: Tensor, value: Tensor, lengths: Tensor, truncated: Tensor, gamma: float) -> None:
    """Adds gamma V_last to the reward of the last valid token of truncated rows, in place."""
    rows = (truncated.bool() & (lengths > 0)).nonzero()[:, 0]
    last = lengths[rows] - 1
    reward[rows, last] += gamma * value[rows, last]


def reinforce_plus_plus(inputs: TokenInputs, *, gamma: float) -> Advantages:
    """Discounted returns G_t = r_t + gamma G_{t+1} over the valid tokens, whitened (REINFORCE++, arXiv:2501.03262)."""
    returns = discounted_returns(inputs, gamma)
    return _whitened(inputs, returns.clone(), returns)


def _whitened(inputs: TokenInputs, advantages: Tensor, returns: Tensor) -> Advantages:
    """Both without rejected tokens, advantages whitened in place."""
    advantages, returns = _kept(inputs, advantages), _kept(inputs, returns)
    metrics = whiten_(advantages, inputs.kept, inputs.reduce)
    return Advantages(advantages, returns, metrics)


def _kept(inputs: TokenInputs, values: Tensor) -> Tensor:
    """Values that are 0 off the response mask, without those of rejected tokens."""
    return values if inputs.kept is inputs.response_mask else select(inputs.kept, values)


def remax(inputs: TokenInputs) -> Advantages:
    """Undiscounted reward to go minus the score of the greedy response to the same prompt (ReMax, arXiv:2310.10505)."""
    assert inputs.greedy_scores is not None  # declared in needs
    rewards = widen(inputs.rewards)
    returns, advantages = torch.empty_like(rewards), torch.empty_like(rewards)
    baseline = inputs.greedy_scores.to(rewards.dtype)[:, None]
    last = _last_token(inputs.response_mask)
    for rows in blocks(rewards.shape[0], rewards.shape[1], rewards.device):
        bits = bits_of(inputs.response_mask[rows], rewards.dtype)
        to_go = _sum_to_end(rewards[rows], bits, None if last is None else last[rows])
        if inputs.kept is not inputs.response_mask:
            bits = bits_of(inputs.kept[rows], rewards.dtype)
        keep_bits(bits, to_go, out=returns[rows])
        keep_bits(bits, to_go.sub_(baseline[rows]), out=advantages[rows])
    return Advantages(advantages, returns, {})


def discounted_returns(inputs: TokenInputs, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_{t+1} over the valid tokens, rejected ones included: [B, T], 0 off the response mask."""
    rewards = widen(inputs.rewards)
    returns = torch.empty_like(rewards)
    if gamma == 1:
        # A gap then changes nothing: what stands in it is a reward of 0.
        last = _last_token(inputs.response_mask)
        for rows in blocks(rewards.shape[0], rewards.shape[1], rewards.device):
            bits = bits_of(inputs.response_mask[rows], rewards.dtype)
            to_go = _sum_to_end(rewards[rows], bits, None if last is None else last[rows])
            keep_bits(bits, to_go, out=returns[rows])
        return returns
    packing = Packing.of(inputs.response_mask)
    reverse_sum = ReverseSum(rewards.shape[1], gamma, rewards)
    for rows in blocks(rewards.shape[0], rewards.shape[1], rewards.device):
        part = packing.rows(rows)
        (reward,) = part.pack(rewards[rows])
        part.unpack_(reverse_sum(reward, out=returns[rows]))
    return returns


def _last_token(mask: Tensor) -> Tensor | None:
    """Position of each row's last token, 0 for an empty row: [B, 1] int64; None if a mask has gaps."""
    return None if has_gaps(mask) else (row_tokens(mask) - 1).clamp(min=0)[:, None]


def _sum_to_end(values: Tensor, bits: Tensor, last: Tensor | None) -> Tensor:
    """Sum of each valid place and all valid ones that follow it along the last axis, in float64 on CPU inside torch.

    Shapes: values and bits (``bits_of`` the mask) [b, T]; last [b, 1] from ``_last_token``. Returns a new [b, T]; or,
    where no row holds a value but on its last token, [b, 1]: outcome rewards need no sum along a row. Right on the
    mask.
    """
    if last is not None and values.numel():
        others = values.scatter(-1, last, 0.0)
        # As integers, whose extremes are found six times as fast; -0.0 is none of them and takes the long way.
        low, high = others.view(integer_like(values.dtype)).aminmax()
        if int(low) == int(high) == 0:
            return values.gather(-1, last)
    return keep_bits(bits, values).flip(-1).cumsum_(-1).flip(-1)
