"""safetensors files and the directories Hugging Face makes of them, read without torch.

A file is the header's length (8 bytes, little endian), a JSON header, then the tensors' bytes. The header maps names
to dtype, shape and [begin, end) offsets after the header (huggingface/safetensors, README "Format").

Invariants:
1. Opening reads headers only; a truncated or missing file, or an index that does not match the files, fails there.
2. A tensor is used, or declared droppable with a reason, or unknown.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from megarl.errors import ModelError
from megarl.models.registry import family_named
from megarl.models.rules import flags
from megarl.models.spec import ModelSpec
from megarl.weights.files.arrays import ITEM_BYTES, Array
from megarl.weights.region import Shape

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

COMPANION_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
"""What a model's directory needs beside weights; copied where the source has it."""

_LENGTH_BYTES = 8
_LARGEST_HEADER = 100_000_000
_GIT_LFS = b"version "
"""How a pointer begins, which a clone without git-lfs has in place of the file; no header is that long."""
_SHOWN = 20


def file_arrays(path: Path) -> dict[str, Array]:
    """The tensors of a file, checked against its size.

    Raises:
        ModelError: a file that cannot be opened, is cut short, has a broken header or a dtype megarl cannot read;
            naming the file and, where it is one tensor's fault, the tensor.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(_LENGTH_BYTES)
            if len(prefix) < _LENGTH_BYTES:
                raise _broken(path, f"it has {size} bytes, too few for a header")
            if prefix == _GIT_LFS:
                raise ModelError(
                    "the file is a pointer of git-lfs, not the weights", where=str(path), fix="git lfs pull"
                )
            (length,) = struct.unpack("<Q", prefix)
            if length > min(_LARGEST_HEADER, size - _LENGTH_BYTES):
                raise _broken(path, f"its header claims {length} bytes of a file of {size}")
            header = json.loads(file.read(length))
    except OSError as error:
        raise ModelError(f"cannot read weights: {error.strerror}", where=str(path)) from error
    except ValueError as error:
        raise _broken(path, f"its header is no JSON ({error})") from error
    if not isinstance(header, dict):
        raise _broken(path, "its header is no JSON object")
    data_start = _LENGTH_BYTES + length
    return {
        name: _array(path, name, entry, data_start, size) for name, entry in header.items() if name != "__metadata__"
    }


def directory_arrays(directory: Path) -> dict[str, Array]:
    """The tensors of a directory with ``model.safetensors``, or ``model.safetensors.index.json`` and its shards.

    Raises:
        ModelError: no weights, a missing or truncated file, an index that names a tensor its file has not.
    """
    index = directory / INDEX_NAME
    return _shards(directory, index) if index.exists() else file_arrays(_single_file(directory))


def unused_tensors(
    names: Iterable[str], spec: ModelSpec, *, value_head: bool = False
) -> tuple[dict[str, str], list[str]]:
    """Tensors a model does not use: those its family declares droppable, with the reason, and the others."""
    present = flags(spec, value_head=value_head, pipelined=False)
    rules = [
        (re.compile(rule.name.replace("{num_layers}", str(spec.num_layers))), rule.reason)
        for rule in family_named(spec.family).dropped
        if present.issuperset(rule.when)
    ]
    dropped: dict[str, str] = {}
    unknown: list[str] = []
    for name in names:
        reason = next((reason for pattern, reason in rules if pattern.fullmatch(name)), None)
        if reason is None:
            unknown.append(name)
        else:
            dropped[name] = reason
    return dropped, unknown


def header_of(tensors: Mapping[str, tuple[str, Shape]]) -> tuple[bytes, dict[str, int], int]:
    """Header bytes (length included), each tensor's first byte in the file, and the file's size.

    Tensors follow each other in the given order, with no gap, as the format demands.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    position = 0
    for name, (dtype, shape) in tensors.items():
        stop = position + prod(shape) * ITEM_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, stop]}
        offsets[name] = position
        position = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    header = struct.pack("<Q", len(text)) + text
    return header, {name: len(header) + offset for name, offset in offsets.items()}, len(header) + position


def listing(items: Sequence[str]) -> str:
    """The first of many problems."""
    shown = "; ".join(items[:_SHOWN])
    return shown if len(items) <= _SHOWN else f"{shown}; and {len(items) - _SHOWN} more"


def _array(path: Path, name: str, entry: Any, data_start: int, size: int) -> Array:
    try:
        dtype, shape = entry["dtype"], tuple(int(dim) for dim in entry["shape"])
        begin, end = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise _broken(path, f"its entry for {name} is malformed") from error
    if dtype not in ITEM_BYTES:
        raise ModelError(f"tensor {name} has dtype {dtype}, which megarl does not read", where=str(path))
    if begin < 0 or end - begin != prod(shape) * ITEM_BYTES[dtype]:
        raise _broken(path, f"tensor {name} of shape {list(shape)} and dtype {dtype} occupies {end - begin} bytes")
    if data_start + end > size:
        raise _broken(path, f"tensor {name} ends at byte {data_start + end} of a file of {size}: the file is truncated")
    return Array(path, data_start + begin, dtype, shape)


def _single_file(directory: Path) -> Path:
    path = directory / SINGLE_NAME
    if path.exists():
        return path
    found = sorted(entry.name for entry in directory.glob("*.safetensors"))
    if found:
        raise ModelError(
            f"{len(found)} safetensors files ({found[0]}, ...) but neither {SINGLE_NAME} nor {INDEX_NAME}",
            where=str(directory),
            fix="fetch the index file too",
        )
    pickled = sorted(entry.name for entry in directory.glob("pytorch_model*.bin"))
    raise ModelError(
        "no safetensors weights" + (f", only {pickled[0]}, which would execute code when read" if pickled else ""),
        where=str(directory),
        fix="save the model with safe_serialization=True" if pickled else "give a directory with model.safetensors",
    )


def _shards(directory: Path, index: Path) -> dict[str, Array]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted(set(weight_map.values()))
        if not shards or not all(isinstance(shard, str) for shard in shards):
            raise ValueError("no tensor has a file")
    except OSError as error:
        raise ModelError(f"cannot read the weights' index: {error.strerror}", where=str(index)) from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(
            f"the weights' index is broken, expected {{'weight_map': {{tensor: file}}}}: {error}",
            where=str(index),
            fix="fetch it again",
        ) from error
    missing = [shard for shard in shards if not (directory / shard).exists()]
    if missing:
        raise ModelError(f"missing weight files: {', '.join(missing)}", where=str(index), fix="fetch them again")
    tensors: dict[str, Array] = {}
    for shard in shards:
        for name, array in file_arrays(directory / shard).items():
            if name in tensors:
                raise ModelError(f"tensor {name} is in {tensors[name].path.name} and in {shard}", where=str(directory))
            tensors[name] = array
    absent = [f"{name} ({shard})" for name, shard in weight_map.items() if name not in tensors]
    if absent:
        raise ModelError(f"the index names tensors their files have not: {listing(absent)}", where=str(index))
    return tensors


def _broken(path: Path, what: str) -> ModelError:
    return ModelError(f"broken safetensors file: {what}", where=str(path), fix="download or copy the file again")
