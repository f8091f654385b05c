"""The reward of benchmarks/step.py, the same for megarl and its peer: cheap, and different from sample to sample."""

from __future__ import annotations

from typing import Any


def share_of_digits(text: str) -> float:
    return sum(character.isdigit() for character in text) / max(1, len(text))


def score(response: str, **_: Any) -> float:
    return share_of_digits(response)
