"""A checkpoint of any axis continues exactly at its own layout, and at any other to rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.observability.metrics import values
from megarl.parallel.grid import ParallelLayout
from megarl.weights.pieces import assemble
from tests.distributed.engines import make_engine, owned_weights, policy_update, recorded_batch, replica
from tests.distributed.parity import MODELS
from tests.distributed.ranks import Rank, RankPool

PATHS = {
    "ep-to-etp": ("experts", ParallelLayout(dp=2, ep=2), ParallelLayout(tp=2, etp=2, sequence_parallel=True)),
    "vpp-to-tp": ("tied", ParallelLayout(pp=2, vpp=2), ParallelLayout(tp=2, sequence_parallel=True)),
    "cp-to-vpp": ("untied", ParallelLayout(cp=2), ParallelLayout(pp=2, vpp=2)),
    "latent": (
        "latent",
        ParallelLayout(tp=2, ep=2, sequence_parallel=True),
        ParallelLayout(pp=2, vpp=2, dp=2, ep=2),
    ),
    "latent-attention-cp": ("latent", ParallelLayout(cp=2, ep=2), ParallelLayout(dp=2, ep=2)),
    "biased": ("biased", ParallelLayout(cp=2, ep=2), ParallelLayout(tp=2, etp=2, sequence_parallel=True)),
    "tp-to-ep": ("experts", ParallelLayout(tp=2, sequence_parallel=True), ParallelLayout(pp=2, dp=2, ep=2)),
}
SLOW = ("tp-to-ep", "latent", "latent-attention-cp", "biased")


def update(rank: Rank, model: str, layout: ParallelLayout, directory: Path, is_new: bool) -> Any:
    """Two updates and a save, or a load; then one more update."""
    groups = rank.start(layout)
    moe = MODELS[model].moe
    rate = 0.02 if moe is not None and moe.expert_bias else 0.0
    engine = make_engine(MODELS[model], groups, seed=3 if is_new else 99, moe_bias_update_rate=rate)
    batch, minibatches = replica(recorded_batch(engine.spec.vocab_size), groups)
    if is_new:
        engine.update_policy(batch, policy_update(), minibatches)
        engine.save(directory)
    else:
        engine.load(directory)
    metrics = engine.update_policy(batch, policy_update(), minibatches[:1])
    return None if metrics is None else values(metrics), owned_weights(engine)


def outcome(ranks: RankPool, *case: Any) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    results = ranks(case[1].world_size).run(update, *case)
    return next(m for m, _ in results if m), assemble(piece for _, pieces in results for piece in pieces)


@pytest.mark.parametrize("path", [pytest.param(path, marks=pytest.mark.slow if path in SLOW else ()) for path in PATHS])
def test_training_goes_on_at_the_same_and_at_another_layout(ranks: RankPool, tmp_path: Path, path: str) -> None:
    model, source, target = PATHS[path]
    metrics, weights = outcome(ranks, model, source, tmp_path / "saved", True)
    again, same = outcome(ranks, model, source, tmp_path / "saved", False)
    assert again == metrics
    for name, tensor in weights.items():
        assert torch.equal(same[name], tensor), name
    elsewhere, moved = outcome(ranks, model, target, tmp_path / "saved", False)
    assert elsewhere == pytest.approx(metrics, rel=1e-5, abs=1e-5)
    for name, tensor in weights.items():
        torch.testing.assert_close(moved[name], tensor, rtol=1e-5, atol=1e-5, msg=name)
