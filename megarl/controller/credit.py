"""From scores to advantages on the driver: the part of a step that needs whole groups and is cheap.

Each function takes the batch and returns it with further columns, and metrics. Tensors are padded [B, T] while the
algorithms work on them; ``megarl.algorithms`` has the formulas.

Invariants:
1. The response's score lies on its last token; an empty response has none.
2. What is off ``response_mask`` is absent from every statistic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.advantages import Estimator
from megarl.algorithms.advantages.base import GroupStatistics
from megarl.algorithms.correction import Corrected, Correction, correct, difference_metrics
from megarl.algorithms.kl import KlController, penalized_rewards
from megarl.algorithms.statistics import batch_metrics
from megarl.config.schema.algorithm import KlConfig, ShapingConfig
from megarl.controller.shaping import components, shaped_scores
from megarl.data.batch import Batch, Ragged
from megarl.observability.metrics import Max, Mean, Metrics, Min
from megarl.rewards.base import SCORE


def padded(batch: Batch, name: str, fill: float = 0.0) -> Tensor:
    """A response column as [B, T] float32."""
    return batch.ragged(name).padded(fill=fill)


def response_mask(batch: Batch) -> Tensor:
    """[B, T] bool."""
    return batch.ragged("response_mask").padded(fill=False)


def to_column(values: Tensor, batch: Batch) -> Ragged:
    """A padded [B, T] result as a response column."""
    return Ragged.from_padded(values.to(torch.float32), batch.response_lengths)


def token_rewards(
    batch: Batch, shaping: ShapingConfig, settings: KlConfig, kl: KlController, *, max_tokens: int
) -> tuple[Batch, Metrics]:
    """Shaped scores on the last token, less the KL penalty where it is part of the reward."""
    mask = response_mask(batch)
    scores = torch.zeros(mask.shape, dtype=torch.float32)
    rows = mask.any(1).nonzero()[:, 0]
    per_row, metrics = shaped_scores(batch, shaping, max_tokens=max_tokens)
    scores[rows, batch.response_lengths[rows] - 1] = per_row[rows]
    rewards, metrics = scores, {**score_metrics(batch), **metrics}
    if settings.where == "reward":
        rewards, measured = penalized_rewards(
            scores,
            padded(batch, "old_log_probs"),
            padded(batch, "ref_log_probs"),
            mask,
            coef=kl.value,
            estimator=settings.estimator,
        )
        metrics |= measured
        kl.update(measured["actor/reward_kl_penalty"].value(), len(batch))
    return (
        batch.add(token_level_scores=to_column(scores, batch), token_level_rewards=to_column(rewards, batch)),
        metrics,
    )


def advantages(
    batch: Batch, estimator: Estimator, correction: Correction | None, group_stats: GroupStatistics
) -> tuple[Batch, Metrics]:
    """Rollout correction, then advantages, and returns where the estimator has a critic.

    ``response_mask`` of the result is what correction left to train on. Without ``correction`` there is nothing to
    compare yet: the trainer's log-probs are the update's own, or the engine's are not of the full softmax.
    """
    mask = response_mask(batch)
    old_log_probs = padded(batch, "old_log_probs") if "old_log_probs" in batch else None
    if correction is None or old_log_probs is None:
        corrected = Corrected(mask, None, {})
    else:
        corrected = correct(old_log_probs, padded(batch, "rollout_log_probs"), mask, correction)
    rewards, values = padded(batch, "token_level_rewards"), padded(batch, "values") if "values" in batch else None
    result = estimator(
        rewards,
        mask,
        batch.tensor("group_id"),
        values=values,
        truncated=torch.tensor([reason != "stop" for reason in batch["finish_reason"]]),
        kept=corrected.kept,
        group_stats=group_stats,
        greedy_scores=batch.tensor("greedy_scores") if "greedy_scores" in batch else None,
        reward_components=_components_for(estimator, batch) if "reward_components" in estimator.needs else None,
        old_log_probs=old_log_probs,
        sum_pi_squared=padded(batch, "sum_pi_squared") if "sum_pi_squared" in batch else None,
        importance_weights=corrected.importance_weights,
    )
    kept = Ragged.from_padded(corrected.kept, batch.response_lengths)
    batch = batch.replace(response_mask=kept)
    if corrected.importance_weights is not None:
        batch = batch.add(importance_weights=to_column(corrected.importance_weights, batch))
    batch = batch.add(advantages=to_column(result.advantages, batch))
    if result.returns is not None:
        batch = batch.add(returns=to_column(result.returns, batch))
    seen = batch_metrics(
        corrected.kept, token_level_rewards=rewards, advantages=result.advantages, returns=result.returns, values=values
    )
    return batch, {**corrected.metrics, **result.metrics, **seen}


def _components_for(estimator: Estimator, batch: Batch) -> dict[str, Tensor]:
    """Components of the reward; its score, most often their sum, only where a weight names it or there is no other."""
    known = components(batch)
    if SCORE not in (estimator.keywords.get("weights") or ()) and len(known) > 1:
        del known[SCORE]
    return known


def score_metrics(batch: Batch) -> Metrics:
    """Scores, lengths and ends of the responses, under the names verl's users know."""
    scores, lengths = batch.tensor("scores").double(), batch.response_lengths
    count = len(batch)
    return {
        "critic/score/mean": Mean(float(scores.sum()), count),
        "critic/score/max": Max(float(scores.max())),
        "critic/score/min": Min(float(scores.min())),
        "response_length/mean": Mean(int(lengths.sum()), count),
        "response_length/max": Max(int(lengths.max())),
        "response_length/min": Min(int(lengths.min())),
        "response_length/clip_ratio": Mean(sum(reason == "length" for reason in batch["finish_reason"]), count),
        "prompt_length/mean": Mean(int(batch.prompt_lengths.sum()), count),
        "prompt_length/max": Max(int(batch.prompt_lengths.max())),
    }


def mismatch_metrics(batch: Batch) -> Metrics:
    """How far the trainer's log-probs are from those of the engine that sampled, on the same weights."""
    names = ("old_log_probs", "rollout_log_probs", "response_mask")
    return difference_metrics(*(batch.ragged(name).values for name in names))
