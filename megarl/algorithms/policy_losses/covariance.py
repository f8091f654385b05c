"""Losses that treat tokens of high covariance between advantage and log-prob apart: clip_cov and kl_cov.

Both come from the entropy mechanism (arXiv:2505.22617, section 4). cov = (A - <A>)(lp - <lp>), the means over the whole
minibatch. Which tokens are chosen is decided in a first pass over the whole minibatch, from sums over all its parts and
from random numbers that hang on (seed, row_id, position): no cut into microbatches or ranks changes the choice.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megarl.algorithms.masking import (
    LOG_RATIO_BOUND,
    Reduce,
    bits_of,
    blocks,
    count_below,
    keep_bits,
    num_tokens,
    select,
    widen,
)
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
    sums = {"pg_clipfrac": count_below(clipped, free), "pg_covfrac": _number(block.selected)}
    loss, slope = torch.neg(objective, out=block.loss), torch.neg(active.mul_(free), out=block.slope)
    loss[block.selected] = 0.0
    slope[block.selected] = 0.0
    return Terms(loss, slope, sums)


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
    covariance = _Covariance(inputs, reduce)
    found = []
    for rows, terms in covariance.blocks():
        within = (terms > clip_cov_lb) & (terms < clip_cov_ub) & mask[rows]
        row, position = within.nonzero(as_tuple=True)
        found.append((row + rows.start, position))
    row, position = _joined(found)
    log_ratio = widen(inputs.log_probs[row, position]) - widen(inputs.old_log_probs[row, position])
    ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    advantages = widen(inputs.advantages[row, position])
    unclipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages >= ratio * advantages
    row, position = row[unclipped], position[unclipped]
    keys = _token_hash(row_id[row], position, seed)
    picked = smallest(keys, max(1, int(clip_cov_ratio * covariance.num_tokens)), reduce)
    return _marked(mask, row[picked], position[picked])


def kl_cov(block: Block, *, ppo_kl_coef: float = 0.1) -> Terms:
    """KL-Cov: -A rho, plus ppo_kl_coef |d| on selected tokens. Metric pg_covfrac: the selected share of tokens."""
    loss = torch.neg(block.advantages * block.ratio, out=block.loss)
    slope = torch.mul(loss, block.inside, out=block.slope)
    chosen = block.selected
    d = block.log_ratio[chosen]
    loss[chosen] += ppo_kl_coef * d.abs()
    slope[chosen] += ppo_kl_coef * d.sign() * block.inside[chosen]
    return Terms(loss, slope, {"pg_covfrac": _number(chosen)})


def _number(chosen: tuple[Tensor, Tensor]) -> Tensor:
    return torch.tensor(float(len(chosen[0])))


def kl_cov_first_pass(
    inputs: PolicyInputs, *, row_id: Tensor, seed: int, reduce: Reduce, kl_cov_ratio: float = 0.0002
) -> Tensor:
    """The max(1, int(kl_cov_ratio * tokens)) tokens of largest covariance; equal ones in a seeded random order."""
    covariance = _Covariance(inputs, reduce)
    k = max(1, int(kl_cov_ratio * covariance.num_tokens))
    # The k largest of all ranks are among the k largest of each; ties with the local k-th stay in, so that none is
    # favoured.
    found = _Largest(k)
    for rows, terms in covariance.blocks():
        found.add(terms, inputs.response_mask[rows], rows.start)
    row, position, values = found.result()
    tie_breaker = _token_hash(row_id[row], position, seed) >> 32
    keys = (_descending_bits(values) << 31) | tie_breaker
    picked = smallest(keys, k, reduce)
    return _marked(inputs.response_mask, row[picked], position[picked])


class _Covariance:
    """Covariance term of each token, float32, from means over the whole minibatch.

    Means are float64, so that ranks and cuts that sum in another order agree on float32 terms but for the last bit.
    """

    def __init__(self, inputs: PolicyInputs, reduce: Reduce) -> None:
        self._inputs = inputs
        mask = inputs.response_mask
        sums = torch.zeros(3, dtype=torch.float64, device=mask.device)
        sums[0] = num_tokens(mask)
        for rows in blocks(mask.shape[0], mask.shape[1], mask.device):
            for place, values in ((1, inputs.advantages), (2, inputs.log_probs.detach())):
                sums[place] += select(mask[rows], values[rows]).sum(-1).double().sum()
        total, advantage_sum, log_prob_sum = (sums if reduce is None else reduce(sums)).tolist()
        self.num_tokens = int(total)
        self._advantage, self._log_prob = advantage_sum / max(total, 1.0), log_prob_sum / max(total, 1.0)

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Rows and their terms [b, T], 0 off the mask."""
        mask = self._inputs.response_mask
        for rows in blocks(mask.shape[0], mask.shape[1], mask.device):
            terms = widen(self._inputs.advantages[rows]) - self._advantage
            terms.mul_(widen(self._inputs.log_probs.detach()[rows]) - self._log_prob)
            bits = bits_of(mask[rows], terms.dtype)
            yield rows, keep_bits(bits, terms, out=terms).float()


class _Largest:
    """The k largest of values that arrive in blocks, ties with the k-th included."""

    def __init__(self, k: int) -> None:
        self._k = k
        self._least = -torch.inf
        self._found: list[tuple[Tensor, Tensor, Tensor]] = []
        self._size = 0

    def add(self, values: Tensor, mask: Tensor, start: int) -> None:
        """Takes the values [b, T] under the mask; ``start`` is the number of the first row. Off the mask they are 0."""
        # Most rows have none that is large enough, and to look at a row's largest costs a tenth of looking for places.
        rows = (values.amax(-1) >= self._least).nonzero()[:, 0] if values.shape[1] else values.new_zeros(0).long()
        if len(rows) < len(values):
            values, mask = values[rows], mask[rows]
        row, position = ((values >= self._least) & mask).nonzero(as_tuple=True)
        self._found.append((rows[row] + start, position, values[row, position]))
        self._size += len(row)
        if self._size > 4 * self._k:
            self._found = [self.result()]
            self._size = len(self._found[0][0])
            self._least = float(self._found[0][2].min())

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        """Row, position and value of each: [N]."""
        row, position, values = (torch.cat(parts) for parts in zip(*self._found, strict=True))
        if len(values) > self._k:
            best = values >= values.topk(self._k).values[-1]
            row, position, values = row[best], position[best], values[best]
        return row, position, values


def _joined(found: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    rows, positions = zip(*found, strict=True)
    return torch.cat(rows), torch.cat(positions)


def _marked(mask: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    chosen = torch.zeros_like(mask)
    chosen[rows, positions] = True
    return chosen


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
