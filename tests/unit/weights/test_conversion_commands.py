"""The commands of tools/convert on a tiny model: what they write, print and answer with."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.errors import LayoutError
from megarl.models.registry import load_spec
from megarl.models.tiny import tiny_config, write_tiny
from megarl.weights.conversion.compare import argument_differences, option_differences
from megarl.weights.conversion.logits import compare_layers
from megarl.weights.conversion.sources import open_source
from megarl.weights.engine_layout import engine_regions
from megarl.weights.files.safetensors_writer import write_hf
from megarl.weights.files.torch_dist import chunk_array, read_torch_dist
from megarl.weights.layout import canonical_shapes, parameter_shapes
from megarl.weights.pieces import fill
from tools.convert.options import add_layout_options, layout_of

ROOT = Path(__file__).resolve().parents[3]
TOOLS = ROOT / "tools/convert"
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def tool(name: str, *arguments: Any, expected: int = 0) -> str:
    words = [sys.executable, str(TOOLS / name), *map(str, arguments)]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert result.returncode == expected, result.stdout + result.stderr
    return result.stdout + result.stderr


def make_model(directory: Path, family: str = "qwen2", **options: Any) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16}
    write_tiny(directory / "description", tiny_config(family, **(sizes | options)))
    shapes = canonical_shapes(load_spec(directory / "description"))
    generator = torch.Generator().manual_seed(3)
    tensors = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    table = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    write_hf(directory / "hf", tensors.items(), table, copy_from=directory / "description")
    return directory / "hf"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def dist(tmp_path_factory, model) -> Path:
    target = tmp_path_factory.mktemp("dist") / "dist"
    text = tool("hf_to_megatron.py", model, target, "--tp", 2, "--pp", 3, "--no-fsync")
    assert "digest" in text and "tensors" in text
    return target


def test_there_and_back_is_the_same_file(tmp_path, model, dist):
    tool("megatron_to_hf.py", dist, tmp_path / "hf", "--no-fsync", "--workers", 1, "--max-memory", "300K")
    assert (tmp_path / "hf/model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (model / name).read_bytes()
    receipt = json.loads((tmp_path / "hf/conversion_manifest.json").read_text())
    assert receipt["source"]["digest"] == receipt["target"]["digest"]
    assert receipt["source"]["format"] == "torch_dist" and set(receipt["versions"]) == {"megarl", "numpy", "python"}
    assert {"name": "embedding.word_embeddings.weight@192,0", "reason": "padding", "elements": 7872} in receipt[
        "dropped"
    ]


def test_through_another_layout_another_format_and_another_dtype(tmp_path, model, dist):
    tool("reshard.py", dist, tmp_path / "wide", "--pp", 3, "--dtype", "bf16", "--no-fsync", "--naming", "local")
    tool("reshard.py", tmp_path / "wide", tmp_path / "legacy", "--format", "legacy", "--tp", 2, "--pp", 3, "--no-fsync")
    assert (tmp_path / "legacy/release/mp_rank_01_002/model_optim_rng.pt").exists()
    content = torch.load(tmp_path / "legacy/release/mp_rank_00_000/model_optim_rng.pt", weights_only=False)
    assert content["checkpoint_version"] == 3.0 and content["args"].num_query_groups == 2
    tool("megatron_to_hf.py", tmp_path / "legacy", tmp_path / "hf", "--no-fsync")
    from safetensors.torch import load_file

    wide, narrow = load_file(model / "model.safetensors"), load_file(tmp_path / "hf/model.safetensors")
    assert all(torch.equal(narrow[name], tensor.bfloat16()) for name, tensor in wide.items())
    text = tool("diff.py", tmp_path / "hf", model, expected=1)
    assert "0 tensors are equal" in text and "model.norm.weight: BF16 and F32" in text
    assert "tensors are equal, 0 differences" in tool("diff.py", tmp_path / "hf", tmp_path / "legacy")


@pytest.mark.slow
def test_options_without_effect_links_and_impossible_names_are_refused(tmp_path, model, dist):
    text = tool("hf_to_megatron.py", model, tmp_path / "x", "--grouped-experts", expected=8)
    assert text.startswith("--grouped-experts is for expert models in the legacy format")
    engine = (tmp_path / "x", "--format", "sharded_state", "--tp", 2, "--pp", 3, "--naming", "te")
    assert "--pp, --naming: an engine's shards" in tool("reshard.py", model, *engine, expected=8)
    assert "none is named" in tool("inspect.py", model, "--tp", 2, expected=8)
    assert "expected 1 to" in tool("verify.py", dist, "--against", model, "--logits", "--tokens", 0, expected=8)
    (tmp_path / "link").symlink_to(dist)
    text = tool("hf_to_megatron.py", model, tmp_path / "link", "--overwrite", expected=8)
    assert text.startswith("the target is a link")
    text = tool("hf_to_megatron.py", model, tmp_path / ("n" * 300), expected=8)
    assert text.startswith("File name too long [")
    assert [path.name for path in tmp_path.iterdir()] == ["link"] and dist.exists()


@pytest.mark.parametrize("tied", [True, False])
def test_an_engines_ranks_get_their_own_parameters(tmp_path, tied):
    from safetensors.torch import load_file

    directory = make_model(tmp_path, tie_word_embeddings=tied)
    weights = load_file(directory / "model.safetensors")
    tool("reshard.py", directory, tmp_path / "engine", "--format", "sharded_state", "--tp", 4, "--no-fsync")
    spec = load_spec(directory)
    for rank in range(4):
        held = load_file(tmp_path / f"engine/model-rank-{rank}-part-0.safetensors")
        scales = {name for name in held if name.endswith("_scale")}
        assert len(scales) == 4 * spec.num_layers and all(held[name] == 1 for name in scales)
        regions = engine_regions(spec, 4, rank)
        expected = {name: torch.ones(shape) for name, shape in parameter_shapes(regions).items()}
        fill(regions, expected, lambda region: weights[region.tensor][region.slices])
        if tied:
            # An engine keeps the smaller of two names of one tensor.
            expected["lm_head.weight"] = expected.pop("model.embed_tokens.weight")
        assert held.keys() - scales == expected.keys()
        assert all(torch.equal(held[name], tensor) for name, tensor in expected.items())
    assert (tmp_path / "engine/config.json").read_bytes() == (directory / "config.json").read_bytes()


def test_where_a_tensor_lives(model, dist):
    text = tool("inspect.py", dist)
    assert "torch_dist" in text and "decoder.layers.mlp.linear_fc1.weight  F32 [3, 192, 64]  12 chunks" in text
    assert "converted from" in text
    name = "model.layers.2.self_attn.v_proj.weight"
    text = tool("inspect.py", dist, "--tensor", name)
    tensor = read_torch_dist(dist).tensors["decoder.layers.self_attention.linear_qkv.weight"]
    chunk = next(chunk for chunk in tensor.chunks if chunk.box[:2] == ((2, 3), (64, 128)))
    begin = chunk_array(chunk, tensor).begin + 48 * 64 * 4
    assert f"[16:32, 0:64]  {chunk.path.name} at byte {begin}, in" in text
    text = tool("inspect.py", dist, "--tensor", name, "--tp", 2, "--pp", 3)
    assert "stage 2 tp 1 rank 5: decoder.layers.0.self_attention.linear_qkv.weight[48:64, 0:64]" in text
    assert "no tensor is called nothing" in tool("inspect.py", model, "--tensor", "nothing", expected=8)
    assert "model.embed_tokens.weight  F32 [261, 64]  model.safetensors at" in tool("inspect.py", model)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--tp", "4", "--ep", "6", "--etp", "1"], (4, 3)),
        (["--tp", "2", "--ep", "1", "--etp", "3"], (2, 3)),
        (["--tp", "2", "--ep", "4"], (2, 4)),
        (["--tp", "0"], "layout degree tp=0 is less than 1"),
        (["--tp", "2", "--ep", "-1"], "layout degree ep=-1 is less than 1"),
    ],
)
def test_a_layout_has_as_many_replicas_as_its_experts_need(options, expected):
    parser = argparse.ArgumentParser()
    add_layout_options(parser)
    given = parser.parse_args(options)
    if isinstance(expected, str):
        with pytest.raises(LayoutError, match=expected):
            layout_of(given, has_experts=True)
    else:
        layout = layout_of(given, has_experts=True)
        assert (layout.tp, layout.dp) == expected


def test_verify_says_what_holds_and_what_does_not(tmp_path, model, dist):
    text = tool("verify.py", dist, "--against", model, "--logits")
    assert text.count(" yes ") == 6 and "NO" not in text
    copy = make_model(tmp_path)
    tool("hf_to_megatron.py", copy, tmp_path / "dist", "--no-fsync")
    tensor = read_torch_dist(tmp_path / "dist").tensors["decoder.layers.mlp.linear_fc1.weight"]
    array = chunk_array(next(chunk for chunk in tensor.chunks if chunk.box[0] == (1, 2)), tensor)
    rows = np.memmap(array.path, np.float32, "r+", array.begin, (96, 64))
    rows[:] = rows[::-1].copy()
    rows.flush()
    text = tool("verify.py", tmp_path / "dist", "--against", model, "--logits", expected=8)
    assert "receipt        NO  model.layers.1.mlp.gate_proj.weight has checksum" in text
    assert "bits           NO  model.layers.1.mlp.gate_proj.weight: other values" in text
    assert "logits         NO  layer 1 is the first that diverges" in text
    assert "give --against" in tool("verify.py", model, expected=8)


def test_options_that_no_tensor_shows_are_compared(tmp_path, model):
    spec = load_spec(model)
    changed = json.loads((model / "config.json").read_text())
    changed["rope_parameters"] = {"rope_type": "default", "rope_theta": 500000.0}
    changed["rms_norm_eps"] = 1e-5
    (tmp_path / "config.json").write_text(json.dumps(changed))
    differences = option_differences(spec, load_spec(tmp_path))
    assert differences == ["rms_norm_eps: 1e-06 and 1e-05", "rope_theta: 10000.0 and 500000.0"]
    assert argument_differences(spec, {"rotary_base": 10000, "num_layers": 3, "norm_epsilon": 1e-6}) == []
    arguments = {"rotary_base": 5000, "untie_embeddings_and_output_weights": True, "rotary_interleaved": True}
    assert len(argument_differences(spec, arguments)) == 3


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"tie_word_embeddings": False, "rope_parameters": LLAMA3}),
        pytest.param("mistral", {}, marks=pytest.mark.slow),
        pytest.param("qwen2", {}, marks=pytest.mark.slow),
        ("qwen3", {"head_dim": 24}),
    ],
)
def test_the_forward_pass_from_the_files_is_transformers(tmp_path, family, options):
    directory = make_model(tmp_path, family, **options)
    tool("hf_to_megatron.py", directory, tmp_path / "dist", "--tp", 2, "--no-fsync")
    legacy = ("--format", "legacy", "--tp", 2, "--pp", 3, "--naming", "local", "--no-fsync")
    tool("hf_to_megatron.py", directory, tmp_path / "legacy", *legacy)
    for kind in ("dist", "legacy"):
        found = list(compare_layers(open_source(tmp_path / kind), directory, [3, 250, 17, 90, 4, 260, 77]))
        assert [entry.layer for entry in found] == ["embedding", "layer 0", "layer 1", "layer 2", "logits"]
        assert max(entry.relative for entry in found) < 1e-5


LATENT = {
    "q_lora_rank": 28,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
}
GROUPS = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}


def expert_model(directory: Path, family: str) -> Path:
    """A tiny model of transformers' own, with random weights."""
    import transformers

    sizes = {
        "vocab_size": 67,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
    }
    options = {
        "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": None, "head_dim": 12},
        "qwen3_moe": {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "head_dim": 16,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
        },
        "qwen2_moe": {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 28,
            "norm_topk_prob": False,
        },
        "deepseek_v2": {**LATENT, **GROUPS, "topk_method": "group_limited_greedy", "q_lora_rank": None},
        "deepseek_v3": {**LATENT, **GROUPS, "norm_topk_prob": True, "rope_parameters": YARN},
        "glm4_moe": {**GROUPS, "head_dim": 16, "use_qk_norm": True, "attention_bias": True, "norm_topk_prob": True},
    }
    classes = {
        "mixtral": "Mixtral",
        "qwen3_moe": "Qwen3Moe",
        "qwen2_moe": "Qwen2Moe",
        "deepseek_v2": "DeepseekV2",
        "deepseek_v3": "DeepseekV3",
        "glm4_moe": "Glm4Moe",
    }
    torch.manual_seed(3)
    config = getattr(transformers, f"{classes[family]}Config")(**sizes | options[family])
    model = getattr(transformers, f"{classes[family]}ForCausalLM")(config)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # zero in a new model
            buffer.copy_(torch.rand_like(buffer))
    model.save_pretrained(directory)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "glm4_moe"])
def test_expert_models_compute_what_transformers_does(tmp_path, family):
    directory = expert_model(tmp_path / "hf", family)
    for naming in ("te", "local"):
        tool("hf_to_megatron.py", directory, tmp_path / naming, "--tp", 2, "--naming", naming, "--no-fsync")
        found = list(compare_layers(open_source(tmp_path / naming), directory, [3, 60, 17, 40, 4, 66, 5]))
        assert max(entry.relative for entry in found) < 1e-5
    tool("megatron_to_hf.py", tmp_path / "te", tmp_path / "back", "--no-fsync")
    assert "0 differences" in tool("diff.py", tmp_path / "back", directory)
