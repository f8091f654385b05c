"""Configurations, names and shapes by the rules are those that transformers itself writes, for every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.models import FAMILIES, load_spec
from megarl.weights.check import match_rules
from megarl.weights.files.safetensors_reader import SafetensorsReader, check_model
from megarl.weights.layout import canonical_shapes

SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
ROUTING: dict[str, Any] = {"n_routed_experts": 6, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    **ROUTING,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 10},
    "mistral": {"head_dim": 10, "sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 10},
    "mixtral": {"num_local_experts": 6},
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 14,
        "mlp_only_layers": [1],
        "decoder_sparse_step": 1,
    },
    "qwen3_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "head_dim": 10,
        "decoder_sparse_step": 2,
    },
    "deepseek_v2": {**LATENT, "q_lora_rank": None, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {**LATENT, "q_lora_rank": 16},
    "glm4_moe": {
        "moe_intermediate_size": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "head_dim": 10,
        "attention_bias": True,
        "use_qk_norm": True,
        **ROUTING,
    },
}


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.filterwarnings("ignore")
def test_what_transformers_saves_is_what_the_rules_say(family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**SIZES, **OPTIONS[family]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    spec = load_spec(tmp_path)
    reader = SafetensorsReader(tmp_path)
    assert {name: stored.shape for name, stored in reader.tensors.items()} == canonical_shapes(spec)
    assert check_model(reader, spec) == {}
    assert len(match_rules(reader.tensors, spec)) == len(reader.tensors)
    # Buffers such as the bias that chooses experts are numbers of a checkpoint and no parameters of the module.
    numbers = sum(tensor.numel() for tensor in model.parameters())
    biases = spec.num_expert_layers * spec.moe.num_experts if spec.moe is not None and spec.moe.expert_bias else 0
    assert spec.num_parameters() == numbers + biases
