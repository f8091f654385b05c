"""Microbatches by token budget: rows into bins whose tokens never exceed a cap.

Invariants:
1. Every row is in exactly one bin, no bin is empty, no bin holds more than ``cap`` tokens.
2. The result depends on the lengths alone: the same on every rank that computes it.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

from megarl.errors import DataError


def pack(lengths: Sequence[int], cap: int, *, min_bins: int = 1) -> list[list[int]]:
    """Rows of each bin, in as few bins as a decreasing fit finds, then evened out.

    The number of bins starts at its lower bound ``ceil(sum / cap)`` and grows until longest-first assignment to the
    emptiest bin respects the cap, or is that of best-fit decreasing (at most 11/9 of the optimum plus one), whichever
    is fewer. Bins come in the order of their first row, rows ascending.

    Args:
        lengths: tokens of each row, at least 1 each.
        cap: most tokens of a bin.
        min_bins: fewest bins, for ranks that must run as many microbatches as the others.

    Raises:
        DataError: a row is longer than the cap or empty, or there are fewer rows than ``min_bins``.
    """
    lengths = [int(length) for length in lengths]
    if len(lengths) < min_bins:
        raise DataError(f"{len(lengths)} rows cannot fill {min_bins} microbatches")
    if not lengths:
        return []
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    if lengths[longest] > cap:
        raise DataError(
            f"row {longest} has {lengths[longest]} tokens, a microbatch holds {cap}",
            fix=f"raise the token budget of a microbatch to at least {lengths[longest]}, or shorten the sequences",
        )
    if min(lengths) < 1:
        raise DataError(f"row {lengths.index(min(lengths))} has no tokens")
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    fitted = _best_fit(lengths, order, cap)
    fewest = max(min_bins, -(-sum(lengths) // cap))
    for count in range(fewest, max(fewest, len(fitted)) + 1):
        if evened := _emptiest_first(lengths, order, cap, count):
            return _ordered(evened)
    return _ordered(fitted)


def _best_fit(lengths: Sequence[int], order: Sequence[int], cap: int) -> list[list[int]]:
    """Each row into the fullest bin with room for it."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), ascending
    for row in order:
        at = bisect_left(room, (lengths[row], -1))
        if at == len(room):
            bins.append([row])
            insort(room, (cap - lengths[row], len(bins) - 1))
        else:
            left, number = room.pop(at)
            bins[number].append(row)
            insort(room, (left - lengths[row], number))
    return bins


def _emptiest_first(lengths: Sequence[int], order: Sequence[int], cap: int, count: int) -> list[list[int]] | None:
    """Each row into the emptiest of ``count`` bins; None when one would exceed the cap."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, number) for number in range(count)]
    for row in order:
        used, number = heap[0]
        if used + lengths[row] > cap:
            return None
        bins[number].append(row)
        heapq.heapreplace(heap, (used + lengths[row], number))
    return bins


def _ordered(bins: list[list[int]]) -> list[list[int]]:
    return sorted(sorted(rows) for rows in bins)
