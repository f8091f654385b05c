"""Correction for the difference between the policy that sampled and the one that trains (four policies, two modes).

lr = train - rollout log-probs. In decoupled mode train is the proximal old policy, recomputed by the trainer; the
weight old/rollout multiplies the token loss and the PPO ratio is current/old. In bypass mode old is the rollout policy:
the PPO ratio already is current/rollout, a ppo loss gets no second weight, and rejection compares current with rollout.

Sources: truncated importance sampling (Yao et al., fengyao.notion.site/off-policy-rl), masked importance sampling and
rejection (Liu et al., richardli.xyz/rl-collapse), bands (IcePop, Ring-1T, arXiv:2510.18855). Names follow verl 0.9.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megarl.algorithms.masking import (
    LOG_RATIO_BOUND,
    Reduce,
    bits_of,
    keep_bits,
    num_tokens,
    row_tokens,
    select,
    spread_rows,
    to_floats,
    widen,
)
from megarl.algorithms.statistics import Deviation, EffectiveSampleSize, moments, spread
from megarl.errors import ConfigError
from megarl.observability.metrics import Last, Max, Mean, Metrics

WeightLevel = Literal["token", "sequence"]
STATISTICS = tuple(f"{level}_{k}" for level in ("token", "seq_sum", "seq_mean", "seq_max") for k in ("k1", "k2", "k3"))


@dataclass(frozen=True, slots=True)
class Rejection:
    """Tokens or rows to drop because the two policies differ too much on them.

    Args:
        statistic: ``token_kN``, ``seq_sum_kN``, ``seq_mean_kN`` or ``seq_max_kN`` with k1 = -lr, k2 = lr^2 / 2,
            k3 = exp(lr) - 1 - lr, lr clamped to +-20 per token.
        upper: for k1 the largest rollout/train ratio exp(k1), for k2 and k3 the largest divergence.
        lower: k1 only: the smallest ratio; None is 1 / upper. ``seq_max_k1`` bounds every token's ratio on both sides.

    Raises:
        ConfigError: unknown statistic, or bounds that cannot hold.
    """

    statistic: str
    upper: float
    lower: float | None = None

    def __post_init__(self) -> None:
        if self.statistic not in STATISTICS:
            raise ConfigError(
                f"unknown rejection statistic {self.statistic!r}", fix=f"use one of {', '.join(STATISTICS)}"
            )
        if self.upper <= 0 or (self.lower is not None and not 0 < self.lower <= self.upper):
            raise ConfigError(
                f"rejection by {self.statistic}: expected 0 < lower <= upper, found {self.lower}, {self.upper}"
            )
        if self.lower is not None and not self.statistic.endswith("k1"):
            raise ConfigError(f"rejection by {self.statistic} has an upper bound only", fix="remove lower")

    def bounds(self) -> tuple[float, float]:
        """Bounds on the statistic itself, logarithms for k1."""
        if self.statistic.endswith("k1"):
            return math.log(self.lower if self.lower is not None else 1 / self.upper), math.log(self.upper)
        return -math.inf, self.upper


@dataclass(frozen=True, slots=True)
class Correction:
    """How to correct: settings as values.

    Args:
        level: importance weights per token or per sequence; None weighs nothing.
        upper: C, weights are capped at it.
        lower: with it, weights outside [lower, upper] become 0 instead.
        normalize: divide weights by their global mean (over tokens, or over rows for sequence weights).
        rejections: all must pass.
    """

    level: WeightLevel | None = None
    upper: float = 2.0
    lower: float | None = None
    normalize: bool = False
    rejections: Sequence[Rejection] = ()

    def __post_init__(self) -> None:
        if self.upper <= 0 or (self.lower is not None and not 0 < self.lower <= self.upper):
            raise ConfigError(f"importance weights: expected 0 < lower <= upper, found {self.lower}, {self.upper}")


@dataclass(frozen=True, slots=True)
class Corrected:
    """Result of ``correct``.

    Args:
        kept: [B, T] bool, what is left of the response mask. Train on it and count denominators from it.
        importance_weights: [B, T] at least float32, 0 off ``kept``; None without a level.
        metrics: named ``rollout_corr/...``.
    """

    kept: Tensor
    importance_weights: Tensor | None
    metrics: Metrics


def correct(
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    settings: Correction,
    *,
    reduce: Reduce = None,
) -> Corrected:
    """Rejects, weighs and measures, without gradient.

    Args:
        train_log_probs: [B, T]; old_log_probs in decoupled mode, those of the current policy in bypass mode.
        rollout_log_probs: [B, T], full-softmax log-probs at the sampling temperature.
        response_mask: [B, T] bool.
        settings: what to do.
        reduce: sum over the ranks that hold the rest of the batch (for ``normalize``).
    """
    with torch.no_grad():
        train, rollout = select(response_mask, train_log_probs), select(response_mask, rollout_log_probs)
        log_ratio = train - rollout
        metrics = gap_metrics(train, rollout, response_mask)
        kept, rejected = reject(log_ratio, response_mask, settings.rejections)
        metrics |= rejected
        if settings.level is None:
            return Corrected(kept, None, metrics)
        weights, _ = importance_weights(
            log_ratio, response_mask, level=settings.level, upper=settings.upper, lower=settings.lower
        )
        weights = select(kept, weights)
        metrics |= _weight_metrics(weights, log_ratio, kept, settings)
        if settings.normalize:
            mean = _global_mean(weights, kept, settings.level, reduce)
            metrics["rollout_corr/rollout_is_batch_norm_factor"] = Last(mean)
            weights = weights / mean
        return Corrected(kept, weights, metrics)


def importance_weights(
    log_ratio: Tensor, mask: Tensor, *, level: WeightLevel, upper: float, lower: float | None = None
) -> tuple[Tensor, Tensor]:
    """Detached weights train/rollout, [B, T], 0 off the mask; and on how many tokens a bound acts, a scalar.

    token: exp(clamp(lr, -20, 20)). sequence: exp(clamp(sum of lr over the row, -20, 20)) on each of its tokens. Capped
    at ``upper``; with ``lower`` they are 0 outside [lower, upper] instead (a band).

    Shapes: log_ratio [B, T] float, mask [B, T] bool, whole rows.
    """
    lr = select(mask, log_ratio.detach())
    if level == "sequence":
        lr = lr.sum(-1, keepdim=True)
    raw = lr.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    if lower is None:
        bounded = raw.clamp(max=upper)
    else:
        low, high = torch.ge(raw, lower, out=torch.empty_like(raw)), torch.le(raw, upper, out=torch.empty_like(raw))
        bounded = low.mul_(high).mul_(raw)
    acts = torch.ne(bounded, raw, out=raw)
    if level == "sequence":
        return spread_rows(bounded[:, 0], mask), (acts[:, 0] * row_tokens(mask)).sum()
    bits = bits_of(mask, raw.dtype)
    return keep_bits(bits, bounded), keep_bits(bits, acts).sum()


def reject(log_ratio: Tensor, mask: Tensor, rejections: Sequence[Rejection]) -> tuple[Tensor, Metrics]:
    """The mask less the tokens and rows that break a bound: [B, T] bool.

    Metrics: rollout_rs_masked_fraction of tokens and rollout_rs_seq_masked_fraction of rows that lost a token, over all
    rejections and for each one, and each statistic's mean, max and min.
    """
    if not rejections:
        return mask, {}
    lr = select(mask, widen(log_ratio)).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    kept = mask
    metrics: Metrics = {}
    for rule in rejections:
        value, is_row = _statistic(lr, mask, rule.statistic)
        low, high = rule.bounds()
        within = (value >= low) & (value <= high)
        if rule.statistic == "seq_max_k1":
            within = (((-lr >= low) & (-lr <= high)) | ~mask).all(-1, keepdim=True)
        passed = mask & within
        kept = kept & passed
        name = f"rollout_corr/rollout_rs_{rule.statistic}"
        metrics |= _fractions(passed, mask, name)
        metrics |= spread(name, value[:, 0] if is_row else value, mask.any(-1) if is_row else mask, "_")
    return kept, metrics | _fractions(kept, mask, "rollout_corr/rollout_rs")


def _statistic(lr: Tensor, mask: Tensor, name: str) -> tuple[Tensor, bool]:
    """The statistic [B, T] or [B, 1], and whether it belongs to rows."""
    level, _, k = name.rpartition("_")
    token = {"k1": lambda: -lr, "k2": lambda: lr.square() / 2, "k3": lambda: lr.expm1() - lr}[k]()
    if level == "token":
        return token, False
    if level == "seq_max":
        lowest = token.new_full((len(token), 1), -torch.inf)
        return torch.cat([torch.where(mask, token, -torch.inf), lowest], dim=-1).amax(-1, keepdim=True), True
    total = token.sum(-1, keepdim=True)
    return (total if level == "seq_sum" else total / row_tokens(mask).clamp(min=1)[:, None]), True


def difference_metrics(train_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor) -> Metrics:
    """Mean and largest |rollout - train log-prob|: on the same weights, how far trainer and engine are apart.

    Shapes: all the same, [B, T] or flat.
    """
    difference = select(response_mask, widen(rollout_log_probs) - widen(train_log_probs)).double().abs()
    count = int(response_mask.sum())
    return {
        "training/rollout_log_probs_diff/mean": Mean(float(difference.sum()), count),
        "training/rollout_log_probs_diff/max": Max(float(difference.max()) if count else 0.0),
    }


def gap_metrics(train_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor) -> Metrics:
    """How far apart the two policies are on the sampled tokens, named as in verl, ``rollout_corr/...``.

    kl <-lr>, k3_kl <exp(lr) - lr - 1>, chi2_token <exp(2 lr)> - 1, chi2_seq over rows of exp(2 sum lr) - 1;
    log-perplexities (mean negative log-prob of a row, averaged over rows with a valid token) of both policies, their
    difference and its extremes, perplexities and their ratio.

    Shapes: all [B, T].
    """
    mask = response_mask
    train, rollout = select(mask, train_log_probs), select(mask, rollout_log_probs)
    lr = train - rollout
    bounded = lr.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    tokens = row_tokens(mask)
    present = tokens > 0
    length = tokens.clamp(min=1)
    train_ppl, rollout_ppl = -train.sum(-1) / length, -rollout.sum(-1) / length
    difference = train_ppl - rollout_ppl
    row_lr = lr.sum(-1).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    above_one = bounded.expm1()
    # All three are 0 where lr is, so off the mask too; exp(2 lr) - 1 = (exp(lr) - 1) (exp(lr) + 1).
    over_tokens = {"kl": -lr, "k3_kl": above_one - bounded, "chi2_token": above_one * (above_one + 2)}
    over_rows = {
        "chi2_seq": (2 * row_lr).expm1(),
        "training_log_ppl": train_ppl,
        "rollout_log_ppl": rollout_ppl,
        "log_ppl_diff": difference,
        "log_ppl_abs_diff": difference.abs(),
        "training_ppl": train_ppl.exp(),
        "rollout_ppl": rollout_ppl.exp(),
        "ppl_ratio": difference.exp(),
    }
    sums = {name: x.sum() for name, x in over_tokens.items()}
    sums |= {name: torch.where(present, x, 0.0).sum() for name, x in over_rows.items()}
    numbers = to_floats(sums | {"tokens": tokens.sum(), "rows": present.sum()})
    counts = {name: numbers["tokens" if name in over_tokens else "rows"] for name in sums}
    metrics: Metrics = {f"rollout_corr/{name}": Mean(numbers[name], counts[name]) for name in sums}
    extremes = spread("rollout_corr/log_ppl_diff", difference, present, "_")
    del extremes["rollout_corr/log_ppl_diff_mean"]
    return metrics | extremes


def _weight_metrics(weights: Tensor, log_ratio: Tensor, kept: Tensor, settings: Correction) -> Metrics:
    """Statistics of the applied weights before normalisation, and how often the raw ratio breaks a bound."""
    name = "rollout_corr/rollout_is"
    lower = settings.lower if settings.lower is not None else 1 / settings.upper
    lr = log_ratio if settings.level == "token" else log_ratio.sum(-1, keepdim=True).expand_as(log_ratio)
    valid = select(kept, weights)
    numbers = to_floats(
        {
            "tokens": num_tokens(kept),
            "sum": valid.sum(),
            "squares": valid.double().square().sum(),
            "high": (kept & (lr > math.log(settings.upper))).sum(),
            "low": (kept & (lr < math.log(lower))).sum(),
        }
    )
    tokens = numbers["tokens"]
    per_row = valid.sum(-1) / row_tokens(kept).clamp(min=1)
    return {
        **spread(name, weights, kept, "_"),
        **spread(f"{name}_seq", per_row, kept.any(-1), "_"),
        f"{name}_std": Deviation(moments(weights, kept)),
        f"{name}_eff_sample_size": EffectiveSampleSize(tokens, numbers["sum"], numbers["squares"]),
        f"{name}_ratio_fraction_high": Mean(numbers["high"], tokens),
        f"{name}_ratio_fraction_low": Mean(numbers["low"], tokens),
    }


def _global_mean(weights: Tensor, kept: Tensor, level: WeightLevel, reduce: Reduce) -> float:
    """Mean weight over all tokens (or rows) of all ranks; 1 where there is nothing to divide by."""
    if level == "token":
        pair = torch.stack([weights.double().sum(), num_tokens(kept).double()])
    else:
        tokens = row_tokens(kept)
        pair = torch.stack([(weights.sum(-1) / tokens.clamp(min=1)).double().sum(), (tokens > 0).sum().double()])
    total, count = (pair if reduce is None else reduce(pair)).tolist()
    return total / count if count and total / count > 1e-8 else 1.0


def _fractions(kept: Tensor, mask: Tensor, name: str) -> Metrics:
    before, after = row_tokens(mask), row_tokens(kept)
    lost, rows = (after < before).sum(), (before > 0).sum()
    numbers = to_floats({"kept": after.sum(), "all": before.sum(), "lost": lost, "rows": rows})
    return {
        f"{name}_masked_fraction": Mean(numbers["all"] - numbers["kept"], numbers["all"]),
        f"{name}_seq_masked_fraction": Mean(numbers["lost"], numbers["rows"]),
    }
