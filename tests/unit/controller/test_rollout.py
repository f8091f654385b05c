"""Requests of a step and the batch made of the answers, without engines."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.config.schema.roles import RolloutConfig
from megarl.controller.dispatch import Member
from megarl.controller.rollout import RolloutRole
from megarl.data.prompts import Prompt
from megarl.observability.metrics import values
from megarl.rollout.engine import Completion, Request, WeightSpan
from megarl.rollout.sampling import Sampling

PROMPTS = [Prompt(number, "", [5, 6 + number], None, "source") for number in range(3)]


class Answer:
    """What a remote call will return."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Engine:
    """Answers with the request's seed and the number of the sample, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.generate = SimpleNamespace(remote=self._generate)

    def _generate(self, requests: Sequence[Request], sampling: Sampling, n: int) -> Answer:
        self.asked += requests
        counts = [1 if request.is_greedy else n for request in requests]
        return Answer(
            [
                (request.request_id, [_completion(request.seed % 1000, number) for number in range(count)])
                for request, count in zip(requests, counts, strict=True)
            ]
        )


def _completion(*token_ids: int) -> Completion:
    return Completion(np.array(token_ids, np.int32), np.full(2, -1, np.float32), "stop", (WeightSpan(4, 0, 2),))


class Watch:
    def get(self, calls: dict[Answer, Member]) -> list[Any]:
        return [call.value for call in calls]


def role(num_engines: int = 2) -> tuple[RolloutRole, list[Engine]]:
    engines = [Engine() for _ in range(num_engines)]
    members = [Member("rollout", rank, engine, None) for rank, engine in enumerate(engines)]
    config = RolloutConfig(samples_per_prompt=2)
    return RolloutRole(members, config, Watch(), seed=3), engines  # type: ignore[arg-type]


def test_greedy_responses_are_sampled_in_the_same_call_beside_their_group():
    rollout, engines = role()
    batch, metrics = rollout.generate(PROMPTS, step=2, version=4, with_greedy=True)
    assert batch.tensor("is_greedy").tolist() == [False] * 6 + [True] * 3
    base = 2 << 32
    assert (batch.tensor("group_id") - base).tolist() == [0, 0, 1, 1, 2, 2, 0, 1, 2]
    assert (batch.tensor("sample_id") - base).tolist() == list(range(9))
    assert [row["temperature"] for row in batch["sampling"]] == [1.0] * 6 + [0.0] * 3
    assert values(metrics)["rollout/tokens"] == 18
    for engine in engines:  # a prompt's requests share its cache
        assert {r.group_id for r in engine.asked if r.is_greedy} == {r.group_id for r in engine.asked}


def test_further_rounds_have_numbers_and_seeds_of_their_own():
    rollout, _ = role()
    first, _ = rollout.generate(PROMPTS, step=2, version=4, with_greedy=True)
    second, _ = rollout.generate(PROMPTS, step=2, version=4, first=3, with_greedy=True)
    for name in ("sample_id", "group_id"):
        assert not set(first.tensor(name).tolist()) & set(second.tensor(name).tolist())
    assert not torch.equal(first.ragged("responses").values, second.ragged("responses").values)
    assert second.tensor("sample_id").tolist() == [(2 << 32) + number for number in range(9, 18)]


@pytest.mark.parametrize("num_engines", [1, 2, 3])
def test_samples_do_not_depend_on_the_number_of_engines(num_engines: int):
    one, _ = role(1)[0].generate(PROMPTS, step=2, version=4, with_greedy=True)
    other, _ = role(num_engines)[0].generate(PROMPTS, step=2, version=4, with_greedy=True)
    assert one.ragged("responses").equal(other.ragged("responses"))
