"""Mathematical equality of the response's answer and the reference, by math-verify.

math-verify interrupts itself with SIGALRM: it must run in the main thread, which a scoring process gives it. Its
default hides a time-out as "not equal"; here a time-out is a failure and only an unreadable response is wrong.
"""

from __future__ import annotations

from typing import Any

from megarl.errors import RewardError
from megarl.rewards.base import RewardInput, Scored
from megarl.rewards.regex import compile_pattern, extract


class MathReward:
    """1 when an expression of the response (or of what ``pattern`` extracts) equals the reference, else 0.

    Args:
        pattern: extracts the answer before it is read.
        timeout_s: of each reading and of the comparison, in whole seconds.

    Raises:
        RewardError: math-verify is not installed.
    """

    def __init__(self, pattern: str | None = None, timeout_s: float = 5.0) -> None:
        self._pattern = None if pattern is None else compile_pattern(pattern)
        self._timeout_s = max(1, int(timeout_s))
        try:
            import math_verify
            import math_verify.errors
        except ImportError as error:
            raise RewardError(
                f"math-verify cannot be imported: {error}", fix="pip install 'math-verify[antlr4_13_2]'"
            ) from error
        self._library = math_verify
        self._timed_out = math_verify.errors.TimeoutException

    def __call__(self, sample: RewardInput) -> Scored:
        if sample.answer is None:
            raise TypeError("math_verify needs an answer; set answer_column of the source")
        gold = self._read(str(sample.answer), is_reference=True)
        if not gold:
            raise ValueError(f"math_verify cannot read the reference answer {str(sample.answer)[:80]!r}")
        text = sample.response if self._pattern is None else extract(self._pattern, sample.response)
        found = [] if text is None else self._read(text, is_reference=self._pattern is not None)
        is_right = bool(found) and self._equal(gold, found)
        return {"score": float(is_right), "accuracy": float(is_right), "extracted": float(bool(found))}

    def _read(self, text: str, *, is_reference: bool) -> list[Any]:
        """Expressions in a text; one that is an answer and nothing else is read as mathematics throughout.

        Without the dollars ``3x+2`` would be read as the number 3.
        """
        if is_reference and "$" not in text and "\\boxed" not in text:
            return self._parse(f"${text}$") or self._parse(text)
        return self._parse(text)

    def _parse(self, text: str) -> list[Any]:
        try:
            return list(self._library.parse(text, parsing_timeout=self._timeout_s, raise_on_error=True))
        except self._timed_out as error:
            raise TimeoutError(f"math_verify read for {self._timeout_s} s") from error
        except Exception:  # whatever its parsers raise over text that is no mathematics
            return []

    def _equal(self, gold: list[Any], found: list[Any]) -> bool:
        try:
            return bool(self._library.verify(gold, found, timeout_seconds=self._timeout_s, raise_on_error=True))
        except self._timed_out as error:
            raise TimeoutError(f"math_verify compared for {self._timeout_s} s") from error
        except Exception:  # whatever sympy raises over expressions it cannot compare
            return False
