"""The reward role on the driver: decode, score in the pool, check that nothing was lost."""

from __future__ import annotations

import time

import numpy as np
import torch

from megarl.data.batch import Batch
from megarl.data.tokenizer import Tokenizer
from megarl.observability.metrics import Mean, Metrics
from megarl.rewards.base import SCORE, RewardInput
from megarl.rewards.pool import RewardPool


class RewardRole:
    """Scores responses with the reward pool."""

    def __init__(self, pool: RewardPool, tokenizer: Tokenizer) -> None:
        self._pool = pool
        self._tokenizer = tokenizer
        self.waited_s = 0.0
        """Seconds spent waiting for the pool since the start."""

    def score(self, batch: Batch) -> tuple[Batch, Metrics]:
        """The batch with ``scores``, and ``reward_components``: all the reward returned, by name.

        Metrics are the means of the components over the responses that are not ``is_greedy``.
        """
        # One prompt for all responses of a group.
        _, first, group = np.unique(batch.tensor("group_id").numpy(), return_index=True, return_inverse=True)
        distinct = self.decode(batch.only("prompts").select(torch.from_numpy(first)), "prompts")
        prompts = [distinct[number] for number in group.tolist()]
        responses = self.decode(batch, "responses")
        samples = [
            RewardInput(
                prompt=prompts[row],
                response=responses[row],
                answer=batch["answer"][row],
                data_source=batch["data_source"][row],
                metadata=batch["metadata"][row],
            )
            for row in range(len(batch))
        ]
        started = time.monotonic()
        results = self._pool.score(samples)
        self.waited_s += time.monotonic() - started
        metrics: Metrics = {"reward/failed": Mean(sum(result.failed is not None for result in results), len(results))}
        is_greedy = batch.tensor("is_greedy").tolist() if "is_greedy" in batch else [False] * len(results)
        sampled = [result.extra for result, greedy in zip(results, is_greedy, strict=True) if not greedy]
        for name in sorted({name for extra in sampled for name in extra}):
            given = [extra[name] for extra in sampled if name in extra]
            metrics[f"reward/{name}"] = Mean(sum(given), len(given))
        batch = batch.add(
            scores=torch.tensor([result.score for result in results], dtype=torch.float32),
            reward_components=[{**result.extra, SCORE: result.score} for result in results],
        )
        return batch, metrics

    def decode(self, batch: Batch, field: str) -> list[str]:
        """Text of a token column; special tokens left out."""
        # Arrays: transformers looks at every number of a list before it decodes it, which takes longer than decoding.
        rows = [row.numpy() for row in batch.ragged(field).rows()]
        return self._tokenizer.batch_decode(rows, skip_special_tokens=True)
