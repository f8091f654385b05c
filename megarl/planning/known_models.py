"""Numbers of well-known models by name, for planning where the model's directory is not at hand.

From each model's ``config.json`` on the Hugging Face hub.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.errors import ModelError
from megarl.models import ModelSpec, load_spec, spec_from_config


def _llama(hidden: int, ffn: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": hidden, "intermediate_size": ffn,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }  # fmt: skip


def _qwen2(vocabulary: int, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "model_type": "qwen2", "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": ffn,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "hidden_act": "silu",
        "tie_word_embeddings": False,
    }  # fmt: skip


def _qwen3(hidden: int, ffn: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": hidden, "intermediate_size": ffn,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "hidden_act": "silu",
        "tie_word_embeddings": False,
    }  # fmt: skip


def _qwen3_moe(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": hidden, "intermediate_size": 3 * hidden,
        "moe_intermediate_size": ffn, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0, "hidden_act": "silu", "tie_word_embeddings": False,
    }  # fmt: skip


KNOWN: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": _llama(4096, 14336, 32, 32),
    "Llama-3.1-70B": _llama(8192, 28672, 80, 64),
    "Llama-3.3-70B": _llama(8192, 28672, 80, 64),
    "Qwen2.5-7B": _qwen2(152064, 3584, 18944, 28, 28, 4),
    "Qwen2.5-32B": _qwen2(152064, 5120, 27648, 64, 40, 8),
    "Qwen2.5-72B": _qwen2(152064, 8192, 29568, 80, 64, 8),
    "Qwen3-8B": _qwen3(4096, 12288, 36, 32),
    "Qwen3-32B": _qwen3(5120, 25600, 64, 64),
    "Qwen3-30B-A3B": _qwen3_moe(2048, 768, 48, 32, 4),
    "Qwen3-235B-A22B": _qwen3_moe(4096, 1536, 94, 64, 4),
}
"""Configurations by the name that a model's directory starts with."""


def known_spec(name: str) -> ModelSpec:
    """The spec of a known model, an ending such as ``-Instruct`` left out. Raises ModelError for an unknown one."""
    match = next((known for known in sorted(KNOWN, key=len, reverse=True) if name.startswith(known)), None)
    if match is None:
        raise ModelError(
            f"no model directory and no known model {name!r}", fix=f"give a directory, or one of {', '.join(KNOWN)}"
        )
    return spec_from_config(KNOWN[match], where=match)


def spec_of(path: str) -> tuple[ModelSpec, bool]:
    """The spec of a model directory, or of the known model it is named after; whether it was the latter.

    Raises:
        ModelError: neither.
    """
    if (Path(path) / "config.json").exists():
        return load_spec(path), False
    return known_spec(Path(path).name), True
