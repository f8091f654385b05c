"""House rules of docs/algorithms.md as properties, for every loss and estimator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.algorithms.advantages import ESTIMATORS, Advantages, build_estimator
from megarl.algorithms.aggregate import Aggregation, Denominators, aggregate, count
from megarl.algorithms.correction import Correction, Rejection, correct
from megarl.algorithms.kl import kl_penalty
from megarl.algorithms.policy_losses import POLICY_LOSSES, PolicyInputs, PolicyLoss, build_policy_loss
from megarl.algorithms.value_losses import value_loss
from megarl.observability.metrics import Metrics, merge
from tests.unit.algorithms.batches import Ragged, ragged

MODES: tuple[Aggregation, ...] = (
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean",
)  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "dro": {"dro_beta": 0.7},
    "kl_cov": {"kl_cov_ratio": 0.1},
    "clip_cov": {"clip_cov_ratio": 0.1, "clip_cov_lb": 0.02},
    "reinforce": {"ratio_level": "sequence", "ratio_cap": 1.5},
}
seeds = st.integers(0, 10_000)
some = settings(max_examples=12, deadline=None)


def batch(seed: int) -> Ragged:
    """float32, with the awkward sizes a seed implies."""
    b = ragged(seed, rows=4 + seed % 9, length=1 + seed % 11)
    return on_tensors(b, lambda x: x.float() if x.is_floating_point() else x)


def on_tensors(b: Ragged, change: Any) -> Ragged:
    return Ragged(**{name: change(getattr(b, name)) for name in b.__dataclass_fields__})


def padded(b: Ragged, extra: int) -> Ragged:
    """More columns, and other poison off the mask."""

    def change(x: Tensor) -> Tensor:
        if x.dim() == 1:
            return x
        if x.dtype == torch.bool:
            return torch.nn.functional.pad(x, (0, extra))
        clean = torch.where(b.mask, x, torch.tensor(-torch.inf))
        return torch.nn.functional.pad(clean, (0, extra), value=torch.nan)

    return on_tensors(b, change)


def selected(loss: PolicyLoss, b: Ragged, row_id: Tensor) -> PolicyInputs:
    inputs = PolicyInputs(b.log_probs, b.old, b.advantages, b.mask, importance_weights=b.weights)
    if loss.needs_first_pass:
        inputs = replace(inputs, selected=loss.first_pass(inputs, row_id=row_id, seed=1))
    return inputs


def make(kind: str) -> PolicyLoss:
    return build_policy_loss(kind, clip_low=0.2, clip_high=0.28, dual_clip=3.0, options=OPTIONS.get(kind))


def update(
    loss: PolicyLoss, inputs: PolicyInputs, mode: Aggregation, parts: list[Tensor]
) -> tuple[Tensor, Tensor, Metrics]:
    """Loss, gradient and merged metrics of a minibatch taken in parts."""
    leaf = inputs.log_probs.clone().requires_grad_()
    denominators = sum((count(inputs.response_mask[p]) for p in parts), Denominators(0, 0))
    total, seen = torch.zeros(()), []
    for part in parts:
        result = loss(replace(inputs, log_probs=leaf).rows(part))
        share = aggregate(
            result.loss, inputs.response_mask[part], loss.aggregation or mode, denominators=denominators, length=16
        )
        share.backward()
        total = total + share.detach()
        seen.append(result.metrics)
    assert leaf.grad is not None
    return total, leaf.grad, merge(seen)


def close(a: Tensor, b: Tensor) -> None:
    scale = float(b.abs().max()) if b.numel() else 0.0
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * max(scale, 1e-3))


def cut(rows: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(rows, generator=generator)
    sizes = torch.randint(1, 4, (rows,), generator=generator).cumsum(0)
    return [p for p in order.tensor_split(sizes[sizes < rows]) if len(p)]


@pytest.mark.parametrize("kind", POLICY_LOSSES.names())
@some
@given(seed=seeds, mode=st.sampled_from(MODES))
def test_loss_does_not_depend_on_the_cut_into_microbatches(kind: str, seed: int, mode: Aggregation) -> None:
    b, loss = batch(seed), make(kind)
    inputs = selected(loss, b, torch.arange(len(b.mask)))
    whole = update(loss, inputs, mode, [torch.arange(len(b.mask))])
    parts = update(loss, inputs, mode, cut(len(b.mask), seed))
    close(parts[0], whole[0])
    close(parts[1], whole[1])
    assert parts[2].keys() == whole[2].keys()
    for name, metric in whole[2].items():
        assert parts[2][name].value() == pytest.approx(metric.value(), rel=1e-5, abs=1e-6, nan_ok=True), name


@pytest.mark.parametrize("kind", POLICY_LOSSES.names())
@some
@given(seed=seeds, extra=st.integers(1, 9), mode=st.sampled_from(MODES))
def test_loss_does_not_see_padding(kind: str, seed: int, extra: int, mode: Aggregation) -> None:
    b, loss = batch(seed), make(kind)
    wide, rows = padded(b, extra), torch.arange(len(b.mask))
    a = update(loss, selected(loss, b, rows), mode, [rows])
    c = update(loss, selected(loss, wide, rows), mode, [rows])
    assert c[0].isfinite() and c[1].isfinite().all()
    close(c[0], a[0])
    close(c[1][:, : b.mask.shape[1]], a[1])
    assert (c[1][~wide.mask] == 0).all()
    assert {n: m.value() for n, m in c[2].items()} == pytest.approx(
        {n: m.value() for n, m in a[2].items()}, rel=1e-5, abs=1e-6, nan_ok=True
    )


@pytest.mark.parametrize("kind", POLICY_LOSSES.names())
@some
@given(seed=seeds)
def test_first_pass_and_loss_follow_the_rows(kind: str, seed: int) -> None:
    b, loss = batch(seed), make(kind)
    order = torch.randperm(len(b.mask), generator=torch.Generator().manual_seed(seed))
    moved = on_tensors(b, lambda x: x[order])
    rows = torch.arange(len(b.mask))
    close(loss(selected(loss, moved, order)).loss, loss(selected(loss, b, rows)).loss[order])


def estimate(kind: str, b: Ragged) -> Advantages:
    estimator = build_estimator(kind, gamma=0.95, lam=0.9, norm_by_std=True, bootstrap_truncated=True)
    return estimator(
        b.rewards, b.mask, b.group, values=b.values, truncated=b.truncated, greedy_scores=b.greedy,
        reward_components={"a": b.greedy, "b": b.greedy.square()}, old_log_probs=b.old, sum_pi_squared=b.pi2,
        importance_weights=b.weights,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ESTIMATORS.names())
@some
@given(seed=seeds, extra=st.integers(1, 40))
def test_advantages_do_not_see_padding(kind: str, seed: int, extra: int) -> None:
    b = batch(seed)
    wide = padded(b, extra)
    a, c = estimate(kind, b), estimate(kind, wide)
    for narrow, padded_out in ((a.advantages, c.advantages), (a.returns, c.returns)):
        if narrow is None:
            assert padded_out is None
            continue
        assert padded_out is not None and padded_out.isfinite().all()
        close(padded_out[:, : b.mask.shape[1]], narrow)
        assert (padded_out[~wide.mask] == 0).all()


@pytest.mark.parametrize("kind", ESTIMATORS.names())
@some
@given(seed=seeds)
def test_advantages_follow_the_rows_and_not_the_group_numbers(kind: str, seed: int) -> None:
    b = batch(seed)
    order = torch.randperm(len(b.mask), generator=torch.Generator().manual_seed(seed))
    moved = on_tensors(b, lambda x: x[order])
    moved.group = moved.group * -31 + 7
    close(estimate(kind, moved).advantages, estimate(kind, b).advantages[order])


@some
@given(seed=seeds, extra=st.integers(1, 9), clip=st.sampled_from([0.2, None]))
def test_value_loss_and_kl_do_not_see_padding_or_cuts(seed: int, extra: int, clip: float | None) -> None:
    b = batch(seed)
    wide = padded(b, extra)

    def outcomes(x: Ragged, parts: list[Tensor]) -> tuple[Tensor, Tensor]:
        leaf = x.log_probs.clone().requires_grad_()
        denominators, total = count(x.mask), torch.zeros(())
        for p in parts:
            tokens = value_loss(leaf[p], x.old_values[p], x.returns[p], x.mask[p], clip=clip).loss
            tokens = tokens + kl_penalty(leaf[p], x.ref[p], x.mask[p], "k3+")
            share = aggregate(tokens, x.mask[p], "seq-mean-token-mean", denominators=denominators)
            share.backward()
            total = total + share.detach()
        assert leaf.grad is not None
        return total, leaf.grad

    rows = [torch.arange(len(b.mask))]
    total, gradient = outcomes(b, rows)
    for other, width in ((outcomes(wide, rows), b.mask.shape[1]), (outcomes(b, cut(len(b.mask), seed)), None)):
        close(other[0], total)
        close(other[1][:, :width], gradient)


@some
@given(seed=seeds, extra=st.integers(1, 9))
def test_correction_does_not_see_padding(seed: int, extra: int) -> None:
    b = batch(seed)
    wide = padded(b, extra)
    rules = [Rejection("token_k2", 0.05), Rejection("seq_mean_k3", 0.04), Rejection("seq_max_k1", 1.5)]
    rule = Correction("token", 1.5, normalize=True, rejections=rules)
    a, c = correct(b.old, b.rollout, b.mask, rule), correct(wide.old, wide.rollout, wide.mask, rule)
    assert torch.equal(c.kept[:, : b.mask.shape[1]], a.kept) and not c.kept[:, b.mask.shape[1] :].any()
    assert a.importance_weights is not None and c.importance_weights is not None
    close(c.importance_weights[:, : b.mask.shape[1]], a.importance_weights)
    for name, metric in a.metrics.items():
        assert c.metrics[name].value() == pytest.approx(metric.value(), rel=1e-4, abs=1e-6, nan_ok=True), name


@some
@given(seed=seeds, mode=st.sampled_from(MODES))
def test_rejected_tokens_and_rows_leave_the_loss_as_if_they_had_never_been(seed: int, mode: Aggregation) -> None:
    b, loss = batch(seed), make("ppo")
    kept = correct(b.old, b.rollout, b.mask, Correction(rejections=[Rejection("token_k2", 0.01)])).kept
    poison = torch.where(kept, b.log_probs, torch.nan)
    rows = [torch.arange(len(b.mask))]
    train = PolicyInputs(b.log_probs, b.old, b.advantages, kept)
    total, gradient, _ = update(loss, train, mode, rows)
    other, other_gradient, _ = update(loss, replace(train, log_probs=poison), mode, rows)
    close(other, total)
    close(other_gradient, gradient)
    present = kept.any(1).nonzero()[:, 0]
    alone, _, _ = update(loss, train.rows(present), mode, [torch.arange(len(present))])
    close(alone, total)
