"""Rows to data-parallel ranks so that their costs are even.

Invariants:
1. Every row is in exactly one part; with ``equal_counts`` all parts have the same number of rows.
2. The result depends on the costs alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from megarl.errors import DataError


def balance(costs: Sequence[float], parts: int, *, equal_counts: bool) -> list[list[int]]:
    """Rows of each part, ascending.

    Without ``equal_counts``: longest-processing-time first, within 4/3 of the best largest part (Graham 1969). With it:
    the largest-differencing method over groups of one row a part (Karmarkar and Karp 1982, balanced form).

    Args:
        costs: cost of each row, such as its tokens or its FLOPs; not negative.
        parts: number of parts, at least 1.
        equal_counts: give every part the same number of rows.

    Raises:
        DataError: with ``equal_counts`` the rows do not divide into the parts; without it there are fewer rows than
            parts; a negative cost.
    """
    size = len(costs)
    if parts < 1:
        raise DataError(f"cannot cut rows into {parts} parts")
    if equal_counts and size % parts:
        raise DataError(f"{size} rows do not divide into {parts} equal parts")
    if size < parts:
        raise DataError(f"{size} rows cannot fill {parts} parts")
    if size and min(costs) < 0:
        raise DataError(f"row {min(range(size), key=costs.__getitem__)} has a negative cost")
    order = sorted(range(size), key=lambda row: (-costs[row], row))
    found = _differencing(costs, order, parts) if equal_counts else _longest_first(costs, order, parts)
    return [sorted(rows) for rows in found]


def inverse(parts: Sequence[Sequence[int]]) -> list[int]:
    """The index that puts rows collected part by part back into their first order.

    ``concat([x.select(p) for p in parts]).select(inverse(parts))`` is ``x``.
    """
    flat = [row for part in parts for row in part]
    back = [0] * len(flat)
    for position, row in enumerate(flat):
        back[row] = position
    return back


def _longest_first(costs: Sequence[float], order: Sequence[int], parts: int) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(parts)]
    # The second entry keeps a part from staying empty when costs are zero.
    heap: list[tuple[float, int, int]] = [(0.0, 0, number) for number in range(parts)]
    for row in order:
        cost, count, number = heap[0]
        found[number].append(row)
        heapq.heapreplace(heap, (cost + costs[row], count + 1, number))
    return found


def _differencing(costs: Sequence[float], order: Sequence[int], parts: int) -> list[list[int]]:
    """Merge partial solutions, the most uneven two first, heavy parts of one with light parts of the other."""
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for number, start in enumerate(range(0, len(order), parts)):
        group = [(float(costs[row]), [row]) for row in order[start : start + parts]]  # descending
        heap.append((group[-1][0] - group[0][0], number, group))
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        pairs = zip(first, reversed(second), strict=True)
        merged = sorted(((a + b, rows + more) for (a, rows), (b, more) in pairs), key=lambda part: (-part[0], part[1]))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
        number += 1
    return [rows for _, rows in heap[0][2]] if heap else [[] for _ in range(parts)]
