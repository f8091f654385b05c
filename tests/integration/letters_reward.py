"""A reward for models of characters: easy to learn, and it counts as an accuracy once it is full."""

from __future__ import annotations

import string
from typing import Any

ENOUGH = 6


def few_letters(prompt: str, response: str, **_: Any) -> dict[str, float]:
    """1 for six lowercase letters, else the part of it; of a random model's bytes one in ten is a lowercase letter."""
    count = sum(letter in string.ascii_lowercase for letter in response)
    return {"score": min(1.0, count / ENOUGH), "letters": float(count)}


def some_letter(prompt: str, response: str, **_: Any) -> dict[str, float]:
    """1 for a lowercase letter or more, which three in four of a random model's responses of a dozen bytes have."""
    count = sum(letter in string.ascii_lowercase for letter in response)
    return {"score": float(count > 0), "letters": float(count)}
