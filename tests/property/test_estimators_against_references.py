"""Advantages and corrections, with tokens and rows rejected, against float64 NumPy on random ragged batches."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.correction import STATISTICS, Correction, Rejection, correct
from megarl.observability.metrics import values
from tests.unit.algorithms import references as ref
from tests.unit.algorithms.batches import Ragged, ragged
from tests.unit.algorithms.cases import ESTIMATOR_CASES, estimate

seeds = st.integers(0, 10_000)
some = settings(max_examples=8, deadline=None)
GROUPED = {"grpo", "rloo", "opo", "gpg", "grpo_passk", "gdpo", "reinforce_plus_plus_baseline"}


def batch(seed: int) -> Ragged:
    """Dense rewards; scores that repeat, so that groups carry no signal; or one reward a row, in masks without gaps."""
    b = ragged(seed, rows=6 + 3 * (seed % 3), length=3 + seed % 6)
    if seed % 4 == 0:
        lengths = b.mask.sum(1)
        clean = {name: getattr(b, name) for name in b.__dataclass_fields__}
        front = torch.arange(b.mask.shape[1]) < lengths[:, None]
        for name, column in clean.items():
            if column.dim() == 2 and name != "mask":
                packed = torch.full_like(column, torch.nan)
                packed[front] = column[b.mask]
                setattr(b, name, packed)
        b.mask = front
        place = torch.arange(b.mask.shape[1]) == (lengths - 1 - (seed // 4) % 2)[:, None]
        b.rewards = torch.where(b.mask, torch.where(place, b.rewards, 0.0), torch.nan)
    elif seed % 2:
        b.rewards = torch.where(b.rewards > 0, 1.0, 0.0).double() / b.mask.sum(1, keepdim=True).clamp(min=1)
        b.rewards = torch.where(b.mask, b.rewards.round(), torch.nan)
    return b


def rejected(b: Ragged, seed: int) -> torch.Tensor:
    """The mask less some tokens and one row in four."""
    generator = torch.Generator().manual_seed(seed)
    kept = b.mask & (torch.rand(b.mask.shape, generator=generator) < 0.8)
    kept[torch.rand(len(kept), generator=generator) < 0.25] = False
    return kept


def expected(kind: str, norm: bool, b: Ragged, kept: ref.Array, counted: ref.Array) -> ref.Array:
    """Advantages where group statistics are over ``counted`` rows and results over ``kept`` tokens."""
    mask, group, rewards = b.mask.numpy(), b.group.numpy(), b.rewards.numpy()
    s = ref.scores(rewards, mask)

    def per_row(function: Any, scores: ref.Array) -> ref.Array:
        out = np.zeros(len(scores))
        for g in np.unique(group):
            inside = np.flatnonzero(group == g)
            members = [i for i in inside if counted[i]]
            if len(members) >= 2 and len(set(scores[members])) > 1:
                for i in inside:
                    out[i] = function(scores[i], scores[members], kept[members].sum(1), i, members)
        return out

    def spread(rows: ref.Array) -> ref.Array:
        return np.where(kept, rows[:, None], 0.0)

    def grpo(x: float, of: ref.Array, *_: Any) -> float:
        return float((x - of.mean()) / (of.std(ddof=1) + 1e-6 if norm else 1.0))

    def passk(x: float, of: ref.Array, _: Any, i: int, members: list[int]) -> float:
        best, second = sorted(of)[-1], sorted(of)[-2]
        if i not in members or x != best or best == second:
            return 0.0
        return float((best - second) / (of.std(ddof=1) + 1e-6 if norm else 1.0))

    if kind == "grpo":
        return spread(per_row(grpo, s))
    if kind == "grpo_passk":
        return spread(per_row(passk, s))
    if kind == "rloo":
        return spread(per_row(lambda x, of, *_: (x - of.mean()) * len(of) / (len(of) - 1), s))
    if kind == "opo":
        return spread(per_row(lambda x, of, n, *_: x - (n * of).sum() / max(1, n.sum()), s))
    if kind == "gpg":
        alpha = counted.sum() / max(1, (counted & (s != 0)).sum())
        return spread(per_row(lambda x, of, *_: alpha * (x - of.mean()), s))
    if kind == "reinforce_plus_plus_baseline":
        return ref.whiten(spread(per_row(lambda x, of, *_: x - of.mean(), s)), kept)
    if kind == "gdpo":
        greedy = b.greedy.numpy()
        return ref.whiten(spread(per_row(grpo, greedy) + per_row(grpo, greedy**2)), kept)
    if kind == "gae":
        raw, _ = ref.gae(rewards, b.values.numpy(), mask, 0.95, 0.9, b.truncated.numpy())
        return ref.whiten(raw, kept)
    if kind == "reinforce_plus_plus":
        return ref.whiten(ref.discounted(rewards, mask, 0.95), kept)
    if kind == "remax":
        return np.where(kept, ref.discounted(rewards, mask, 1.0) - b.greedy.numpy()[:, None], 0.0)
    assert kind == "optimal_token_baseline"
    return optimal_token_baseline(b, kept, counted)


def optimal_token_baseline(b: Ragged, kept: ref.Array, counted: ref.Array) -> ref.Array:
    returns = ref.discounted(b.rewards.numpy(), b.mask.numpy(), 1.0)
    old, pi2, weights, group = (x.numpy() for x in (b.old, b.pi2, b.weights, b.group))
    energy = np.zeros(kept.shape)
    for i, tokens in enumerate(ref.rows_of(kept)):
        total = 0.0
        for t in tokens:
            total += (1 - 2 * np.exp(old[i, t]) + pi2[i, t]) * weights[i, t] ** 2
            energy[i, t] = total
    out = np.zeros(kept.shape)
    for i, t in zip(*np.nonzero(kept), strict=True):
        members = [j for j in np.flatnonzero(group == group[i]) if counted[j]]
        here = [j for j in members if kept[j, t]]
        top, bottom = sum(returns[j, t] * energy[j, t] for j in here), sum(energy[j, t] for j in here)
        if len(members) >= 2:
            out[i, t] = returns[i, t] - top / (bottom + 1e-8)
    return out


@pytest.mark.parametrize(("kind", "norm"), ESTIMATOR_CASES)
@pytest.mark.parametrize("group_stats", ["kept", "all"])
@some
@given(seed=seeds)
def test_advantages_with_rejection_are_those_of_the_reference(
    kind: str, norm: bool, group_stats: str, seed: int
) -> None:
    b = batch(seed)
    kept = rejected(b, seed)
    result = estimate(kind, b, norm_by_std=norm, kept=kept, group_stats=group_stats)
    counted = (kept if group_stats == "kept" else b.mask).any(1).numpy()
    np.testing.assert_allclose(
        result.advantages.numpy(), expected(kind, norm, b, kept.numpy(), counted), rtol=1e-7, atol=1e-7
    )
    assert (result.advantages[~kept] == 0).all()
    if kind in GROUPED | {"optimal_token_baseline"}:
        s, group = ref.scores(b.rewards.numpy(), b.mask.numpy()), b.group.numpy()
        sizes = [int(counted[group == g].sum()) for g in np.unique(group)]
        varied = [len(set(s[(group == g) & counted])) > 1 for g in np.unique(group)]
        seen = values(result.metrics)
        assert seen["adv/singleton_groups"] == sum(size == 1 for size in sizes)
        equal = sum(size >= 2 and not v for size, v in zip(sizes, varied, strict=True))
        assert seen["adv/zero_signal_groups"] == equal


@some
@given(
    seed=seeds,
    level=st.sampled_from(["token", "sequence"]),
    lower=st.sampled_from([None, 0.8]),
    statistic=st.sampled_from(STATISTICS),
)
def test_normalised_weights_and_their_statistics_are_those_of_the_reference(
    seed: int, level: Any, lower: float | None, statistic: str
) -> None:
    b = ragged(seed, rows=4 + seed % 5, length=2 + seed % 6)
    mask, lr = b.mask.numpy(), (b.old - b.rollout).numpy()
    upper = {"k1": 1.3, "k2": 0.1, "k3": 0.1}[statistic[-2:]]
    rule = Correction(level, 1.25, lower, normalize=True, rejections=[Rejection(statistic, upper)])
    result = correct(b.old, b.rollout, b.mask, rule)
    kept, raw, weights = np.zeros(mask.shape, dtype=bool), np.ones(mask.shape), np.zeros(mask.shape)
    for i, tokens in enumerate(ref.rows_of(mask)):
        if tokens:
            kept[i, tokens] = ref.passes(lr[i, tokens], statistic, upper)
            raw[i, tokens] = np.exp(lr[i, tokens] if level == "token" else lr[i, tokens].sum())
    for i, t in zip(*np.nonzero(kept), strict=True):
        w = raw[i, t]
        weights[i, t] = min(w, 1.25) if lower is None else (w if lower <= w <= 1.25 else 0.0)
    assert np.array_equal(result.kept.numpy(), kept)
    assert result.importance_weights is not None
    rows = [weights[i, tokens].mean() for i, tokens in enumerate(ref.rows_of(kept)) if tokens]
    flat = weights[kept]
    mean = np.mean(rows if level == "sequence" else flat) if kept.any() else 0.0
    np.testing.assert_allclose(result.importance_weights.numpy(), weights / (mean if mean > 0 else 1.0), rtol=1e-9)
    seen = {name.removeprefix("rollout_corr/rollout_is_"): v for name, v in values(result.metrics).items()}
    low = lower if lower is not None else 1 / 1.25
    for name, number in {
        "mean": flat.mean() if kept.any() else math.nan,
        "std": flat.std() if kept.any() else math.nan,
        "ratio_fraction_high": (raw[kept] > 1.25).mean() if kept.any() else math.nan,
        "ratio_fraction_low": (raw[kept] < low).mean() if kept.any() else math.nan,
        "eff_sample_size": 1 / np.mean((flat / flat.mean()) ** 2) if flat.any() else (0.0 if kept.any() else math.nan),
        "batch_norm_factor": mean if mean > 0 else 1.0,
    }.items():
        assert seen[name] == pytest.approx(number, rel=1e-9, abs=1e-12, nan_ok=True), name
    lost = 1 - kept.sum() / mask.sum()
    assert values(result.metrics)["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(lost, abs=1e-12)
