"""Value, gradient and clip fractions of every policy loss against float64 NumPy and its finite differences."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.aggregate import Aggregation, aggregate, aggregate_rows, count
from megarl.algorithms.kl import kl_penalty
from megarl.config.schema.algorithm import KlEstimator
from megarl.observability.metrics import values
from tests.unit.algorithms import loss_references as losses
from tests.unit.algorithms import references as ref
from tests.unit.algorithms.batches import Ragged, ragged
from tests.unit.algorithms.cases import LOSS_OPTIONS, LOSSES, make_loss, policy_inputs

STEP = 1e-6
seeds = st.integers(0, 10_000)
some = settings(max_examples=6, deadline=None)


def batch(seed: int) -> Ragged:
    return ragged(seed, rows=3 + seed % 4, length=2 + seed % 5)


def reference(case: str, b: Ragged, lp: ref.Array, chosen: ref.Array, weighted: bool) -> ref.Array:
    """Token losses [B, T] with gradient flowing through ``lp`` alone."""
    kind, _, number = case.partition("/")
    options = LOSS_OPTIONS.get(kind, [{}])[int(number)]
    lp0, old, a, weights = (x.numpy() for x in (b.log_probs, b.old, b.advantages, b.weights))
    out = np.zeros(b.mask.shape)
    for i, tokens in enumerate(ref.rows_of(b.mask.numpy())):
        if not tokens:
            continue
        at = (i, tokens)
        out[at] = losses.token_losses(kind, options, lp[at], lp0[at], old[at], a[at], chosen[at])
        if weighted:
            out[at] *= np.exp(np.log(weights[at]).mean()) if kind == "geo_mean" else weights[at]
    return out


@pytest.mark.parametrize("case", LOSSES)
@some
@given(seed=seeds, mode=st.sampled_from(get_args(Aggregation)), weighted=st.booleans())
def test_loss_and_gradient_are_those_of_the_reference(case: str, seed: int, mode: Aggregation, weighted: bool) -> None:
    b, loss = batch(seed), make_loss(case)
    mode = loss.aggregation or mode
    row_id = torch.arange(len(b.mask))
    inputs = policy_inputs(loss, b, row_id, importance_weights=b.weights if weighted else None)
    chosen = torch.zeros_like(b.mask) if inputs.selected is None else inputs.selected
    leaf = b.log_probs.clone().requires_grad_()
    result = loss(replace(inputs, log_probs=leaf))
    total = aggregate(result.loss, b.mask, mode, denominators=count(b.mask), length=7)
    (gradient,) = torch.autograd.grad(total, leaf)

    mask, lp = b.mask.numpy(), b.log_probs.numpy()

    def value(at: ref.Array) -> float:
        return ref.aggregate(reference(case, b, at, chosen.numpy(), weighted), mask, mode, 7)

    np.testing.assert_allclose(
        result.loss.detach().numpy(), reference(case, b, lp, chosen.numpy(), weighted), rtol=1e-9, atol=1e-10
    )
    assert total.item() == pytest.approx(value(lp), rel=1e-9, abs=1e-12)
    expected = np.zeros(mask.shape)
    for i, t in zip(*np.nonzero(mask), strict=True):
        high, low = lp.copy(), lp.copy()
        high[i, t] += STEP
        low[i, t] -= STEP
        expected[i, t] = (value(high) - value(low)) / (2 * STEP)
    np.testing.assert_allclose(gradient.numpy(), expected, rtol=1e-5, atol=1e-8)
    # Without a second masking, and from row sums, value and gradient are the same.
    again = aggregate(result.loss, b.mask, mode, denominators=count(b.mask), length=7, is_masked=True)
    assert torch.equal(again, total)
    rows = loss.row_sums(replace(inputs, log_probs=leaf))
    from_rows = aggregate_rows(rows.sums, b.mask, mode, denominators=count(b.mask), length=7)
    assert from_rows.item() == pytest.approx(total.item(), rel=1e-12, abs=1e-14)
    assert torch.equal(torch.autograd.grad(from_rows, leaf)[0], gradient)
    assert rows.metrics == result.metrics


@pytest.mark.parametrize("case", LOSSES)
@some
@given(seed=seeds)
def test_metrics_are_those_of_the_reference(case: str, seed: int) -> None:
    b, loss = batch(seed), make_loss(case)
    kind, _, number = case.partition("/")
    inputs = policy_inputs(loss, b, torch.arange(len(b.mask)))
    chosen = (torch.zeros_like(b.mask) if inputs.selected is None else inputs.selected).numpy()
    lp, old, a = b.log_probs.numpy(), b.old.numpy(), b.advantages.numpy()
    valid = b.mask.numpy()
    expected: dict[str, float] = {"ppo_kl": float((old[valid] - lp[valid]).mean())}
    for i, tokens in enumerate(ref.rows_of(b.mask.numpy())):
        if tokens:
            at = (i, tokens)
            options = LOSS_OPTIONS.get(kind, [{}])[int(number)]
            for name, n in losses.clip_counts(kind, options, lp[at], old[at], a[at], chosen[at]).items():
                expected[name] = expected.get(name, 0.0) + n / int(b.mask.sum())
    seen = {name.removeprefix("actor/"): value for name, value in values(loss(inputs).metrics).items()}
    assert seen == pytest.approx(expected, rel=1e-9, abs=1e-12)


@some
@given(seed=seeds)
def test_tokens_of_high_covariance_are_those_of_the_reference(seed: int) -> None:
    b = ragged(seed, rows=8, length=7)
    mask = b.mask.numpy()
    covariance = losses.covariance(b.log_probs.numpy(), b.advantages.numpy(), mask)
    places = list(zip(*np.nonzero(mask), strict=True))
    loss = make_loss("kl_cov")
    selected = policy_inputs(loss, b, torch.arange(8)).selected
    assert selected is not None
    best = sorted(places, key=lambda at: -covariance[at])[: max(1, int(0.1 * len(places)))]
    assert {tuple(at) for at in selected.nonzero().tolist()} == {(int(i), int(t)) for i, t in best}

    loss = make_loss("clip_cov")
    selected = policy_inputs(loss, b, torch.arange(8)).selected
    assert selected is not None
    eligible = set()
    for i, t in places:
        ratio, a = float((b.log_probs - b.old)[i, t].exp()), float(b.advantages[i, t])
        if 0.02 < covariance[i, t] < 5.0 and not ((a > 0 and ratio > 1.28) or (a < 0 and ratio < 0.8)):
            eligible.add((int(i), int(t)))
    taken = {tuple(at) for at in selected.nonzero().tolist()}
    assert taken <= eligible
    assert len(taken) == min(len(eligible), max(1, int(0.1 * len(places))))


@pytest.mark.parametrize("estimator", get_args(KlEstimator))
@some
@given(seed=seeds)
def test_kl_and_its_gradient_are_those_of_the_reference(estimator: str, seed: int) -> None:
    b = batch(seed)
    b.ref = torch.where(torch.rand(b.mask.shape, generator=torch.Generator().manual_seed(seed)) < 0.1, -40.0, b.ref)
    b.ref = torch.where(b.mask, b.ref, torch.nan)
    leaf = b.log_probs.clone().requires_grad_()
    kl = kl_penalty(leaf, b.ref, b.mask, estimator)
    (gradient,) = torch.autograd.grad(kl.sum(), leaf)
    base = estimator.removesuffix("+")
    slope_of = "k2" if estimator.endswith("+") else base
    value, slope = np.zeros(b.mask.shape), np.zeros(b.mask.shape)
    for i, t in zip(*np.nonzero(b.mask.numpy()), strict=True):
        lp, r = float(b.log_probs[i, t]), float(b.ref[i, t])
        value[i, t] = ref.kl(lp, r, base)
        slope[i, t] = (ref.kl(lp + STEP, r, slope_of) - ref.kl(lp - STEP, r, slope_of)) / (2 * STEP)
    np.testing.assert_allclose(kl.detach().numpy(), value, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(gradient.numpy(), slope, rtol=1e-5, atol=1e-7)
