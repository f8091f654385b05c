"""Losses that treat tokens of high covariance between advantage and log-prob apart: clip_cov and kl_cov.

Both come from the entropy mechanism (arXiv:2505.22617, section 4). cov = (A - <A>)(lp - <lp>), the means over the whole
minibatch. Which tokens are chosen is decided in a first pass over the whole minibatch, from sums over all its parts and
from random numbers that hang on (seed, row_id, position): no cut into microbatches or ranks changes the choice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.masking import LOG_RATIO_BOUND, Reduce, count_below, num_tokens, select, widen
from megarl.algorithms.policy_losses.base import Block, PolicyInputs, Terms

_KEY_BITS = 63
_DIGIT_BITS = 9


def clip_cov(block: Block, *, clip_low: float, clip_high: float) -> Terms:
    """Clip-Cov: the clipped surrogate without dual clip; selected tokens have neither loss nor gradient.

    Metrics: pg_clipfrac as in ppo, pg_covfrac the selected share of tokens.
    """
    advantages = block.advantages
    free = advantages * block.ratio
    clipped = block.ratio.clamp(1 - clip_low, 1 + clip_high).mul_(advantages)
    objective = torch.minimum(free, clipped)
    active = torch.eq(objective, free, out=torch.empty_like(free)).mul_(block.inside)
    chosen = block.selected
    kept = 1 - chosen
    sums = {"pg_clipfrac": count_below(clipped, free), "pg_covfrac": chosen.sum()}
    return Terms(objective.mul_(kept).neg_(), active.mul_(free).mul_(kept).neg_(), sums)


def clip_cov_first_pass(
    inputs: PolicyInputs,
    *,
    row_id: Tensor,
    seed: int,
    reduce: Reduce,
    clip_low: float,
    clip_high: float,
    clip_cov_ratio: float = 0.0002,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
) -> Tensor:
    """Random max(1, int(clip_cov_ratio * tokens)) of the tokens the ratio clip leaves alone with cov in (lb, ub)."""
    mask = inputs.response_mask
    covariance, total = _covariance(inputs, reduce)
    rows, positions = (mask & (covariance > clip_cov_lb) & (covariance < clip_cov_ub)).nonzero(as_tuple=True)
    log_ratio = widen(inputs.log_probs[rows, positions]) - widen(inputs.old_log_probs[rows, positions])
    ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    advantages = widen(inputs.advantages[rows, positions])
    unclipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages >= ratio * advantages
    rows, positions = rows[unclipped], positions[unclipped]
    keys = _token_hash(row_id[rows], positions, seed)
    picked = smallest(keys, max(1, int(clip_cov_ratio * total)), reduce)
    return _marked(mask, rows[picked], positions[picked])


def kl_cov(block: Block, *, ppo_kl_coef: float = 0.1) -> Terms:
    """KL-Cov: -A rho, plus ppo_kl_coef |d| on selected tokens. Metric pg_covfrac: the selected share of tokens."""
    free = block.advantages * block.ratio
    penalty = block.selected * ppo_kl_coef
    loss = penalty * block.log_ratio.abs() - free
    slope = (penalty * block.log_ratio.sign() - free).mul_(block.inside)
    return Terms(loss, slope, {"pg_covfrac": block.selected.sum()})


def kl_cov_first_pass(
    inputs: PolicyInputs, *, row_id: Tensor, seed: int, reduce: Reduce, kl_cov_ratio: float = 0.0002
) -> Tensor:
    """The max(1, int(kl_cov_ratio * tokens)) tokens of largest covariance; equal ones in a seeded random order."""
    mask = inputs.response_mask
    covariance, total = _covariance(inputs, reduce)
    covariance.masked_fill_(~mask, -torch.inf)
    k = max(1, int(kl_cov_ratio * total))
    # The k largest of all ranks are among the k largest of each; ties with the local k-th stay in, so that none is
    # favoured.
    local = covariance.flatten()
    least = local.topk(min(k, len(local)), sorted=True).values[-1:]
    rows, positions = (mask & (covariance >= least)).nonzero(as_tuple=True)
    tie_breaker = _token_hash(row_id[rows], positions, seed) >> 32
    keys = (_descending_bits(covariance[rows, positions]) << 31) | tie_breaker
    picked = smallest(keys, k, reduce)
    return _marked(mask, rows[picked], positions[picked])


def _marked(mask: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    chosen = torch.zeros_like(mask)
    chosen[rows, positions] = True
    return chosen


def _covariance(inputs: PolicyInputs, reduce: Reduce) -> tuple[Tensor, int]:
    """Covariance term of each token, [B, T] float32, and the number of tokens of the whole minibatch.

    Means are float64, so that ranks and cuts that sum in another order agree on float32 terms but for the last bit.
    """
    mask = inputs.response_mask
    advantages, log_probs = select(mask, inputs.advantages), select(mask, inputs.log_probs.detach())
    sums = torch.stack([num_tokens(mask).double(), advantages.sum(-1).double().sum(), log_probs.sum(-1).double().sum()])
    total, advantage_sum, log_prob_sum = (sums if reduce is None else reduce(sums)).tolist()
    count = max(total, 1.0)
    covariance = advantages.sub_(advantage_sum / count).mul_(log_probs.sub_(log_prob_sum / count))
    return covariance.float(), int(total)


def smallest(keys: Tensor, k: int, reduce: Reduce) -> Tensor:
    """Marks the k smallest of non-negative int64 keys spread over ranks, or all if there are fewer: bool like keys.

    A radix selection: per digit one histogram, summed over ranks, so no keys travel. Keys equal to the k-th are all
    marked.
    """
    bins = 1 << _DIGIT_BITS
    alive = torch.ones_like(keys, dtype=torch.bool)
    threshold = 0
    for shift in range(_KEY_BITS - _DIGIT_BITS, -1, -_DIGIT_BITS):
        digits = (keys >> shift) & (bins - 1)
        histogram = torch.bincount(digits[alive], minlength=bins)
        if reduce is not None:
            histogram = reduce(histogram)
        cumulative = histogram.cumsum(0).tolist()
        if shift == _KEY_BITS - _DIGIT_BITS and cumulative[-1] <= k:
            return alive
        digit = next(d for d, reached in enumerate(cumulative) if reached >= k)
        k -= cumulative[digit - 1] if digit else 0
        alive &= digits == digit
        threshold = (threshold << _DIGIT_BITS) | digit
    return keys <= threshold


def _descending_bits(values: Tensor) -> Tensor:
    """float32 -> int64 in [0, 2^32) such that a larger value has a smaller image."""
    bits = values.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    ascending = torch.where(bits >= 0x80000000, 0xFFFFFFFF - bits, bits + 0x80000000)
    return 0xFFFFFFFF - ascending


def _token_hash(row_id: Tensor, position: Tensor, seed: int) -> Tensor:
    """Uniform int64 in [0, 2^63) for each (seed, row, position), shapes [N]; the finalizer of splitmix64, mod 2^64."""
    x = _mix(row_id.long() + _signed((seed + 1) * 0x9E3779B97F4A7C15))
    return _mix(x + position * _signed(0xD1B54A32D192ED03)) & 0x7FFFFFFFFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch shifts int64 arithmetically."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(constant: int) -> int:
    constant &= (1 << 64) - 1
    return constant - (1 << 64) if constant >= 1 << 63 else constant
