"""Every registered estimator and loss with settings under which all of its branches act on a ragged batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from megarl.algorithms.advantages import ESTIMATORS, Advantages, build_estimator
from megarl.algorithms.masking import Reduce
from megarl.algorithms.policy_losses import POLICY_LOSSES, PolicyInputs, PolicyLoss, build_policy_loss
from tests.unit.algorithms.batches import Ragged

LOSS_OPTIONS: dict[str, list[dict[str, Any]]] = {
    "dro": [{"dro_beta": 0.7}],
    "kl_cov": [{"kl_cov_ratio": 0.1}],
    "clip_cov": [{"clip_cov_ratio": 0.1, "clip_cov_lb": 0.02}],
    "reinforce": [
        {"ratio_level": "none"},
        {"ratio_level": "token", "ratio_cap": 1.5},
        {"ratio_level": "sequence", "ratio_cap": 1.5, "ratio_floor": 0.7},
    ],
}
LOSSES = [f"{kind}/{number}" for kind in POLICY_LOSSES.names() for number in range(len(LOSS_OPTIONS.get(kind, [{}])))]
"""Each loss with each of its options, as ``kind/number``."""

# gdpo's components are made of these columns; without a deviation grpo and its kin have another branch.
ESTIMATOR_CASES = [
    *((kind, True) for kind in ESTIMATORS.names()),
    ("grpo", False),
    ("grpo_passk", False),
    ("gdpo", False),
]


def make_loss(case: str, **settings: Any) -> PolicyLoss:
    kind, _, number = case.partition("/")
    options = LOSS_OPTIONS.get(kind, [{}])[int(number or 0)]
    return build_policy_loss(
        kind, **({"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0, "options": options} | settings)
    )


def policy_inputs(
    loss: PolicyLoss, b: Ragged, row_id: Tensor, *, reduce: Reduce = None, seed: int = 1, **changes: Any
) -> PolicyInputs:
    """The inputs of a loss, its first pass taken."""
    given = {"response_mask": b.mask, "importance_weights": b.weights, "rollout_log_probs": b.rollout} | changes
    inputs = PolicyInputs(b.log_probs, b.old, b.advantages, **given)
    if loss.needs_first_pass:
        inputs = replace(inputs, selected=loss.first_pass(inputs, row_id=row_id, seed=seed, reduce=reduce))
    return inputs


def estimate(kind: str, b: Ragged, *, norm_by_std: bool = True, **extra: Any) -> Advantages:
    """Advantages of a batch, every optional input given."""
    estimator = build_estimator(kind, gamma=0.95, lam=0.9, norm_by_std=norm_by_std, bootstrap_truncated=True)
    return estimator(
        b.rewards, b.mask, b.group, values=b.values, truncated=b.truncated, greedy_scores=b.greedy,
        reward_components={"a": b.greedy, "b": b.greedy.square()}, old_log_probs=b.old, sum_pi_squared=b.pi2,
        importance_weights=b.weights, **extra,
    )  # fmt: skip


def on_tensors(b: Ragged, change: Any) -> Ragged:
    """The batch with each of its tensors changed."""
    return Ragged(**{name: change(getattr(b, name)) for name in b.__dataclass_fields__})


def single(b: Ragged) -> Ragged:
    """The batch in float32."""
    return on_tensors(b, lambda x: x.float() if x.is_floating_point() else x)


def rows_of(b: Ragged, rows: Tensor) -> Ragged:
    """Some rows of the batch."""
    return on_tensors(b, lambda x: x[rows])
