"""Elements as bits: dtype conversion, block-scaled fp8 and checksums with numpy alone. Loads no torch.

Invariants:
1. ``checksum_bits`` equals ``weights.checksum.checksum`` of the same elements, so that a file, a trainer and an engine
   can be compared.
2. Conversions round to nearest, ties to even, as torch does; the same dtype passes through untouched.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np

from megarl.errors import CheckpointError
from megarl.weights.files.arrays import Bits, bits_of
from megarl.weights.region import Box
from megarl.weights.row_sums import (
    GROUP,
    MODULUS,
    OUTER,
    ROW_SEED,
    WORD_BYTES,
    WORD_SEED,
    Rows,
    Words,
    is_compiled,
    odd_keys,
    sum_rows,
)

_FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
CONVERTIBLE = (*_FLOATS, "BF16")
"""Floating dtypes that convert into each other."""
FP8_BLOCK = 128
"""Rows and columns that share a scale in block-quantised fp8 checkpoints."""


def checksum_bits(piece: Bits, box: Box) -> int:
    """Share of a tensor's checksum that one box of it contributes, in ``[0, 2^64)``.

    Args:
        piece: the elements' bits, shaped like the box.
        box: where they lie in the canonical tensor.
    """
    if piece.size == 0:
        return 0
    start, stop = box[-1] if box else (0, 1)
    flat = piece.reshape(-1, stop - start)
    if is_compiled():
        return _compiled_checksum(np.ascontiguousarray(flat), box, start * piece.itemsize)
    lanes = WORD_BYTES // piece.itemsize
    first, lead = divmod(start, lanes)
    width = -(-stop // lanes) - first
    if lead or stop % lanes or not flat.flags.c_contiguous or flat.ctypes.data % WORD_BYTES:
        padded = np.zeros((len(flat), width * lanes), piece.dtype)
        padded[:, lead : lead + flat.shape[1]] = flat
        flat = padded
    words = flat.view(np.uint64)
    # A row's factors begin a word earlier than those of the row before, 16 rows in turn (weights/checksum.py).
    keys = _range_keys(first + 1, first + width + GROUP)
    rows = np.arange(*(box[-2] if len(box) > 1 else (0, 1)))
    turns = np.tile(rows % GROUP, len(flat) // len(rows))
    per_row = np.empty(len(flat), np.uint64)
    for turn in range(GROUP):
        chosen = slice((turn - int(rows[0])) % GROUP, None, GROUP) if len(box) == 2 else turns == turn
        shift = GROUP - 1 - turn
        per_row[chosen] = np.einsum("rw,w->r", words[chosen], keys[shift : shift + width])
    return int(np.dot(per_row, _row_keys(box[:-1])))


def _compiled_checksum(flat: Bits, box: Box, first_byte: int) -> int:
    """The same of contiguous rows, matrix by matrix."""
    first, last = box[-2] if len(box) > 1 else (0, 1)
    count, row_bytes = last - first, flat.shape[1] * flat.itemsize
    address, total = flat.ctypes.data, 0
    for index, outer in enumerate(product(*(range(*bounds) for bounds in box[:-2]))):
        rows = Rows(address + index * count * row_bytes, row_bytes, count, row_bytes)
        total += sum_rows(rows, first, first_byte, outer)
    return total % MODULUS


def converter(source: str, target: str) -> Any:
    """A function from bits of one dtype to bits of another, None for the same dtype.

    Raises:
        CheckpointError: a dtype that does not convert.
    """
    if source == target:
        return None
    if source not in CONVERTIBLE or target not in CONVERTIBLE:
        raise CheckpointError(f"{source} does not convert to {target}", fix="keep the dtype (--dtype keep)")
    return lambda bits: from_float(to_float(bits, source), target)


def to_float(bits: Bits, dtype: str) -> np.ndarray[Any, Any]:
    """Numbers of a floating dtype, float32 or wider, exactly."""
    if dtype == "BF16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    if dtype == "F8_E4M3":
        return _e4m3_values()[bits]
    values = bits.view(_FLOATS[dtype])
    return values.astype(np.float32) if dtype == "F16" else values


def from_float(values: np.ndarray[Any, Any], dtype: str) -> Bits:
    """Bits of numbers in a floating dtype, rounded to nearest even."""
    if dtype != "BF16":
        with np.errstate(over="ignore"):
            converted: Bits = np.ascontiguousarray(values.astype(_FLOATS[dtype], copy=False)).view(bits_of(dtype))
        return converted
    with np.errstate(over="ignore"):
        wide = np.ascontiguousarray(values.astype(np.float32, copy=False)).view(np.uint32)
    # Adding half of the last kept bit's weight, or a little less where that bit is even, rounds to nearest even.
    rounded = ((wide + (0x7FFF + ((wide >> 16) & 1))) >> 16).astype(np.uint16)
    not_numbers = (wide & 0x7FFFFFFF) > 0x7F800000
    if not_numbers.any():
        rounded[not_numbers] = 0x7FC0
    return rounded


def scale_blocks(values: np.ndarray[Any, Any], scales: np.ndarray[Any, Any], box: Box) -> np.ndarray[Any, Any]:
    """Block-quantised values times the scale of their 128 x 128 block.

    Args:
        values: float32, shaped like the box.
        scales: float32 [ceil(rows / 128), ceil(columns / 128)] of the whole matrix.
        box: rows and columns that ``values`` are.
    """
    rows, columns = (np.arange(start, stop) // FP8_BLOCK for start, stop in box)
    scaled: np.ndarray[Any, Any] = values * scales[rows[:, None], columns[None]]
    return scaled


@lru_cache(maxsize=1)
def _e4m3_values() -> np.ndarray[Any, Any]:
    """The number of each of the 256 bit patterns of float8_e4m3fn (OCP 8-bit floating point, revision 1.0)."""
    bits = np.arange(256)
    sign, exponent, mantissa = np.where(bits >> 7, -1.0, 1.0), (bits >> 3) & 15, bits & 7
    values = sign * np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    values[(bits & 127) == 127] = np.nan
    return values.astype(np.float32)


def _row_keys(bounds: Box) -> Words:
    """Factor of each row, from its indices along all dims but the last; 16 rows have one."""
    index = np.zeros(1, np.uint64)
    for dim, (start, stop) in enumerate(bounds):
        along = np.arange(start, stop, dtype=np.uint64)
        if dim == len(bounds) - 1:
            along //= np.uint64(GROUP)
        index = (index[:, None] * np.uint64(OUTER) + along).reshape(-1)
    return odd_keys(index, ROW_SEED)


@lru_cache(maxsize=64)
def _range_keys(start: int, stop: int) -> Words:
    return odd_keys(np.arange(start, stop, dtype=np.uint64), WORD_SEED)
