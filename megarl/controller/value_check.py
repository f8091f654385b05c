"""Whether engines compute what the trainer computes: log-probs of fixed tokens, before a weight update is committed.

Checksums prove that the trainer's values lie in the engines' parameters; this proves that the engines compute with
them, through vLLM's own packing and kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megarl.controller.dispatch import Member, Watch, WorkerGroup
from megarl.data.batch import Batch, Ragged
from megarl.observability.metrics import Last, Metrics
from megarl.weights.failure import sync_failure

NUM_ROWS, PROMPT_TOKENS, RESPONSE_TOKENS = 4, 4, 8

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest mean difference of two log-probs by the engines' dtype. Two bfloat16 implementations differ by a few
hundredths; one matrix of another update moves log-probs by more than one."""


class ValueCheck:
    """The same tokens in every update.

    Args:
        actor: the trainer's ranks.
        engines: rollout engines.
        watch: waits for the engines.
        vocab_size: tokens are drawn below it.
        dtype: of the engines.
    """

    def __init__(
        self, actor: WorkerGroup, engines: Sequence[Member], watch: Watch, *, vocab_size: int, dtype: str
    ) -> None:
        self._actor, self._engines, self._watch = actor, list(engines), watch
        self._tolerance = TOLERANCE[dtype]
        generator = torch.Generator().manual_seed(0)
        shape = (NUM_ROWS, PROMPT_TOKENS + RESPONSE_TOKENS)
        self._rows = torch.randint(vocab_size, shape, generator=generator).tolist()
        self._expected = torch.empty(0)
        self._before = torch.empty(0)
        self.metrics: Metrics = {}

    def ask_trainer(self) -> None:
        """Before the update, while training has the device: what engines are to compute after it."""
        batch = Batch.create(
            prompts=Ragged.from_rows([row[:PROMPT_TOKENS] for row in self._rows], torch.int64),
            responses=Ragged.from_rows([row[PROMPT_TOKENS:] for row in self._rows], torch.int64),
        )
        columns = self._actor.log_probs(batch, temperature=1.0, with_entropy=False, with_sum_pi_squared=False)
        self._expected = columns["log_probs"].values

    def ask_engines(self, version: int) -> None:
        """After the transfer. Raises SyncError naming the engine that computes something else."""
        asked = [(row[:PROMPT_TOKENS], row[PROMPT_TOKENS:]) for row in self._rows]
        answers = self._watch.get({member.handle.score.remote(asked): member for member in self._engines})
        found = torch.tensor(answers).flatten(1)
        differences = mean_difference(found, self._expected)
        for member, difference in zip(self._engines, differences.tolist(), strict=True):
            if not difference <= self._tolerance:
                raise sync_failure(
                    f"rollout replica {member.rank}",
                    "verify",
                    None,
                    f"log-probs of version {version} differ from the trainer's by {difference:.4f} on average, "
                    f"more than {self._tolerance}",
                )
        self.metrics = {"weight_sync/values_difference": Last(float(differences.max()))}
        if len(self._before):
            self.metrics["weight_sync/values_change"] = Last(float(mean_difference(found, self._before).max()))
        self._before = found


def mean_difference(found: Tensor, expected: Tensor) -> Tensor:
    """Mean absolute difference of each row of [N, T] from a row, or from the same row."""
    return (found - expected).abs().mean(-1)
