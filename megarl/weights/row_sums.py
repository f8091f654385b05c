"""Rows of bytes copied and summed for checksums, in compiled code where there is a compiler. Loads no torch.

``checksum.py`` has the formula; this is the part of it over one matrix in host memory.

Invariants:
1. What is summed is read back from where it was written.
2. Both ends of a transfer choose the same groups of a box, and at least one of each.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from megarl.platform.native import compiled

MODULUS = 1 << 64
ROW_SEED, WORD_SEED = 0x243F6A8885A308D3, 0x13198A2E03707344
WORD_BYTES = 8
GROUP = 16
"""Rows with one factor."""
OUTER = 0x100000001
"""Distinct rows must get distinct indices without knowing the tensor's shape: 2^32 rows per dim are plenty."""

Words: TypeAlias = np.ndarray[Any, Any]


class Share(NamedTuple):
    """Which groups of rows of a box are summed: of each ``every`` of them, counted from the box's first, one.

    Args:
        every: 1 sums all. A box of fewer groups has one of them summed.
        turn: which one; any integer, so that a counter takes all in turn.
    """

    every: int = 1
    turn: int = 0

    def of(self, rows: tuple[int, int]) -> range:
        """The groups (of all of the tensor's) of a box with these rows."""
        first, stop = rows[0] // GROUP, -(-rows[1] // GROUP)
        step = max(1, min(self.every, stop - first))
        return range(first + self.turn % step, stop, step)


ALL = Share()


class Rows(NamedTuple):
    """Rows in host memory.

    Args:
        address: of the first byte.
        step: bytes from row to row.
        number: of rows.
        num_bytes: of one.
    """

    address: int
    step: int
    number: int
    num_bytes: int


def is_compiled() -> bool:
    """Whether ``sum_rows`` can be called."""
    return _kernel() is not None


def sum_rows(
    rows: Rows,
    first_row: int,
    first_byte: int,
    outer: Sequence[int] = (),
    share: Share | None = ALL,
    to: tuple[int, int] | None = None,
) -> int:
    """The sum, in ``[0, 2^64)``, over the chosen groups of one matrix; only where ``is_compiled``.

    Args:
        rows: what is summed, or copied.
        first_row: index of the first along the tensor's last dim but one.
        first_byte: of a row in the tensor's.
        outer: indices along the dims before.
        share: None sums nothing.
        to: address and step of where rows are copied; they are summed there.
    """
    kernel = _kernel()
    assert kernel is not None
    every, turn = 0, 0
    if share is not None:
        chosen = share.of((first_row, first_row + rows.number))
        every, turn = chosen.step, chosen.start - first_row // GROUP
    target, target_step = (None, 0) if to is None else to
    word, lead = divmod(first_byte, WORD_BYTES)
    num_words = word + -(-(lead + rows.num_bytes) // WORD_BYTES)
    keys, address = _word_keys(1 << num_words.bit_length())
    total = kernel(
        target, target_step, rows.address, rows.step, rows.number, rows.num_bytes, first_row, lead,
        address + WORD_BYTES * word, (outer_index(outer) + first_row // GROUP) % MODULUS, every, turn,
    )  # fmt: skip
    del keys  # held until here
    return total


def outer_index(outer: Sequence[int]) -> int:
    """What the dims before the last two add to the index of a group."""
    index = 0
    for along in outer:
        index = (index + along) * OUTER
    return index % MODULUS


def odd_keys(index: Words, seed: int) -> Words:
    """Odd pseudo-random number of each index (splitmix64)."""
    with np.errstate(over="ignore"):
        x = index * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return x | np.uint64(1)


@lru_cache(maxsize=32)
def _word_keys(count: int) -> tuple[Words, int]:
    """Factors from 15 words before a row's first to ``count`` words after it, and their address.

    A row's factors begin a word earlier than those of the row before, 16 rows in turn.
    """
    keys = odd_keys(np.arange(1, GROUP + count, dtype=np.uint64), WORD_SEED)
    return keys, keys.ctypes.data


@lru_cache(maxsize=1)
def _kernel() -> Callable[..., int] | None:
    library = compiled(Path(__file__).with_suffix(".c"))
    if library is None:
        return None
    kernel = library.megarl_rows
    number, address = ctypes.c_int64, ctypes.c_void_p
    kernel.argtypes = [
        address, number, address, number, number, number, number, number, address, ctypes.c_uint64, number, number,
    ]  # fmt: skip
    kernel.restype = ctypes.c_uint64
    found: Callable[..., int] = kernel
    return found
