"""Algorithm: advantages, losses, KL, importance correction. Definitions and papers: megarl/algorithms."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from megarl.config.schema.base import StrictModel

LossAggregation = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"
]
KlEstimator = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"]


class PolicyLossConfig(StrictModel):
    """Token loss of the policy. Read by the actor's update."""

    kind: str = "ppo"
    """Registered policy loss (ppo, gspo, cispo, ...) or the import path ``package.module:function`` of your own."""
    clip_low: float = Field(0.2, ge=0, lt=1)
    """Ratios below 1 - clip_low are clipped."""
    clip_high: float = Field(0.2, ge=0)
    """Ratios above 1 + clip_high are clipped; larger than clip_low is DAPO's clip-higher."""
    dual_clip: float | None = Field(3.0, gt=1)
    """Bound c of the dual clip for negative advantages; None leaves it out."""
    aggregation: LossAggregation = "token-mean"
    """How token losses become one number; every denominator is counted over the global minibatch."""
    aggregation_length: int | None = Field(None, ge=1)
    """Constant length of seq-mean-token-sum-norm; required by it."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of the loss; one the loss does not take is an error."""


class KlConfig(StrictModel):
    """KL penalty towards the reference policy."""

    where: Literal["none", "loss", "reward"] = "none"
    """Add the KL to the policy loss, subtract it from the token rewards, or leave the reference policy out."""
    estimator: KlEstimator = "k3"
    """Per-token estimator (Schulman, joschu.net/blog/kl-approx.html); ``+`` takes the gradient of k2."""
    coef: float = Field(0.001, ge=0)
    """Coefficient; the starting value when adaptive."""
    adaptive: bool = False
    """Adapt the coefficient to the target (reward only; arXiv:1909.08593, section 2.2)."""
    target: float = Field(6.0, gt=0)
    """Target KL of the adaptive controller, in nats per response token as measured."""
    horizon: float = Field(10_000.0, gt=0)
    """Horizon of the adaptive controller in samples."""


class AdvantageConfig(StrictModel):
    """Advantage estimation."""

    kind: str = "grpo"
    """Registered estimator (grpo, gae, rloo, ...) or the import path ``package.module:function`` of your own."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount."""
    lam: float = Field(1.0, ge=0, le=1)
    """Lambda of generalized advantage estimation."""
    norm_by_std: bool = True
    """Divide group-relative advantages by the group's deviation (GRPO); false is Dr. GRPO."""
    bootstrap_truncated: bool = False
    """Bootstrap the return of responses cut at the length limit from the critic (gae only)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of the estimator; one it does not take is an error."""


class AlgorithmConfig(StrictModel):
    """One policy-gradient algorithm."""

    advantage: AdvantageConfig = AdvantageConfig()
    """Advantage estimator."""
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    """Policy loss."""
    kl: KlConfig = KlConfig()
    """KL towards the reference policy."""
    old_log_probs: Literal["decoupled", "bypass"] = "decoupled"
    """Recompute the proximal policy's log-probs in the trainer, or take the rollout engine's for them."""
    minibatch_size: int | None = Field(None, ge=1)
    """Responses per optimizer update over all data-parallel ranks; None makes one update of the whole batch."""
    epochs: int = Field(1, ge=1)
    """Passes over the batch in one step."""
    shuffle: bool = True
    """Shuffle the batch before it is cut into minibatches, seeded by step and epoch."""
