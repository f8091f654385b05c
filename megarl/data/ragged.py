"""Per-token columns of unequal lengths, kept flat.

Invariants:
1. ``values[offsets[i]:offsets[i + 1]]`` is row i; the lengths sum to ``len(values)``.
2. No operation loops over tokens in Python, and none writes into its operands: tensors may be shared, also with
   another process (a pickled column is mapped read-only by Ray).
3. ``lengths`` stays on the CPU: control flow reads it, and reading it from a device would wait for the device.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import chain
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megarl.errors import DataError

Index: TypeAlias = "Sequence[int] | range | slice | Tensor"
Side: TypeAlias = Literal["left", "right"]


class Ragged:
    """Rows of unequal lengths: values [N, ...] of all rows one after the other and lengths [B] int64.

    Raises:
        DataError: the lengths do not describe the values.
    """

    __slots__ = ("_offsets", "lengths", "values")

    def __init__(self, values: Tensor, lengths: Tensor) -> None:
        lengths = lengths.detach().to("cpu", torch.int64)
        if lengths.ndim != 1 or values.ndim < 1:
            shapes = f"{tuple(values.shape)} and {tuple(lengths.shape)}"
            raise DataError(f"expected values [N, ...] and lengths [B], found {shapes}")
        if len(lengths) and int(lengths.min()) < 0:
            raise DataError(f"row {int(lengths.argmin())} has negative length {int(lengths.min())}")
        if int(lengths.sum()) != len(values):
            raise DataError(f"lengths sum to {int(lengths.sum())}, but there are {len(values)} values")
        self.values = values
        self.lengths = lengths
        self._offsets: Tensor | None = None

    # -- making ------------------------------------------------------------------------------------------------------

    @classmethod
    def from_rows(cls, rows: Sequence[Any], dtype: torch.dtype | None = None) -> Ragged:
        """Rows given as tensors [T_i, ...], or as sequences or arrays of numbers (then ``dtype`` is required)."""
        if all(isinstance(row, Tensor) for row in rows):
            if not rows:
                return cls(torch.empty(0, dtype=dtype), torch.empty(0, dtype=torch.int64))
            values = torch.cat(list(rows))
            return cls(values if dtype is None else values.to(dtype), torch.tensor([len(row) for row in rows]))
        if dtype is None:
            raise DataError("rows that are not tensors need a dtype")
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        if rows and all(isinstance(row, np.ndarray) for row in rows):
            flat = np.concatenate(rows, dtype=_numpy_dtype(dtype))
        else:
            flat = np.fromiter(chain.from_iterable(rows), _numpy_dtype(dtype), int(lengths.sum()))
        return cls(torch.from_numpy(flat), torch.from_numpy(lengths))

    @classmethod
    def from_padded(cls, padded: Tensor, lengths: Tensor, side: Side = "right") -> Ragged:
        """The rows of a padded tensor [B, T, ...]; ``side`` is where the padding is."""
        lengths = lengths.detach().to("cpu", torch.int64)
        if len(lengths) and int(lengths.max()) > padded.shape[1]:
            raise DataError(f"a row has length {int(lengths.max())}, the padded tensor holds {padded.shape[1]}")
        if not len(lengths):
            return cls(padded.reshape(0, *padded.shape[2:]), lengths)
        rows = zip(padded.unbind(0), lengths.tolist(), strict=True)
        parts = [row[:size] if side == "right" else row[row.shape[0] - size :] for row, size in rows]
        return cls(torch.cat(parts), lengths)

    @classmethod
    def concat(cls, parts: Sequence[Ragged]) -> Ragged:
        """All rows of all parts, in order."""
        if not parts:
            raise DataError("cannot concatenate no columns: their dtype is unknown")
        return cls(torch.cat([part.values for part in parts]), torch.cat([part.lengths for part in parts]))

    @classmethod
    def join_rows(cls, left: Ragged, right: Ragged) -> Ragged:
        """Row i of the result is row i of ``left`` followed by row i of ``right`` (a prompt and its response)."""
        if len(left) != len(right):
            raise DataError(f"cannot join {len(left)} rows with {len(right)} rows")
        size = len(left)
        lengths = torch.stack([left.lengths, right.lengths], dim=1).reshape(-1)
        both = cls(torch.cat([left.values, right.values]), torch.cat([left.lengths, right.lengths]))
        order = torch.stack([torch.arange(size), torch.arange(size) + size], dim=1).reshape(-1)
        return cls(both.select(order).values, lengths.view(size, 2).sum(dim=1))

    def with_values(self, values: Tensor) -> Ragged:
        """Other values [N, ...] on the same rows."""
        return Ragged(values, self.lengths)

    # -- reading -----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> Tensor:
        """Row ``row``, a view [T_i, ...]."""
        size = len(self)
        if not -size <= row < size:
            raise IndexError(f"row {row} of {size}")
        row %= size
        return self.values[int(self.offsets[row]) : int(self.offsets[row + 1])]

    def __repr__(self) -> str:
        return f"Ragged(rows={len(self)}, values={tuple(self.values.shape)} {self.dtype} on {self.device})"

    @property
    def offsets(self) -> Tensor:
        """Start of each row and the total, [B + 1] int64 on the CPU."""
        if self._offsets is None:
            self._offsets = torch.zeros(len(self) + 1, dtype=torch.int64)
            torch.cumsum(self.lengths, 0, out=self._offsets[1:])
        return self._offsets

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """Where the values are."""
        return self.values.device

    @property
    def max_length(self) -> int:
        """Length of the longest row; 0 without rows."""
        return int(self.lengths.max()) if len(self) else 0

    def rows(self) -> list[Tensor]:
        """Each row as a view [T_i, ...]."""
        return list(torch.split(self.values, self.lengths.tolist())) if len(self) else []

    def row_index(self) -> Tensor:
        """Number of the row each value belongs to, [N] int64 on the values' device."""
        return torch.repeat_interleave(torch.arange(len(self)), self.lengths).to(self.device)

    def mask(self, length: int | None = None, side: Side = "right") -> Tensor:
        """True where ``padded(length, side=side)`` holds a value, [B, T] bool."""
        return _mask(self.lengths, self._width(length), side).to(self.device)

    def padded(self, length: int | None = None, fill: float = 0, side: Side = "right") -> Tensor:
        """The rows as [B, T, ...], ``fill`` beyond their ends; T is the longest row unless ``length`` is given.

        Raises:
            DataError: a row is longer than ``length``.
        """
        width = self._width(length)
        if not len(self) or not self.max_length:
            return self.values.new_full((len(self), width, *self.values.shape[1:]), fill)
        # Row by row: several times faster than through a mask.
        out = pad_sequence(self.rows(), batch_first=True, padding_value=fill, padding_side=side)
        if width == out.shape[1]:
            return out
        beyond = self.values.new_full((len(self), width - out.shape[1], *self.values.shape[1:]), fill)
        return torch.cat([out, beyond] if side == "right" else [beyond, out], dim=1)

    def equal(self, other: Ragged) -> bool:
        """Whether rows, dtype and values are the same."""
        return (
            self.dtype == other.dtype
            and torch.equal(self.lengths, other.lengths)
            and torch.equal(self.values, other.values.to(self.device))
        )

    # -- selecting ---------------------------------------------------------------------------------------------------

    def select(self, index: Index) -> Ragged:
        """The rows of ``index`` in its order; a slice or range of step 1 gives views.

        Raises:
            DataError: an index outside 0..B-1.
        """
        rows = row_indices(index, len(self))
        if isinstance(rows, range):
            start, stop = int(self.offsets[rows.start]), int(self.offsets[rows.stop])
            return Ragged(self.values[start:stop], self.lengths[rows.start : rows.stop])
        lengths = self.lengths[rows]
        places = zip(self.offsets[rows].tolist(), lengths.tolist(), strict=True)
        return self._joined([self.values[start : start + size] for start, size in places], lengths)

    def tail(self, lengths: Tensor) -> Ragged:
        """The last ``lengths`` [B] values of each row (a response inside its sequence)."""
        return self._joined(self._cut(self.lengths - lengths)[1::2], lengths)

    def head(self, lengths: Tensor) -> Ragged:
        """The first ``lengths`` [B] values of each row."""
        return self._joined(self._cut(lengths)[::2], lengths)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Ragged:
        """The values on another device."""
        return Ragged(self.values.to(device, non_blocking=non_blocking), self.lengths)

    def _joined(self, views: Sequence[Tensor], lengths: Tensor) -> Ragged:
        # Concatenating views copies whole rows: for rows of 2,000 tokens ten times as fast as gathering by token index.
        return Ragged(torch.cat(list(views)) if views else self.values[:0], lengths)

    def _cut(self, at: Tensor) -> Sequence[Tensor]:
        """Views of each row before and after its position ``at`` [B], alternating."""
        if len(at) != len(self) or bool(((at < 0) | (at > self.lengths)).any()):
            raise DataError(f"cannot cut rows of {self.lengths[:5].tolist()}... tokens at {at[:5].tolist()}...")
        sizes = torch.stack([at, self.lengths - at], dim=1).reshape(-1)
        return torch.split(self.values, sizes.tolist()) if len(self) else ()

    def _width(self, length: int | None) -> int:
        if length is None:
            return self.max_length
        if self.max_length > length:
            raise DataError(f"row {int(self.lengths.argmax())} has {self.max_length} tokens, padding allows {length}")
        return length

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (to_buffer(self.values), to_buffer(self.lengths)))


def row_indices(index: Index, size: int) -> range | Tensor:
    """An index as a step-1 range (rows can be views) or as an int64 tensor, checked against ``size`` rows."""
    if isinstance(index, slice):
        index = range(*index.indices(size))
    if isinstance(index, range):
        if index.step == 1 and 0 <= index.start <= index.stop <= size:
            return index
        index = list(index)
    rows = index if isinstance(index, Tensor) else torch.as_tensor(index, dtype=torch.int64)
    if rows.dtype == torch.bool:
        if len(rows) != size:
            raise DataError(f"a mask of {len(rows)} rows cannot select from {size} rows")
        rows = rows.nonzero().squeeze(1)
    rows = rows.to("cpu", torch.int64)
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < size:
        raise DataError(f"row indices run from {int(rows.min())} to {int(rows.max())}, but there are {size} rows")
    return rows


def to_buffer(tensor: Tensor) -> np.ndarray[Any, Any] | Tensor:
    """The tensor as a numpy array, whose pickle (protocol 5) is one buffer that Ray maps instead of copying."""
    tensor = tensor.detach().cpu().contiguous()
    # numpy has no bfloat16; torch pickles such a tensor itself, slower.
    return tensor if tensor.dtype == torch.bfloat16 else tensor.numpy()


def from_buffer(array: np.ndarray[Any, Any] | Tensor) -> Tensor:
    """The tensor on the array's memory."""
    if isinstance(array, Tensor):
        return array
    with warnings.catch_warnings():
        # Ray's mapping is read-only and torch warns about it; invariant 2 says why that is no danger here.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def _rebuild(values: Any, lengths: Any) -> Ragged:
    return Ragged(from_buffer(values), from_buffer(lengths))


def _mask(lengths: Tensor, width: int, side: Side) -> Tensor:
    position = torch.arange(width)
    if side == "right":
        return position < lengths[:, None]
    return position >= width - lengths[:, None]


def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return torch.empty(0, dtype=dtype).numpy().dtype
