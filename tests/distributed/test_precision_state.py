"""Optimizer state in less than float32: the same updates where it holds the same, and checkpoints in float32.

Transformer Engine's kernels need a GPU (``tests/gpu``); its interface and state are a stand-in's here.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from megarl.errors import SetupError
from megarl.parallel.grid import ParallelLayout
from megarl.parallel.groups import ParallelGroups
from megarl.train.engine import ValueUpdate
from megarl.train.megatron.engine import MegatronEngine
from megarl.train.megatron.optimizer_state import _places, _state
from tests.distributed import fused_adam
from tests.distributed.engines import make_engine, owned_weights, policy_update, recorded_batch, replica
from tests.distributed.models import QWEN2
from tests.distributed.ranks import Rank, RankPool

DP2 = ParallelLayout(dp=2)
REMAINDERS = {"precision_aware": True}
SHORT = {**REMAINDERS, "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "float16"}
SCALED = {**REMAINDERS, "main_params_dtype": "float16", "main_grads_dtype": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Course:
    """Main parameters after the first update, or as loaded, and where it was saved; weights after one more; bytes."""

    first: list[Tensor]
    last: list[Tensor]
    weights: list[Tensor]
    state_bytes: int


def run(rank: Rank, settings: dict[str, Any], head: str, load: Path | None, save: Path | None) -> Course:
    """Updates, or none after loading; a checkpoint; one more update."""
    groups = rank.start(DP2)
    with fused_adam.installed() if settings.get("precision_aware") else nullcontext():
        seed = 3 if load is None else 99
        engine = make_engine(QWEN2, groups, dtype="bfloat16", head=head, optimizer=settings, seed=seed)
        batch, minibatches = replica(recorded_batch(QWEN2.vocab_size), groups)

        def update(minibatch: list[int]) -> None:
            if head == "value":
                engine.update_values(batch, ValueUpdate(0.2), [minibatch])
            else:
                engine.update_policy(batch, policy_update(), [minibatch])

        if load is None:
            update(minibatches[0])
        else:
            engine.load(load)
        first = main_parameters(engine, groups)
        if load is None:
            update(minibatches[1])
        if save is not None:
            engine.save(save)
        last = main_parameters(engine, groups)
        update(minibatches[0])
        weights = [piece for _, piece in owned_weights(engine)]
        return Course(first, last, weights, engine.state_summary().optimizer_bytes)


def main_parameters(engine: MegatronEngine, groups: ParallelGroups) -> list[Tensor]:
    """This rank's, float32."""
    assert engine.optimizer is not None
    return [
        _state(part, place)["param"].clone()
        for part in engine.optimizer._parts()
        for place in _places(part)
        if groups.coordinate.dp in place.pieces
    ]


def largest_gap(one: list[Tensor], other: list[Tensor]) -> float:
    pairs = zip(one, other, strict=True)
    return max((float((a.float() - b.float()).abs().max()) for a, b in pairs if a.numel()), default=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["lm", "value"])
def test_float32_state_in_half_of_its_bytes_is_the_same_and_goes_to_and_fro(ranks: RankPool, tmp_path: Path, head: str):
    """A critic's head is float32: its own main parameter. Later updates of the two round bfloat16 weights otherwise."""
    plain = ranks(2).run(run, {}, head, None, tmp_path / "plain")
    halved = ranks(2).run(run, REMAINDERS, head, None, tmp_path / "halved")
    again = ranks(2).run(run, REMAINDERS, head, tmp_path / "halved", None)
    into = ranks(2).run(run, REMAINDERS, head, tmp_path / "plain", None)
    out_of = ranks(2).run(run, {}, head, tmp_path / "halved", None)
    assert plain[0].weights
    for rank in range(2):
        assert largest_gap(plain[rank].first, halved[rank].first) <= 1e-6
        assert largest_gap(halved[rank].last, again[rank].first) == 0
        assert largest_gap(halved[rank].weights, again[rank].weights) == 0
        assert largest_gap(plain[rank].last, into[rank].first) == 0
        assert largest_gap(halved[rank].last, out_of[rank].first) == 0
        assert halved[rank].state_bytes < plain[rank].state_bytes


@pytest.mark.slow
@pytest.mark.parametrize("settings", [SHORT, SCALED], ids=["moments", "main-and-gradients"])
def test_state_of_lower_precision_continues_where_it_was(ranks: RankPool, tmp_path: Path, settings: dict[str, Any]):
    first = ranks(2).run(run, settings, "lm", None, tmp_path / "saved")
    again = ranks(2).run(run, settings, "lm", tmp_path / "saved", None)
    plain = ranks(2).run(run, {}, "lm", None, None)
    for rank in range(2):
        assert largest_gap(first[rank].last, again[rank].first) <= 1e-5
        assert largest_gap(first[rank].weights, again[rank].weights) <= 1e-2
        assert largest_gap(plain[rank].first, first[rank].first) <= 1e-3
        assert first[rank].state_bytes < plain[rank].state_bytes


def refused(rank: Rank) -> str:
    groups = rank.start(ParallelLayout())
    with pytest.raises(SetupError) as caught:
        make_engine(QWEN2, groups, dtype="bfloat16", optimizer=REMAINDERS)
    return str(caught.value)


def test_it_is_refused_without_transformer_engine(ranks: RankPool):
    (message,) = ranks(1).run(refused)
    assert "FusedAdam, which is not installed" in message and "optimizer.precision_aware" in message
