"""Optimizers but Adam, weight decay where it belongs, and skipped updates that end a run by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megarl.config.schema.train import ScheduleConfig
from megarl.errors import SetupError, TrainError
from megarl.observability.metrics import values
from megarl.parallel.grid import ParallelLayout
from megarl.weights.pieces import assemble
from tests.distributed.engines import make_engine, owned_weights, policy_update, recorded_batch, replica
from tests.distributed.models import QWEN2
from tests.distributed.ranks import Rank, RankPool

DOWN = "mlp.linear_fc2.weight"


def skip(rank: Rank, layout: ParallelLayout, allowed: int, updates: int) -> Any:
    """Updates whose gradient of the last stage's first down projection is not finite."""
    groups = rank.start(layout)
    engine = make_engine(QWEN2, groups, optimizer={"max_skipped_steps": allowed})
    batch, minibatches = replica(recorded_batch(QWEN2.vocab_size), groups)
    prepare = engine.optimizer.megatron.prepare_grads

    def prepare_broken() -> Any:
        if groups.is_last_stage:
            broken = next(p for name, p in engine.parameters().items() if name.endswith(DOWN))
            broken.main_grad.fill_(float("inf"))
        return prepare()

    engine.optimizer.megatron.prepare_grads = prepare_broken
    reports = []
    for _ in range(updates):
        try:
            metrics = engine.update_policy(batch, policy_update(), minibatches[:1])
        except TrainError as error:
            return reports, str(error)
        reports.append(None if metrics is None else values(metrics)["actor/skipped_updates"])
    engine.optimizer.megatron.prepare_grads = prepare
    engine.update_policy(batch, policy_update(), minibatches[:1])
    return reports, engine.optimizer.num_skipped_in_a_row


@pytest.mark.parametrize(
    "layout", [ParallelLayout(), ParallelLayout(pp=2), ParallelLayout(dp=2)], ids=["one", "pp2", "dp2"]
)
def test_more_skips_in_a_row_than_allowed_end_the_run_and_name_the_tensors(
    ranks: RankPool, layout: ParallelLayout
) -> None:
    results = ranks(layout.world_size).run(skip, layout, 1, 3)
    layer = QWEN2.num_layers // layout.pp if layout.pp > 1 else 0
    name = f"model.layers.{layer}.mlp.down_proj.weight"
    for reports, error in results:
        assert len(reports) == 1 and reports[0] in (None, 1.0)
        assert "2 updates in a row" in error and f"{name} (2 times)" in error
        assert error.count("model.") == 1  # nothing else is blamed
        assert "max_skipped_steps" in error


def test_an_update_ends_the_row_of_skips(ranks: RankPool) -> None:
    ((reports, in_a_row),) = ranks(1).run(skip, ParallelLayout(), 2, 2)
    assert reports == [1.0, 1.0] and in_a_row == 0


def two_updates_of_sgd(rank: Rank, momentum: float) -> Any:
    groups = rank.start(ParallelLayout())
    settings = {"kind": "sgd", "lr": 0.1, "momentum": momentum, "clip_grad": 0.0, "schedule": ScheduleConfig()}
    engine = make_engine(QWEN2, groups, distributed=False, optimizer=settings)
    batch, minibatches = replica(recorded_batch(QWEN2.vocab_size), groups)
    expected = {name: p.detach().clone() for name, p in engine.parameters().items()}
    buffers: dict[str, torch.Tensor] = {}
    for minibatch in minibatches:
        engine.update_policy(batch, policy_update(), [minibatch])
        for name, parameter in engine.parameters().items():
            decay = 0.1 if parameter.dim() > 1 else 0.0
            gradient = parameter.main_grad.detach() + decay * expected[name]
            buffers[name] = momentum * buffers[name] + gradient if name in buffers else gradient
            expected[name] -= 0.1 * buffers[name]
    return max(float((p.detach() - expected[name]).abs().max()) for name, p in engine.parameters().items())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_the_gradient_with_momentum(ranks: RankPool, momentum: float) -> None:
    (difference,) = ranks(1).run(two_updates_of_sgd, momentum)
    assert difference < 1e-6


def decayed(rank: Rank, layout: ParallelLayout, distributed: bool, decay: float) -> Any:
    groups = rank.start(layout)
    engine = make_engine(QWEN2, groups, distributed=distributed, optimizer={"weight_decay": decay})
    batch, minibatches = replica(recorded_batch(QWEN2.vocab_size), groups)
    engine.update_policy(batch, policy_update(), minibatches[:1])
    return owned_weights(engine)


@pytest.mark.parametrize("distributed", [True, False], ids=["sharded", "plain"])
def test_weight_decay_leaves_norms_and_biases_alone(ranks: RankPool, distributed: bool) -> None:
    with_decay, without = (
        assemble(
            piece for pieces in ranks(2).run(decayed, ParallelLayout(dp=2), distributed, decay) for piece in pieces
        )
        for decay in (0.5, 0.0)
    )
    vectors = {name for name, tensor in without.items() if tensor.dim() == 1}
    assert len(vectors) > 4
    for name, tensor in without.items():
        assert torch.equal(with_decay[name], tensor) == (name in vectors), name


def with_muon(rank: Rank, layout: ParallelLayout) -> Any:
    groups = rank.start(layout)
    try:
        engine = make_engine(QWEN2, groups, distributed=False, optimizer={"kind": "muon", "lr": 1e-2})
    except SetupError as error:
        return str(error)
    batch, minibatches = replica(recorded_batch(QWEN2.vocab_size), groups)
    before = owned_weights(engine)
    engine.update_policy(batch, policy_update(), minibatches)
    return before, owned_weights(engine)


def test_muon_orthogonalizes_the_updates_of_matrices_or_says_what_it_needs(ranks: RankPool) -> None:
    (alone,) = ranks(1).run(with_muon, ParallelLayout())
    if isinstance(alone, str):
        assert "optimizer.kind=muon" in alone and "Python 3.12" in alone
        return
    both = ranks(2).run(with_muon, ParallelLayout(dp=2))
    before, after = (assemble(pieces) for pieces in alone)
    on_two = assemble(piece for _, pieces in both for piece in pieces)
    name = "model.layers.0.mlp.down_proj.weight"
    singular = torch.linalg.svdvals(after[name] - before[name])
    assert singular.min() > 0.2 * singular.max()  # Adam's first update has a condition far above that
    for name, tensor in after.items():
        torch.testing.assert_close(on_two[name], tensor, rtol=1e-3, atol=1e-4, msg=name)
