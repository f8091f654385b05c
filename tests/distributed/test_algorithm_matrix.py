"""Every combination of estimator, loss, aggregation and KL mode trains a real Megatron model, or is refused with why.

One tiny model on one rank takes an update from the same weights for each combination, through the role that the
controller uses. The whole matrix is slow; a cover in which every allowed pair of values occurs is not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from megarl.algorithms.advantages import ESTIMATORS
from megarl.algorithms.kl import penalized_rewards
from megarl.config.rules import TRAIN_RULES
from megarl.config.schema import TrainConfig
from megarl.data.batch import Batch, Ragged
from megarl.observability.metrics import Metrics, values
from megarl.parallel.grid import ParallelLayout
from megarl.rollout.sampling import Sampling
from megarl.train.megatron.engine import MegatronEngine
from tests.distributed.engines import make_engine
from tests.distributed.models import QWEN2
from tests.distributed.ranks import Rank, RankPool
from tests.unit.algorithms import matrix
from tests.unit.algorithms.matrix import Combination

TINY = replace(QWEN2, vocab_size=37, num_layers=1, hidden_size=16, ffn_hidden_size=24, num_heads=2, num_kv_heads=1)
LENGTHS = (5, 2, 4, 3, 0, 6)
"""Response tokens of two groups of three."""


class InProcess:
    """The engine as a worker group of one."""

    def __init__(self, engine: MegatronEngine) -> None:
        self.engine = engine

    def update_policy(self, batch: Batch, minibatches: Any, update: Any) -> Metrics:
        metrics = self.engine.update_policy(batch, update, minibatches)
        assert metrics is not None
        return metrics

    def update_values(self, batch: Batch, minibatches: Any, update: Any) -> Metrics:
        metrics = self.engine.update_values(batch, update, minibatches)
        assert metrics is not None
        return metrics


def sampled() -> Batch:
    """Two prompts, three responses each, with all that a step may read."""
    generator = torch.Generator().manual_seed(4)

    def floats(scale: float, shift: float = 0.0) -> Ragged:
        return Ragged.from_rows([shift + scale * torch.randn(n, generator=generator) for n in LENGTHS])

    def tokens(lengths: Sequence[int]) -> Ragged:
        return Ragged.from_rows([torch.randint(0, 37, (n,), generator=generator) for n in lengths])

    mask = [torch.ones(n, dtype=torch.bool) for n in LENGTHS]
    mask[0][2] = False
    return Batch.create(
        sample_id=torch.arange(6),
        group_id=torch.tensor([8, 8, 8, 3, 3, 3]),
        prompts=tokens([3, 3, 3, 2, 2, 2]),
        responses=tokens(LENGTHS),
        response_mask=Ragged.from_rows(mask),
        rollout_log_probs=floats(0.3, -3.5),
        old_log_probs=floats(0.3, -3.5),
        ref_log_probs=floats(0.3, -3.5),
        values=floats(0.3),
    )


def estimated(batch: Batch, config: TrainConfig) -> Batch:
    """The batch with rewards and advantages as configured."""
    from megarl.controller.roles import make_estimator

    kl = config.algorithm.kl
    mask = batch.ragged("response_mask").padded(fill=False)

    def column(name: str) -> Tensor:
        return batch.ragged(name).padded()

    rewards = torch.zeros(mask.shape)
    scores = torch.tensor([1.0, 0.0, 0.5, 0.0, 7.0, 1.0])
    rewards[torch.arange(6), (batch.response_lengths - 1).clamp(min=0)] = scores
    if kl.where == "reward":
        rewards, _ = penalized_rewards(
            rewards, column("old_log_probs"), column("ref_log_probs"), mask, coef=kl.coef, estimator=kl.estimator
        )
    result = make_estimator(config.algorithm)(
        rewards,
        mask,
        batch.tensor("group_id"),
        values=column("values"),
        truncated=torch.tensor([False, True, False, False, True, False]),
        greedy_scores=torch.tensor([0.5, 0.5, 0.5, 0.0, 0.0, 0.0]),
        reward_components={"a": scores, "b": 1 - scores.square()},
        old_log_probs=column("old_log_probs"),
        sum_pi_squared=torch.full(mask.shape, 0.1),
    )
    lengths = batch.response_lengths
    batch = batch.add(advantages=Ragged.from_padded(result.advantages, lengths))
    if result.returns is not None:
        batch = batch.add(returns=Ragged.from_padded(result.returns, lengths))
    return batch


def run(rank: Rank, wanted: Sequence[Combination]) -> list[tuple[dict[str, float], float]]:
    """Metrics of each combination's update and how far it moved the weights."""
    from megarl.controller.roles import ActorRole, CriticRole

    groups = rank.start(ParallelLayout())
    actor = make_engine(TINY, groups, distributed=False)
    critic = make_engine(TINY, groups, distributed=False, head="value")
    start = {name: weight.detach().clone() for name, weight in actor.parameters().items()}
    outcomes = []
    for combination in wanted:
        config, breaches = matrix.bind(combination)
        assert not breaches
        batch = estimated(sampled(), config)
        seen: Metrics = {}
        if config.critic is not None:
            group = cast(Any, InProcess(critic))
            seen |= CriticRole(group, config.critic, config.algorithm, seed=1).update(batch, step=1)
        if config.algorithm.old_log_probs == "current":
            batch = batch.without("old_log_probs")
        if config.algorithm.old_log_probs == "bypass":
            batch = batch.replace(old_log_probs=batch["rollout_log_probs"])
        role = ActorRole(cast(Any, InProcess(actor)), config.algorithm, Sampling(), seed=1)
        seen |= role.update(batch, step=1)
        with torch.no_grad():
            moved = [float((weight - start[name]).abs().max()) for name, weight in actor.parameters().items()]
            for name, weight in actor.parameters().items():
                weight.copy_(start[name])
        outcomes.append((values(seen), max(moved)))
    return outcomes


def check(combination: Combination, seen: dict[str, float], moved: float) -> None:
    assert all(math.isfinite(value) for value in seen.values()), (combination, seen)
    assert seen["actor/skipped_updates"] == 0 and seen["actor/grad_norm"] > 0 and moved > 0, (combination, seen)
    where = combination["kl"].partition(" ")[0]
    assert ("actor/kl_loss" in seen) == (where == "loss"), combination
    if where == "none":
        assert seen["actor/loss"] == pytest.approx(seen["actor/pg_loss"], rel=1e-6), combination
    assert ("critic/vf_loss" in seen) == (combination["advantage"] == "gae"), combination


def test_every_allowed_pair_trains_and_every_other_is_refused_with_its_rule(ranks: RankPool) -> None:
    chosen, refused = matrix.pairwise()
    rules = {rule.__name__ for rule in TRAIN_RULES}
    for part, breach in refused.items():
        assert part and breach.rule in rules and breach.expected, (part, breach)
    shown = {pair for combination in chosen for pair in itertools.combinations(sorted(combination.items()), 2)}
    factors = matrix.FACTORS | matrix.PROXIMAL
    for one, other in itertools.combinations(sorted(factors), 2):
        for pair in itertools.product(((one, v) for v in factors[one]), ((other, v) for v in factors[other])):
            assert pair in shown or any(part <= set(pair) for part in refused), f"{pair} neither trains nor is refused"
    for combination, (seen, moved) in zip(chosen, ranks(1).run(run, chosen, timeout_s=200.0)[0], strict=True):
        check(combination, seen, moved)


@pytest.mark.slow
@pytest.mark.parametrize("advantage", ESTIMATORS.names())
def test_the_whole_matrix(ranks: RankPool, advantage: str) -> None:
    _, refused = matrix.pairwise()
    allowed = []
    for combination in matrix.combinations():
        if combination["advantage"] != advantage:
            continue
        _, breaches = matrix.bind(combination)
        # What the pairwise cover learned of refusals holds for the whole matrix, both ways.
        assert bool(breaches) == any(part <= combination.items() for part in refused), (combination, breaches)
        if not breaches:
            allowed.append(combination)
    for combination, (seen, moved) in zip(allowed, ranks(1).run(run, allowed, timeout_s=280.0)[0], strict=True):
        check(combination, seen, moved)
