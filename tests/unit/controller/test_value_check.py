from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from megarl.controller.dispatch import Member
from megarl.controller.value_check import RESPONSE_TOKENS, ValueCheck
from megarl.controller.workers import TrainWorker
from megarl.data.batch import Batch, Ragged
from megarl.errors import SyncError
from megarl.observability.metrics import values


def log_probs(rows: list[list[int]], weight: float) -> list[list[float]]:
    """Of a model whose weight shows in every token."""
    return [[-weight * (1 + token % 7) for token in row] for row in rows]


class Actor:
    weight = 1.0

    def log_probs(self, batch: Batch, **options: Any) -> dict[str, Ragged]:
        inspect.signature(TrainWorker.log_probs).bind(None, batch, **options)  # what the workers take
        assert options["temperature"] == 1.0
        rows = [row.tolist() for row in batch["responses"].rows()]
        assert all(len(row) == RESPONSE_TOKENS for row in rows)
        return {"log_probs": Ragged.from_rows(log_probs(rows, self.weight), torch.float32)}


class Engine:
    """A handle whose calls return their answer."""

    def __init__(self, weight: float) -> None:
        self.weight = weight

    @property
    def score(self) -> Engine:
        return self

    def remote(self, rows: list[tuple[list[int], list[int]]]) -> Any:
        return Answer(log_probs([response for _, response in rows], self.weight))


class Answer(list[Any]):
    __hash__ = object.__hash__  # type: ignore[assignment]


class Watch:
    def get(self, calls: dict[Any, Member]) -> list[Any]:
        return list(calls)


def check(actor: Actor, engines: list[Engine], dtype: str = "float32") -> ValueCheck:
    members = [Member("rollout", rank, engine, None) for rank, engine in enumerate(engines)]
    return ValueCheck(actor, members, Watch(), vocab_size=50, dtype=dtype)  # type: ignore[arg-type]


def test_engines_that_compute_what_the_trainer_does_pass_and_the_change_is_told():
    actor, engines = Actor(), [Engine(1.0), Engine(1.0)]
    made = check(actor, engines)
    made.ask_trainer()
    made.ask_engines(1)
    assert values(made.metrics) == {"weight_sync/values_difference": 0.0}
    actor.weight = engines[0].weight = engines[1].weight = 1.5
    made.ask_trainer()
    made.ask_engines(2)
    numbers = values(made.metrics)
    assert numbers["weight_sync/values_difference"] == pytest.approx(0.0, abs=1e-6)
    assert numbers["weight_sync/values_change"] > 0.4


@pytest.mark.parametrize("wrong", [1.01, float("nan")])
def test_an_engine_that_computes_something_else_is_named(wrong):
    made = check(Actor(), [Engine(1.0), Engine(wrong)])
    made.ask_trainer()
    with pytest.raises(SyncError, match=r"rollout replica 1 in phase verify: log-probs of version 7 differ"):
        made.ask_engines(7)


def test_bfloat16_engines_may_differ_by_its_rounding():
    made = check(Actor(), [Engine(1.01)], "bfloat16")
    made.ask_trainer()
    made.ask_engines(1)
