"""Reads tensors of a checkpoint from mapped files, a copy from the file to where they belong.

torch's reader unpacks each archive through Python's streams into a tensor of its own before it copies the part that is
wanted. Archives without compression, as torch and megarl write them, can be used where they lie.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from torch import Tensor
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from megarl.errors import CheckpointError
from megarl.train.megatron.checkpoint_writer import DTYPES
from megarl.weights.files.torch_archive import Stored, read_archive

_DTYPE_OF_NAME = {name: dtype for dtype, name in DTYPES.items()}


class MappedReader(dcp.FileSystemReader):
    """torch's reader but for how tensors are read."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy every tensor and object of the plan to where the planner wants it."""
        requests: dict[str, list[Any]] = defaultdict(list)
        for request in plan.items:
            requests[self.storage_data[request.storage_index].relative_path].append(request)
        for name, wanted in requests.items():
            path = Path(self.path) / name
            # Private to this process and never written to: pages of the file itself.
            content = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
            for request in sorted(wanted, key=lambda one: self.storage_data[one.storage_index].offset):
                place = self.storage_data[request.storage_index]
                if request.type == LoadItemType.BYTE_IO:
                    entry = content[place.offset : place.offset + place.length]
                    planner.load_bytes(request, io.BytesIO(entry.numpy().tobytes()))
                    continue
                tensor = _stored_tensor(path, content, place.offset, place.length)
                for dim, (start, size) in enumerate(zip(request.storage_offsets, request.lengths, strict=True)):
                    tensor = tensor.narrow(dim, start, size)
                target = planner.resolve_tensor(request).detach()
                if target.shape != tensor.shape:
                    raise CheckpointError(
                        f"{request.dest_index.fqn} has shape {list(tensor.shape)}, wanted is {list(target.shape)}",
                        where=str(path),
                    )
                target.copy_(tensor)
                planner.commit_tensor(request, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _stored_tensor(path: Path, content: Tensor, offset: int, length: int) -> Tensor:
    """The tensor of the archive at ``offset``, as a view of the file's bytes."""
    stored = read_archive(path, offset, length)
    if not isinstance(stored, Stored) or stored.array.dtype not in _DTYPE_OF_NAME:
        raise CheckpointError(f"the entry at byte {offset} is no tensor megarl reads", where=str(path))
    array = stored.array
    dtype = _DTYPE_OF_NAME[array.dtype]
    last = sum((size - 1) * stride for size, stride in zip(array.shape, stored.strides, strict=True))
    num_bytes = (last + 1) * dtype.itemsize if array.num_bytes else 0
    raw = content[array.begin : array.begin + num_bytes]
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return torch.as_strided(raw.view(dtype), array.shape, stored.strides)


@contextmanager
def mapped_reading() -> Iterator[None]:
    """Megatron's load reads through ``MappedReader``: it makes its reader by a function of its own module."""
    original = torch_strategy._get_filesystem_reader

    def reader(checkpoint_dir: str | Path, *_: Any, **__: Any) -> dcp.FileSystemReader:
        return MappedReader(checkpoint_dir)

    torch_strategy._get_filesystem_reader = reader
    try:
        yield
    finally:
        torch_strategy._get_filesystem_reader = original


def merge_in_place(state: dict[str, Any]) -> None:
    """Let tensors that a checkpoint has in parts (gate and up) be where they are once their parts were loaded.

    Megatron joins loaded parts in a new tensor even when they are views of the tensor that they are for.
    """

    def without_copy(entry: Any) -> Any:
        if not isinstance(entry, ShardedTensorFactory) or not isinstance(entry.data, Tensor):
            return entry
        whole, merge = entry.data, entry.merge_fn

        def merged(parts: Any) -> Any:
            leaves = list(nested_values(parts)) if isinstance(parts, dict | list) else [parts]
            here = whole.untyped_storage().data_ptr()
            if all(isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() == here for leaf in leaves):
                return whole
            return merge(parts)

        return replace(entry, merge_fn=merged)

    dict_list_map_inplace(without_copy, state)
