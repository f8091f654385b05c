"""A model directory small enough to write in a test and complete enough for the doctor: no tensor's bytes are real."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from megarl.models import spec_from_config
from megarl.weights.layout import canonical_shapes

QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}


def write_model(directory: Path, **changes: Any) -> Path:
    """A Hugging Face directory of zeros with tokenizer and chat template."""
    config = {**QWEN2, **changes}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shapes = canonical_shapes(spec_from_config(config))
    write_safetensors(directory / "model.safetensors", shapes)
    write_tokenizer(directory, vocab_size=500)
    return directory


def write_safetensors(path: Path, shapes: dict[str, tuple[int, ...]], dtype: str = "BF16") -> None:
    entries, position = {}, 0
    for name, shape in shapes.items():
        stop = position + 2 * math.prod(shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, stop]}
        position = stop
    header = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + position)


def write_tokenizer(directory: Path, *, vocab_size: int, template: bool = True) -> None:
    vocabulary = {f"t{index}": index for index in range(vocab_size)}
    content = {"model": {"type": "BPE", "vocab": vocabulary}, "added_tokens": []}
    settings: dict[str, Any] = {"eos_token": "t2"}
    if template:
        settings["chat_template"] = "{{ messages }}"
    (directory / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def write_checkpoint(run: Path, *, step: int) -> Path:
    """A checkpoint of one file with its manifest in a run directory, which ``latest`` names."""
    name = f"step_{step:06d}"
    directory = run / "checkpoints" / name
    directory.mkdir(parents=True)
    (directory / "state.json").write_text("{}", encoding="utf-8")
    manifest = {"files": {"state.json": {"bytes": 2}}, "contents": {}}
    (directory / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    (directory.parent / "latest").write_text(json.dumps(name), encoding="utf-8")
    return directory
