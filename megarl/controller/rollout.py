"""The rollout role on the driver: prompts out to the engines, a checked batch back.

Invariants:
1. Token ids go out and come back as they are; nothing is tokenized again.
2. Every sample carries the weight version of its tokens, the sampling settings and why it ended.
3. The same seed, step, prompts and weights ask for the same samples, whatever the number of replicas.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from megarl.config.schema.roles import RolloutConfig
from megarl.controller.dispatch import Member, Watch
from megarl.data.batch import Batch, Ragged
from megarl.data.prompts import Prompt
from megarl.errors import RolloutError
from megarl.observability.metrics import Mean, Metrics, Sum
from megarl.rollout.engine import Completion, Request
from megarl.rollout.router import collect, route
from megarl.rollout.sampling import Sampling

# A sample id is the step in the high bits and the number of the sample within the step in the low ones.
SAMPLES_PER_STEP_BITS = 32


class RolloutRole:
    """All engines of a run, called as one."""

    def __init__(self, members: Sequence[Member], config: RolloutConfig, watch: Watch, *, seed: int) -> None:
        self.members = list(members)
        self.config = config
        self.seed = seed
        self._watch = watch

    @property
    def sampling(self) -> Sampling:
        """Sampling settings of training."""
        return Sampling(**self.config.sampling.model_dump())

    def generate(
        self, prompts: Sequence[Prompt], *, step: int, version: int, first: int = 0, with_greedy: bool = False
    ) -> tuple[Batch, Metrics]:
        """The samples of a training step, ``samples_per_prompt`` for each prompt.

        Args:
            prompts: what to continue.
            step: controller step.
            version: weight version the engines serve.
            first: prompts of this step that were sampled before.
            with_greedy: also one greedy response for each prompt, in the same call; they follow the samples, and the
                column ``is_greedy`` tells them apart.

        Raises:
            RolloutError: an engine sampled under another weight version than ``version``.
        """
        started = time.monotonic()
        n = self.config.samples_per_prompt
        batch = self.sample(prompts, self.sampling, n=n, step=step, first=first, with_greedy=with_greedy)
        elapsed_s = time.monotonic() - started
        for row, spans in enumerate(batch["weight_versions"]):
            if any(span.version != version for span in spans):
                raise RolloutError(
                    f"sample {int(batch.tensor('sample_id')[row])} was sampled under weight versions "
                    f"{[span.version for span in spans]}, expected {version}",
                    fix="an engine missed a weight update; restart the run from its last checkpoint",
                )
        tokens = int(batch.response_lengths.sum())
        return batch, {
            "rollout/tokens": Sum(tokens),
            "rollout/tokens_per_s": Mean(tokens, elapsed_s),
            "rollout/aborted": Mean(sum(reason == "abort" for reason in batch["finish_reason"]), len(batch)),
        }

    def sample(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        n: int,
        step: int,
        stream: int = 0,
        first: int = 0,
        with_greedy: bool = False,
    ) -> Batch:
        """``n`` samples of each prompt, in the order of the prompts, then the greedy ones.

        Args:
            prompts: what to continue.
            sampling: settings.
            n: samples per prompt.
            step: controller step, part of the seeds and of the sample ids.
            stream: 0 for training, 1 for validation: keeps their seeds apart.
            first: number of the first prompt within the step, part of the seeds and ids too.
            with_greedy: also a greedy response for each prompt, from the replica that samples it.
        """
        requests = [
            Request(
                request_id=index + is_greedy * len(prompts),
                prompt_token_ids=list(prompt.token_ids),
                seed=request_seed(self.seed, step, stream, first + index),
                group_id=index if with_greedy else None,
                is_greedy=is_greedy,
            )
            for is_greedy in (False, True)[: 1 + with_greedy]
            for index, prompt in enumerate(prompts)
        ]
        parts = route(requests, len(self.members), n=n, max_tokens=sampling.max_tokens)
        busy = [(member, part) for member, part in zip(self.members, parts, strict=True) if part]
        results = self._watch.get({member.handle.generate.remote(part, sampling, n): member for member, part in busy})
        completions = collect([part for _, part in busy], results, n=n)
        batch = _as_batch(prompts, completions, sampling, step=step, first=first, first_row=first * (n + with_greedy))
        if not with_greedy:
            return batch
        greedy = {index: completions[len(prompts) + index] for index in range(len(prompts))}
        extra = _as_batch(
            prompts, greedy, sampling.greedy(), step=step, first=first, first_row=first * (n + 1) + len(batch)
        )
        is_greedy = torch.arange(len(batch) + len(extra)) >= len(batch)
        return Batch.concat([batch, extra]).add(is_greedy=is_greedy)

    def abort(self, timeout_s: float) -> None:
        """End the samples under way on all engines: their step has been given up."""
        self._watch.get({member.handle.abort.remote(): member for member in self.members}, timeout_s)


def request_seed(seed: int, step: int, stream: int, index: int) -> int:
    """A seed below 2^62 of one request; different for any two requests of a run (splitmix64 of their coordinates)."""
    value = seed
    for part in (step, stream, index):
        value = (value ^ part) + 0x9E3779B97F4A7C15 & (2**64 - 1)
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB & (2**64 - 1)
        value ^= value >> 31
    return value >> 2


def _as_batch(
    prompts: Sequence[Prompt],
    completions: Mapping[int, Sequence[Completion]],
    sampling: Sampling,
    *,
    step: int,
    first: int,
    first_row: int,
) -> Batch:
    rows = [(index, sample) for index in range(len(prompts)) for sample in completions[index]]
    of = [prompts[index] for index, _ in rows]
    done = [completion for _, completion in rows]
    base = step << SAMPLES_PER_STEP_BITS
    responses = Ragged.from_rows([completion.token_ids for completion in done], torch.int64)
    return Batch.create(
        sample_id=base + first_row + torch.arange(len(rows), dtype=torch.int64),
        group_id=base + first + torch.tensor([index for index, _ in rows], dtype=torch.int64),
        prompts=Ragged.from_rows([prompt.token_ids for prompt in of], torch.int64),
        data_source=[prompt.data_source for prompt in of],
        answer=[prompt.answer for prompt in of],
        metadata=[prompt.metadata for prompt in of],
        responses=responses,
        response_mask=Ragged(torch.ones(len(responses.values), dtype=torch.bool), responses.lengths),
        rollout_log_probs=Ragged.from_rows([completion.log_probs for completion in done], torch.float32),
        finish_reason=[completion.finish_reason for completion in done],
        weight_versions=[completion.weight_versions for completion in done],
        sampling=[sampling.record()] * len(rows),
    )
