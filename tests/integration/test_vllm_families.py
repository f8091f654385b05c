"""Families that vLLM serves on the CPU, TP 1 and 2: updates in a row, each equal to transformers.

Latent attention (DeepSeek) is not among them: vLLM's CPU build takes it at kv_lora_rank 512 only, and cannot reload it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megarl.config.schema.roles import RolloutConfig
from megarl.models.registry import load_spec
from megarl.parallel.grid import ParallelLayout
from megarl.platform import env
from megarl.rollout.engine import Request, WeightSpan
from megarl.rollout.sampling import Sampling
from megarl.weights.engine_layout import engine_regions
from megarl.weights.sync import DIRECT, SyncOptions, SyncSession
from tests.integration.sync_ends import HOST, EngineOnLoop, LocalRank, Loop, close_local_ranks, invoke

# vLLM's own, at import and at start; warnings of megarl stay errors.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

SIZES = {
    "vocab_size": 131, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": 130,
    "pad_token_id": None, "use_cache": True,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
TP2, EP2 = ParallelLayout(tp=2), ParallelLayout(dp=2, ep=2)

FAMILIES: dict[str, tuple[ParallelLayout, dict[str, Any]]] = {
    "llama": (TP2, {"tie_word_embeddings": False, "head_dim": 32}),
    "mistral": (TP2, {"tie_word_embeddings": False, "head_dim": 32, "sliding_window": None}),
    "qwen2": (TP2, {"tie_word_embeddings": True}),
    "qwen3": (TP2, {"tie_word_embeddings": True, "head_dim": 32}),
    "mixtral": (EP2, {"tie_word_embeddings": False, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32}),
    "qwen2_moe": (EP2, {**EXPERTS, "shared_expert_intermediate_size": 160, "norm_topk_prob": False}),
    "qwen3_moe": (EP2, {**EXPERTS, "head_dim": 32, "norm_topk_prob": True, "tie_word_embeddings": False}),
}

PROMPT = [70, 54, 57, 9]


class Model:
    """Transformers' model of a family and its directory."""

    def __init__(self, family: str, directory: Path) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family][1])
        self.directory = directory
        self.hf: Any = AutoModelForCausalLM.from_config(config).float().eval()
        self.draw(0)

    def draw(self, seed: int) -> Path:
        """New weights; returns a file of them under the names of the checkpoint."""
        torch.manual_seed(seed)
        for parameter in self.hf.parameters():
            torch.nn.init.normal_(parameter, std=0.2 if parameter.dim() > 1 else 1.0)
        self.hf.save_pretrained(self.directory)
        path = self.directory / f"weights-{seed}.pt"
        torch.save(load_file(self.directory / "model.safetensors"), path)
        return path

    @torch.no_grad()
    def log_probs(self, response: list[int]) -> torch.Tensor:
        """[len(response), V]: of every token after each prefix."""
        return self.hf(torch.tensor([[*PROMPT, *response]])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    env.update(env.rollout_environment("cpu", 1))
    loop = Loop()
    yield loop
    loop.stop()


def started(loop: Loop, directory: Path, tp: int, **options: Any) -> EngineOnLoop:
    from megarl.rollout.vllm.engine import VllmEngine

    config = RolloutConfig(tp=tp, dtype="float32", kv_cache_gib=0.25, max_num_seqs=8)
    engine = EngineOnLoop(loop, VllmEngine(directory, config, device="cpu", max_model_len=64, **options))
    engine.call("start")
    return engine


def assert_three_updates(engine: EngineOnLoop, model: Model, family: str, tp: int) -> SyncSession:
    layout = FAMILIES[family][0]
    trainers = [LocalRank(model.directory, layout, rank) for rank in range(layout.world_size)]
    updates = SyncSession(
        trainers, [engine], invoke, host=HOST, ranks_per_receiver=tp,
        options=SyncOptions(bucket_bytes=200_000, timeout_s=60.0),
    )  # fmt: skip
    try:
        drawn = {}
        # The first weights again at the end: the KL from what they sampled is zero, not nearly so.
        for version, seed in enumerate((1, 2, 3, 1), start=1):
            weights = model.draw(seed)
            for trainer in trainers:
                trainer.load(weights)
            updates.publish(version)
            tokens, found = drawn[version] = sampled(engine, version)
            expected = model.log_probs(tokens)
            assert tokens == expected.argmax(-1).tolist()
            torch.testing.assert_close(found, expected.max(-1).values, rtol=0, atol=1e-3)
        assert drawn[4][0] == drawn[1][0]
        assert torch.equal(drawn[4][1], drawn[1][1])
    finally:
        close_local_ranks()
    return updates


def sampled(engine: EngineOnLoop, version: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens after the prompt and their log-probabilities [10] float32, all of this version."""
    (((_, (completion,)),)) = engine.call(
        "generate", [Request(0, PROMPT, version)], Sampling(temperature=0, max_tokens=10), 1
    )
    tokens = list(map(int, completion.token_ids))
    assert completion.weight_versions == (WeightSpan(version, 0, len(tokens)),)
    return tokens, torch.as_tensor(completion.log_probs, dtype=torch.float32)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_three_updates_in_a_row_are_exact(tmp_path, loop, family, tp):
    model = Model(family, tmp_path)
    engine = started(loop, tmp_path, tp)
    try:
        layouts = engine.call("layout", {r.tensor: r.tensor_shape for r in engine_regions(load_spec(tmp_path), 1, 0)})
        for rank, layout in enumerate(layouts):
            assert layout.way == DIRECT
            # The loader and the arithmetic agree on every element.
            assert places(layout.regions) == places(engine_regions(load_spec(tmp_path), tp, rank))
        updates = assert_three_updates(engine, model, family, tp)
        assert updates.schedule is not None and len(updates.schedule.senders) == 2
    finally:
        engine.call("stop")


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_whole_tensors_through_the_loader_are_as_exact(tmp_path, loop, family):
    """The way of engines whose loader cannot be traced."""
    model = Model(family, tmp_path)
    engine = started(loop, tmp_path, 1, may_write=False)
    try:
        updates = assert_three_updates(engine, model, family, 1)
        assert updates.schedule is not None
        assert {r.local_name for r in updates.schedule.plan.destinations[0]} == set(
            load_file(tmp_path / "model.safetensors")
        )
    finally:
        engine.call("stop")


def places(regions: Any) -> set[tuple[Any, ...]]:
    """Regions without what the two ways may name differently, cut to single rows of the tensor."""
    found = set()
    for r in regions:
        for row in range(*r.box[0]):
            offset = r.offset + (row - r.box[0][0]) * r.strides[0]
            sizes = [stop - start for start, stop in r.box[1:]]
            strides = tuple(s for s, n in zip(r.strides[1:], sizes, strict=True) if n > 1)
            found.add((r.tensor, row, r.box[1:], r.local_name, r.local_shape, offset, strides))
    return found
