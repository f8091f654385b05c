"""Options that change memory or speed and no number: recomputed activations, overlapped reduction of gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.schema.train import EngineConfig, LoraConfig, OptimizerConfig
from megarl.errors import TrainError
from megarl.observability.metrics import values
from megarl.parallel.grid import ParallelLayout
from megarl.platform.device import get_device
from megarl.train.engine import ValueUpdate
from megarl.train.megatron.engine import MegatronEngine
from tests.distributed.engines import buckets_of, make_engine, policy_update, recorded_batch, replica
from tests.distributed.models import QWEN2
from tests.distributed.ranks import Rank, RankPool

SPEC = replace(QWEN2, num_layers=4, tied_embeddings=False)


def train(rank: Rank, layout: ParallelLayout, recompute: Any, **options: Any) -> Any:
    """Metrics and weights after two updates of two minibatches, in several microbatches each."""
    groups = rank.start(layout)
    engine = MegatronEngine(
        "actor", QWEN2, None, groups, get_device("cpu"),
        EngineConfig(dtype="float32", microbatch_tokens=32, logits_chunk_tokens=7, recompute=recompute),
        OptimizerConfig(lr=1e-2, eps=1e-3, **options), seed=3,
    )  # fmt: skip
    batch, minibatches = replica(recorded_batch(QWEN2.vocab_size), groups)
    metrics = [engine.update_policy(batch, policy_update(), minibatches) for _ in range(2)]
    return [values(one) for one in metrics if one is not None], [piece.clone() for _, piece in engine.pieces()]


def train_gathering(
    rank: Rank,
    layout: ParallelLayout,
    head: Any,
    lora: LoraConfig | None,
    optimizer: dict[str, Any],
    directory: Path,
) -> Any:
    """What two steps compute and what is read between them: log-probs, weights, a checkpoint, and what it continues."""
    groups = rank.start(layout)
    with buckets_of(3000):  # several, the head's among them
        engine = make_engine(SPEC, groups, head=head, optimizer=optimizer, lora=lora)
    batch, minibatches = replica(recorded_batch(SPEC.vocab_size), groups)
    found: list[Any] = []

    def look(*methods: Callable[[], Any]) -> None:
        for method in methods:
            found.append(method())

    def update() -> Any:
        if head == "value":
            return told(engine.update_values(batch, ValueUpdate(0.2), minibatches))
        return told(engine.update_policy(batch, policy_update(), minibatches))

    def passed() -> Any:
        column = engine.values(batch) if head == "value" else engine.log_probs(batch)
        return None if column is None else (column if head == "value" else column["log_probs"]).values

    def weights() -> Any:
        engine.gather_weights()
        return [piece.clone() for _, piece in engine.pieces()]

    look(update, passed, update, weights, passed, update)
    engine.save(directory)
    look(update, weights)
    engine.load(directory)
    look(weights, passed, update, passed)
    return found


def read_alone(rank: Rank) -> Any:
    """After an update, what reading says before weights are gathered, and what rank 0 reads by itself afterwards."""
    groups = rank.start(ParallelLayout(dp=2))
    reduce = {"overlap_grad_reduce": True}
    with buckets_of(3000):
        engine, plain = (
            make_engine(SPEC, groups, optimizer=chosen) for chosen in ({**reduce, "overlap_param_gather": True}, reduce)
        )
    batch, minibatches = replica(recorded_batch(SPEC.vocab_size), groups)
    for one in (engine, plain):
        one.update_policy(batch, policy_update(), minibatches)
    with pytest.raises(TrainError, match="gather_weights on all ranks") as refused:
        engine.parameters()
    engine.gather_weights()
    if groups.rank != 0:  # takes part in no collective any more: one of rank 0's would wait for its time-out
        return str(refused.value), True
    expected = plain.parameters()
    return str(refused.value), all(torch.equal(w, expected[name]) for name, w in engine.parameters().items())


def test_one_rank_reads_gathered_weights_without_the_others(ranks: RankPool):
    for number, (message, whole) in enumerate(ranks(2).run(read_alone)):
        assert f"rank {number}" in message
        assert whole


def told(metrics: Any) -> Any:
    return None if metrics is None else values(metrics)


ADAPTERS = LoraConfig(rank=8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "head", "lora"),
    [
        (ParallelLayout(dp=2), "lm", None),
        (ParallelLayout(dp=2), "value", None),
        (ParallelLayout(dp=2), "lm", ADAPTERS),
        (ParallelLayout(dp=2, pp=2), "lm", None),
        (ParallelLayout(dp=2, pp=2, vpp=2), "lm", None),
    ],
    ids=["dp2", "dp2-value", "dp2-adapters", "dp2-pp2", "dp2-pp2-vpp2"],
)
def test_weights_gathered_in_the_next_pass_are_the_same(
    ranks: RankPool, layout: ParallelLayout, head: str, lora: LoraConfig | None, tmp_path: Path
):
    overlap = {"overlap_grad_reduce": True}
    size = layout.world_size
    expected = ranks(size).run(train_gathering, layout, head, lora, overlap, tmp_path / "after")
    overlap["overlap_param_gather"] = True
    found = ranks(size).run(train_gathering, layout, head, lora, overlap, tmp_path / "within")
    for one, other in zip(expected, found, strict=True):
        assert all(map(same, one, other))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return all(map(same, one, other)) if isinstance(one, list) else bool(one == other)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_activations_give_the_same_update(ranks: RankPool, recompute: str):
    layout = ParallelLayout(tp=2, sequence_parallel=True)
    kept, again = (ranks(2).run(train, layout, mode) for mode in ("none", recompute))
    for (metrics, weights), (other_metrics, other_weights) in zip(kept, again, strict=True):
        assert metrics == other_metrics
        assert all(map(torch.equal, weights, other_weights))


@pytest.mark.parametrize("layout", [ParallelLayout(dp=2), ParallelLayout(pp=2)], ids=["dp2", "pp2"])
@pytest.mark.parametrize("distributed", [True, False], ids=["sharded", "plain"])
def test_overlapped_reduction_gives_the_same_update(ranks: RankPool, layout: ParallelLayout, distributed: bool):
    options = {"distributed": distributed}
    after, within = (
        ranks(2).run(train, layout, "none", overlap_grad_reduce=overlap, **options) for overlap in (False, True)
    )
    for (metrics, weights), (other_metrics, other_weights) in zip(after, within, strict=True):
        assert metrics == other_metrics
        assert all(map(torch.equal, weights, other_weights))
