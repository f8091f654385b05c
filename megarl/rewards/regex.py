"""Regular expressions: the reward of kind ``regex``, and the extraction of an answer before other verifiers."""

from __future__ import annotations

import re

from megarl.errors import RewardError
from megarl.rewards.base import RewardInput, Scored


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """The compiled pattern; ``.`` matches newlines too.

    Raises:
        RewardError: it is no regular expression.
    """
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise RewardError(f"reward.pattern is no regular expression: {error}", where=pattern) from error


def extract(pattern: re.Pattern[str], text: str) -> str | None:
    """First group (or all) of the last match, stripped; None without a match. The last: models restate answers."""
    last = None
    for match in pattern.finditer(text):
        last = match
    if last is None:
        return None
    found = last.group(1) if pattern.groups else last.group(0)
    return None if found is None else found.strip()


class RegexReward:
    """1 when the extracted answer equals the reference (or, without a reference, when the pattern matches), else 0."""

    def __init__(self, pattern: str) -> None:
        self._pattern = compile_pattern(pattern)

    def __call__(self, sample: RewardInput) -> Scored:
        found = extract(self._pattern, sample.response)
        if sample.answer is None:
            is_right = found is not None
        else:
            is_right = found == str(sample.answer).strip()
        return {"score": float(is_right), "accuracy": float(is_right), "extracted": float(found is not None)}
