"""safetensors dtypes and headers in torch's terms; the format itself is in ``safetensors_header``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from megarl.weights.files.arrays import TORCH_NAMES, Array
from megarl.weights.files.safetensors_header import INDEX_NAME, SINGLE_NAME, file_arrays, header_of
from megarl.weights.region import Shape

__all__ = [
    "DTYPES",
    "DTYPE_NAMES",
    "INDEX_NAME",
    "SINGLE_NAME",
    "StoredTensor",
    "build_header",
    "read_header",
    "stored",
]

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, torch_name) for name, torch_name in TORCH_NAMES.items()}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


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


def stored(arrays: Mapping[str, Array]) -> dict[str, StoredTensor]:
    """Arrays of files as tensors."""
    return {
        name: StoredTensor(name, array.path, DTYPES[array.dtype], array.shape, array.begin)
        for name, array in arrays.items()
    }


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file, checked against its size; raises like ``safetensors_header.file_arrays``."""
    return stored(file_arrays(path))


def build_header(tensors: Mapping[str, tuple[torch.dtype, Shape]]) -> tuple[bytes, dict[str, int], int]:
    """Header bytes (length included), each tensor's first byte in the file, and the file's size."""
    return header_of({name: (DTYPE_NAMES[dtype], shape) for name, (dtype, shape) in tensors.items()})
