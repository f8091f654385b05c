"""Forecast memory is what a real engine allocates: state to the byte, passes within ten per cent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megarl.config.schema.train import EngineConfig, LoraConfig, OptimizerConfig
from megarl.data.batch import Batch, Ragged
from megarl.models.spec import MixtureOfExperts, ModelSpec
from megarl.parallel.grid import ParallelLayout
from megarl.planning.memory import rank_memory
from megarl.planning.state import StateBytes
from megarl.platform.device import get_device
from megarl.platform.live_memory import LiveMemory
from megarl.train.megatron.engine import MegatronEngine
from tests.distributed.engines import policy_update
from tests.distributed.models import QWEN2
from tests.distributed.ranks import Rank, RankPool

SPEC = replace(
    QWEN2,
    vocab_size=500,
    hidden_size=96,
    ffn_hidden_size=264,
    num_layers=4,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    tied_embeddings=False,
    max_position=512,
)
EXPERTS = replace(
    SPEC,
    family="qwen2_moe",
    moe=MixtureOfExperts(
        num_experts=8, top_k=2, ffn_hidden_size=120, dense_layers=(1,), shared_ffn_hidden_size=88, shared_gate=True
    ),
)
TOKENS, PROMPT, RESPONSE = 512, 64, 192
TOLERANCE, PADDING, SPLIT = 0.1, 0.002, 0.15


def settings(dtype: Any, recompute: Any) -> EngineConfig:
    return EngineConfig(dtype=dtype, recompute=recompute, microbatch_tokens=TOKENS, logits_chunk_tokens=64)


def batch_of(rows: int) -> Batch:
    """Rows of equal length, so that every microbatch is full; no two prompts are the same."""
    generator = torch.Generator().manual_seed(1)

    def numbers(length: int) -> Ragged:
        return Ragged.from_rows([torch.randn(length, generator=generator) for _ in range(rows)])

    def tokens(length: int) -> Ragged:
        drawn = torch.randint(0, SPEC.vocab_size, (rows, length), generator=generator)
        return Ragged.from_rows(list(drawn))

    return Batch.create(
        sample_id=torch.arange(rows),
        prompts=tokens(PROMPT),
        responses=tokens(RESPONSE),
        response_mask=Ragged.from_rows([torch.ones(RESPONSE, dtype=torch.bool)] * rows),
        old_log_probs=numbers(RESPONSE),
        ref_log_probs=numbers(RESPONSE),
        advantages=numbers(RESPONSE),
    )


def measure(
    rank: Rank,
    spec: ModelSpec,
    layout: ParallelLayout,
    dtype: Any,
    recompute: Any,
    optimizer: OptimizerConfig,
    num_microbatches: int,
    lora: LoraConfig | None,
) -> tuple[int, StateBytes, int, int]:
    """Stage, state, and the peaks of an update and of a log-prob pass, of one rank."""
    groups = rank.start(layout)
    engine = MegatronEngine(
        "actor", spec, None, groups, get_device("cpu"), settings(dtype, recompute),
        optimizer, seed=1, lora=lora,
    )  # fmt: skip
    batch = batch_of(num_microbatches * TOKENS // (PROMPT + RESPONSE))
    rows = [list(range(len(batch)))]
    engine.update_policy(batch, policy_update(), rows)  # Adam's moments are there from the first update on
    with LiveMemory() as training:
        engine.update_policy(batch, policy_update(), rows)
    with LiveMemory() as inference:
        engine.log_probs(batch)
    summary = engine.state_summary()
    state = StateBytes(summary.weights_bytes, summary.gradients_bytes, summary.optimizer_bytes, summary.host_bytes)
    return groups.coordinate.pp, state, training.peak_bytes, inference.peak_bytes


CASES = [
    (ParallelLayout(), "float32", "none", True, 1),
    (ParallelLayout(), "bfloat16", "none", False, 1),
    (ParallelLayout(), "bfloat16", "selective", True, 1),
    (ParallelLayout(), "float32", "full", True, 1),
    (ParallelLayout(dp=2), "bfloat16", "full", True, 1),
    (ParallelLayout(tp=2), "float32", "none", True, 1),
    (ParallelLayout(tp=2, sequence_parallel=True), "bfloat16", "none", True, 1),
    (ParallelLayout(pp=2), "float32", "none", True, 4),
]


@pytest.mark.parametrize(("layout", "dtype", "recompute", "distributed", "num_microbatches"), CASES)
def test_memory_is_what_was_forecast(
    ranks: RankPool, layout: ParallelLayout, dtype: str, recompute: str, distributed: bool, num_microbatches: int
):
    compare(ranks, SPEC, layout, dtype, recompute, distributed, num_microbatches)


def test_memory_of_a_context_parallel_rank_is_what_was_forecast(ranks: RankPool):
    """Within twice the tolerance: masks of the blocks are not modelled."""
    compare(ranks, SPEC, ParallelLayout(cp=2), "float32", "none", True, 1, tolerance=2 * TOLERANCE)


EXPERT_CASES = [
    (ParallelLayout(), "float32", "none", True, 1),
    (ParallelLayout(dp=2, ep=2), "bfloat16", "none", True, 1),
    (ParallelLayout(tp=2, etp=2, sequence_parallel=True), "float32", "full", True, 1),
]


@pytest.mark.parametrize(("layout", "dtype", "recompute", "distributed", "num_microbatches"), EXPERT_CASES)
def test_memory_of_experts_is_what_was_forecast(
    ranks: RankPool, layout: ParallelLayout, dtype: str, recompute: str, distributed: bool, num_microbatches: int
):
    """Within twice the tolerance: experts are taken to be visited alike, which those of random weights nearly are."""
    compare(ranks, EXPERTS, layout, dtype, recompute, distributed, num_microbatches, tolerance=2 * TOLERANCE)


LORA = LoraConfig(rank=8)
ADAPTER_CASES = [
    (ParallelLayout(tp=2, sequence_parallel=True), "bfloat16", "none", True, 1),
    (ParallelLayout(dp=2), "float32", "full", True, 1),
    pytest.param(ParallelLayout(), "float32", "none", False, 1, marks=pytest.mark.slow),
    pytest.param(ParallelLayout(pp=2), "bfloat16", "selective", True, 4, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("layout", "dtype", "recompute", "distributed", "num_microbatches"), ADAPTER_CASES)
def test_memory_with_adapters_is_what_was_forecast(
    ranks: RankPool, layout: ParallelLayout, dtype: str, recompute: str, distributed: bool, num_microbatches: int
):
    compare(ranks, SPEC, layout, dtype, recompute, distributed, num_microbatches, lora=LORA)


HOST_CASES = [
    (ParallelLayout(), "float32", {"cpu_offload_fraction": 1.0}),
    (ParallelLayout(dp=2), "bfloat16", {"cpu_offload_fraction": 1.0, "main_grads_dtype": "bfloat16"}),
    (ParallelLayout(), "bfloat16", {"cpu_offload_fraction": 0.5}),
    (ParallelLayout(), "bfloat16", {"cpu_offload_fraction": 0.5, "main_grads_dtype": "bfloat16"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "dtype", "options"), HOST_CASES)
def test_state_on_the_host_is_what_was_forecast(
    ranks: RankPool, layout: ParallelLayout, dtype: str, options: dict[str, Any]
):
    compare(ranks, SPEC, layout, dtype, "full", True, 1, **options)


def compare(
    ranks: RankPool,
    spec: ModelSpec,
    layout: ParallelLayout,
    dtype: Any,
    recompute: Any,
    distributed: bool,
    num_microbatches: int,
    tolerance: float = TOLERANCE,
    lora: LoraConfig | None = None,
    **options: Any,
) -> None:
    optimizer = OptimizerConfig(distributed=distributed, **options)
    arguments = (spec, layout, dtype, recompute, optimizer, num_microbatches, lora)
    measured = ranks(layout.world_size).run(measure, *arguments)
    for stage, state, training, inference in measured:
        # Rows are the same on all replicas here, and every replica has all of them.
        expected = rank_memory(
            spec, layout, settings(dtype, recompute),
            stage=stage, num_microbatches=num_microbatches, layers="local", optimizer=optimizer, lora=lora,
        )  # fmt: skip
        assert (expected.state.weights, expected.state.gradients) == (state.weights, state.gradients)
        # Which replica holds how much of the padding between parameters is not modelled.
        slack = 0 if layout.dp * layout.cp == 1 else PADDING
        if 0 < optimizer.cpu_offload_fraction < 1:
            slack = SPLIT  # whole parameters move
        assert expected.state.optimizer == pytest.approx(state.optimizer, rel=slack, abs=0)
        assert expected.state.host == pytest.approx(state.host, rel=slack, abs=0)
        assert expected.training == pytest.approx(training, rel=tolerance), (stage, "training")
        assert expected.inference == pytest.approx(inference, rel=tolerance), (stage, "inference")
