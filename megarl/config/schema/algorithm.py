"""Algorithm: advantages, losses, KL, importance correction. Definitions and papers: megarl/algorithms."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from megarl.config.schema.base import StrictModel
from megarl.config.schema.correction_presets import (
    CorrectionPreset,
    apply_correction_preset,
    preset_departures,
)

LossAggregation = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"
]
KlEstimator = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"]
RejectionStatistic = Literal[
    "token_k1", "token_k2", "token_k3",
    "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3",
    "seq_max_k1", "seq_max_k2", "seq_max_k3",
]  # fmt: skip


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


class RejectionConfig(StrictModel):
    """One bound on the difference between the policy that sampled and the one that trains."""

    statistic: RejectionStatistic
    """What is bounded: level (token; sum, mean or max over the row) and divergence (k1, k2, k3) of the two policies."""
    upper: float = Field(gt=0)
    """k1: largest rollout/train ratio; k2 and k3: largest divergence."""
    lower: float | None = Field(None, gt=0)
    """k1 only: smallest ratio; None is 1 / upper."""

    @model_validator(mode="after")
    def _bounds_fit(self) -> Self:
        if self.lower is not None and not self.statistic.endswith("k1"):
            raise ValueError(f"{self.statistic} has an upper bound only: remove lower")
        if self.lower is not None and self.lower > self.upper:
            raise ValueError(f"lower {self.lower} is above upper {self.upper}")
        return self


class CorrectionConfig(StrictModel):
    """Correction for the difference between the policy that sampled and the one that trains."""

    preset: CorrectionPreset | None = None
    """A named combination, under the names of verl's rollout correction; keys beside it override its numbers."""
    weights: Literal["none", "token", "sequence"] = "none"
    """Importance weight old/rollout on each token loss: per token, or the row's product. Decoupled mode only."""
    upper: float = Field(2.0, gt=0)
    """Weights are capped here."""
    lower: float | None = Field(None, gt=0)
    """With it, weights outside [lower, upper] become 0 instead of being capped (a band)."""
    normalize: bool = False
    """Divide weights by their mean over the global batch."""
    reject: list[RejectionConfig] = Field(default_factory=list)
    """Bounds a token or row must keep to train; a rejected token leaves every denominator. Decoupled they are checked
    before the advantages; with bypass before each minibatch, at its weights, in a pass of its own."""
    group_stats: Literal["kept", "all"] = "kept"
    """Whether rows rejected whole still count in their group's baseline. Decoupled mode only: with bypass baselines are
    there before anything is rejected."""

    @model_validator(mode="after")
    def _band_is_ordered(self) -> Self:
        if self.lower is not None and self.lower > self.upper:
            raise ValueError(f"lower {self.lower} is above upper {self.upper}")
        return self


class ShapingConfig(StrictModel):
    """From what the reward returned to the score an estimator sees."""

    weights: dict[str, float] = Field(default_factory=dict)
    """Weights of reward components, what the reward returns in its dict; their sum becomes the score. ``score`` is the
    reward's own. Empty leaves the score as it is. With gdpo they weigh the components' advantages instead."""
    clip_low: float | None = None
    """Lower bound of scores; None has none."""
    clip_high: float | None = None
    """Upper bound of scores; None has none."""
    overlong_share: float | None = Field(None, gt=0, le=1)
    """Part of rollout.sampling.max_tokens, at its end, over which a penalty on length rises (DAPO); None has none."""
    overlong_factor: float = Field(1.0, gt=0)
    """Penalty of a response of the longest length."""
    length_factor: float = Field(0.0, ge=0)
    """Weight of a reward for being shorter than the other right responses of the group (Kimi k1.5); 0 has none."""
    whiten: bool = False
    """Subtract the mean of the step's scores and divide by their deviation."""


class FilterConfig(StrictModel):
    """Replace groups of equal scores by new prompts until a step is full (dynamic sampling of DAPO)."""

    metric: str = "score"
    """Whose equality drops a group: the score, or a component the reward returns, such as accuracy."""
    max_rounds: int = Field(10, ge=1)
    """Most rounds of sampling in a step; a step that is not full then trains on the groups there are."""


class AlgorithmConfig(StrictModel):
    """One policy-gradient algorithm."""

    advantage: AdvantageConfig = AdvantageConfig()
    """Advantage estimator."""
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    """Policy loss."""
    kl: KlConfig = KlConfig()
    """KL towards the reference policy."""
    shaping: ShapingConfig = ShapingConfig()
    """Reward shaping."""
    filter: FilterConfig | None = None
    """Group filter; None keeps every group."""
    correction: CorrectionConfig = CorrectionConfig()
    """Rollout correction."""
    old_log_probs: Literal["decoupled", "bypass", "current"] = "decoupled"
    """Where the proximal policy's log-probs come from. decoupled: a pass of the trainer before the update. bypass: the
    rollout engine. current: the update itself, which saves the pass; exact, and allowed, with one update a step."""
    minibatch_size: int | None = Field(None, ge=1)
    """Responses per optimizer update over all data-parallel ranks; None makes one update of the whole batch."""
    epochs: int = Field(1, ge=1)
    """Passes over the batch in one step."""
    shuffle: bool = True
    """Shuffle the batch before it is cut into minibatches, seeded by step and epoch."""

    @classmethod
    def implied(cls, given: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """What the correction preset stands for."""
        return preset_departures(given), "correction.preset"

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, data: Any) -> Any:
        return apply_correction_preset(data) if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _bypass_has_no_second_weight(self) -> Self:
        if self.old_log_probs == "bypass" and self.correction.weights != "none":
            raise ValueError(
                "with old_log_probs=bypass the ratio of the loss already is current/rollout: correction.weights must "
                "be none (a reinforce loss weighs by it through its own options)"
            )
        return self
