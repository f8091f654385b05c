"""Held-out evaluation: the same engines, another temperature, nothing trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megarl.config.schema.run import ValidationConfig
from megarl.controller.roles import Roles
from megarl.data.prompts import Prompt
from megarl.observability.metrics import Mean, Metrics
from megarl.rewards.base import FULL_SCORE

VALIDATION_STREAM = 1


@dataclass(frozen=True, slots=True)
class Validation:
    """Metrics under ``val/``, and a few decoded samples with their scores."""

    metrics: Metrics
    samples: list[dict[str, Any]]


def validate(roles: Roles, prompts: Sequence[Prompt], config: ValidationConfig, *, step: int) -> Validation:
    """One response for each held-out prompt, scored.

    ``val/accuracy`` is the share of responses with the full score 1, over all sources and for each of them.
    """
    sampling = replace(roles.rollout.sampling.greedy(), temperature=config.temperature)
    batch = roles.rollout.sample(prompts, sampling, n=1, step=step, stream=VALIDATION_STREAM)
    batch, _ = roles.reward.score(batch)
    scores = batch.tensor("scores").tolist()
    metrics: Metrics = {
        "val/reward": Mean(sum(scores), len(scores)),
        "val/accuracy": Mean(sum(score >= FULL_SCORE for score in scores), len(scores)),
        "val/response_length": Mean(int(batch.response_lengths.sum()), len(batch)),
    }
    sources = batch["data_source"]
    for source in sorted(set(sources)):
        own = [score for score, of in zip(scores, sources, strict=True) if of == source]
        metrics[f"val/{source}/accuracy"] = Mean(sum(score >= FULL_SCORE for score in own), len(own))
    shown = batch.select(range(min(config.show_samples, len(batch))))
    texts = zip(roles.reward.decode(shown, "prompts"), roles.reward.decode(shown, "responses"), strict=True)
    samples = [
        {"prompt": prompt, "response": response, "answer": shown["answer"][row], "score": scores[row]}
        for row, (prompt, response) in enumerate(texts)
    ]
    return Validation(metrics, samples)
