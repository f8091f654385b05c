"""From what the reward returned to the score of a response, on the driver: weights, bounds, length, greedy baseline.

What the reward returned is weighed and bounded first (``weigh``): that is the score that metrics, the group filter and
the greedy baseline see. Penalties on length and whitening (``shaped_scores``) come behind it, for the responses that
train.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megarl.algorithms.shaping import clip_scores, combine_rewards, length_penalty, overlong_penalty, whiten_scores
from megarl.config.schema.algorithm import ShapingConfig
from megarl.data.batch import Batch
from megarl.errors import DataError
from megarl.observability.metrics import Mean, Metrics
from megarl.rewards.base import FULL_SCORE


def components(batch: Batch) -> dict[str, Tensor]:
    """Every reward component by name, [B] float32, the score among them; 0 where a response does not have it."""
    found: list[dict[str, float]] = batch["reward_components"]
    names = sorted({name for given in found for name in given})
    return {name: torch.tensor([given.get(name, 0.0) for given in found], dtype=torch.float32) for name in names}


def component(batch: Batch, name: str) -> Tensor:
    """One component, [B] float32.

    Raises:
        DataError: no response has it.
    """
    known = components(batch)
    if name not in known:
        raise DataError(
            f"no response has the reward component {name!r}", fix=f"the reward gives: {', '.join(sorted(known))}"
        )
    return known[name]


def weigh(batch: Batch, settings: ShapingConfig) -> tuple[Batch, Metrics]:
    """The batch whose scores are the weighted sum of reward components, if weights are given, within bounds.

    Raises:
        DataError: a weight names a component that no response has.
    """
    scores, metrics = batch.tensor("scores"), Metrics()
    if settings.weights:
        named = {name: component(batch, name) for name in settings.weights}
        scores, _ = combine_rewards(named, settings.weights)
    if settings.clip_low is not None or settings.clip_high is not None:
        low = -math.inf if settings.clip_low is None else settings.clip_low
        high = math.inf if settings.clip_high is None else settings.clip_high
        scores, metrics = clip_scores(scores, low=low, high=high)
    return batch.replace(scores=scores.to(torch.float32)), metrics


def take_greedy(batch: Batch) -> Batch:
    """The sampled rows, each with the score of the greedy response to its prompt; greedy rows are gone."""
    if "is_greedy" not in batch:
        return batch
    is_greedy, group = batch.tensor("is_greedy"), batch.tensor("group_id")
    scores = dict(zip(group[is_greedy].tolist(), batch.tensor("scores")[is_greedy].tolist(), strict=True))
    sampled = batch.select((~is_greedy).nonzero().flatten().tolist()).without("is_greedy")
    greedy = torch.tensor([scores[number] for number in sampled.tensor("group_id").tolist()], dtype=torch.float32)
    return sampled.add(greedy_scores=greedy)


def shaped_scores(batch: Batch, settings: ShapingConfig, *, max_tokens: int) -> tuple[Tensor, Metrics]:
    """Scores with rewards on length added, then whitened: [B] float32.

    Args:
        batch: with ``scores``.
        settings: what to do.
        max_tokens: longest response, at which the overlong penalty is whole.
    """
    scores, lengths, metrics = batch.tensor("scores"), batch.response_lengths, Metrics()
    shaped = scores
    if settings.overlong_share is not None:
        buffer = max(1, round(settings.overlong_share * max_tokens))
        penalty = overlong_penalty(lengths, max_length=max_tokens, buffer=buffer, factor=settings.overlong_factor)
        metrics["reward/overlong_penalty"] = Mean(float(penalty.double().sum()), len(batch))
        shaped = shaped + penalty
    if settings.length_factor > 0:
        bonus = length_penalty(lengths, scores >= FULL_SCORE, batch.tensor("group_id"), factor=settings.length_factor)
        metrics["reward/length"] = Mean(float(bonus.double().sum()), len(batch))
        shaped = shaped + bonus
    if settings.whiten:
        shaped = whiten_scores(shaped, lengths > 0)
    return shaped, metrics
