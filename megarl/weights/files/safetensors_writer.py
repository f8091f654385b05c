"""Writing a Hugging Face directory: files of known size, filled in any order, put in place in one rename.

    writer = SafetensorsWriter(directory, tensors, max_shard_bytes)   # allocates every file: a full disk fails here
    writer.write(name, tensor) / writer.write_box(name, box, piece)   # any order; other processes may attach and fill
    writer.finish(copy_from=source)                                   # index, configuration, fsync, rename

Invariants:
1. The directory under its final name is complete or absent: files grow in a temporary one beside it.
2. Memory is one tensor's at most; nothing is gathered.
3. The index is built from the files as written, reopened; not from what was asked for.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.errors import CheckpointError
from megarl.platform.durable import sync
from megarl.weights.files.safetensors_format import (
    DTYPE_NAMES,
    INDEX_NAME,
    SINGLE_NAME,
    build_header,
    read_header,
)
from megarl.weights.files.safetensors_header import COMPANION_FILES
from megarl.weights.region import Box, Shape, volume

TensorTable = Mapping[str, tuple[torch.dtype, Shape]]


class SafetensorsWriter:
    """A Hugging Face directory being written.

    Args:
        directory: final name; must not exist unless ``overwrite``.
        tensors: dtype and shape of every tensor, in the order of the files.
        max_shard_bytes: a file holds at most this many bytes of data, or one larger tensor.
        overwrite: an existing directory is replaced by ``finish``.
        attach: join the files that another process allocated, instead of allocating them.

    Raises:
        CheckpointError: the directory exists, the disk is full, or files cannot be made.
    """

    def __init__(
        self,
        directory: str | Path,
        tensors: TensorTable,
        *,
        max_shard_bytes: int = 5_000_000_000,
        overwrite: bool = False,
        attach: bool = False,
    ) -> None:
        self.directory = Path(os.path.abspath(directory))
        self.temporary = self.directory.with_name(f".{self.directory.name}.partial")
        self._tensors = dict(tensors)
        self._overwrite = overwrite
        self._written = dict.fromkeys(tensors, 0)
        self._place: dict[str, tuple[Path, int]] = {}
        self._files: dict[Path, tuple[bytes, int]] = {}
        self._handles: dict[Path, int] = {}
        self._lay_out(max_shard_bytes)
        if self.directory.exists() and not overwrite:
            raise CheckpointError("the export's directory exists", where=str(directory), fix="choose another name")
        if not attach:
            self._allocate()

    def write(self, name: str, tensor: Tensor) -> None:
        """Writes a whole tensor; dtype and device are converted."""
        self.write_box(name, tuple((0, size) for size in self._entry(name)[1]), tensor)

    def write_box(self, name: str, box: Box, piece: Tensor) -> None:
        """Writes one box of a tensor.

        Raises:
            CheckpointError: an unknown tensor, a piece that is not shaped like the box, or a failing write.
        """
        dtype, shape = self._entry(name)
        if tuple(piece.shape) != tuple(stop - start for start, stop in box):
            raise CheckpointError(f"a piece of shape {tuple(piece.shape)} is not the box {box} of {name} {shape}")
        piece = piece.detach().to(device="cpu", dtype=dtype).contiguous()
        path, begin = self._place[name]
        row = prod(shape[1:]) * dtype.itemsize
        try:
            if all(bounds == (0, size) for bounds, size in zip(box[1:], shape[1:], strict=True)):
                self._write_at(path, begin + box[0][0] * row, piece)
            else:
                mapped = np.memmap(path, dtype=np.uint8, mode="r+", offset=begin, shape=(prod(shape) * dtype.itemsize,))
                target = torch.from_numpy(mapped).view(dtype).view(shape)
                target[tuple(slice(start, stop) for start, stop in box)] = piece
        except OSError as error:
            raise CheckpointError(f"cannot write {name}: {error.strerror}", where=str(path)) from error
        self._written[name] += volume(box)

    def finish(self, *, config: Mapping[str, Any] | None = None, copy_from: str | Path | None = None) -> None:
        """Completes the directory and gives it its name.

        Args:
            config: written as config.json.
            copy_from: a Hugging Face directory whose configuration and tokenizer files are copied.

        Raises:
            CheckpointError: a tensor was not written exactly once by this process and none attached, or a write failed.
        """
        wrong = [
            f"{name} ({self._written[name]} of {prod(shape)})"
            for name, (_, shape) in self._tensors.items()
            if self._written[name] != prod(shape)
        ]
        if wrong:
            raise CheckpointError(f"tensors not written once: {', '.join(wrong[:20])}", where=str(self.directory))
        self.commit(config=config, copy_from=copy_from)

    def commit(self, *, config: Mapping[str, Any] | None = None, copy_from: str | Path | None = None) -> None:
        """Like ``finish``, where other processes wrote parts and the caller has proved that all are written."""
        try:
            self.close()
            self._write_companions(config, copy_from)
            self._write_index()
            for entry in self.temporary.iterdir():
                sync(entry)
            sync(self.temporary)
            self._put_in_place()
        except OSError as error:
            raise CheckpointError(f"cannot complete the export: {error.strerror}", where=str(self.directory)) from error

    def close(self) -> None:
        """Closes the files of this process."""
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()

    def abort(self) -> None:
        """Removes the unfinished directory."""
        self.close()
        shutil.rmtree(self.temporary, ignore_errors=True)

    def _entry(self, name: str) -> tuple[torch.dtype, Shape]:
        if name not in self._tensors:
            raise CheckpointError(f"tensor {name} is not among those announced", where=str(self.directory))
        return self._tensors[name]

    def _lay_out(self, max_shard_bytes: int) -> None:
        """Spreads the tensors over files and computes headers."""
        shards: list[dict[str, tuple[torch.dtype, Shape]]] = [{}]
        filled = 0
        for name, (dtype, shape) in self._tensors.items():
            if dtype not in DTYPE_NAMES:
                raise CheckpointError(f"tensor {name} has dtype {dtype}, which safetensors has not")
            size = prod(shape) * dtype.itemsize
            if shards[-1] and filled + size > max_shard_bytes:
                shards.append({})
                filled = 0
            shards[-1][name] = (dtype, shape)
            filled += size
        for number, shard in enumerate(shards, start=1):
            name = SINGLE_NAME if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            header, offsets, size = build_header(shard)
            path = self.temporary / name
            self._files[path] = (header, size)
            self._place.update({tensor: (path, offset) for tensor, offset in offsets.items()})

    def _allocate(self) -> None:
        try:
            shutil.rmtree(self.temporary, ignore_errors=True)
            self.temporary.mkdir(parents=True)
            for path, (header, size) in self._files.items():
                handle = self._open(path, os.O_CREAT)
                # Reserving the space makes a full disk an error here instead of a fault in the middle of a write.
                os.posix_fallocate(handle, 0, size)
                os.pwrite(handle, header, 0)
        except OSError as error:
            self.abort()
            needed = sum(size for _, size in self._files.values())
            raise CheckpointError(
                f"cannot reserve {needed / 1e9:.2f} GB for the export: {error.strerror}", where=str(self.directory)
            ) from error

    def _open(self, path: Path, flags: int = 0) -> int:
        if path not in self._handles:
            self._handles[path] = os.open(path, os.O_RDWR | flags, 0o644)
        return self._handles[path]

    def _write_at(self, path: Path, position: int, piece: Tensor) -> None:
        data = memoryview(piece.reshape(-1).view(torch.uint8).numpy())
        while data:
            count = os.pwrite(self._open(path), data, position)
            data, position = data[count:], position + count

    def _write_companions(self, config: Mapping[str, Any] | None, copy_from: str | Path | None) -> None:
        if copy_from is not None:
            for name in COMPANION_FILES:
                source = Path(copy_from) / name
                if source.exists():
                    shutil.copyfile(source, self.temporary / name)
        if config is not None:
            (self.temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def _write_index(self) -> None:
        if len(self._files) == 1:
            return
        weight_map = {name: path.name for path in self._files for name in read_header(path)}
        total = sum(prod(shape) * dtype.itemsize for dtype, shape in self._tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (self.temporary / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _put_in_place(self) -> None:
        previous = self.directory.with_name(f".{self.directory.name}.previous")
        if self._overwrite and self.directory.exists():
            shutil.rmtree(previous, ignore_errors=True)
            os.rename(self.directory, previous)
        os.rename(self.temporary, self.directory)
        sync(self.directory.parent)
        shutil.rmtree(previous, ignore_errors=True)


def write_hf(
    directory: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    table: TensorTable,
    *,
    config: Mapping[str, Any] | None = None,
    copy_from: str | Path | None = None,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
) -> None:
    """Writes full tensors, given in any order, as a Hugging Face directory; raises like ``SafetensorsWriter``.

    An interrupted or failed write leaves nothing under the directory's name.
    """
    writer = SafetensorsWriter(directory, table, max_shard_bytes=max_shard_bytes, overwrite=overwrite)
    done = False
    try:
        for name, tensor in tensors:
            writer.write(name, tensor)
        writer.finish(config=config, copy_from=copy_from)
        done = True
    finally:
        if not done:
            writer.abort()


def table_of(shapes: Mapping[str, Shape], dtype: torch.dtype) -> dict[str, tuple[torch.dtype, Shape]]:
    """A writer's table for tensors of one dtype."""
    return {name: (dtype, tuple(shape)) for name, shape in shapes.items()}
