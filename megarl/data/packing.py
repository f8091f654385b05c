"""Microbatches by token budget: rows into bins whose tokens never exceed a cap and whose work is even.

Invariants:
1. Every row is in exactly one bin, no bin is empty, no bin holds more than ``cap`` tokens.
2. The result depends on lengths and costs alone: the same on every rank that computes it.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

from megarl.errors import DataError

_FILL = 0.99
"""Fill below which bins are not added for the sake of even work."""
_EVEN = 1.05
"""Heaviest bin, in multiples of the lightest that it can be, at which no further bin is added for even work."""


def pack(
    lengths: Sequence[int], cap: int, *, costs: Sequence[float] | None = None, min_bins: int = 1
) -> list[list[int]]:
    """Rows of each bin: as few bins as a decreasing fit finds, or up to 1 % more where that evens their work.

    The number of bins starts at its lower bound ``ceil(sum / cap)``. Rows go longest first to the lightest bin that has
    room; from the counts that keep bins 99 % full, the first whose heaviest bin is within 5 % of
    ``max(mean, costliest row)`` is taken, or else that with the lightest heaviest bin. Where no such count has room for
    all rows it grows until one has, or is that of best-fit decreasing (at most 11/9 of the optimum plus one), whichever
    is fewer. Bins come heaviest first, so that ranks that run theirs side by side meet equals; rows ascending.

    Args:
        lengths: tokens of each row, at least 1 each.
        cap: most tokens of a bin.
        costs: work of each row, growing with its length; the lengths themselves if None.
        min_bins: fewest bins, for ranks that must run as many microbatches as the others.

    Raises:
        DataError: a row is longer than the cap or empty, or there are fewer rows than ``min_bins``.
    """
    lengths = [int(length) for length in lengths]
    costs = lengths if costs is None else costs
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
    fewest = max(min_bins, -(-sum(lengths) // cap))
    most = max(fewest, min(len(lengths), int(sum(lengths) / (_FILL * cap))))
    best: tuple[float, list[list[int]]] | None = None
    for count in sorted({fewest, (fewest + most) // 2, most}):
        if (found := _lightest_first(lengths, costs, order, cap, count)) is None:
            continue
        if best is None or found[0] < best[0]:
            best = found
        if found[0] <= _EVEN * max(sum(costs) / count, max(costs)):
            break
    return _ordered(_in_more_bins(lengths, costs, order, cap, most + 1) if best is None else best[1], costs)


def _in_more_bins(
    lengths: Sequence[int], costs: Sequence[float], order: Sequence[int], cap: int, fewest: int
) -> list[list[int]]:
    fitted = _best_fit(lengths, order, cap)
    for count in range(fewest, len(fitted) + 1):
        if found := _lightest_first(lengths, costs, order, cap, count):
            return found[1]
    return fitted


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


def _lightest_first(
    lengths: Sequence[int], costs: Sequence[float], order: Sequence[int], cap: int, count: int
) -> tuple[float, list[list[int]]] | None:
    """Each row into the lightest of ``count`` bins with room for it: cost of the heaviest, and the bins' rows.

    None when a row finds no room.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    room = [cap] * count
    lightest: list[tuple[float, int]] = [(0.0, number) for number in range(count)]
    # Bins too full for the row at hand; they come back for shorter ones.
    waiting: list[tuple[int, float, int]] = []
    heaviest = 0.0
    for row in order:
        length = lengths[row]
        while waiting and -waiting[0][0] >= length:
            _, cost, number = heapq.heappop(waiting)
            heapq.heappush(lightest, (cost, number))
        while lightest and room[lightest[0][1]] < length:
            cost, number = heapq.heappop(lightest)
            heapq.heappush(waiting, (-room[number], cost, number))
        if not lightest:
            return None
        cost, number = lightest[0]
        bins[number].append(row)
        room[number] -= length
        cost += costs[row]
        heaviest = max(heaviest, cost)
        heapq.heapreplace(lightest, (cost, number))
    return heaviest, bins


def _ordered(bins: list[list[int]], costs: Sequence[float]) -> list[list[int]]:
    return sorted((sorted(rows) for rows in bins), key=lambda rows: (-sum(costs[row] for row in rows), rows))
