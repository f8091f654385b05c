"""Arrays inside files: every checkpoint format is, in the end, dense row-major arrays at known bytes of known files.

Loads no torch: dtypes go by safetensors' names, elements are moved as bits.

Invariants:
1. Reading and writing touch the bytes of the box alone; memory is the caller's buffer.
2. A file that is too short, cannot be opened or is full is a CheckpointError naming it, never a signal.
3. Writers of disjoint boxes may work on one file at once: nothing is read back and rewritten.
"""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from megarl.errors import CheckpointError
from megarl.weights.region import Box, Region, Shape

ITEM_BYTES: dict[str, int] = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}
"""Bytes of an element, by safetensors' name of the dtype."""

TORCH_NAMES: dict[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
"""torch's attribute of the same dtype."""

Bits: TypeAlias = np.ndarray[Any, Any]
"""Elements as unsigned integers of their width."""

_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SHORT_RUN_BYTES = 4096
_MAX_HANDLES = 64


@dataclass(frozen=True, slots=True)
class Array:
    """A dense row-major array whose first byte is ``begin`` of the file."""

    path: Path
    begin: int
    dtype: str
    shape: Shape

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.item_bytes


def bits_of(dtype: str) -> Any:
    """The unsigned integer of a dtype's width."""
    return _BITS[ITEM_BYTES[dtype]]


class Handles:
    """Open files of one worker, the least recently used closed first. Not for sharing between threads."""

    def __init__(self, *, writable: bool = False) -> None:
        self._flags = os.O_RDWR if writable else os.O_RDONLY
        self._writable = writable
        self._open: OrderedDict[Path, int] = OrderedDict()

    def __enter__(self) -> Handles:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes all of them."""
        while self._open:
            os.close(self._open.popitem()[1])

    def read(self, array: Array, region: Region, box: Box, out: Bits) -> None:
        """Reads a box (canonical coordinates, inside the region's) into ``out``, which is shaped like it.

        Raises:
            CheckpointError: the file cannot be read or is too short.
        """
        first, shape, strides = _inside(region, box)
        outer, run = _runs(shape, strides)
        if not outer:
            self._read_run(array, first, out if out.flags.c_contiguous else None, out, run)
        elif run * array.item_bytes >= _SHORT_RUN_BYTES:
            flat_shape = tuple(shape[len(outer) :])
            for index in np.ndindex(*outer):
                part = out[index]
                at = first + sum(i * step for i, step in zip(index, strides, strict=False))
                self._read_run(array, at, part if part.flags.c_contiguous else None, part.reshape(flat_shape), run)
        else:
            with self._window(array, first, shape, strides) as window:
                np.copyto(out, window.view)

    def write(self, array: Array, region: Region, box: Box, data: Bits) -> None:
        """Writes a box (canonical coordinates, inside the region's).

        Raises:
            CheckpointError: the file cannot be written.
        """
        first, shape, strides = _inside(region, box)
        outer, run = _runs(shape, strides)
        if not outer:
            self._write_run(array, first, np.ascontiguousarray(data))
        elif run * array.item_bytes >= _SHORT_RUN_BYTES:
            for index in np.ndindex(*outer):
                at = first + sum(i * step for i, step in zip(index, strides, strict=False))
                self._write_run(array, at, np.ascontiguousarray(data[index]))
        else:
            with self._window(array, first, shape, strides) as window:
                np.copyto(window.view, data)

    def _read_run(self, array: Array, first: int, direct: Bits | None, out: Bits, count: int) -> None:
        buffer = direct if direct is not None else np.empty(out.shape, out.dtype)
        view = memoryview(buffer.reshape(-1)).cast("B")
        position = array.begin + first * array.item_bytes
        handle = self._handle(array.path)
        while view:
            try:
                done = os.preadv(handle, [view], position)
            except OSError as error:
                raise CheckpointError(f"cannot read: {error.strerror}", where=str(array.path)) from error
            if not done:
                raise CheckpointError(
                    f"the file ends at byte {position}, {len(view)} bytes before the end of an array in it",
                    where=str(array.path),
                    fix="copy the file again",
                )
            view, position = view[done:], position + done
        if direct is None:
            np.copyto(out, buffer)

    def _write_run(self, array: Array, first: int, data: Bits) -> None:
        view = memoryview(data.reshape(-1)).cast("B")
        position = array.begin + first * array.item_bytes
        handle = self._handle(array.path)
        while view:
            try:
                done = os.pwrite(handle, view, position)
            except OSError as error:
                raise CheckpointError(f"cannot write: {error.strerror}", where=str(array.path)) from error
            view, position = view[done:], position + done

    def _window(self, array: Array, first: int, shape: Shape, strides: tuple[int, ...]) -> _Window:
        return _Window(self._handle(array.path), array, first, shape, strides, self._writable)

    def _handle(self, path: Path) -> int:
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        if len(self._open) >= _MAX_HANDLES:
            os.close(self._open.popitem(last=False)[1])
        try:
            self._open[path] = os.open(path, self._flags)
        except OSError as error:
            raise CheckpointError(f"cannot open: {error.strerror}", where=str(path)) from error
        return self._open[path]


class _Window:
    """A mapped part of a file, for boxes whose elements lie apart: strided access without reading what is between."""

    def __init__(
        self, handle: int, array: Array, first: int, shape: Shape, strides: tuple[int, ...], writable: bool
    ) -> None:
        last = first + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        start = array.begin + first * array.item_bytes
        stop = array.begin + (last + 1) * array.item_bytes
        # Reading a mapped page behind the end of its file would be a signal.
        if os.fstat(handle).st_size < stop:
            raise CheckpointError("the file is truncated", where=str(array.path), fix="copy the file again")
        aligned = start - start % mmap.ALLOCATIONGRANULARITY
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._map = mmap.mmap(handle, stop - aligned, access=access, offset=aligned)
        flat = np.frombuffer(self._map, bits_of(array.dtype), offset=start - aligned)
        step = array.item_bytes
        self.view: Bits = np.lib.stride_tricks.as_strided(
            flat, shape, tuple(stride * step for stride in strides), writeable=writable
        )

    def __enter__(self) -> _Window:
        return self

    def __exit__(self, *exc_info: object) -> None:
        del self.view
        self._map.close()


def _inside(region: Region, box: Box) -> tuple[int, Shape, tuple[int, ...]]:
    """First element, shape and strides of a box inside its region's parameter."""
    first = region.offset + sum(
        (start - origin) * stride
        for (start, _), (origin, _), stride in zip(box, region.box, region.strides, strict=True)
    )
    return first, tuple(stop - start for start, stop in box), region.strides


def _runs(shape: Shape, strides: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Sizes of the outer dims over which a box is scattered, and the elements that lie together."""
    run = 1
    for dim in range(len(shape) - 1, -1, -1):
        if shape[dim] != 1 and strides[dim] != run:
            return shape[: dim + 1], run
        run *= shape[dim]
    return (), run
