"""Checksums of tensors that shards can compute apart and add up.

    checksum = sum over rows r, words w of  A(r // 16) * B(w - r mod 16) * word[r, w]   mod 2^64

A row is an index of the last dim but one (and of all before it); a word is eight consecutive bytes of a row, counted
from the row's first element in canonical coordinates. A and B are odd pseudo-random 64-bit numbers (splitmix64 of the
index). An element contributes ``bits << position in its word``, so a shard that cuts through a word contributes its
share of it. Since B moves by a word from row to row, 16 rows are added along their diagonals before anything is
multiplied, at three times the speed.

Invariants:
1. The sum over boxes that tile a tensor is the tensor's checksum, whatever the boxes and their order.
2. One changed element always changes the checksum, since an odd factor loses no bit of it. Swapped rows or columns,
   shifted boxes and stale blocks change it but for a chance of about 2^-16 at the worst position and 2^-64 usually;
   only what moves by as many words as rows inside 16 rows is not seen.
3. It covers bits as they travel: convert the dtype first. Zeros contribute nothing, so absence of data is not seen
   here; ``check.check_complete`` proves that nothing is absent.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise, product

import torch
from torch import Tensor

from megarl.weights.region import Box, Region

MODULUS = 1 << 64

_ROW_SEED, _WORD_SEED = 0x243F6A8885A308D3, 0x13198A2E03707344
_WORD_BYTES = 8
_GROUP = 16
_CHUNK_BYTES = 1 << 22


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
    total = torch.zeros((), dtype=torch.int64, device=piece.device)
    if piece.numel() == 0:
        return total
    for outer, matrix in _matrices(piece, box):
        total += _matrix_sum(matrix, (0, 1) if len(box) == 1 else box[-2], box[-1], outer)
    return total


def copy_with_checksum(place: Tensor, source: Tensor, box: Box) -> Tensor:
    """Copy ``source`` into ``place``, converting the dtype, and return the checksum of what ``place`` then holds.

    Doing so block by block, out of the cache, was slower: the calls cost more than memory.

    Args:
        place: the box's elements, to be written.
        source: what to write, of the same shape.
        box: where they lie in the canonical tensor.
    """
    place.copy_(source)
    return checksum_tensor(place, box)


def _matrices(piece: Tensor, box: Box) -> Iterable[tuple[tuple[int, ...], Tensor]]:
    """The matrices that make up a piece, with their indices along the dims before the last two."""
    if piece.dim() == 1:
        yield (), piece[None]
        return
    for outer in product(*(range(start, stop) for start, stop in box[:-2])):
        yield outer, piece[tuple(index - start for index, (start, _) in zip(outer, box[:-2], strict=True))]


def _matrix_sum(matrix: Tensor, rows: tuple[int, int], columns: tuple[int, int], outer: tuple[int, ...]) -> Tensor:
    """The sum over an [R, W] matrix of elements at these rows and columns of the canonical tensor."""
    lanes = _WORD_BYTES // matrix.element_size()
    lead, first_word = columns[0] % lanes, columns[0] // lanes
    width = (-(-columns[1] // lanes) - first_word) * lanes
    total = torch.zeros((), dtype=torch.int64, device=matrix.device)
    in_place = not lead and matrix.shape[1] == width and matrix.device.type == "cpu" and _viewable(matrix, lanes)
    step = len(matrix) if in_place else max(_GROUP, _CHUNK_BYTES // (width * matrix.element_size()) // _GROUP * _GROUP)
    cuts = [rows[0], *range(rows[0] - rows[0] % _GROUP + step, rows[1], step), rows[1]]
    for first, last in pairwise(cuts):
        words = _as_words(matrix[first - rows[0] : last - rows[0]], lead, width, lanes)
        total += _sum(words, first, first_word, outer)
    return total


def _sum(words: Tensor, first_row: int, first_word: int, outer: tuple[int, ...]) -> Tensor:
    """The sum over [R, W] int64 words: rows of broken groups one by one, whole groups at once."""
    stop = first_row + len(words)
    aligned, end = -(-first_row // _GROUP) * _GROUP, stop - stop % _GROUP
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    if aligned >= end:
        aligned = end = stop
    for row in [*range(first_row, aligned), *range(end, stop)]:
        keys = _word_keys(first_word - row % _GROUP, words.shape[1], words.device)
        total += (
            _dot(words[row - first_row], keys) * _group_keys(row // _GROUP, row // _GROUP + 1, outer, words.device)[0]
        )
    if aligned < end:
        sums = _group_sums(words[aligned - first_row : end - first_row], first_word)
        total += _dot(sums, _group_keys(aligned // _GROUP, end // _GROUP, outer, words.device))
    return total


def _group_sums(words: Tensor, first_word: int) -> Tensor:
    """[G] sums of 16 rows each, without the group's factor."""
    num_groups, width, stride = len(words) // _GROUP, words.shape[1], words.stride(0)
    inner = width - _GROUP + 1
    if inner < _GROUP or words.stride(1) != 1:
        return _times(words.reshape(num_groups, -1), _edge_keys(first_word, width, width, words.device))
    # Column l of this view is words[lo, l + lo] of each row lo of a group: one diagonal, one factor.
    diagonals = words.as_strided((num_groups, _GROUP, inner), (_GROUP * stride, stride + 1, 1), words.storage_offset())
    sums = _times(diagonals.sum(1), _word_keys(first_word, inner, words.device))
    edges = torch.cat([words[:, : _GROUP - 1], words[:, inner:]], 1).view(num_groups, -1)
    return sums + _times(edges, _edge_keys(first_word, width, _GROUP - 1, words.device))


@lru_cache(maxsize=64)
def _edge_keys(first_word: int, width: int, edge: int, device: torch.device) -> Tensor:
    """Factors, row after row of a group, of what lies beyond the whole diagonals.

    These are ``edge`` words on either side, zero where a whole diagonal covers them; all where ``edge`` is the width.
    """
    row = torch.arange(_GROUP, device=device)[:, None]
    column = torch.arange(width, device=device)[None]
    keys = _keys(first_word + column - row + _GROUP, _WORD_SEED)
    if edge == width:
        return keys.reshape(-1)
    keys = torch.where((column >= row) & (column < row + width - edge), 0, keys)
    return torch.cat([keys[:, :edge], keys[:, width - edge :]], 1).reshape(-1)


def _word_keys(first: int, count: int, device: torch.device) -> Tensor:
    """Factors of words ``first`` and on; a row's first words may be as far as 15 before the tensor's."""
    return _range_keys(first + _GROUP, first + _GROUP + count, _WORD_SEED, device)


def _group_keys(first: int, last: int, outer: tuple[int, ...], device: torch.device) -> Tensor:
    """Factors of groups of rows."""
    if not outer:
        return _range_keys(first, last, _ROW_SEED, device)
    index = 0
    for along in outer:
        # Distinct rows must get distinct indices without knowing the tensor's shape: 2^32 rows per dim are plenty.
        index = index * 0x100000001 + along
    start = _signed(index * 0x100000001 % MODULUS)
    return _keys(torch.arange(first, last, dtype=torch.int64, device=device) + start, _ROW_SEED)


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


def _times(block: Tensor, keys: Tensor) -> Tensor:
    """[R, W] int64 times [W] int64 summed over W, wrapping."""
    # CUDA has no integer matrix-vector product; blocks are small enough for the temporary.
    return torch.mv(block, keys) if block.device.type == "cpu" else (block * keys).sum(1)


def _dot(one: Tensor, other: Tensor) -> Tensor:
    """[W] int64 times [W] int64, wrapping."""
    return torch.dot(one, other) if one.device.type == "cpu" else (one * other).sum()


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
