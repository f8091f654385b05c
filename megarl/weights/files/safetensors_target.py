"""Files of a Hugging Face directory, laid out: which tensor goes where in which shard, and the index. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from megarl.weights.files.arrays import ITEM_BYTES, Array
from megarl.weights.files.safetensors_header import INDEX_NAME, SINGLE_NAME, file_arrays, header_of
from megarl.weights.region import Shape

DEFAULT_SHARD_BYTES = 5_000_000_000


@dataclass
class SafetensorsLayout:
    """A directory laid out.

    Args:
        arrays: each tensor's array, paths relative to the directory.
        sizes: bytes of each file.
        headers: what each file begins with.
    """

    arrays: dict[str, Array] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    headers: dict[str, bytes] = field(default_factory=dict)


def lay_out_safetensors(
    tensors: Mapping[str, tuple[str, Shape]], max_shard_bytes: int = DEFAULT_SHARD_BYTES
) -> SafetensorsLayout:
    """Spreads tensors over files in the given order; a file holds at most so many bytes, or one larger tensor."""
    shards: list[dict[str, tuple[str, Shape]]] = [{}]
    filled = 0
    for name, (dtype, shape) in tensors.items():
        size = prod(shape) * ITEM_BYTES[dtype]
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = (dtype, shape)
        filled += size
    layout = SafetensorsLayout()
    for number, shard in enumerate(shards, start=1):
        file = SINGLE_NAME if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        layout.headers[file], offsets, layout.sizes[file] = header_of(shard)
        for name, (dtype, shape) in shard.items():
            layout.arrays[name] = Array(Path(file), offsets[name], dtype, shape)
    return layout


def index_of(directory: Path, files: Mapping[str, int]) -> tuple[str, bytes] | None:
    """The index of what lies on disk; None for a single file, which needs none."""
    if len(files) == 1:
        return None
    arrays = {name: array for file in files for name, array in file_arrays(directory / file).items()}
    total = sum(array.num_bytes for array in arrays.values())
    weight_map = {name: array.path.name for name, array in arrays.items()}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return INDEX_NAME, (json.dumps(index, indent=2) + "\n").encode()
