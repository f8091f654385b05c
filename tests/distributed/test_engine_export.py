"""A trained engine as a Hugging Face directory, and its memory moved away and back."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.schema.train import EngineConfig
from megarl.errors import CheckpointError
from megarl.models.registry import load_spec
from megarl.models.rules import ROUTING_BIAS
from megarl.models.tiny import tiny_config, write_tiny
from megarl.observability.metrics import values
from megarl.parallel.grid import ParallelLayout
from megarl.platform.device import get_device
from megarl.train.engine import ValueUpdate
from megarl.train.megatron.engine import MegatronEngine
from megarl.train.megatron.offload import Offloader
from megarl.weights.files.safetensors_reader import SafetensorsReader
from megarl.weights.files.safetensors_writer import SafetensorsWriter
from tests.distributed.engines import make_engine, policy_update, recorded_batch, replica
from tests.distributed.models import QWEN2
from tests.distributed.ranks import Rank, RankPool


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "model", tiny_config(hidden_size=64, intermediate_size=96, head_dim=16))


def train_and_export(rank: Rank, layout: ParallelLayout, model_dir: Path, target: Path, head: Any) -> Any:
    groups = rank.start(layout)
    spec = load_spec(model_dir)
    rate = 0.05 if spec.moe is not None and spec.moe.expert_bias else 0.0
    engine = MegatronEngine(
        "actor",
        spec,
        None,
        groups,
        get_device("cpu"),
        EngineConfig(dtype="float32", microbatch_tokens=64, moe_bias_update_rate=rate),
        _optimizer(),
        head=head,
        source_dir=model_dir,
    )
    batch, minibatches = replica(recorded_batch(spec.vocab_size), groups)
    if head == "lm":
        engine.update_policy(batch, policy_update(), minibatches)
        result: Any = engine.log_probs(batch)
        result = result and result["log_probs"]
    else:
        engine.update_values(batch, ValueUpdate(clip_value=1.0), minibatches)
        result = engine.values(batch)
    engine.export_hf(target)
    return result


def _optimizer() -> Any:
    from megarl.config.schema.train import OptimizerConfig

    return OptimizerConfig(lr=1e-2)


def read_back(rank: Rank, layout: ParallelLayout, directory: Path, head: Any) -> Any:
    groups = rank.start(layout)
    engine = make_engine(load_spec(directory), groups, model_dir=directory, head=head, trained=False)
    batch = recorded_batch(engine.spec.vocab_size)
    return engine.log_probs(batch) if head == "lm" else engine.values(batch)


def test_the_exported_policy_is_what_transformers_and_another_layout_read(
    ranks: RankPool, model_dir: Path, tmp_path: Path
) -> None:
    check_export(ranks, ParallelLayout(tp=2, pp=2), model_dir, tmp_path / "exported")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "deepseek_v3"])
def test_exported_experts_are_what_transformers_and_another_layout_read(
    ranks: RankPool, tmp_path: Path, family: str
) -> None:
    """Trained at TP, CP and EP 2, and log-probs from there."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    config = tiny_config(family, tie_word_embeddings=False, **sizes)
    model_dir, layout = write_tiny(tmp_path / "model", config), ParallelLayout(tp=2, cp=2, ep=2, sequence_parallel=True)
    check_export(ranks, layout, model_dir, tmp_path / "exported")
    with SafetensorsReader(tmp_path / "exported") as reader:
        biases = [reader.read(name) for name in reader.tensors if name.endswith(ROUTING_BIAS)]
    assert len(biases) == (0 if family == "qwen3_moe" else 3)
    assert all(bias.dtype == torch.float32 for bias in biases)


def check_export(ranks: RankPool, layout: ParallelLayout, model_dir: Path, target: Path) -> None:
    from transformers import AutoModelForCausalLM

    results = ranks(layout.world_size).run(train_and_export, layout, model_dir, target, "lm")
    expected = next(result for result in results if result is not None)
    (again,) = ranks(1).run(read_back, ParallelLayout(), target, "lm")
    torch.testing.assert_close(again["log_probs"].values, expected.values, rtol=1e-4, atol=1e-4)
    assert (target / "tokenizer.json").exists()
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    batch = recorded_batch(model.config.vocab_size)
    prompt, response = batch["prompts"][0], batch["responses"][0]
    with torch.no_grad():
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
    actual = logits.log_softmax(-1).gather(1, response[:, None]).squeeze(1)
    torch.testing.assert_close(actual, expected[0], rtol=1e-4, atol=1e-4)


def test_an_exported_critic_keeps_its_head(ranks: RankPool, model_dir: Path, tmp_path: Path) -> None:
    target = tmp_path / "exported"
    expected, _ = ranks(2).run(train_and_export, ParallelLayout(tp=2), model_dir, target, "value")
    assert expected.values.abs().max() > 0
    (again,) = ranks(1).run(read_back, ParallelLayout(), target, "value")
    torch.testing.assert_close(again.values, expected.values, rtol=1e-4, atol=1e-5)


def test_transformers_reads_an_exported_critic_as_a_score_of_one_label(
    ranks: RankPool, model_dir: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForSequenceClassification

    target = tmp_path / "exported"
    (expected,) = ranks(1).run(train_and_export, ParallelLayout(), model_dir, target, "value")
    model = AutoModelForSequenceClassification.from_pretrained(target, dtype=torch.float32)
    batch = recorded_batch(model.config.vocab_size)
    prompt, response = batch["prompts"][0], batch["responses"][0]
    with torch.no_grad():
        hidden = model.model(torch.cat([prompt, response])[None]).last_hidden_state[0, len(prompt) - 1 : -1]
        actual = model.score(hidden).squeeze(1)
    torch.testing.assert_close(actual, expected[0], rtol=1e-4, atol=1e-4)


def fail_to_export(rank: Rank, layout: ParallelLayout, target: Path) -> str | None:
    engine = make_engine(QWEN2, rank.start(layout), trained=False)
    original = SafetensorsWriter.write_box
    if rank.rank == 1:

        def write_box(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        SafetensorsWriter.write_box = write_box  # type: ignore[method-assign, assignment]
    try:
        engine.export_hf(target)
    except CheckpointError as error:
        return str(error)
    finally:
        SafetensorsWriter.write_box = original  # type: ignore[method-assign]
    return None


def test_a_failing_rank_ends_the_export_everywhere_and_nothing_is_left(ranks: RankPool, tmp_path: Path) -> None:
    errors = ranks(2).run(fail_to_export, ParallelLayout(tp=2), tmp_path / "exported")
    assert all("No space left on device" in str(error) and "rank 1" in str(error) for error in errors)
    assert list(tmp_path.iterdir()) == []


def move_away_and_back(rank: Rank, layout: ParallelLayout, distributed: bool, dtype: str) -> Any:
    """The offloader works on any device; the engine uses it on CUDA only, where host memory is another memory."""
    groups = rank.start(layout)
    outcomes = []
    for is_moved in (False, True):
        engine = make_engine(QWEN2, groups, distributed=distributed, dtype=dtype)
        batch, minibatches = replica(recorded_batch(QWEN2.vocab_size), groups)
        offloader = Offloader(engine._chunks, engine.optimizer, get_device("cpu"))
        metrics = []
        for _ in range(2):
            if is_moved:
                held = engine.state_summary()
                moved = offloader.offload()
                assert moved.num_bytes == held.weights_bytes + held.optimizer_bytes and moved.seconds > 0
                assert offloader.offload().num_bytes == 0
                empty = engine.state_summary()
                assert held.weights_bytes > 0 and held.gradients_bytes > 0
                assert empty.weights_bytes == empty.gradients_bytes == empty.optimizer_bytes == 0
                assert offloader.onload().num_bytes == moved.num_bytes
                assert engine.state_summary() == held
            metrics.append(engine.update_policy(batch, policy_update(), minibatches))
        outcomes.append(
            ([values(m) for m in metrics if m is not None], [piece.clone() for _, piece in engine.pieces()])
        )
    (metrics, weights), (moved_metrics, moved_weights) = outcomes
    return metrics == moved_metrics, all(map(torch.equal, weights, moved_weights))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("distributed", [True, False], ids=["sharded", "plain"])
def test_state_moved_to_the_host_and_back_is_the_same(ranks: RankPool, distributed: bool, dtype: str) -> None:
    results = ranks(2).run(move_away_and_back, ParallelLayout(dp=2), distributed, dtype)
    assert results == [(True, True)] * 2
