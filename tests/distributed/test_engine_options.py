"""Options that change memory or speed and no number: recomputed activations, overlapped reduction of gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megarl.config.schema.train import EngineConfig, OptimizerConfig
from megarl.observability.metrics import values
from megarl.parallel.grid import ParallelLayout
from megarl.platform.device import get_device
from megarl.train.megatron.engine import MegatronEngine
from tests.distributed.engines import policy_update, recorded_batch, replica
from tests.distributed.models import QWEN2
from tests.distributed.ranks import Rank, RankPool


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
