from __future__ import annotations

import numpy as np
import pytest
import torch

from megarl.algorithms.kl import KlController, kl_penalty, penalized_rewards
from megarl.errors import CheckpointError, ConfigError
from tests.unit.algorithms import references as ref
from tests.unit.algorithms.batches import ragged


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"])
def test_value_and_gradient_equal_the_reference(estimator: str) -> None:
    b = ragged(1)
    leaf = b.log_probs.clone().requires_grad_()
    kl = kl_penalty(leaf, b.ref, b.mask, estimator)
    (gradient,) = torch.autograd.grad(kl.sum(), leaf)
    assert (kl[~b.mask] == 0).all() and (gradient[~b.mask] == 0).all()
    base = estimator.rstrip("+")
    for i, t in b.mask.nonzero().tolist():
        lp, r = float(b.log_probs[i, t]), float(b.ref[i, t])
        assert kl[i, t].item() == pytest.approx(ref.kl(lp, r, base), rel=1e-9, abs=1e-12)
        source = "k2" if estimator.endswith("+") else base
        numeric = (ref.kl(lp + 1e-6, r, source) - ref.kl(lp - 1e-6, r, source)) / 2e-6
        assert float(gradient[i, t]) == pytest.approx(numeric, rel=1e-5, abs=1e-7)


def test_reference_of_another_precision_takes_that_of_the_log_probs() -> None:
    b = ragged(2)
    expected = kl_penalty(b.log_probs.float(), b.ref.float(), b.mask, "k3")
    assert torch.equal(kl_penalty(b.log_probs.float(), b.ref, b.mask, "k3"), expected)
    assert kl_penalty(b.log_probs.bfloat16(), b.ref, b.mask, "k3").dtype == torch.float32


def test_k3_of_nearby_policies_is_not_lost_in_rounding() -> None:
    x = torch.tensor([[1e-4, -1e-4, 1e-3]])
    leaf = x.clone().requires_grad_()
    kl = kl_penalty(leaf, torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool), "k3")
    kl.sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(kl.detach(), x.square() / 2 - x**3 / 6, rtol=1e-3, atol=0)
    torch.testing.assert_close(leaf.grad, x - x.square() / 2, rtol=1e-5, atol=0)


def test_names_of_other_libraries() -> None:
    b = ragged(2)
    for theirs, ours in (("kl", "k1"), ("mse", "k2"), ("low_var_kl", "k3"), ("low_var_kl+", "k3+")):
        assert torch.equal(kl_penalty(b.log_probs, b.ref, b.mask, theirs), kl_penalty(b.log_probs, b.ref, b.mask, ours))
    with pytest.raises(ConfigError, match="unknown KL estimator 'k4'"):
        kl_penalty(b.log_probs, b.ref, b.mask, "k4")


def test_penalty_in_the_reward_touches_valid_tokens_only() -> None:
    b = ragged(3)
    rewards, metrics = penalized_rewards(b.rewards, b.old, b.ref, b.mask, coef=0.1, estimator="k1")
    expected = torch.where(b.mask, b.rewards - 0.1 * (b.old - b.ref), 0.0)
    torch.testing.assert_close(rewards, expected)
    mean = float(np.mean((b.old - b.ref)[b.mask].numpy()))
    assert metrics["actor/reward_kl_penalty"].value() == pytest.approx(mean)
    assert metrics["actor/reward_kl_penalty_coeff"].value() == 0.1


def test_controller_state_is_part_of_a_checkpoint() -> None:
    controller = KlController(0.1, adaptive=True, target=6.0, horizon=1e4)
    controller.update(12.0, 256)
    fresh = KlController(0.1, adaptive=True, target=6.0, horizon=1e4)
    fresh.load_state_dict(controller.state_dict())
    assert fresh.value == controller.value != 0.1
    fixed = KlController(0.5, adaptive=False, target=6.0, horizon=1e4)
    fixed.update(100.0, 1000)
    fixed.load_state_dict(controller.state_dict())
    assert fixed.value == 0.5
    with pytest.raises(CheckpointError):
        fresh.load_state_dict({})


def test_controller_bounds_and_ignores_nothing_measured() -> None:
    controller = KlController(1.0, adaptive=True, target=1.0, horizon=10.0)
    controller.update(-100.0, 10)
    assert controller.value == pytest.approx(0.8)
    controller.update(float("nan"), 10)
    assert controller.value == pytest.approx(0.8)
