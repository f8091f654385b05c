"""Policy and value losses against NumPy references, finite differences, and edge cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megarl.algorithms.aggregate import aggregate, count
from megarl.algorithms.policy_losses import POLICY_LOSSES, PolicyInputs, PolicyLoss, TokenLoss, build_policy_loss
from megarl.algorithms.policy_losses.covariance import _descending_bits, smallest
from megarl.algorithms.value_losses import value_loss
from megarl.errors import ConfigError
from megarl.observability.metrics import Mean
from tests.unit.algorithms import references as ref
from tests.unit.algorithms.batches import Ragged, ragged

OPTIONS: dict[str, dict[str, Any]] = {
    "dro": {"dro_beta": 0.7},
    "kl_cov": {"kl_cov_ratio": 0.2},
    "clip_cov": {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.05, "clip_cov_ub": 5.0},
}


def make(kind: str, **changes: Any) -> PolicyLoss:
    settings = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0, "options": OPTIONS.get(kind)} | changes
    return build_policy_loss(kind, **settings)


def inputs_of(b: Ragged, loss: PolicyLoss, **changes: Any) -> PolicyInputs:
    inputs = PolicyInputs(b.log_probs, b.old, b.advantages, b.mask, **changes)
    if loss.needs_first_pass:
        inputs = replace(inputs, selected=loss.first_pass(inputs, row_id=torch.arange(len(b.mask)) * 13, seed=3))
    return inputs


SIMPLE: dict[str, Callable[[float, float, float], float]] = {
    "ppo": ref.ppo,
    "vanilla": ref.ppo,
    "cispo": lambda lp, old, a: ref.cispo(lp, old, a)[0],
    "sapo": ref.sapo,
    "dppo_tv": lambda lp, old, a: ref.dppo(lp, old, a, "tv")[0],
    "dppo_kl": lambda lp, old, a: ref.dppo(lp, old, a, "kl")[0],
    "gpg": lambda lp, old, a: -a * lp,
    "dro": lambda lp, old, a: -(a * lp - 0.35 * (lp - old) ** 2),
    "reinforce": lambda lp, old, a: -a * lp * min(ref.ratio(lp, old), 2.0),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", SIMPLE)
def test_token_loss_equals_its_reference(kind: str, seed: int) -> None:
    b = ragged(seed)
    result = make(kind)(PolicyInputs(b.log_probs, b.old, b.advantages, b.mask))
    expected = np.zeros(b.mask.shape)
    for i, t in zip(*np.nonzero(b.mask.numpy()), strict=True):
        expected[i, t] = SIMPLE[kind](float(b.log_probs[i, t]), float(b.old[i, t]), float(b.advantages[i, t]))
    np.testing.assert_allclose(result.loss.numpy(), expected, rtol=1e-9, atol=1e-9)
    assert (result.loss[~b.mask] == 0).all()


@pytest.mark.parametrize("kind", ["gspo", "geo_mean"])
def test_row_loss_equals_its_reference(kind: str) -> None:
    b = ragged(1)
    loss = make(kind)
    result = loss(PolicyInputs(b.log_probs, b.old, b.advantages, b.mask))
    assert loss.aggregation == "seq-mean-token-mean"
    function = ref.gspo_row if kind == "gspo" else ref.geo_mean_row
    rows = [
        function(b.log_probs[i, tokens].numpy(), b.old[i, tokens].numpy(), b.advantages[i, tokens].numpy())
        for i, tokens in enumerate(ref.rows_of(b.mask.numpy()))
        if tokens
    ]
    total = aggregate(result.loss, b.mask, loss.aggregation, denominators=count(b.mask))
    assert float(total) == pytest.approx(np.mean(rows), rel=1e-9)


def test_covariance_losses_treat_the_right_tokens_apart() -> None:
    b = ragged(2)
    mask, lp, a = b.mask, torch.where(b.mask, b.log_probs, 0.0), torch.where(b.mask, b.advantages, 0.0)
    n = int(mask.sum())
    cov = (a - a.sum() / n) * (lp - lp.sum() / n)
    loss = make("kl_cov")
    inputs = inputs_of(b, loss)
    assert inputs.selected is not None
    k = int(0.2 * n)
    top = torch.where(mask, cov, -torch.inf).flatten().topk(k).indices
    assert set(top.tolist()) == set(inputs.selected.flatten().nonzero()[:, 0].tolist())
    ratio = torch.where(mask, b.log_probs - b.old, 0.0).exp()
    extra = torch.where(inputs.selected, (b.log_probs - b.old).abs() * 0.1, 0.0)
    torch.testing.assert_close(loss(inputs).loss, extra - a * ratio)

    loss = make("clip_cov")
    inputs = inputs_of(b, loss)
    assert inputs.selected is not None and 0 < int(inputs.selected.sum()) <= int(0.2 * n)
    clipped = ratio.clamp(0.8, 1.28) * a < ratio * a
    assert not (inputs.selected & (~mask | clipped | (cov <= 0.05) | (cov >= 5.0))).any()
    surrogate = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a)
    torch.testing.assert_close(loss(inputs).loss, torch.where(inputs.selected, 0.0, surrogate))
    other = loss.first_pass(inputs, row_id=torch.arange(len(mask)) * 13, seed=4)
    assert not torch.equal(other, inputs.selected)


def test_first_pass_needs_no_more_than_sums_over_ranks() -> None:
    b = ragged(7, rows=16)
    for kind in ("clip_cov", "kl_cov"):
        loss = make(kind)
        row_id = torch.arange(16) + 100
        whole = loss.first_pass(PolicyInputs(b.log_probs, b.old, b.advantages, b.mask), row_id=row_id, seed=1)
        order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
        parts = _ranks(loss, b, [order[:5], order[5:]], row_id)
        assert torch.equal(torch.cat(parts)[order.argsort()], whole)


def _ranks(loss: PolicyLoss, b: Ragged, parts: list[Tensor], row_id: Tensor) -> list[Tensor]:
    import threading

    barrier, lock, totals = threading.Barrier(len(parts)), threading.Lock(), {}
    out: list[Any] = [None] * len(parts)

    def rank(n: int, rows: Tensor) -> None:
        calls = 0

        def reduce(x: Tensor) -> Tensor:
            nonlocal calls
            with lock:
                totals[calls] = totals.get(calls, 0) + x
            barrier.wait(timeout=30)
            calls += 1
            return totals[calls - 1].clone()

        inputs = PolicyInputs(b.log_probs[rows], b.old[rows], b.advantages[rows], b.mask[rows])
        out[n] = loss.first_pass(inputs, row_id=row_id[rows], seed=1, reduce=reduce)

    threads = [threading.Thread(target=rank, args=item) for item in enumerate(parts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(x is not None for x in out)
    return out


def test_radix_selection_marks_the_smallest() -> None:
    keys = torch.randint(0, 1 << 62, (1000,), generator=torch.Generator().manual_seed(0))
    for k in (1, 7, 999, 1000, 2000):
        expected = set(keys.sort().values[:k].tolist())
        assert set(keys[smallest(keys, k, None)].tolist()) == expected
    assert smallest(keys[:0], 3, None).shape == (0,)
    values = torch.tensor([3.0, -0.0, -7.5, 0.25, -1e-30, torch.inf, -torch.inf])
    order = _descending_bits(values).argsort()
    assert values[order].tolist() == sorted(values.tolist(), reverse=True)


# The stop-gradients of these losses make a finite difference of the whole meaningless: their slope has a reference.
STOPPED = {"cispo", "dppo_tv", "dppo_kl", "reinforce", "gspo"}


@pytest.mark.parametrize("kind", [k for k in POLICY_LOSSES.names() if k not in STOPPED])
@pytest.mark.parametrize("dual_clip", [3.0, None])
def test_gradient_equals_finite_differences(kind: str, dual_clip: float | None) -> None:
    b = ragged(3, rows=6, length=5)
    loss = make(kind, dual_clip=dual_clip)
    inputs = inputs_of(b, loss, importance_weights=None if kind == "geo_mean" else b.weights)
    check_gradient(loss, inputs, b)


def check_gradient(loss: PolicyLoss, inputs: PolicyInputs, b: Ragged) -> None:
    denominators = count(b.mask)

    def value(lp: Tensor) -> Tensor:
        token = loss(replace(inputs, log_probs=lp)).loss
        return aggregate(token, b.mask, loss.aggregation or "token-mean", denominators=denominators)

    leaf = b.log_probs.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(value(leaf), leaf)
    assert (gradient[~b.mask] == 0).all()
    step = 1e-6
    for i, t in b.mask.nonzero().tolist():
        high, low = b.log_probs.clone(), b.log_probs.clone()
        high[i, t] += step
        low[i, t] -= step
        numeric = (value(high) - value(low)).item() / (2 * step)
        assert float(gradient[i, t]) == pytest.approx(numeric, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("kind", sorted(STOPPED))
def test_gradient_of_losses_with_stopped_factors(kind: str) -> None:
    b = ragged(4)
    loss = make(kind)
    leaf = b.log_probs.clone().requires_grad_()
    token = loss(PolicyInputs(leaf, b.old, b.advantages, b.mask)).loss
    (gradient,) = torch.autograd.grad(token.sum(), leaf)
    assert (gradient[~b.mask] == 0).all()
    for i, t in b.mask.nonzero().tolist():
        lp, old, a = float(b.log_probs[i, t]), float(b.old[i, t]), float(b.advantages[i, t])
        if kind == "gspo":
            valid = b.mask[i]
            g = float((b.log_probs[i, valid] - b.old[i, valid]).mean().exp())
            expected = -a * g if -a * g >= -a * min(max(g, 0.8), 1.28) else 0.0
        elif kind == "reinforce":
            expected = -a * min(ref.ratio(lp, old), 2.0)
        elif kind == "cispo":
            expected = ref.cispo(lp, old, a)[1]
        else:
            expected = ref.dppo(lp, old, a, kind[-2:])[1]
        assert float(gradient[i, t]) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("kind", POLICY_LOSSES.names())
def test_large_log_ratios_stay_finite_and_have_no_gradient_through_the_clamp(kind: str) -> None:
    mask = torch.ones(2, 2, dtype=torch.bool)
    lp = torch.tensor([[-1.0, -200.0], [-1.0, -200.0]]).requires_grad_()
    old = torch.tensor([[-200.0, -1.0], [-200.0, -1.0]])
    advantages = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    loss = make(kind, dual_clip=None)
    inputs = PolicyInputs(lp, old, advantages, mask, selected=torch.zeros_like(mask))
    result = loss(inputs)
    assert result.loss.isfinite().all()
    (gradient,) = torch.autograd.grad(result.loss.sum(), lp)
    assert gradient.isfinite().all()
    if kind in ("ppo", "vanilla", "sapo", "clip_cov", "kl_cov", "geo_mean"):
        assert (gradient == 0).all()


@pytest.mark.parametrize("kind", POLICY_LOSSES.names())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_are_computed_in_float32(kind: str, dtype: torch.dtype) -> None:
    b = ragged(6)
    loss = make(kind)
    rounded = {name: getattr(b, name).to(dtype) for name in ("log_probs", "old", "advantages")}
    narrow = inputs_of(replace(b, **rounded), loss)
    wide = inputs_of(replace(b, **{name: x.float() for name, x in rounded.items()}), loss)
    leaf = narrow.log_probs.clone().requires_grad_()
    result = loss(replace(narrow, log_probs=leaf))
    assert result.loss.dtype == torch.float32
    torch.testing.assert_close(result.loss.detach(), loss(wide).loss, rtol=0, atol=0)
    (gradient,) = torch.autograd.grad(result.loss.sum(), leaf)
    assert gradient.dtype == dtype


@pytest.mark.parametrize("kind", POLICY_LOSSES.names())
def test_inputs_of_another_precision_take_that_of_the_log_probs(kind: str) -> None:
    b = ragged(6)
    loss = make(kind)
    inputs = inputs_of(b, loss, importance_weights=b.weights)
    mixed = loss(replace(inputs, log_probs=b.log_probs.float(), importance_weights=b.weights.bfloat16()))
    narrow = {name: getattr(inputs, name).float() for name in ("log_probs", "old_log_probs", "advantages")}
    expected = loss(replace(inputs, **narrow, importance_weights=b.weights.bfloat16().float()))
    assert mixed.loss.dtype == torch.float32
    torch.testing.assert_close(mixed.loss, expected.loss, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", POLICY_LOSSES.names())
def test_all_masked_batch_has_zero_loss_with_a_graph(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    b = ragged(1)
    b.mask = torch.zeros_like(b.mask)
    loss = make(kind)
    inputs = inputs_of(b, loss)
    leaf = b.log_probs.clone().requires_grad_()
    total = aggregate(
        loss(replace(inputs, log_probs=leaf)).loss,
        b.mask,
        loss.aggregation or "token-mean",
        denominators=count(b.mask),
    )
    (gradient,) = torch.autograd.grad(total, leaf)
    assert total.item() == 0 and (gradient == 0).all()
    assert "without a single valid token" in caplog.text


def test_importance_weights_scale_loss_and_gradient() -> None:
    b = ragged(8)
    for kind in ("ppo", "gspo", "cispo", "gpg"):
        loss = make(kind)
        plain, weighted = b.log_probs.clone().requires_grad_(), b.log_probs.clone().requires_grad_()
        without = loss(PolicyInputs(plain, b.old, b.advantages, b.mask))
        given = loss(PolicyInputs(weighted, b.old, b.advantages, b.mask, importance_weights=b.weights))
        clean = torch.where(b.mask, b.weights, 0.0)
        torch.testing.assert_close(given.loss, without.loss * clean)
        (g1,) = torch.autograd.grad(without.loss.sum(), plain)
        (g2,) = torch.autograd.grad(given.loss.sum(), weighted)
        torch.testing.assert_close(g2, g1 * clean)


def test_geo_mean_weighs_rows_by_the_geometric_mean() -> None:
    b = ragged(9)
    loss = make("geo_mean")
    inputs = PolicyInputs(b.log_probs, b.old, b.advantages, b.mask)
    plain, weighted = loss(inputs).loss, loss(replace(inputs, importance_weights=b.weights)).loss
    for i, tokens in enumerate(ref.rows_of(b.mask.numpy())):
        if tokens:
            factor = float(b.weights[i, tokens].log().mean().exp())
            torch.testing.assert_close(weighted[i, tokens], plain[i, tokens] * factor)
    check_gradient(loss, replace(inputs, importance_weights=b.weights), b)


def test_clip_fractions() -> None:
    mask = torch.ones(1, 4, dtype=torch.bool)
    lp = torch.tensor([[1.0, -1.0, 2.0, 0.1]])
    advantages = torch.tensor([[1.0, -1.0, -1.0, 1.0]])
    metrics = make("ppo")(PolicyInputs(lp, torch.zeros(1, 4), advantages, mask)).metrics
    assert metrics["actor/pg_clipfrac"] == Mean(2.0, 4.0)  # high clip, low clip
    assert metrics["actor/pg_clipfrac_lower"] == Mean(1.0, 4.0)  # dual clip: e^2 > 3


@pytest.mark.parametrize("clip", [0.3, None])
def test_value_loss(clip: float | None) -> None:
    b = ragged(2)
    leaf = b.values.clone().requires_grad_()
    result = value_loss(leaf, b.old_values, b.returns, b.mask, clip=clip)
    expected = np.zeros(b.mask.shape)
    for i, t in zip(*np.nonzero(b.mask.numpy()), strict=True):
        expected[i, t] = ref.value(float(b.values[i, t]), float(b.old_values[i, t]), float(b.returns[i, t]), clip)
    np.testing.assert_allclose(result.loss.detach().numpy(), expected, rtol=1e-9, atol=1e-12)
    (gradient,) = torch.autograd.grad(result.loss.sum(), leaf)
    assert (gradient[~b.mask] == 0).all()
    for i, t in b.mask.nonzero().tolist():
        v, old, target = (float(x[i, t]) for x in (b.values, b.old_values, b.returns))
        numeric = (ref.value(v + 1e-6, old, target, clip) - ref.value(v - 1e-6, old, target, clip)) / 2e-6
        assert float(gradient[i, t]) == pytest.approx(numeric, rel=1e-5, abs=1e-7)


def test_value_clip_that_does_not_act_is_not_counted() -> None:
    values = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(4, 64, dtype=torch.bool)
    leaf = values.clone().requires_grad_()
    result = value_loss(leaf, values + 0.1, torch.zeros(4, 64), mask, clip=0.2)
    assert result.metrics["critic/vf_clipfrac"].value() == 0
    (gradient,) = torch.autograd.grad(result.loss.sum(), leaf)
    torch.testing.assert_close(gradient, values)


def test_unknown_option_names_those_it_takes() -> None:
    with pytest.raises(ConfigError, match=r"does not take 'dro_beta'.*its options are: none"):
        make("ppo", options={"dro_beta": 1.0})
    with pytest.raises(ConfigError, match=r"its options are: clip_cov_ratio, clip_cov_lb, clip_cov_ub"):
        make("clip_cov", options={"ratio": 1.0})
    with pytest.raises(ConfigError, match="needs the option 'dro_beta'"):
        make("dro", options={})
    with pytest.raises(ConfigError, match="first_pass"):
        b = ragged()
        make("kl_cov")(PolicyInputs(b.log_probs, b.old, b.advantages, b.mask))


def my_loss(inputs: PolicyInputs, *, clip_high: float, power: int = 1) -> TokenLoss:
    return TokenLoss((inputs.log_probs / inputs.old_log_probs + 1 / inputs.advantages) * clip_high * power, {})


def test_import_path_needs_no_registration_and_cannot_leak_from_the_mask() -> None:
    b = ragged(5)
    leaf = b.log_probs.clone().requires_grad_()
    result = make(f"{__name__}:my_loss", options={"power": 2})(PolicyInputs(leaf, b.old, b.advantages, b.mask))
    assert result.loss.isfinite().all() and (result.loss[~b.mask] == 0).all()
    (gradient,) = torch.autograd.grad(result.loss.sum(), leaf)
    torch.testing.assert_close(gradient, torch.where(b.mask, 0.56 / b.old, 0.0))
    sums = make(f"{__name__}:my_loss", options={"power": 2}).row_sums(inputs_of(b, make("ppo"))).sums
    torch.testing.assert_close(sums, result.loss.detach().sum(-1))
    with pytest.raises(ConfigError, match="cannot import"):
        make("no_such_package.losses:mine")
