"""House rules of docs/algorithms.md as properties, for every loss and estimator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.algorithms.aggregate import Aggregation, Denominators, aggregate, count
from megarl.algorithms.correction import STATISTICS, Correction, Rejection, WeightLevel, correct
from megarl.algorithms.kl import kl_penalty, penalized_rewards
from megarl.algorithms.policy_losses import PolicyInputs, PolicyLoss
from megarl.algorithms.value_losses import value_loss
from megarl.observability.metrics import Metrics, merge, values
from tests.unit.algorithms.batches import Ragged, ragged
from tests.unit.algorithms.cases import (
    ESTIMATOR_CASES,
    LOSSES,
    estimate,
    make_loss,
    on_tensors,
    policy_inputs,
    rows_of,
    single,
)

MODES: tuple[Aggregation, ...] = (
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean",
)  # fmt: skip
seeds = st.integers(0, 10_000)
some = settings(max_examples=12, deadline=None)


def batch(seed: int) -> Ragged:
    """float32, with the awkward sizes a seed implies."""
    return single(ragged(seed, rows=4 + seed % 9, length=1 + seed % 11))


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


def update(
    loss: PolicyLoss, inputs: PolicyInputs, mode: Aggregation, parts: list[Tensor]
) -> tuple[Tensor, Tensor, Metrics, float]:
    """Loss, gradient and merged metrics of a minibatch taken in parts; and the sum of its absolute terms."""
    leaf = inputs.log_probs.clone().requires_grad_()
    denominators = sum((count(inputs.response_mask[p]) for p in parts), Denominators(0, 0))
    total, size, seen = torch.zeros(()), 0.0, []
    for part in parts:
        result = loss(replace(inputs, log_probs=leaf).rows(part))
        share, terms = (
            aggregate(x, inputs.response_mask[part], loss.aggregation or mode, denominators=denominators, length=16)
            for x in (result.loss, result.loss.detach().abs())
        )
        size += float(terms)
        share.backward()
        total = total + share.detach()
        seen.append(result.metrics)
    assert leaf.grad is not None
    return total, leaf.grad, merge(seen), size


def close(a: Tensor, b: Tensor, scale: float | None = None) -> None:
    """Equal to 1e-5 of their size, or of the size of the terms they are sums of."""
    if scale is None:
        scale = float(b.abs().max()) if b.numel() else 0.0
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * max(scale, 1e-3))


def same(actual: Metrics, expected: Metrics, rel: float = 1e-5) -> None:
    assert values(actual) == pytest.approx(values(expected), rel=rel, abs=1e-6, nan_ok=True)


def cut(rows: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(rows, generator=generator)
    sizes = torch.randint(1, 4, (rows,), generator=generator).cumsum(0)
    return [p for p in order.tensor_split(sizes[sizes < rows]) if len(p)]


@pytest.mark.parametrize("case", LOSSES)
@some
@given(seed=seeds, mode=st.sampled_from(MODES))
def test_loss_does_not_depend_on_the_cut_into_microbatches(case: str, seed: int, mode: Aggregation) -> None:
    b, loss = batch(seed), make_loss(case)
    inputs = policy_inputs(loss, b, torch.arange(len(b.mask)))
    whole = update(loss, inputs, mode, [torch.arange(len(b.mask))])
    parts = update(loss, inputs, mode, cut(len(b.mask), seed))
    close(parts[0], whole[0], scale=whole[3])
    close(parts[1], whole[1])
    same(parts[2], whole[2])


@pytest.mark.parametrize("case", LOSSES)
@some
@given(seed=seeds, extra=st.integers(1, 9), mode=st.sampled_from(MODES))
def test_loss_does_not_see_padding(case: str, seed: int, extra: int, mode: Aggregation) -> None:
    b, loss = batch(seed), make_loss(case)
    wide, rows = padded(b, extra), torch.arange(len(b.mask))
    a = update(loss, policy_inputs(loss, b, rows), mode, [rows])
    c = update(loss, policy_inputs(loss, wide, rows), mode, [rows])
    assert c[0].isfinite() and c[1].isfinite().all()
    close(c[0], a[0], scale=a[3])
    close(c[1][:, : b.mask.shape[1]], a[1])
    assert (c[1][~wide.mask] == 0).all()
    same(c[2], a[2])


@pytest.mark.parametrize("case", LOSSES)
@some
@given(seed=seeds, mode=st.sampled_from(MODES))
def test_loss_gradient_and_metrics_follow_the_rows(case: str, seed: int, mode: Aggregation) -> None:
    b, loss = batch(seed), make_loss(case)
    order = torch.randperm(len(b.mask), generator=torch.Generator().manual_seed(seed))
    rows = torch.arange(len(b.mask))
    a = update(loss, policy_inputs(loss, b, rows), mode, [rows])
    c = update(loss, policy_inputs(loss, rows_of(b, order), order), mode, [rows])
    close(c[0], a[0], scale=a[3])
    close(c[1], a[1][order])
    same(c[2], a[2])


@pytest.mark.parametrize(("kind", "norm"), ESTIMATOR_CASES)
@some
@given(seed=seeds, extra=st.integers(1, 40))
def test_advantages_do_not_see_padding(kind: str, norm: bool, seed: int, extra: int) -> None:
    b = batch(seed)
    wide = padded(b, extra)
    a, c = estimate(kind, b, norm_by_std=norm), estimate(kind, wide, norm_by_std=norm)
    for narrow, padded_out in ((a.advantages, c.advantages), (a.returns, c.returns)):
        if narrow is None:
            assert padded_out is None
            continue
        assert padded_out is not None and padded_out.isfinite().all()
        close(padded_out[:, : b.mask.shape[1]], narrow)
        assert (padded_out[~wide.mask] == 0).all()
    same(c.metrics, a.metrics)


@pytest.mark.parametrize(("kind", "norm"), ESTIMATOR_CASES)
@some
@given(seed=seeds)
def test_advantages_follow_the_rows_and_not_the_group_numbers(kind: str, norm: bool, seed: int) -> None:
    b = batch(seed)
    order = torch.randperm(len(b.mask), generator=torch.Generator().manual_seed(seed))
    moved = rows_of(b, order)
    moved.group = moved.group * -31 + 7
    a, c = estimate(kind, b, norm_by_std=norm), estimate(kind, moved, norm_by_std=norm)
    close(c.advantages, a.advantages[order])
    same(c.metrics, a.metrics)


@some
@given(seed=seeds, extra=st.integers(1, 9), clip=st.sampled_from([0.2, None]))
def test_value_loss_and_kl_do_not_see_padding_or_cuts(seed: int, extra: int, clip: float | None) -> None:
    b = batch(seed)
    wide = padded(b, extra)

    def outcomes(x: Ragged, parts: list[Tensor]) -> tuple[Tensor, Tensor, Metrics]:
        leaf = x.log_probs.clone().requires_grad_()
        denominators, total, seen = count(x.mask), torch.zeros(()), []
        for p in parts:
            result = value_loss(leaf[p], x.old_values[p], x.returns[p], x.mask[p], clip=clip)
            seen.append(result.metrics)
            tokens = result.loss + kl_penalty(leaf[p], x.ref[p], x.mask[p], "k3+")
            share = aggregate(tokens, x.mask[p], "seq-mean-token-mean", denominators=denominators)
            share.backward()
            total = total + share.detach()
        assert leaf.grad is not None
        return total, leaf.grad, merge(seen)

    rows = [torch.arange(len(b.mask))]
    total, gradient, metrics = outcomes(b, rows)
    for other, width in ((outcomes(wide, rows), b.mask.shape[1]), (outcomes(b, cut(len(b.mask), seed)), None)):
        close(other[0], total)
        close(other[1][:, :width], gradient)
        same(other[2], metrics)


@pytest.mark.parametrize("level", ["token", "sequence"])
@some
@given(seed=seeds, extra=st.integers(1, 9), lower=st.sampled_from([None, 0.7]))
def test_correction_does_not_see_padding_or_the_order_of_rows(
    level: WeightLevel, seed: int, extra: int, lower: float | None
) -> None:
    b = batch(seed)
    order = torch.randperm(len(b.mask), generator=torch.Generator().manual_seed(seed))
    rules = [Rejection("token_k2", 0.05), Rejection("seq_mean_k3", 0.04), Rejection("seq_max_k1", 1.5)]
    rule = Correction(level, 1.5, lower, normalize=True, rejections=rules)
    a = correct(b.old, b.rollout, b.mask, rule)
    other = rows_of(padded(b, extra), order)
    c = correct(other.old, other.rollout, other.mask, rule)
    width = b.mask.shape[1]
    assert torch.equal(c.kept[:, :width], a.kept[order]) and not c.kept[:, width:].any()
    assert a.importance_weights is not None and c.importance_weights is not None
    close(c.importance_weights[:, :width], a.importance_weights[order])
    same(c.metrics, a.metrics, rel=1e-4)


@some
@given(seed=seeds, extra=st.integers(1, 9), estimator=st.sampled_from(["k1", "abs", "k2", "k3"]))
def test_kl_in_the_reward_does_not_see_padding_order_or_cuts(seed: int, extra: int, estimator: str) -> None:
    b = batch(seed)
    order = torch.randperm(len(b.mask), generator=torch.Generator().manual_seed(seed))

    def rewards(x: Ragged) -> tuple[Tensor, Metrics]:
        return penalized_rewards(x.rewards, x.old, x.ref, x.mask, coef=0.3, estimator=estimator)

    whole, measured = rewards(b)
    moved, seen = rewards(rows_of(padded(b, extra), order))
    close(moved[:, : b.mask.shape[1]], whole[order])
    assert (moved[:, b.mask.shape[1] :] == 0).all()
    same(seen, measured)
    parts = [rewards(rows_of(b, part)) for part in cut(len(b.mask), seed)]
    same(merge(metrics for _, metrics in parts), measured)


@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (3, 0), (3, 4)])
def test_nothing_to_learn_from_is_defined(shape: tuple[int, int], caplog: pytest.LogCaptureFixture) -> None:
    """No rows, no columns, or nothing under the mask: zeros with a graph, no exception, no NaN."""
    b = single(ragged(1, rows=3, length=4))
    b = rows_of(on_tensors(b, lambda x: x[:, : shape[1]] if x.dim() == 2 else x), torch.arange(shape[0]))
    b.mask = torch.zeros_like(b.mask)
    for kind, norm in ESTIMATOR_CASES:
        assert (estimate(kind, b, norm_by_std=norm).advantages == 0).all(), kind
    levels: tuple[WeightLevel | None, ...] = ("token", "sequence", None)
    for level in levels:
        rules = [Rejection(name, 1.5) for name in STATISTICS]
        result = correct(b.old, b.rollout, b.mask, Correction(level, normalize=True, rejections=rules))
        assert not result.kept.any()
        assert result.importance_weights is None or (result.importance_weights == 0).all()
    for case in LOSSES:
        loss = make_loss(case)
        inputs = policy_inputs(loss, b, torch.arange(shape[0]))
        total, gradient, _, _ = update(loss, inputs, "token-mean", [torch.arange(shape[0])])
        assert total == 0 and (gradient == 0).all(), case
    assert "without a single valid token" in caplog.text


@some
@given(seed=seeds, mode=st.sampled_from(MODES))
def test_rejected_tokens_and_rows_leave_the_loss_as_if_they_had_never_been(seed: int, mode: Aggregation) -> None:
    b, loss = batch(seed), make_loss("ppo")
    kept = correct(b.old, b.rollout, b.mask, Correction(rejections=[Rejection("token_k2", 0.01)])).kept
    poison = torch.where(kept, b.log_probs, torch.nan)
    rows = [torch.arange(len(b.mask))]
    train = PolicyInputs(b.log_probs, b.old, b.advantages, kept)
    total, gradient, _, size = update(loss, train, mode, rows)
    other, other_gradient, _, _ = update(loss, replace(train, log_probs=poison), mode, rows)
    close(other, total, scale=size)
    close(other_gradient, gradient)
    present = kept.any(1).nonzero()[:, 0]
    alone, _, _, _ = update(loss, train.rows(present), mode, [torch.arange(len(present))])
    close(alone, total, scale=size)
