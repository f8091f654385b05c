"""Checksums of tensors that shards can compute apart and add up.

    checksum = sum over rows r, words w of  A(r // 16) * B(w - r mod 16) * word[r, w]   mod 2^64

A row is an index of the last dim but one (and of all before it); a word is eight consecutive bytes of a row, counted
from the row's first element in canonical coordinates. A and B are odd pseudo-random 64-bit numbers (splitmix64 of the
index). An element contributes ``bits << position in its word``, so a shard that cuts through a word contributes its
share of it. Since B moves by a word from row to row, 16 rows can be added along their diagonals before anything is
multiplied, as torch does it here; in host memory ``row_sums.py`` does it in compiled code.

Invariants:
1. The sum over boxes that tile a tensor is the tensor's checksum, whatever the boxes and their order.
2. One changed element always changes the checksum, since an odd factor loses no bit of it. Swapped rows or columns,
   shifted boxes and stale blocks change it but for a chance of about 2^-16 at the worst position and 2^-64 usually;
   only what moves by as many words as rows inside 16 rows is not seen.
3. It covers bits as they travel: convert the dtype first. Zeros contribute nothing, so absence of data is not seen
   here; ``check.check_complete`` proves that nothing is absent.
4. A ``Share`` of the groups of rows is chosen by the box alone: the sums of two ends that hold the same boxes agree,
   those of other boxes do not add up to the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise, product
from typing import TypeAlias

import torch
from torch import Tensor

from megarl.weights.region import Box, Region
from megarl.weights.row_sums import (
    ALL,
    GROUP,
    MODULUS,
    ROW_SEED,
    WORD_BYTES,
    WORD_SEED,
    Rows,
    Share,
    is_compiled,
    outer_index,
    sum_rows,
)

_CHUNK_BYTES = 1 << 22

Sum: TypeAlias = int | Tensor
"""A number, or an int64 scalar on a device, which need not be waited for; see ``numbers``."""


def checksum(piece: Tensor, box: Box, share: Share = ALL) -> int:
    """Share of a tensor's checksum that one box of it contributes, in ``[0, 2^64)``.

    Args:
        piece: the box's elements, of any dtype and strides, on any device.
        box: where they lie in the canonical tensor.
        share: which groups of the box's rows are summed.
    """
    return numbers([checksum_sum(piece, box, share)])[0]


def checksum_sum(piece: Tensor, box: Box, share: Share = ALL) -> Sum:
    """Like ``checksum``, but does not wait for a device."""
    piece = piece.detach()
    if piece.numel() == 0:
        return 0
    if _has_rows(piece) and is_compiled():
        return _host_sum(piece, None, box, share)
    total = torch.zeros((), dtype=torch.int64, device=piece.device)
    for outer, matrix in _matrices(piece, box):
        total += _matrix_sum(matrix, (0, 1) if len(box) == 1 else box[-2], box[-1], outer, share)
    return total


def move(place: Tensor, source: Tensor, box: Box, share: Share | None = ALL) -> Sum:
    """Copy ``source`` into ``place``, converting the dtype, and return the checksum of what ``place`` then holds.

    Args:
        place: the box's elements, to be written.
        source: what to write, of the same shape.
        box: where they lie in the canonical tensor.
        share: which groups of the box's rows are summed; None sums nothing.
    """
    # Rows are copied in a single thread, at the speed of memory; torch has more threads where it may.
    are_rows = place.dtype == source.dtype and _has_rows(place) and _has_rows(source) and torch.get_num_threads() == 1
    if are_rows and is_compiled() and place.numel():
        return _host_sum(place, source, box, share)
    place.copy_(source)
    return 0 if share is None else checksum_sum(place, box, share)


def numbers(sums: Sequence[Sum]) -> list[int]:
    """Sums as numbers in ``[0, 2^64)``; one transfer from the device for all."""
    lazy = [value for value in sums if isinstance(value, Tensor)]
    found = iter(torch.stack(lazy).tolist() if lazy else [])
    return [(next(found) if isinstance(value, Tensor) else value) % MODULUS for value in sums]


def _has_rows(piece: Tensor) -> bool:
    """Whether it lies in host memory with every row in one run."""
    return piece.device.type == "cpu" and piece.dim() > 0 and (piece.stride(-1) == 1 or piece.shape[-1] == 1)


def _host_sum(place: Tensor, source: Tensor | None, box: Box, share: Share | None) -> int:
    """Matrix by matrix; ``source`` is copied into ``place`` first."""
    size, rows, columns = place.element_size(), box[-2] if len(box) > 1 else (0, 1), box[-1]
    shape = (rows[1] - rows[0], size * (columns[1] - columns[0]))
    read, written = _matrix_places(place if source is None else source, box), None
    if source is not None:
        written = _matrix_places(place, box)
    total = 0
    for index, (outer, address, step) in enumerate(read):
        to = None if written is None else written[index][1:]
        total += sum_rows(Rows(address, step, *shape), rows[0], size * columns[0], outer, share, to)
    return total % MODULUS


def _matrix_places(piece: Tensor, box: Box) -> list[tuple[tuple[int, ...], int, int]]:
    """Indices along the dims before the last two, address, and bytes from row to row of the matrices of a piece."""
    size, address, strides = piece.element_size(), piece.data_ptr(), piece.stride()
    step = size * strides[-2] if len(box) > 1 else 0
    if len(box) <= 2:
        return [((), address, step)]
    found = []
    for outer in product(*(range(start, stop) for start, stop in box[:-2])):
        places = zip(outer, box, strides, strict=False)
        at = address + size * sum((along - start) * stride for along, (start, _), stride in places)
        found.append((outer, at, step))
    return found


def _matrices(piece: Tensor, box: Box) -> Iterable[tuple[tuple[int, ...], Tensor]]:
    """The matrices that make up a piece, with their indices along the dims before the last two."""
    if piece.dim() == 1:
        yield (), piece[None]
        return
    for outer in product(*(range(start, stop) for start, stop in box[:-2])):
        yield outer, piece[tuple(index - start for index, (start, _) in zip(outer, box[:-2], strict=True))]


def _matrix_sum(
    matrix: Tensor, rows: tuple[int, int], columns: tuple[int, int], outer: tuple[int, ...], share: Share
) -> Tensor:
    """The sum over an [R, W] matrix of elements at these rows and columns of the canonical tensor."""
    lanes = WORD_BYTES // matrix.element_size()
    lead, first_word = columns[0] % lanes, columns[0] // lanes
    width = (-(-columns[1] // lanes) - first_word) * lanes
    total = torch.zeros((), dtype=torch.int64, device=matrix.device)
    chosen = share.of(rows)
    whole = range(-(-rows[0] // GROUP), rows[1] // GROUP)
    for group in (group for group in chosen if group not in whole):
        first, last = max(rows[0], group * GROUP), min(rows[1], (group + 1) * GROUP)
        words = _as_words(matrix[first - rows[0] : last - rows[0]], lead, width, lanes)
        total += _broken_group(words, first, first_word, outer)
    groups = [group for group in chosen if group in whole]
    per_chunk = max(1, _CHUNK_BYTES // (width * matrix.element_size()) // GROUP)
    if not lead and matrix.shape[1] == width and chosen.step == 1 and _viewable(matrix, lanes):
        per_chunk = max(1, len(groups))  # nothing is copied
    for cut, end in pairwise([*range(0, len(groups), per_chunk), len(groups)]):
        part = range(groups[cut], groups[end - 1] + 1, chosen.step)
        block = matrix[part[0] * GROUP - rows[0] : (part[-1] + 1) * GROUP - rows[0]]
        if chosen.step > 1:
            block = block.unflatten(0, (-1, GROUP))[:: chosen.step].flatten(0, 1)
        sums = _group_sums(_as_words(block, lead, width, lanes), first_word)
        total += _dot(sums, _group_keys(part, outer, matrix.device))
    return total


def _broken_group(words: Tensor, first_row: int, first_word: int, outer: tuple[int, ...]) -> Tensor:
    """The sum over [R, W] int64 words of a group of which not all rows are there."""
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for row, held in enumerate(words, first_row):
        total += _dot(held, _word_keys(first_word - row % GROUP, words.shape[1], words.device))
    group = first_row // GROUP
    return total * _group_keys(range(group, group + 1), outer, words.device)[0]


def _group_sums(words: Tensor, first_word: int) -> Tensor:
    """[G] sums of 16 rows each, without the group's factor."""
    num_groups, width, stride = len(words) // GROUP, words.shape[1], words.stride(0)
    inner = width - GROUP + 1
    if inner < GROUP or words.stride(1) != 1:
        return _times(words.reshape(num_groups, -1), _edge_keys(first_word, width, width, words.device))
    # Column l of this view is words[lo, l + lo] of each row lo of a group: one diagonal, one factor.
    diagonals = words.as_strided((num_groups, GROUP, inner), (GROUP * stride, stride + 1, 1), words.storage_offset())
    sums = _times(diagonals.sum(1), _word_keys(first_word, inner, words.device))
    edges = torch.cat([words[:, : GROUP - 1], words[:, inner:]], 1).view(num_groups, -1)
    return sums + _times(edges, _edge_keys(first_word, width, GROUP - 1, words.device))


@lru_cache(maxsize=64)
def _edge_keys(first_word: int, width: int, edge: int, device: torch.device) -> Tensor:
    """Factors, row after row of a group, of what lies beyond the whole diagonals.

    These are ``edge`` words on either side, zero where a whole diagonal covers them; all where ``edge`` is the width.
    """
    row = torch.arange(GROUP, device=device)[:, None]
    column = torch.arange(width, device=device)[None]
    keys = _keys(first_word + column - row + GROUP, WORD_SEED)
    if edge == width:
        return keys.reshape(-1)
    keys = torch.where((column >= row) & (column < row + width - edge), 0, keys)
    return torch.cat([keys[:, :edge], keys[:, width - edge :]], 1).reshape(-1)


def _word_keys(first: int, count: int, device: torch.device) -> Tensor:
    """Factors of words ``first`` and on; a row's first words may be as far as 15 before the tensor's."""
    return _range_keys(first + GROUP, first + GROUP + count, WORD_SEED, device)


def _group_keys(groups: range, outer: tuple[int, ...], device: torch.device) -> Tensor:
    """Factors of groups of rows."""
    if not outer:
        # One table, since on a device every operation that makes keys costs as much as a copy.
        return _range_keys(0, 1 << groups.stop.bit_length(), ROW_SEED, device)[groups.start : groups.stop : groups.step]
    index = torch.arange(groups.start, groups.stop, groups.step, dtype=torch.int64, device=device)
    return _keys(index + _signed(outer_index(outer)), ROW_SEED)


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
