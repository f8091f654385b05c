"""Metrics whose merge is more than a sum (deviation, effective sample size, explained variance); batch statistics."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from megarl.algorithms.masking import num_tokens, row_tokens, select, to_floats
from megarl.observability.metrics import Max, Mean, Metrics, Min


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean and summed squared deviations, merged without cancellation (Chan, Golub, LeVeque 1979)."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    def merge(self, other: Moments) -> Moments:
        """Moments of both together."""
        count = self.count + other.count
        if not count:
            return self
        step = other.mean - self.mean
        squares = self.squares + other.squares + step * step * self.count * other.count / count
        return Moments(count, self.mean + step * other.count / count, squares)

    def variance(self, ddof: int) -> float:
        """Variance; NaN with too few numbers."""
        return self.squares / (self.count - ddof) if self.count > ddof else math.nan


@dataclass(frozen=True, slots=True)
class Deviation:
    """Population standard deviation (ddof 0)."""

    moments: Moments

    def merge(self, other: Deviation) -> Deviation:
        """Deviation of both together."""
        return Deviation(self.moments.merge(other.moments))

    def value(self) -> float:
        """NaN when nothing was seen."""
        return math.sqrt(self.moments.variance(0))


@dataclass(frozen=True, slots=True)
class EffectiveSampleSize:
    """ESS of importance weights as a share of their number, 1 / <(w / <w>)^2> = (sum w)^2 / (n sum w^2)."""

    count: float
    total: float
    squares: float

    def merge(self, other: EffectiveSampleSize) -> EffectiveSampleSize:
        """ESS of both together."""
        return EffectiveSampleSize(self.count + other.count, self.total + other.total, self.squares + other.squares)

    def value(self) -> float:
        """NaN when nothing was seen, 0 when all weights are 0."""
        if not self.count:
            return math.nan
        return self.total**2 / (self.count * self.squares) if self.squares else 0.0


@dataclass(frozen=True, slots=True)
class ExplainedVariance:
    """1 - var(R - V) / (var(R) + 1e-5), ddof 1, verl's critic/vf_explained_var."""

    errors: Moments = Moments()
    returns: Moments = Moments()

    def merge(self, other: ExplainedVariance) -> ExplainedVariance:
        """Explained variance of both together."""
        return ExplainedVariance(self.errors.merge(other.errors), self.returns.merge(other.returns))

    def value(self) -> float:
        """NaN with fewer than two tokens."""
        return 1 - self.errors.variance(1) / (self.returns.variance(1) + 1e-5)


def moments(values: Tensor, mask: Tensor) -> Moments:
    """Moments of the values at true places."""
    valid = select(mask, values).double()
    count = num_tokens(mask) if mask.dim() > 1 else mask.sum()
    mean = valid.sum() / count.clamp(min=1)
    squares = select(mask, valid - mean).square().sum()
    return Moments(*to_floats({"count": count, "mean": mean, "squares": squares}).values())


def spread(name: str, values: Tensor, mask: Tensor, separator: str = "/") -> Metrics:
    """``name/mean``, ``name/max`` and ``name/min`` of the values at true places; shapes [B] or [B, T]."""
    name += separator
    valid = values[mask].double()
    count = float(valid.numel())
    if not count:
        return {f"{name}mean": Mean(0.0, 0.0), f"{name}max": Max(), f"{name}min": Min()}
    low, high = valid.aminmax()
    numbers = to_floats({"sum": valid.sum(), "low": low, "high": high})
    return {
        f"{name}mean": Mean(numbers["sum"], count),
        f"{name}max": Max(numbers["high"]),
        f"{name}min": Min(numbers["low"]),
    }


def batch_metrics(
    response_mask: Tensor,
    *,
    scores: Tensor | None = None,
    token_level_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    returns: Tensor | None = None,
    values: Tensor | None = None,
) -> Metrics:
    """Statistics of a batch under the names verl's users know, for whatever is given.

    critic/score and critic/rewards are over rows with a valid token, critic/advantages, critic/returns and
    critic/values over valid tokens; each has /mean, /max and /min. Values with returns add critic/vf_explained_var.

    Shapes: scores [B]; all others [B, T].
    """
    metrics: Metrics = {}
    present = row_tokens(response_mask) > 0
    if scores is not None:
        metrics |= spread("critic/score", scores, present)
    if token_level_rewards is not None:
        metrics |= spread("critic/rewards", select(response_mask, token_level_rewards).sum(-1), present)
    for name, tensor in (("advantages", advantages), ("returns", returns), ("values", values)):
        if tensor is not None:
            metrics |= spread(f"critic/{name}", tensor, response_mask)
    if values is not None and returns is not None:
        metrics["critic/vf_explained_var"] = ExplainedVariance(
            moments(returns.double() - values.double(), response_mask), moments(returns, response_mask)
        )
    return metrics
