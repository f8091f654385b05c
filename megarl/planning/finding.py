"""One thing the doctor found: what it is about, what is wrong, and what to change."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from megarl.errors import ConfigError, DataError, ModelError, RewardError, SetupError

Area = Literal[
    "configuration", "model", "batch", "placement", "checkpoint", "data", "reward", "memory", "disk", "setup"
]
Level = Literal["error", "warning"]

_CODES: dict[Area, int] = {
    "configuration": ConfigError.exit_code,
    "model": ModelError.exit_code,
    "batch": ConfigError.exit_code,
    "placement": ConfigError.exit_code,
    "checkpoint": ModelError.exit_code,
    "data": DataError.exit_code,
    "reward": RewardError.exit_code,
    "memory": SetupError.exit_code,
    "disk": SetupError.exit_code,
    "setup": SetupError.exit_code,
}


@dataclass(frozen=True, slots=True)
class Finding:
    """An error, which would end the run, or a warning, which would slow it or may end it.

    Args:
        area: what it is about; decides the exit code.
        key: configuration key, file or variable to look at.
        problem: what was expected and what was found.
        fix: what to change.
        level: error or warning.
    """

    area: Area
    key: str
    problem: str
    fix: str
    level: Level = "error"

    def line(self) -> str:
        """``key: problem. Fix: fix`` on one line."""
        return f"{self.key}: {self.problem}. Fix: {self.fix}"


def errors(findings: Iterable[Finding]) -> list[Finding]:
    """Those that would end the run."""
    return [finding for finding in findings if finding.level == "error"]


def exit_code(findings: Iterable[Finding]) -> int:
    """Code of the first error's class (``megarl/errors.py``), 0 without errors."""
    return next((_CODES[finding.area] for finding in errors(findings)), 0)
