"""An optimizer that is partly in host memory: the same updates, and checkpoints that go to and from one that is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.parallel.grid import ParallelLayout
from megarl.train.engine import ValueUpdate
from megarl.train.megatron.engine import MegatronEngine
from tests.distributed.engines import make_engine, owned_weights, policy_update, recorded_batch, replica
from tests.distributed.models import QWEN2
from tests.distributed.ranks import Rank, RankPool

WHOLE, HALF = {"cpu_offload_fraction": 1.0}, {"cpu_offload_fraction": 0.5, "overlap_cpu_offload": True}
CLOSE = {"rtol": 0.0, "atol": 1e-5}


def update(engine: MegatronEngine, groups: Any) -> None:
    batch, minibatches = replica(recorded_batch(QWEN2.vocab_size), groups)
    if engine.is_value:
        engine.update_values(batch, ValueUpdate(0.2), minibatches)
    else:
        engine.update_policy(batch, policy_update(), minibatches)


def engine_with(groups: Any, optimizer: dict[str, Any], head: str, dtype: str, seed: int = 3) -> MegatronEngine:
    return make_engine(QWEN2, groups, head=head, dtype=dtype, seed=seed, optimizer=optimizer)


def trained(rank: Rank, layout: ParallelLayout, optimizer: dict[str, Any], head: str, dtype: str) -> Any:
    """The weights after two updates, by region, and the bytes of optimizer state in host memory."""
    groups = rank.start(layout)
    engine = engine_with(groups, optimizer, head, dtype)
    for _ in range(2):
        update(engine, groups)
    return owned_weights(engine), engine.state_summary().host_bytes


def gradients_kept(rank: Rank) -> list[int]:
    """Bytes of gradients that parameters updated on the device hold after an update, for each optimizer."""
    groups = rank.start(ParallelLayout())
    engine = engine_with(groups, {**HALF, "main_grads_dtype": "bfloat16"}, "lm", "bfloat16")
    update(engine, groups)
    assert engine.optimizer is not None
    on_device = [hybrid.gpu_optimizer for hybrid in engine.optimizer.torch_optimizers()]  # type: ignore[attr-defined]
    return [
        sum(own.grad.nbytes for group in inner.param_groups for own in group["params"] if own.grad is not None)
        for inner in on_device
    ]


@pytest.mark.slow
def test_float32_copies_of_gradients_do_not_outlive_the_update(ranks: RankPool):
    assert ranks(1).run(gradients_kept) == [[0]]


CASES = [
    (ParallelLayout(dp=2), WHOLE, "lm", "float32"),
    pytest.param(ParallelLayout(dp=2), HALF, "lm", "float32", marks=pytest.mark.slow),
    pytest.param(ParallelLayout(tp=2), HALF, "lm", "bfloat16", marks=pytest.mark.slow),
    pytest.param(ParallelLayout(dp=2), WHOLE, "value", "bfloat16", marks=pytest.mark.slow),
    pytest.param(ParallelLayout(pp=2), HALF, "value", "float32", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("layout", "optimizer", "head", "dtype"), CASES)
def test_updates_on_the_host_are_those_on_the_device(
    ranks: RankPool, layout: ParallelLayout, optimizer: dict[str, Any], head: str, dtype: str
):
    size = layout.world_size
    plain, moved = (ranks(size).run(trained, layout, settings, head, dtype) for settings in ({}, optimizer))
    for (expected, none), (found, some) in zip(plain, moved, strict=True):
        assert none == 0 < some
        for (_, one), (_, other) in zip(expected, found, strict=True):
            torch.testing.assert_close(other, one, **CLOSE)


def written(rank: Rank, layout: ParallelLayout, optimizer: dict[str, Any], head: str, dtype: str, to: Path) -> Any:
    """The weights after two updates and a third that follows a checkpoint."""
    groups = rank.start(layout)
    engine = engine_with(groups, optimizer, head, dtype)
    for _ in range(2):
        update(engine, groups)
    engine.save(to)
    update(engine, groups)
    return owned_weights(engine)


def read(rank: Rank, layout: ParallelLayout, optimizer: dict[str, Any], head: str, dtype: str, of: Path) -> Any:
    """The weights after an update that follows the loading of a checkpoint."""
    groups = rank.start(layout)
    engine = engine_with(groups, optimizer, head, dtype, seed=99)
    engine.load(of)
    update(engine, groups)
    return owned_weights(engine)


def by_tensor(results: Any) -> dict[str, Any]:
    """Pieces of a run by where they lie."""
    return {repr((region.tensor, region.box)): piece for weights in results for region, piece in weights}


DP2, TP2 = ParallelLayout(dp=2), ParallelLayout(tp=2)
EXCHANGES = [
    (DP2, WHOLE, DP2, WHOLE, "lm", "float32"),
    (DP2, WHOLE, DP2, {}, "lm", "bfloat16"),
    (DP2, {}, DP2, HALF, "value", "bfloat16"),
    (TP2, HALF, TP2, HALF, "value", "bfloat16"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "optimizer", "other", "then", "head", "dtype"), EXCHANGES)
def test_a_checkpoint_continues_on_the_host_and_off_it(
    ranks: RankPool,
    tmp_path: Path,
    layout: ParallelLayout,
    optimizer: dict[str, Any],
    other: ParallelLayout,
    then: dict[str, Any],
    head: str,
    dtype: str,
):
    expected = by_tensor(ranks(2).run(written, layout, optimizer, head, dtype, tmp_path / "saved"))
    found = by_tensor(ranks(2).run(read, other, then, head, dtype, tmp_path / "saved"))
    assert expected.keys() == found.keys()
    exact = optimizer == then
    for name, piece in expected.items():
        torch.testing.assert_close(found[name], piece, **({"rtol": 0, "atol": 0} if exact else CLOSE))


def resharded(rank: Rank, layout: ParallelLayout, optimizer: dict[str, Any], dtype: str, of: Path, to: Path) -> Any:
    """A checkpoint loaded and written again; what its optimizer state is, and the weights after one more update."""
    groups = rank.start(layout)
    engine = engine_with(groups, optimizer, "lm", dtype, seed=99)
    engine.load(of)
    engine.save(to)
    update(engine, groups)
    return [(region.tensor, piece) for region, piece in owned_weights(engine)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_state_on_the_host_continues_at_another_layout(ranks: RankPool, tmp_path: Path, dtype: str):
    """From two replicas to one rank and back: equal to the run that went on, to rounding."""
    expected = by_tensor(ranks(2).run(written, DP2, WHOLE, "lm", dtype, tmp_path / "two"))
    ranks(1).run(resharded, ParallelLayout(), HALF, dtype, tmp_path / "two", tmp_path / "one")
    found = by_tensor(ranks(2).run(read, DP2, WHOLE, "lm", dtype, tmp_path / "one"))
    for name, piece in expected.items():
        torch.testing.assert_close(found[name], piece, rtol=0, atol=0)


def started_afresh(rank: Rank, directory: Path, dtype: str) -> Any:
    """Weights after an update of an engine that loaded weights without optimizer state, and of one that starts so."""
    groups = rank.start(ParallelLayout())
    found = []
    for optimizer in (HALF, {}):
        engine = engine_with(groups, optimizer, "lm", dtype, seed=99)
        engine.load(directory, fresh=["optimizer", "scheduler"])
        update(engine, groups)
        found.append(owned_weights(engine))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_without_their_state_are_updated_from_where_they_are(ranks: RankPool, tmp_path: Path, dtype: str):
    ranks(1).run(written, ParallelLayout(), {}, "lm", dtype, tmp_path / "saved")
    ((moved, plain),) = ranks(1).run(started_afresh, tmp_path / "saved", dtype)
    for (_, one), (_, other) in zip(plain, moved, strict=True):
        torch.testing.assert_close(other, one, **CLOSE)
