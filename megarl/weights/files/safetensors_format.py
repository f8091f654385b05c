"""The safetensors file format: header, dtypes, where a tensor's bytes lie.

A file is the header's length (8 bytes, little endian), a JSON header, then the tensors' bytes. The header maps names
to dtype, shape and [begin, end) offsets after the header (huggingface/safetensors, README "Format").
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from megarl.errors import ModelError
from megarl.weights.region import Shape

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_LENGTH_BYTES = 8
_LARGEST_HEADER = 100_000_000


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: ``begin`` is the byte of the file where its data start."""

    name: str
    path: Path
    dtype: torch.dtype
    shape: Shape
    begin: int

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> dict[str, StoredTensor]:
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
        name: _stored(path, name, entry, data_start, size) for name, entry in header.items() if name != "__metadata__"
    }


def build_header(tensors: Mapping[str, tuple[torch.dtype, Shape]]) -> tuple[bytes, dict[str, int], int]:
    """Header bytes (length included), each tensor's first byte in the file, and the file's size.

    Tensors follow each other in the given order, with no gap, as the format demands.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    position = 0
    for name, (dtype, shape) in tensors.items():
        stop = position + prod(shape) * dtype.itemsize
        entries[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [position, stop]}
        offsets[name] = position
        position = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    header = struct.pack("<Q", len(text)) + text
    return header, {name: len(header) + offset for name, offset in offsets.items()}, len(header) + position


def _stored(path: Path, name: str, entry: Any, data_start: int, size: int) -> StoredTensor:
    try:
        dtype_name, shape = entry["dtype"], tuple(int(dim) for dim in entry["shape"])
        begin, end = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise _broken(path, f"its entry for {name} is malformed") from error
    if dtype_name not in DTYPES:
        raise ModelError(f"tensor {name} has dtype {dtype_name}, which megarl does not read", where=str(path))
    if begin < 0 or end - begin != prod(shape) * DTYPES[dtype_name].itemsize:
        raise _broken(path, f"tensor {name} of shape {list(shape)} and dtype {dtype_name} occupies {end - begin} bytes")
    if data_start + end > size:
        raise _broken(path, f"tensor {name} ends at byte {data_start + end} of a file of {size}: the file is truncated")
    return StoredTensor(name, path, DTYPES[dtype_name], shape, data_start + begin)


def _broken(path: Path, what: str) -> ModelError:
    return ModelError(f"broken safetensors file: {what}", where=str(path), fix="download or copy the file again")
