from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megarl.algorithms.correction import (
    STATISTICS,
    Correction,
    Rejection,
    correct,
    gap_metrics,
    importance_weights,
    reject,
)
from megarl.algorithms.statistics import Deviation, EffectiveSampleSize, ExplainedVariance, Moments, batch_metrics
from megarl.errors import ConfigError
from megarl.observability.metrics import merge
from tests.unit.algorithms import references as ref
from tests.unit.algorithms.batches import Ragged, ragged


def ratios(b: Ragged) -> list[np.ndarray]:
    lr = (b.old - b.rollout).numpy()
    return [lr[i, tokens] for i, tokens in enumerate(ref.rows_of(b.mask.numpy()))]


def statistic(lr: np.ndarray, k: str) -> np.ndarray:
    return {"k1": -lr, "k2": lr**2 / 2, "k3": np.exp(lr) - 1 - lr}[k]


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("lower", [None, 0.9])
def test_weights_equal_the_reference(level: str, lower: float | None) -> None:
    b = ragged(1)
    weights, _ = importance_weights(b.old - b.rollout, b.mask, level=level, upper=1.1, lower=lower)  # type: ignore[arg-type]
    assert (weights[~b.mask] == 0).all()
    for i, lr in enumerate(ratios(b)):
        raw = np.exp(lr) if level == "token" else np.full(len(lr), np.exp(lr.sum()))
        expected = np.minimum(raw, 1.1) if lower is None else np.where((raw < lower) | (raw > 1.1), 0.0, raw)
        np.testing.assert_allclose(weights[i, b.mask[i]].numpy(), expected, rtol=1e-9)


@pytest.mark.parametrize("name", STATISTICS)
def test_rejection_equals_the_reference(name: str) -> None:
    b = ragged(2)
    level, _, k = name.rpartition("_")
    reduce = {"seq_sum": np.sum, "seq_mean": np.mean, "seq_max": np.max}.get(level)
    upper = {"k1": 1.05 if level == "seq_mean" else 1.15, "k2": 0.02, "k3": 0.02}[k]
    rule = Rejection(name, upper)
    kept, metrics = reject(b.old - b.rollout, b.mask, [rule])
    expected = np.zeros(b.mask.shape, dtype=bool)
    for i, lr in enumerate(ratios(b)):
        values = statistic(lr, k)
        inside = values <= upper if k != "k1" else (values <= math.log(upper)) & (values >= -math.log(upper))
        if name == "seq_max_k1":
            inside = np.full(len(lr), inside.all())
        elif reduce is not None and len(lr):
            total = reduce(values)
            ok = total <= upper if k != "k1" else abs(total) <= math.log(upper)
            inside = np.full(len(lr), ok)
        expected[i, b.mask[i].numpy()] = inside
    assert np.array_equal(kept.numpy(), expected)
    assert 0 < expected.sum() < int(b.mask.sum()), "the bound should reject some and keep some"
    lost = int(b.mask.sum()) - expected.sum()
    assert metrics["rollout_corr/rollout_rs_masked_fraction"].value() == pytest.approx(lost / int(b.mask.sum()))
    assert f"rollout_corr/rollout_rs_{name}_mean" in metrics


def test_rejection_leaves_weights_and_their_mean() -> None:
    b = ragged(3)
    settings = Correction("token", 2.0, normalize=True, rejections=[Rejection("token_k2", 0.01)])
    result = correct(b.old, b.rollout, b.mask, settings)
    assert result.importance_weights is not None
    assert (result.importance_weights[~result.kept] == 0).all()
    assert float(result.importance_weights[result.kept].mean()) == pytest.approx(1.0)
    assert not result.importance_weights.requires_grad


def test_sequence_weights_are_normalised_over_rows() -> None:
    b = ragged(4)
    result = correct(b.old, b.rollout, b.mask, Correction("sequence", 3.0, normalize=True))
    assert result.importance_weights is not None
    rows = [float(result.importance_weights[i, b.mask[i]][0]) for i in range(12) if b.mask[i].any()]
    assert np.mean(rows) == pytest.approx(1.0)


def test_gap_metrics_equal_the_reference() -> None:
    b = ragged(5)
    metrics = {k.removeprefix("rollout_corr/"): m.value() for k, m in gap_metrics(b.old, b.rollout, b.mask).items()}
    rows = [lr for lr in ratios(b) if len(lr)]
    flat = np.concatenate(rows)
    assert metrics["kl"] == pytest.approx(-flat.mean())
    assert metrics["k3_kl"] == pytest.approx((np.exp(flat) - flat - 1).mean())
    assert metrics["chi2_token"] == pytest.approx(np.exp(2 * flat).mean() - 1)
    assert metrics["chi2_seq"] == pytest.approx(np.mean([np.exp(2 * r.sum()) for r in rows]) - 1)
    tokens = [t for t in ref.rows_of(b.mask.numpy()) if t]
    index = [i for i, t in enumerate(ref.rows_of(b.mask.numpy())) if t]
    old = np.array([-b.old[i, t].mean().item() for i, t in zip(index, tokens, strict=True)])
    roll = np.array([-b.rollout[i, t].mean().item() for i, t in zip(index, tokens, strict=True)])
    assert metrics["training_log_ppl"] == pytest.approx(old.mean())
    assert metrics["rollout_log_ppl"] == pytest.approx(roll.mean())
    assert metrics["log_ppl_diff"] == pytest.approx((old - roll).mean())
    assert metrics["log_ppl_diff_max"] == pytest.approx((old - roll).max())
    assert metrics["ppl_ratio"] == pytest.approx(np.exp(old - roll).mean())


def test_metrics_do_not_depend_on_the_split() -> None:
    b = ragged(6)
    settings = Correction("token", 1.2, rejections=[Rejection("seq_mean_k3", 0.02)])
    whole = correct(b.old, b.rollout, b.mask, settings)
    parts = [correct(b.old[r], b.rollout[r], b.mask[r], settings) for r in (slice(0, 2), slice(2, 7), slice(7, 12))]
    merged = merge(p.metrics for p in parts)
    assert merged.keys() == whole.metrics.keys()
    for name, metric in whole.metrics.items():
        assert merged[name].value() == pytest.approx(metric.value(), rel=1e-9, nan_ok=True), name


def test_identical_policies_keep_everything_and_weigh_one() -> None:
    b = ragged(7)
    rules = [Rejection(s, 1.001 if s.endswith("k1") else 1e-6) for s in STATISTICS]
    result = correct(b.old, b.old, b.mask, Correction("sequence", rejections=rules))
    assert torch.equal(result.kept, b.mask)
    assert result.importance_weights is not None and (result.importance_weights[b.mask] == 1).all()


def test_all_masked_batch_is_defined() -> None:
    b = ragged(8)
    result = correct(
        b.old,
        b.rollout,
        torch.zeros_like(b.mask),
        Correction("token", normalize=True, rejections=[Rejection("seq_max_k2", 1.0)]),
    )
    assert result.importance_weights is not None and (result.importance_weights == 0).all()
    assert not result.kept.any()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Rejection("seq_k1", 1.0),
        lambda: Rejection("token_k1", 1.0, 2.0),
        lambda: Rejection("token_k2", 1.0, 0.5),
        lambda: Rejection("token_k2", 0.0),
        lambda: Correction("token", 1.0, 2.0),
    ],
)
def test_settings_that_cannot_hold_are_refused(make: object) -> None:
    with pytest.raises(ConfigError):
        make()  # type: ignore[operator]


def test_merged_moments_equal_those_of_the_whole() -> None:
    x = np.random.default_rng(0).normal(1e6, 1.0, 100)
    whole = Moments(100, x.mean(), ((x - x.mean()) ** 2).sum())
    parts = [Moments(len(p), p.mean(), ((p - p.mean()) ** 2).sum()) for p in np.split(x, [3, 50])]
    merged = Moments().merge(parts[0]).merge(parts[1]).merge(parts[2])
    assert merged.variance(1) == pytest.approx(whole.variance(1), rel=1e-9)
    assert Deviation(merged).value() == pytest.approx(x.std(), rel=1e-9)
    assert math.isnan(EffectiveSampleSize(0, 0, 0).value())
    assert math.isnan(ExplainedVariance().value())


def test_batch_metrics() -> None:
    b = ragged(9)
    mask = b.mask.numpy()
    seen = batch_metrics(
        b.mask,
        scores=torch.arange(12.0),
        token_level_rewards=b.rewards,
        advantages=b.advantages,
        returns=b.returns,
        values=b.values,
    )
    values = {name: metric.value() for name, metric in seen.items()}
    present = mask.any(1)
    assert values["critic/score/mean"] == pytest.approx(np.arange(12.0)[present].mean())
    assert values["critic/rewards/max"] == pytest.approx(ref.scores(b.rewards.numpy(), mask)[present].max())
    assert values["critic/advantages/min"] == pytest.approx(b.advantages.numpy()[mask].min())
    errors, returns = (b.returns - b.values).numpy()[mask], b.returns.numpy()[mask]
    assert values["critic/vf_explained_var"] == pytest.approx(1 - errors.var(ddof=1) / (returns.var(ddof=1) + 1e-5))
