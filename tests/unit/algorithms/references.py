"""Independent float64 NumPy references, written token by token from docs/algorithms.md."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def rows_of(mask: Array) -> list[list[int]]:
    return [list(np.flatnonzero(row)) for row in mask]


def whiten(values: Array, mask: Array) -> Array:
    valid = values[mask]
    out = np.zeros_like(values)
    out[mask] = valid if valid.size < 2 else (valid - valid.mean()) / np.sqrt(valid.var(ddof=1) + 1e-8)
    return out


def gae(
    rewards: Array, values: Array, mask: Array, gamma: float, lam: float, truncated: Array | None
) -> tuple[Array, Array]:
    advantages, returns = np.zeros_like(rewards), np.zeros_like(rewards)
    for i, tokens in enumerate(rows_of(mask)):
        next_value = values[i, tokens[-1]] if tokens and truncated is not None and truncated[i] else 0.0
        next_advantage = 0.0
        for t in reversed(tokens):
            delta = rewards[i, t] + gamma * next_value - values[i, t]
            next_advantage = delta + gamma * lam * next_advantage
            next_value = values[i, t]
            advantages[i, t], returns[i, t] = next_advantage, next_advantage + values[i, t]
    return advantages, returns


def discounted(rewards: Array, mask: Array, gamma: float) -> Array:
    out = np.zeros_like(rewards)
    for i, tokens in enumerate(rows_of(mask)):
        total = 0.0
        for t in reversed(tokens):
            total = rewards[i, t] + gamma * total
            out[i, t] = total
    return out


def scores(rewards: Array, mask: Array) -> Array:
    return np.array([sum(rewards[i, t] for t in tokens) for i, tokens in enumerate(rows_of(mask))])


def by_group(s: Array, group: Array, mask: Array, function: Callable[[Array, list[int]], Array]) -> Array:
    """Applies a function of (scores of a group's non-empty rows, their indices) and spreads it over tokens."""
    per_row = np.zeros(len(s))
    for g in np.unique(group):
        members = [i for i in np.flatnonzero(group == g) if mask[i].any()]
        if len(members) >= 2 and len(set(s[members])) > 1:
            per_row[members] = function(s[members], members)
    return np.where(mask, per_row[:, None], 0.0)


def grpo(s: Array, group: Array, mask: Array, norm: bool = True) -> Array:
    return by_group(s, group, mask, lambda x, _: (x - x.mean()) / (x.std(ddof=1) + 1e-6 if norm else 1.0))


def rloo(s: Array, group: Array, mask: Array) -> Array:
    def leave_one_out(x: Array, _: list[int]) -> Array:
        return np.array([x[i] - np.delete(x, i).mean() for i in range(len(x))])

    return by_group(s, group, mask, leave_one_out)


def opo(s: Array, group: Array, mask: Array) -> Array:
    def weighted(x: Array, members: list[int]) -> Array:
        lengths = mask[members].sum(1)
        return x - (lengths * x).sum() / lengths.sum()

    return by_group(s, group, mask, weighted)


def gpg(s: Array, group: Array, mask: Array) -> Array:
    present = mask.any(1)
    alpha = present.sum() / max(1, np.count_nonzero(s[present]))
    return by_group(s, group, mask, lambda x, _: alpha * (x - x.mean()))


def passk(s: Array, group: Array, mask: Array) -> Array:
    def best(x: Array, _: list[int]) -> Array:
        order = np.argsort(x)
        out = np.zeros_like(x)
        out[order[-1]] = (x[order[-1]] - x[order[-2]]) / (x.std(ddof=1) + 1e-6)
        return out

    return by_group(s, group, mask, best)


def optimal_token_baseline(rewards: Array, mask: Array, group: Array, old: Array, pi2: Array, weights: Array) -> Array:
    returns = discounted(rewards, mask, 1.0)
    cumulative = np.zeros_like(rewards)
    for i, tokens in enumerate(rows_of(mask)):
        total = 0.0
        for t in tokens:
            total += (1 - 2 * np.exp(old[i, t]) + pi2[i, t]) * weights[i, t] ** 2
            cumulative[i, t] = total
    out = np.zeros_like(rewards)
    for g in np.unique(group):
        members = [i for i in np.flatnonzero(group == g) if mask[i].any()]
        for t in range(rewards.shape[1]):
            here = [i for i in members if mask[i, t]]
            top = sum(returns[i, t] * cumulative[i, t] for i in here)
            baseline = top / (sum(cumulative[i, t] for i in here) + 1e-8)
            for i in here:
                out[i, t] = returns[i, t] - baseline if len(members) >= 2 else 0.0
    return out


# --- token losses: functions of (lp, old, A) of one token unless they say otherwise --------------------------------


def ratio(lp: float, old: float) -> float:
    return float(np.exp(np.clip(lp - old, -20, 20)))


def ppo(lp: float, old: float, a: float, lo: float = 0.2, hi: float = 0.28, c: float | None = 3.0) -> float:
    r = ratio(lp, old)
    loss = max(-a * r, -a * min(max(r, 1 - lo), 1 + hi))
    return min(loss, -a * c) if a < 0 and c is not None else loss


def cispo(lp: float, old: float, a: float, lo: float = 0.2, hi: float = 0.28) -> tuple[float, float]:
    weight = min(max(ratio(lp, old), 1 - lo), 1 + hi)
    return -weight * a * lp, -weight * a


def sapo(lp: float, old: float, a: float) -> float:
    tau = 1.0 if a > 0 else 1.05
    return float(-a * 4 / tau / (1 + np.exp(-tau * (ratio(lp, old) - 1))))


def dppo(lp: float, old: float, a: float, kind: str, lo: float = 0.2, hi: float = 0.28) -> tuple[float, float]:
    p, q = np.exp(lp), np.exp(old)
    if kind == "tv":
        keep = p - q <= hi if a > 0 else p - q >= -lo
    else:
        divergence = q * (old - lp) + (1 - q) * np.log((1 - q + 1e-8) / (1 - p + 1e-8))
        keep = (divergence <= hi or p <= q) if a > 0 else (divergence <= lo or p >= q)
    weight = min(ratio(lp, old), 20.0) * keep
    return float(-weight * a * lp), float(-weight * a)


def gspo_row(lp: Array, old: Array, a: Array, lo: float = 0.2, hi: float = 0.28) -> float:
    g = np.exp(min(np.clip(lp - old, -20, 20).mean(), 10.0))
    return float(np.maximum(-a * g, -a * np.clip(g, 1 - lo, 1 + hi)).mean())


def geo_mean_row(lp: Array, old: Array, a: Array, lo: float = 0.2, hi: float = 0.28) -> float:
    d = np.clip(lp - old, -20, 20)
    d = np.where(a > 0, np.minimum(d, hi), np.where(a < 0, np.maximum(d, -lo), 0.0))
    return float(-a.mean() * np.exp(d.mean()))


def value(v: float, old: float, target: float, clip: float | None) -> float:
    free = (v - target) ** 2
    if clip is None:
        return 0.5 * free
    return 0.5 * max(free, (min(max(v, old - clip), old + clip) - target) ** 2)


def kl(lp: float, ref: float, kind: str) -> float:
    x = lp - ref
    if kind == "k1":
        return x
    if kind == "abs":
        return abs(x)
    if kind == "k2":
        return x * x / 2
    negative = min(max(-x, -20.0), 20.0)
    return float(min(max(np.exp(negative) - negative - 1, -10.0), 10.0))


def passes(lr: Array, statistic: str, upper: float) -> NDArray[np.bool_]:
    """Which of a row's tokens a rejection with this upper bound (k1: and 1 / upper below) keeps; lr [n]."""
    level, _, k = statistic.rpartition("_")
    d = np.array([{"k1": -x, "k2": x * x / 2, "k3": np.exp(x) - 1 - x}[k] for x in lr])
    inside = np.abs(d) <= np.log(upper) if k == "k1" else d <= upper
    if level == "token":
        return inside
    if level == "seq_max":
        return np.full(len(lr), inside.all())
    whole = d.sum() if level == "seq_sum" else d.mean()
    return np.full(len(lr), abs(whole) <= np.log(upper) if k == "k1" else whole <= upper)


def aggregate(loss: Array, mask: Array, mode: str, length: int | None = None) -> float:
    per_row = [loss[i, tokens] for i, tokens in enumerate(rows_of(mask)) if tokens]
    if mode == "token-mean":
        return float(loss[mask].mean())
    if mode == "token-sum":
        return float(loss[mask].sum())
    if mode == "seq-mean-token-sum":
        return float(np.mean([x.sum() for x in per_row]))
    if mode == "seq-mean-token-sum-norm":
        assert length is not None
        return float(np.mean([x.sum() / length for x in per_row]))
    return float(np.mean([x.mean() for x in per_row]))
