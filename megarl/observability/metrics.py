"""Typed metric values: the type of a value decides how it is reduced over ranks, microbatches and steps.

Invariants:
1. ``merge`` is associative and commutative up to rounding, so a metric does not depend on how the batch was cut.
2. A name never decides a reduction, and one name keeps one type: merging different types raises.
3. Values are plain floats and ints: picklable, no tensors, no device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, Self, TypeAlias, runtime_checkable


@runtime_checkable
class Metric(Protocol):
    """A value that knows how to be merged with another of its own type and how to become a number."""

    def merge(self, other: Self) -> Self: ...

    def value(self) -> float: ...


Metrics: TypeAlias = dict[str, Metric]


@dataclass(frozen=True, slots=True)
class Mean:
    """A weighted mean kept as its numerator and denominator; NaN when nothing was counted."""

    sum: float
    count: float

    def merge(self, other: Mean) -> Mean:
        return Mean(self.sum + other.sum, self.count + other.count)

    def value(self) -> float:
        return self.sum / self.count if self.count else math.nan


@dataclass(frozen=True, slots=True)
class Sum:
    """A total over everything that was merged."""

    total: float

    def merge(self, other: Sum) -> Sum:
        return Sum(self.total + other.total)

    def value(self) -> float:
        return self.total


@dataclass(frozen=True, slots=True)
class Max:
    """The largest value; -inf when nothing was seen."""

    largest: float = -math.inf

    def merge(self, other: Max) -> Max:
        return Max(max(self.largest, other.largest))

    def value(self) -> float:
        return self.largest


@dataclass(frozen=True, slots=True)
class Min:
    """The smallest value; inf when nothing was seen."""

    smallest: float = math.inf

    def merge(self, other: Min) -> Min:
        return Min(min(self.smallest, other.smallest))

    def value(self) -> float:
        return self.smallest


@dataclass(frozen=True, slots=True)
class Last:
    """A value all contributors agree on or of which the latest counts, such as a learning rate."""

    latest: float

    def merge(self, other: Last) -> Last:
        return other

    def value(self) -> float:
        return self.latest


def merge(parts: Iterable[Mapping[str, Metric]]) -> Metrics:
    """Merge dictionaries of metrics name by name.

    Raises:
        TypeError: one name carries two metric types.
    """
    merged: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            previous = merged.get(name)
            if previous is None:
                merged[name] = metric
            elif type(previous) is not type(metric):
                raise TypeError(f"metric {name!r} is {type(previous).__name__} and {type(metric).__name__}")
            else:
                merged[name] = previous.merge(metric)
    return merged


def values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The number of each metric, names kept."""
    return {name: metric.value() for name, metric in metrics.items()}
