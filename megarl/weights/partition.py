"""Disjoint boxes of one tensor, looked up by box: what a plan asks of a tensor's sources.

Loads no torch. Layers and experts are cut alike, so that one partition and its answers serve thousands of tensors.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import cached_property
from itertools import accumulate

from megarl.weights.region import Box, overlap, overlapping_pairs, union_volume, volume

Part = tuple[int, Box]
"""Index of a box of the partition, and the part of it that a looked-up box covers."""


class Partition:
    """Boxes sorted by rows.

    Args:
        boxes: of one tensor, none empty.
    """

    def __init__(self, boxes: tuple[Box, ...]) -> None:
        self.boxes = boxes
        self._order = sorted(range(len(boxes)), key=lambda index: boxes[index])
        self._starts = [boxes[index][0][0] if boxes[index] else 0 for index in self._order]
        stops = [boxes[index][0][1] if boxes[index] else 1 for index in self._order]
        self._furthest = list(accumulate(stops, max))
        self.num_elements = sum(map(volume, boxes))
        self._covered: dict[frozenset[Box], int] = {}
        self._known: dict[Box, tuple[tuple[Part, ...], int]] = {}

    @cached_property
    def overlaps(self) -> list[tuple[Box, Box]]:
        """Pairs of boxes that are not disjoint, of which a partition has none."""
        return [(self.boxes[one], self.boxes[other]) for one, other in overlapping_pairs(self.boxes)]

    def parts(self, box: Box) -> tuple[tuple[Part, ...], int]:
        """The partition's boxes that a box meets, in the order of their rows, and how many elements none holds."""
        known = self._known.get(box)
        if known is None:
            known = self._known[box] = self._find(box)
        return known

    def covered(self, boxes: frozenset[Box]) -> int:
        """Elements of the partition that at least one of the boxes holds."""
        known = self._covered.get(boxes)
        if known is None:
            known = union_volume({part for box in boxes for _, part in self.parts(box)[0]})
            self._covered[boxes] = known
        return known

    def _find(self, box: Box) -> tuple[tuple[Part, ...], int]:
        start, stop = box[0] if box else (0, 1)
        first, last = bisect_right(self._furthest, start), bisect_left(self._starts, stop)
        found: list[Part] = []
        for index in self._order[first:last]:
            common = overlap(self.boxes[index], box)
            if common is not None:
                # One object for equal boxes keeps a plan of millions of copies small.
                found.append((index, box if common == box else common))
        return tuple(found), volume(box) - sum(volume(part) for _, part in found)
