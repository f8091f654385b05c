"""The controller's first update on recorded samples at every layout of the actor: preset, role and split are real.

``test_engine_updates.py`` has the engine alone, with shares of its own making; here ``ActorRole`` chooses columns and
minibatches, and ``split_minibatches`` what each data-parallel rank gets.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megarl.config.load import load_train
from megarl.controller.dispatch import shares_of, split_minibatches
from megarl.controller.roles import ActorRole
from megarl.data.batch import Batch, Ragged
from megarl.observability.metrics import Metrics, values
from megarl.parallel.grid import ParallelLayout
from megarl.rollout.sampling import Sampling
from megarl.train.engine import PolicyUpdate
from tests.distributed.engines import make_engine, recorded_batch
from tests.distributed.models import QWEN2
from tests.distributed.ranks import Rank, RankPool

TEMPERATURE = 0.9

DEGREES = [(2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2), (2, 1, 2)]

ALGORITHMS = {
    "preset": [],
    "kl-in-loss": ["algorithm.kl.where=loss", "algorithm.kl.coef=0.1", "algorithm.policy_loss.entropy_coef=0.01"],
    "row-means": ["algorithm.policy_loss.aggregation=seq-mean-token-mean"],
    # Its loss chooses tokens of the whole minibatch by sample id.
    "kl-cov": ["algorithm.policy_loss.kind=kl_cov"],
    "epochs": ["algorithm.minibatch_size=4", "algorithm.epochs=2"],
}


def on_rank(rank: Rank, layout: ParallelLayout, method: str, shares: list[tuple[Any, ...]]) -> Any:
    """One call of the engine's method, with the share of this rank's replica."""
    groups = rank.start(layout)
    engine = make_engine(QWEN2, groups, cap=40)
    return getattr(engine, method)(*shares[groups.coordinate.dp])


class PoolGroup:
    """Stands for a ``WorkerGroup`` of the actor: the same split, on the ranks of the pool."""

    def __init__(self, ranks: RankPool, layout: ParallelLayout) -> None:
        self.ranks, self.layout = ranks, layout

    def update_policy(self, batch: Batch, minibatches: list[list[int]], update: PolicyUpdate) -> Metrics:
        parts, local = split_minibatches(batch.sequence_lengths.tolist(), minibatches, self.layout.dp)
        shares = [(batch.select(part), update, own) for part, own in zip(parts, local, strict=True)]
        results = self.ranks(self.layout.world_size).run(on_rank, self.layout, "update_policy", shares)
        reports = [metrics for metrics in results if metrics is not None]
        assert reports and all(other == reports[0] for other in reports)
        return reports[0]


def first_update(ranks: RankPool, layout: ParallelLayout, samples: Batch, overrides: list[str]) -> dict[str, float]:
    """Metrics of step 1 under ``grpo_tiny``; one update of the whole batch unless an override says otherwise."""
    size = ["data.prompts_per_step=3", "rollout.samples_per_prompt=4", "algorithm.minibatch_size=null"]
    config = load_train("grpo_tiny", [*size, *overrides]).config
    sampling = Sampling(temperature=TEMPERATURE)
    actor = ActorRole(PoolGroup(ranks, layout), config.algorithm, sampling, seed=config.run.seed)  # type: ignore[arg-type]
    return values(actor.update(samples, step=1))


@pytest.fixture(scope="module")
def samples(ranks: RankPool) -> Batch:
    """Recorded samples whose log-probs are near those of the policy: some ratios are clipped, most are not."""
    batch = recorded_batch(QWEN2.vocab_size)
    (columns,) = ranks(1).run(on_rank, ParallelLayout(), "log_probs", [(batch.only("prompts", "responses"),)])
    generator = torch.Generator().manual_seed(2)

    def near(scale: float) -> Ragged:
        log_probs = columns["log_probs"]
        noise = scale * torch.randn(log_probs.values.shape, generator=generator)
        return log_probs.with_values(log_probs.values + noise)

    batch = batch.only("sample_id", "prompts", "responses", "response_mask", "advantages")
    return batch.add(rollout_log_probs=near(0.01), old_log_probs=near(0.2), ref_log_probs=near(0.2))


@pytest.fixture(scope="module")
def expected(ranks: RankPool, samples: Batch) -> dict[str, dict[str, float]]:
    """The same on one rank."""
    return {name: first_update(ranks, ParallelLayout(), samples, options) for name, options in ALGORITHMS.items()}


@pytest.mark.parametrize(
    "algorithm",
    [pytest.param(name, marks=() if name in ("preset", "kl-cov") else pytest.mark.slow) for name in ALGORITHMS],
)
@pytest.mark.parametrize("degrees", DEGREES, ids=lambda degrees: "tp{}-pp{}-dp{}".format(*degrees))
def test_the_first_update_does_not_depend_on_the_layout(
    ranks: RankPool,
    samples: Batch,
    expected: dict[str, dict[str, float]],
    degrees: tuple[int, int, int],
    algorithm: str,
):
    layout = ParallelLayout(tp=degrees[0], pp=degrees[1], dp=degrees[2])
    actual = first_update(ranks, layout, samples, ALGORITHMS[algorithm])
    assert actual["actor/loss"] == pytest.approx(expected[algorithm]["actor/loss"], abs=1e-4)
    assert actual["actor/grad_norm"] == pytest.approx(expected[algorithm]["actor/grad_norm"], rel=1e-4)
    assert actual == pytest.approx(expected[algorithm], rel=1e-4, abs=1e-5)


def test_the_samples_are_worth_the_comparison(expected: dict[str, dict[str, float]]):
    """Every part of the loss is there, replicas get unequal shares, and the variants differ."""
    preset = expected["preset"]
    assert abs(preset["actor/loss"]) > 1e-2
    assert preset["actor/grad_norm"] > 1e-2
    assert 0 < preset["actor/pg_clipfrac"] < 0.9
    assert expected["kl-in-loss"]["actor/kl_loss"] > 1e-3
    losses = [round(metrics["actor/loss"], 5) for metrics in expected.values()]
    assert len(set(losses)) == len(losses)


def test_replicas_get_unequal_shares(samples: Batch):
    """Denominators of their own would show."""
    parts = [samples.select(share) for share in shares_of(samples.sequence_lengths.tolist(), 2)]
    assert len({int(part.ragged("response_mask").values.sum()) for part in parts}) == 2
