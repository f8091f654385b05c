"""Golden values of the project's definitions of its algorithms, section 6: fp32 to 1e-5, exactly 0 off the mask.

Sources: verl 0.9.1's functions (trainer/ppo/core_algos.py, run from its wheel as benchmarks/algorithms.py does) give
each of these numbers on valid tokens, but for the correction and token-sum, which follow from their formulas by hand.
Each test names the function and the paper. Off the mask verl leaves values in advantages and returns; here they are 0.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algorithms.advantages import Advantages, build_estimator
from megarl.algorithms.aggregate import aggregate, count
from megarl.algorithms.correction import Correction, correct
from megarl.algorithms.kl import KlController, kl_penalty
from megarl.algorithms.policy_losses import PolicyInputs, build_policy_loss
from tests.unit.algorithms.batches import ADVANTAGES, GROUP, MASK, NEW, OLD, REWARDS, ROLLOUT, VALUES


def estimate(kind: str, norm_by_std: bool = True) -> Advantages:
    estimator = build_estimator(kind, gamma=0.9, lam=0.8, norm_by_std=norm_by_std, bootstrap_truncated=False)
    return estimator(REWARDS, MASK, GROUP, values=VALUES)


def same(actual: Tensor, expected: Any) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=actual.dtype), rtol=1e-5, atol=1e-5)


def test_gae() -> None:
    # compute_gae_advantage_return; arXiv:1506.02438, eq. 16.
    result = estimate("gae")
    same(
        result.advantages,
        [
            [-0.274493, -0.206694, 0, -0.088252, 0.100528],
            [-1.175345, -0.923779, -0.598657, 0, 0],
            [-1.297843, 0, 0, 0, 0],
            [0.307504, 0.82013, 1.313615, 2.023288, 0],
        ],
    )
    assert result.returns is not None
    same(
        result.returns,
        [
            [0.485453, 0.62424, 0, 0.792, 1],
            [0.37008, 0.414, 0.5, 0, 0],
            [0, 0, 0, 0, 0],
            [0.81841, 1.11168, 1.494, 2, 0],
        ],
    )
    assert (result.advantages[~MASK] == 0).all() and (result.returns[~MASK] == 0).all()


@pytest.mark.parametrize(
    ("kind", "norm_by_std", "rows"),
    [
        ("grpo", True, [0.707105, -0.707105, -0.707106, 0.707106]),
        ("grpo", False, [0.25, -0.25, -1, 1]),
        ("rloo", True, [0.5, -0.5, -2, 2]),
    ],
)
def test_row_estimators(kind: str, norm_by_std: bool, rows: list[float]) -> None:
    # compute_grpo_ and compute_rloo_outcome_advantage; arXiv:2402.03300, arXiv:2503.20783, arXiv:2402.14740.
    result = estimate(kind, norm_by_std)
    same(result.advantages, torch.where(MASK, torch.tensor(rows)[:, None], 0.0).tolist())


def test_reinforce_plus_plus() -> None:
    # compute_reinforce_plus_plus_outcome_advantage; arXiv:2501.03262.
    same(
        estimate("reinforce_plus_plus").advantages,
        [
            [-0.391953, -0.261659, 0, -0.116889, 0.043967],
            [-0.913126, -0.840741, -0.760313, 0, 0],
            [-1.564593, 0, 0, 0, 0],
            [0.780688, 1.041274, 1.330815, 1.652527, 0],
        ],
    )


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 0.836364),
        ("token-sum", 9.2),
        ("seq-mean-token-sum", 3.066667),
        ("seq-mean-token-sum-norm", 0.613333),
        ("seq-mean-token-mean", 0.816667),
    ],
)
def test_aggregation(mode: Any, expected: float) -> None:
    # agg_loss; arXiv:2503.14476, eq. 8; arXiv:2503.20783, section 3.2; arXiv:2402.03300, eq. 3.
    mask = MASK.clone()
    mask[2] = False
    loss = torch.arange(20).reshape(4, 5) / 10
    same(aggregate(loss, mask, mode, denominators=count(mask), length=5), expected)


LP, REF = [-1.0, -2.0, -0.5, -30.0], [-1.2, -1.0, -0.5, -1.0]


@pytest.mark.parametrize(
    ("estimator", "values", "gradient"),
    [
        ("k1", [0.2, -1, 0, -29], [1, 1, 1, 1]),
        ("k2", [0.02, 0.5, 0, 420.5], [0.2, -1, 0, -29]),
        ("k3", [0.018731, 0.718282, 0, 10], [0.181269, -1.718282, 0, 0]),
        ("abs", [0.2, 1, 0, 29], [1, -1, 0, -1]),
        ("k2+", [0.02, 0.5, 0, 420.5], [0.2, -1, 0, -29]),
        ("k1+", [0.2, -1, 0, -29], [0.2, -1, 0, -29]),
        ("abs+", [0.2, 1, 0, 29], [0.2, -1, 0, -29]),
        ("k3+", [0.018731, 0.718282, 0, 10], [0.2, -1, 0, -29]),
    ],
)
def test_kl(estimator: str, values: list[float], gradient: list[float]) -> None:
    # kl_penalty; joschu.net/blog/kl-approx.html.
    log_probs = torch.tensor([LP]).requires_grad_()
    kl = kl_penalty(log_probs, torch.tensor([REF]), torch.ones(1, 4, dtype=torch.bool), estimator)
    kl.sum().backward()
    same(kl.detach(), [values])
    assert log_probs.grad is not None
    same(log_probs.grad, [gradient])


@pytest.mark.parametrize(("kl", "expected"), [(12.0, 0.100512), (6.3, 0.100128)])
def test_adaptive_coefficient(kl: float, expected: float) -> None:
    # AdaptiveKLController; arXiv:1909.08593, section 2.2.
    controller = KlController(0.1, adaptive=True, target=6.0, horizon=1e4)
    controller.update(kl, 256)
    assert controller.value == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(
    ("kind", "mode", "expected"),
    [
        ("ppo", "token-mean", 0.169531),
        ("vanilla", "seq-mean-token-mean", 1.038187),
        ("gspo", None, 0.896442),
        ("gpg", "token-mean", -0.079167),
    ],
)
def test_policy_loss(kind: str, mode: Any, expected: float) -> None:
    # compute_policy_loss_vanilla, _gspo, _gpg; arXiv:1707.06347, arXiv:1912.09729, arXiv:2507.18071, arXiv:2504.02546.
    loss = build_policy_loss(kind, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    result = loss(PolicyInputs(NEW, OLD, ADVANTAGES, MASK))
    same(aggregate(result.loss, MASK, loss.aggregation or mode, denominators=count(MASK)), expected)
    assert result.metrics["actor/ppo_kl"].value() == pytest.approx(-0.125, abs=1e-6)
    if kind == "ppo":
        assert result.metrics["actor/pg_clipfrac"].value() == pytest.approx(0.333333, abs=1e-6)


def test_correction() -> None:
    # exp(old - rollout) capped at 2, its mean and (sum w)^2 / (n sum w^2); fengyao.notion.site/off-policy-rl.
    result = correct(OLD, ROLLOUT, MASK, Correction(level="token", upper=2.0))
    assert result.importance_weights is not None
    same(
        result.importance_weights,
        [
            [0.904837, 1.349859, 0, 0.606531, 1],
            [0.406570, 1.221403, 0.904837, 0, 0],
            [2, 0, 0, 0, 0],
            [1, 1, 0.818731, 1.105171, 0],
        ],
    )
    assert result.metrics["rollout_corr/rollout_is_mean"].value() == pytest.approx(1.02649, abs=1e-5)
    assert result.metrics["rollout_corr/rollout_is_eff_sample_size"].value() == pytest.approx(0.87952, abs=1e-5)
