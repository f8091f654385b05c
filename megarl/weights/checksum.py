"""Checksums of tensors that shards can compute apart and add up.

    checksum = sum over rows r, words w of  A(r) * B(w) * word[r, w]   mod 2^64

A row is an index of all dims but the last; a word is eight consecutive bytes of a row, counted from the row's first
element in canonical coordinates. A and B are odd pseudo-random 64-bit numbers (splitmix64 of the index). An element
contributes ``bits << position in its word``, so a shard that cuts through a word contributes its share of it.

Invariants:
1. The sum over boxes that tile a tensor is the tensor's checksum, whatever the boxes and their order.
2. One changed element always changes the checksum, since an odd factor loses no bit of it. Swapped rows or columns,
   shifted boxes and stale blocks change it but for a chance of about 2^-16 at the worst position and 2^-64 usually.
3. It covers bits as they travel: convert the dtype first. Zeros contribute nothing, so absence of data is not seen
   here; ``check.check_complete`` proves that nothing is absent.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

from megarl.weights.region import Box, Region

MODULUS = 1 << 64

_ROW_SEED, _WORD_SEED = 0x243F6A8885A308D3, 0x13198A2E03707344
_WORD_BYTES = 8
_CHUNK_BYTES = 1 << 22
# Small enough to stay in a core's second-level cache, large enough that the calls do not count.
_CACHED_BYTES = 1 << 19


def checksum(piece: Tensor, box: Box) -> int:
    """Share of a tensor's checksum that one box of it contributes, in ``[0, 2^64)``.

    Args:
        piece: the box's elements, of any dtype and strides, on any device.
        box: where they lie in the canonical tensor.
    """
    return int(checksum_tensor(piece, box)) % MODULUS


def checksum_tensor(piece: Tensor, box: Box) -> Tensor:
    """Like ``checksum``, as an int64 scalar on the piece's device, which need not wait for it."""
    piece = piece.detach()
    if piece.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=piece.device)
    return _weighted_sum(piece.reshape(-1, piece.shape[-1]), box, _row_keys(box[:-1], piece.device))


def copy_with_checksum(place: Tensor, source: Tensor, box: Box) -> Tensor:
    """Copy ``source`` into ``place``, converting the dtype, and return the checksum of what ``place`` then holds.

    In host memory a block of rows is summed right after it was copied, out of the cache: memory is read once.

    Args:
        place: the box's elements, to be written.
        source: what to write, of the same shape.
        box: where they lie in the canonical tensor.
    """
    row_bytes = place.shape[-1] * place.element_size() if place.dim() == 2 else 0
    step = _CACHED_BYTES // row_bytes if row_bytes else 0
    if not 0 < step < len(place) or place.device.type != "cpu":
        place.copy_(source)
        return checksum_tensor(place, box)
    rows = _row_keys(box[:-1], place.device)
    total = torch.zeros((), dtype=torch.int64)
    for first in range(0, len(place), step):
        block = place[first : first + step]
        block.copy_(source[first : first + step])
        total += _weighted_sum(block, box, rows[first : first + step])
    return total


def _weighted_sum(flat: Tensor, box: Box, rows: Tensor) -> Tensor:
    """Sum over a [R, W] block of whole rows of a box, whose row factors are ``rows``."""
    start, stop = box[-1]
    lanes = _WORD_BYTES // flat.element_size()
    words = _range_keys(start // lanes, -(-stop // lanes), _WORD_SEED, flat.device)
    whole_words = start % lanes == 0 and stop % lanes == 0
    if whole_words and flat.device.type == "cpu" and _viewable(flat, lanes):
        return (torch.mv(flat.view(torch.int64), words) * rows).sum()
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    step = _rows_per_chunk(flat)
    for first in range(0, len(flat), step):
        block = _as_words(flat[first : first + step], start % lanes, len(words) * lanes, lanes)
        total += (_times(block, words) * rows[first : first + step]).sum()
    return total


def checksums(pieces: Iterable[tuple[Region, Tensor]]) -> dict[str, int]:
    """Checksum shares by tensor name of one rank's pieces."""
    totals: dict[str, int] = {}
    for region, piece in pieces:
        totals[region.tensor] = (totals.get(region.tensor, 0) + checksum(piece, region.box)) % MODULUS
    return totals


def add(shares: Iterable[dict[str, int]]) -> dict[str, int]:
    """The sum of several ranks' shares, by tensor."""
    totals: dict[str, int] = {}
    for share in shares:
        for name, value in share.items():
            totals[name] = (totals.get(name, 0) + value) % MODULUS
    return totals


def _times(block: Tensor, words: Tensor) -> Tensor:
    """[R, W] int64 times [W] int64 summed over W, wrapping."""
    if block.device.type == "cpu":
        return torch.mv(block, words)
    # CUDA has no integer matrix-vector product; blocks are small enough for the temporary.
    return (block * words).sum(1)


def _as_words(block: Tensor, lead: int, width: int, lanes: int) -> Tensor:
    """Rows as int64 words; zeros stand in where the block begins or ends inside a word."""
    if lead or block.shape[1] != width:
        padded = torch.zeros((len(block), width), dtype=block.dtype, device=block.device)
        padded[:, lead : lead + block.shape[1]] = block
        block = padded
    elif not _viewable(block, lanes):
        block = block.clone(memory_format=torch.contiguous_format)
    return block.view(torch.int64)


def _viewable(block: Tensor, lanes: int) -> bool:
    """Whether the rows can be read as int64 in place."""
    return block.stride(1) == 1 and block.stride(0) % lanes == 0 and block.storage_offset() % lanes == 0


def _rows_per_chunk(flat: Tensor) -> int:
    return max(1, _CHUNK_BYTES // (flat.shape[1] * flat.element_size()))


def _row_keys(bounds: Box, device: torch.device) -> Tensor:
    """Factor of each row, from its indices along all dims but the last."""
    if len(bounds) == 1:
        return _range_keys(*bounds[0], _ROW_SEED, device)
    index = torch.zeros(1, dtype=torch.int64, device=device)
    for start, stop in bounds:
        along = torch.arange(start, stop, dtype=torch.int64, device=device)
        # Distinct rows must get distinct indices without knowing the tensor's shape: 2^32 rows per dim are plenty.
        index = (index[:, None] * 0x100000001 + along).reshape(-1)
    return _keys(index, _ROW_SEED)


@lru_cache(maxsize=64)
def _range_keys(start: int, stop: int, seed: int, device: torch.device) -> Tensor:
    """Keys of consecutive indices; a model's tensors share few ranges."""
    return _keys(torch.arange(start, stop, dtype=torch.int64, device=device), seed)


def _keys(index: Tensor, seed: int) -> Tensor:
    """Odd pseudo-random int64 of each index (splitmix64)."""
    x = index.to(torch.int64) * _signed(0x9E3779B97F4A7C15) + _signed(seed)
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return (x ^ _shift(x, 31)) | 1


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - MODULUS if value >= MODULUS // 2 else value
