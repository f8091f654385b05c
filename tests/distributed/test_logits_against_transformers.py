"""A Hugging Face directory in, the same logits out: Megatron at every layout against transformers in float32."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megarl.models import load_spec
from megarl.models.rules import ROUTING_BIAS
from megarl.models.tiny import tiny_config, write_tiny
from megarl.parallel.grid import ParallelLayout
from megarl.parallel.groups import ParallelGroups
from megarl.platform.device import get_device
from megarl.train.megatron.model import Chunk, build_model, named_weights
from megarl.weights.check import check_names, detect_naming
from megarl.weights.files.safetensors_reader import SafetensorsReader, check_model, load_into
from megarl.weights.layout import megatron_regions
from tests.distributed.ranks import Rank, RankPool

TOLERANCE = 1e-4
LENGTHS = [7, 1, 12]
LONG = [600]
"""Llama 3's scaling changes wavelengths above 2,048: only distant tokens show it."""

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Hidden is neither heads times head_dim (where the family allows it) nor the feed-forward size; key-value heads are
# fewer than heads; the vocabulary of 261 divides by no shard.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "hidden_size": 96, "num_attention_heads": 4, "head_dim": 32},
    "llama3": {"family": "llama", "head_dim": 48, "rope_parameters": LLAMA3_ROPE, "rms_norm_eps": 1e-5},
    "mistral": {"family": "mistral", "num_attention_heads": 8, "num_key_value_heads": 4},
    "qwen2": {"family": "qwen2", "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}},
    "qwen3": {"family": "qwen3", "hidden_size": 80, "num_key_value_heads": 4},
    "mixtral": {"family": "mixtral", "hidden_size": 80, "intermediate_size": 112},
    # Dense layers between those with experts, so that stages and layers differ.
    "qwen2_moe": {"family": "qwen2_moe", "mlp_only_layers": [1], "shared_expert_intermediate_size": 80},
    "qwen3_moe": {"family": "qwen3_moe", "hidden_size": 80, "num_experts": 6, "mlp_only_layers": [0, 3]},
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}
MODELS |= {
    "deepseek_v2": {"family": "deepseek_v2", "hidden_size": 80},
    "deepseek_v3": {"family": "deepseek_v3", "hidden_size": 80, "rope_parameters": YARN},
    "glm4_moe": {"family": "glm4_moe", "hidden_size": 80, "first_k_dense_replace": 2},
}
EXPERT_MODELS = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "glm4_moe")
QUICK_EXPERT_MODELS = EXPERT_MODELS[:3]
QUICK_LATENT = ("deepseek_v3", "one")
DENSE_MODELS = [name for name in MODELS if name not in EXPERT_MODELS]
LAYOUTS = {
    "tp1-pp1": ParallelLayout(),
    "tp2-pp1": ParallelLayout(tp=2),
    "tp1-pp2": ParallelLayout(pp=2),
    "tp2-pp2": ParallelLayout(tp=2, pp=2, sequence_parallel=True),
    "pp2-uneven": ParallelLayout(pp=2, last_stage_layers=1),
}
EXPERT_LAYOUTS = {
    "one": ParallelLayout(),
    "ep2": ParallelLayout(dp=2, ep=2),
    "tp2-ep2": ParallelLayout(tp=2, ep=2, sequence_parallel=True),
    "tp2-etp2": ParallelLayout(tp=2, etp=2, sequence_parallel=True),
    "pp2-ep2": ParallelLayout(pp=2, dp=2, ep=2),
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``directories(name, tied)`` is a directory that transformers saved, with random weights."""
    root = tmp_path_factory.mktemp("hf")

    @cache
    def make(name: str, tied: bool, kind: str = "AutoModelForCausalLM") -> Path:
        transformers = pytest.importorskip("transformers", reason="transformers is not installed")
        options = {"num_hidden_layers": 4, "intermediate_size": 208, "initializer_range": 0.1, **MODELS[name]}
        directory = root / f"{name}-{tied}-{kind}"
        write_tiny(directory, tiny_config(tie_word_embeddings=tied, **options))
        torch.manual_seed(0)
        config = transformers.AutoConfig.from_pretrained(directory)
        if kind == "AutoModelForSequenceClassification":
            config.num_labels = 1
        model = getattr(transformers, kind).from_config(config)
        with torch.no_grad():
            # Norms, biases and heads away from their neutral start, so that one in the wrong place shows.
            for key, parameter in model.named_parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.3 * torch.randn_like(parameter))
                if key == "score.weight":
                    parameter.normal_()
            for key, buffer in model.named_buffers():
                if key.endswith(ROUTING_BIAS):
                    buffer.copy_(0.2 * torch.randn_like(buffer))
        # More than one file, so that the index is read.
        model.save_pretrained(directory, max_shard_size="500KB")
        return directory

    return make


def token_ids(vocab_size: int, lengths: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, vocab_size, (length,), generator=generator) for length in lengths]


@cache
def expected_outputs(
    directory: Path, lengths: tuple[int, ...], kind: str = "AutoModelForCausalLM", plain_rope: bool = False
) -> Tensor:
    """transformers' logits of each sequence alone, concatenated."""
    import transformers

    model = getattr(transformers, kind).from_pretrained(directory, dtype=torch.float32).eval()
    if plain_rope:
        rotary = model.model.rotary_emb
        size = model.config.head_dim
        rotary.inv_freq = model.config.rope_parameters["rope_theta"] ** (-torch.arange(0, size, 2).float() / size)
    with torch.no_grad():
        parts = [model(ids[None]).logits[0] for ids in token_ids(model.config.vocab_size, list(lengths))]
    return torch.cat(parts)


def load(rank: Rank, layout: ParallelLayout, directory: Path, head: str) -> tuple[Chunk, ParallelGroups]:
    """The rank's chunk with the directory's weights, its names checked against the layout's."""
    groups = rank.start(layout)
    spec = load_spec(directory)
    is_critic = head == "value"
    (chunk,) = build_model(spec, groups, device=get_device("cpu"), dtype=torch.float32, head=head)  # type: ignore[arg-type]
    state = {name: tuple(value.shape) for name, value in chunk.state_dict().items() if value is not None}
    regions = megatron_regions(spec, layout, groups.coordinate, value_head=is_critic, naming=detect_naming(state))
    check_names(regions, state)
    params = named_weights([chunk])
    with torch.no_grad():
        for parameter in params.values():
            parameter.fill_(torch.nan)
    with SafetensorsReader(directory) as reader:
        assert check_model(reader, spec, value_head=is_critic) == {}
        load_into(regions, reader, params)
    return chunk, groups


def outputs(rank: Rank, layout: ParallelLayout, directory: Path, lengths: list[int], head: str = "lm") -> Tensor | None:
    """Logits [N, V], or values [N, 1], of one pack on the ranks of the last stage."""
    chunk, groups = load(rank, layout, directory, head)
    ids = torch.cat(token_ids(chunk.spec.vocab_size, lengths))[None]
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    pack = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
    positions = torch.cat([torch.arange(length) for length in lengths])[None]

    def collect(output: Tensor, non_loss_data: bool = False) -> Tensor:
        return output.detach().reshape(-1, 1) if head == "value" else whole_logits(output, chunk, groups)

    def step(data: Any, model: Any) -> Any:
        return model(input_ids=next(data), position_ids=positions, packed_seq_params=pack), collect

    with torch.no_grad():
        results = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter([ids]),
            model=[chunk],
            num_microbatches=1,
            seq_length=ids.numel(),
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
        )
    return results[0] if groups.is_last_stage else None


def whole_logits(hidden: Tensor, chunk: Chunk, groups: ParallelGroups) -> Tensor:
    def gathered(tensor: Tensor, dim: int) -> Tensor:
        parts = [torch.empty_like(tensor) for _ in range(groups.tp.size())]
        dist.all_gather(parts, tensor.detach().contiguous(), group=groups.tp)
        return torch.cat(parts, dim)

    if groups.layout.sequence_parallel:
        hidden = gathered(hidden, 0)
    return gathered(hidden.flatten(0, 1) @ chunk.output_weight().T, 1)[:, : chunk.spec.vocab_size]


def compare(ranks: RankPool, layout: ParallelLayout, directory: Path, lengths: list[int], expected: Tensor) -> None:
    results = ranks(layout.world_size).run(outputs, layout, directory, lengths)
    found = [output for output in results if output is not None]
    assert len(found) == layout.tp * layout.dp
    for output in found:
        torch.testing.assert_close(output, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", DENSE_MODELS)
def test_logits_are_those_of_transformers(
    ranks: RankPool, directories: Any, name: str, tied: bool, layout: ParallelLayout
) -> None:
    directory = directories(name, tied)
    expected = expected_outputs(directory, tuple(LENGTHS))
    assert expected.std() > 0.3, "logits this flat would hide a difference"
    compare(ranks, layout, directory, LENGTHS, expected)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(
            name,
            EXPERT_LAYOUTS[layout],
            id=f"{name}-{layout}",
            marks=() if name in QUICK_EXPERT_MODELS or (name, layout) == QUICK_LATENT else pytest.mark.slow,
        )
        for name, layout in product(EXPERT_MODELS, EXPERT_LAYOUTS)
    ],
)
def test_logits_of_expert_models_are_those_of_transformers(
    ranks: RankPool, directories: Any, name: str, layout: ParallelLayout
) -> None:
    directory = directories(name, False)
    expected = expected_outputs(directory, tuple(LENGTHS))
    assert expected.std() > 0.3, "logits this flat would hide a difference"
    compare(ranks, layout, directory, LENGTHS, expected)


def test_llama3_rope_scaling_is_applied(ranks: RankPool, directories: Any) -> None:
    directory = directories("llama3", True)
    expected = expected_outputs(directory, tuple(LONG))
    without = expected_outputs(directory, tuple(LONG), plain_rope=True)
    assert (expected - without).abs().max() > 100 * TOLERANCE
    compare(ranks, ParallelLayout(tp=2), directory, LONG, expected)


@pytest.mark.parametrize("layout", [LAYOUTS["tp1-pp1"], LAYOUTS["tp2-pp2"]], ids=["tp1-pp1", "tp2-pp2"])
def test_a_sequence_classifier_of_transformers_is_a_critic(
    ranks: RankPool, directories: Any, layout: ParallelLayout
) -> None:
    """Its one score, read at the last token, is our value there."""
    kind = "AutoModelForSequenceClassification"
    directory = directories("qwen2", False, kind)
    expected = expected_outputs(directory, tuple(LENGTHS), kind)
    last = torch.tensor(LENGTHS).cumsum(0) - 1
    found = [
        values
        for values in ranks(layout.world_size).run(outputs, layout, directory, LENGTHS, head="value")
        if values is not None
    ]
    assert len(found) == layout.tp
    for values in found:
        torch.testing.assert_close(values[last, 0], expected.flatten(), rtol=0, atol=TOLERANCE)
