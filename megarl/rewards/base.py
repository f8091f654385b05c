"""What goes into a reward and what comes out.

Invariants:
1. A result always has a finite score: a failed one has the configured score and says why it failed.
2. This module imports nothing heavy: scoring processes start with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol, TypeAlias

FULL_SCORE = 1.0
"""A verifier's full score: scores below it (partial credit for form) are not right answers."""

SCORE = "score"
"""Key of the score in what a reward returns, and its name as a component."""

Scored: TypeAlias = "float | Mapping[str, Any]"


@dataclass(frozen=True, slots=True)
class RewardInput:
    """One sample to score."""

    prompt: str
    response: str
    answer: Any = None
    data_source: str = ""
    metadata: Any = None


@dataclass(frozen=True, slots=True)
class RewardResult:
    """A finite score, further numbers that become metrics, and the failure if there was one."""

    score: float
    extra: dict[str, float] = field(default_factory=dict)
    failed: str | None = None


class Scorer(Protocol):
    """Scores one sample, in the main thread of a scoring process. May be a coroutine function."""

    def __call__(self, sample: RewardInput) -> Any:
        """A number, or a mapping with ``score`` whose other keys become metrics (or a coroutine of either)."""
        ...


def as_result(scored: Any) -> RewardResult:
    """What a scorer returned as a result.

    Raises:
        TypeError: not a number and not a mapping of numbers with ``score``.
        ValueError: a number that is not finite.
    """
    if isinstance(scored, Mapping):
        if SCORE not in scored:
            raise TypeError(f"the reward returned a dict without 'score', its keys are {sorted(map(str, scored))}")
        extra = {str(name): _number(value, str(name)) for name, value in scored.items() if name != SCORE}
        return RewardResult(_number(scored[SCORE], SCORE), extra)
    return RewardResult(_number(scored, SCORE))


def _number(value: Any, name: str) -> float:
    if not isinstance(value, Real):
        raise TypeError(f"the reward returned {type(value).__name__} for {name}, expected a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"the reward returned {number} for {name}")
    return number
