"""A tiny model's directory, without weights: the configuration and a character tokenizer with a chat template.

    python -m megarl.models.tiny DIR [--family qwen2] [--hidden 128] ...

The tokenizer has one token a byte, thus one a character of English text, so that arithmetic is spelled digit by digit;
with its five special tokens the vocabulary divides by no tensor-parallel size, as real ones seldom do.

transformers 5 builds a byte-level tokenizer of its own for ``model_type: qwen2`` and takes only vocabulary, merges and
special tokens from the files. Byte-level pieces without merges come out the same there as from tokenizer.json.

Invariants:
1. ``decode(encode(text)) == text`` for every text in Unicode's composed form (NFC); there is no unknown token.
2. The directory is what transformers and vLLM load, with nothing fetched from anywhere.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.errors import ModelError
from megarl.models.registry import family_named, spec_from_config

SPECIAL_TOKENS = ("<pad>", "<eos>", "<|system|>", "<|user|>", "<|assistant|>")
NUM_BYTES = 256

PAD_ID, EOS_ID = 0, 1

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('unknown role ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<eos>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""``<|user|>question<|assistant|>answer<eos>``; the generation block marks what an assistant-token mask covers."""


_LATENT = {
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "attention_bias": False,
}
_ROUTED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
# Experts are narrower than a dense layer, as in the real families; Mixtral's have its only feed-forward size.
_EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": False},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "shared_expert_intermediate_size": 160,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "qkv_bias": True,
        "output_router_logits": False,
    },
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
        "output_router_logits": False,
    },
    "deepseek_v2": {**_LATENT, **_ROUTED, "q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    "deepseek_v3": {**_LATENT, **_ROUTED, "q_lora_rank": 48, "n_group": 2, "topk_group": 1, "norm_topk_prob": True},
    "glm4_moe": {
        **_ROUTED,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "attention_bias": True,
        "use_qk_norm": True,
    },
}

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", *_EXPERTS)
"""Families that a tiny model can be of."""


def tokenizer_size() -> int:
    """Tokens of the character tokenizer."""
    return len(SPECIAL_TOKENS) + NUM_BYTES


def tiny_config(
    family: str = "qwen2",
    *,
    vocab_size: int | None = None,
    hidden_size: int = 128,
    intermediate_size: int = 352,
    num_hidden_layers: int = 4,
    num_attention_heads: int = 4,
    num_key_value_heads: int = 2,
    head_dim: int = 32,
    max_position_embeddings: int = 2048,
    tie_word_embeddings: bool = True,
    rope_parameters: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """A Hugging Face configuration of a small model of a family, as transformers 5 writes it.

    Args:
        family: one of ``FAMILIES``; those with experts have four a layer, two of them chosen, unless ``options`` say.
        vocab_size: rows of the embedding; None is the tokenizer's size.
        hidden_size: and the sizes below, as in the configuration.
        intermediate_size: rows of the gate and up projections.
        num_hidden_layers: decoder layers.
        num_attention_heads: query heads.
        num_key_value_heads: key-value heads.
        head_dim: size of a head; vLLM needs at least 32 on CPU.
        max_position_embeddings: longest sequence.
        tie_word_embeddings: the head is the embedding.
        rope_parameters: None is plain rotary embeddings with base 10,000.
        options: further keys of the configuration.

    Raises:
        ModelError: sizes that no model of the family can have, or a vocabulary smaller than the tokenizer's.
    """
    if vocab_size is not None and vocab_size < tokenizer_size():
        raise ModelError(f"vocabulary of {vocab_size} is smaller than the tokenizer's {tokenizer_size()} tokens")
    config: dict[str, Any] = {
        "architectures": [family_named(family).architecture],
        "model_type": family,
        "vocab_size": tokenizer_size() if vocab_size is None else vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_attention_heads,
        "num_key_value_heads": num_key_value_heads,
        "max_position_embeddings": max_position_embeddings,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": rope_parameters or {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": tie_word_embeddings,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "dtype": "float32",
        "use_cache": True,
    }
    if family_named(family).latent:
        # A key for each head, and sizes of a head of their own.
        config["num_key_value_heads"] = num_attention_heads
    elif family in ("qwen2", "qwen2_moe"):
        if head_dim * num_attention_heads != hidden_size:
            raise ModelError(
                f"{family} has no head_dim of its own: {num_attention_heads} heads of {head_dim} are not {hidden_size}"
            )
        config["use_sliding_window"] = False
    else:
        config["head_dim"] = head_dim
    if family in ("qwen3", "qwen2_moe", "qwen3_moe"):
        config["use_sliding_window"] = False
    if family in ("mistral", "mixtral"):
        config["sliding_window"] = None
    config |= _EXPERTS.get(family, {}) | options
    spec_from_config(config, where="tiny_config")
    return config


def tokenizer_files() -> dict[str, dict[str, Any]]:
    """Contents of tokenizer.json and tokenizer_config.json."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *_byte_characters()))}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "trim_offsets": True}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": token, **special} for index, token in enumerate(SPECIAL_TOKENS)],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {**byte_level, "add_prefix_space": False, "use_regex": False},
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True, "use_regex": True},
        # Byte-pair encoding without merges: every byte stays a token of its own.
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
        "chat_template": CHAT_TEMPLATE,
    }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": config}


def _byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2's ``bytes_to_unicode``)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(NUM_BYTES, 2 * NUM_BYTES))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(NUM_BYTES)]


def write_tiny(directory: str | Path, config: dict[str, Any] | None = None) -> Path:
    """Writes a tiny model's configuration and tokenizer; files that exist are replaced one by one.

    Returns:
        the directory.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = tiny_config() if config is None else config
    generation = {"eos_token_id": config["eos_token_id"], "pad_token_id": config["pad_token_id"]}
    files = {"config.json": config, "generation_config.json": generation, **tokenizer_files()}
    for name, content in files.items():
        temporary = directory / f".{name}.partial"
        temporary.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(temporary, directory / name)
    return directory


def main(arguments: Sequence[str] | None = None) -> None:
    """The command: writes a tiny model's directory."""
    parser = argparse.ArgumentParser(prog="python -m megarl.models.tiny", description=main.__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--family", default="qwen2", choices=FAMILIES)
    parser.add_argument("--vocab", type=int, default=None, help="embedding rows (default: the tokenizer's size)")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--ffn", type=int, default=352)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=None, help="default: hidden / heads")
    parser.add_argument("--max-position", type=int, default=2048)
    parser.add_argument("--untied", action="store_true", help="a head of its own instead of the embedding")
    given = parser.parse_args(arguments)
    config = tiny_config(
        given.family,
        vocab_size=given.vocab,
        hidden_size=given.hidden,
        intermediate_size=given.ffn,
        num_hidden_layers=given.layers,
        num_attention_heads=given.heads,
        num_key_value_heads=given.kv_heads,
        head_dim=given.hidden // given.heads if given.head_dim is None else given.head_dim,
        max_position_embeddings=given.max_position,
        tie_word_embeddings=not given.untied,
    )
    write_tiny(given.directory, config)


if __name__ == "__main__":
    main()
