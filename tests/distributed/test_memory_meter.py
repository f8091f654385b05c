"""The memory line on CPU: a worker's meter around passes of a real engine, against real sizes and the forecast."""

from __future__ import annotations

import pytest

from megarl.config.schema.train import OptimizerConfig
from megarl.controller.memory import MemoryMeter
from megarl.parallel.grid import ParallelLayout
from megarl.planning.memory import rank_memory
from megarl.platform.device import get_device
from megarl.train.megatron.engine import MegatronEngine
from tests.distributed.engines import policy_update
from tests.distributed.ranks import Rank, RankPool
from tests.distributed.test_memory_forecast import SPEC, TOLERANCE, batch_of, settings


def meter_passes(rank: Rank) -> tuple[list[dict[str, int]], int]:
    groups, device = rank.start(ParallelLayout()), get_device("cpu")
    config = settings("float32", "none")
    actor = MegatronEngine("actor", SPEC, None, groups, device, config, OptimizerConfig(), seed=1)
    reference = MegatronEngine("reference", SPEC, None, groups, device, config, None, seed=1)
    meter, seen, batch = MemoryMeter(device, {"actor": actor, "reference": reference}), [], batch_of(2)
    for _ in range(3):
        with meter.watch("reference", "log_probs"):
            reference.log_probs(batch)
        with meter.watch("actor", "update"):
            actor.update_policy(batch, policy_update(), [list(range(len(batch)))])
        seen.append({name.removeprefix("memory/"): size for name, size in meter.numbers().items()})
    return seen, sum(parameter.nbytes for parameter in reference.parameters().values())


def test_the_second_pass_of_a_kind_is_measured_on_cpu(ranks: RankPool):
    ((first, second, third), weights) = ranks(1).run(meter_passes)[0]
    assert first == {}, "counting costs time"
    assert second == third
    expected = rank_memory(
        SPEC, ParallelLayout(), settings("float32", "none"), stage=0, num_microbatches=1, layers="local"
    )
    assert second["reference/weights"] == weights
    assert second["reference/gradients"] == second["reference/optimizer"] == 0
    state = expected.state
    assert second["actor/weights"] == state.weights == second["actor/gradients"] == state.gradients  # padded, float32
    assert second["actor/optimizer"] == state.optimizer == 2 * weights
    assert second["actor/update_activations"] == pytest.approx(expected.training, rel=TOLERANCE)
    assert second["reference/log_probs_activations"] == pytest.approx(expected.inference, rel=TOLERANCE)
    assert second["actor/update_peak"] == state.total + weights + second["actor/update_activations"]
    assert second["reference/log_probs_peak"] == state.total + weights + second["reference/log_probs_activations"]
