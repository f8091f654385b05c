"""One broken rule and how it is told; values at keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.config.origin import Origins
from megarl.config.schema import SftConfig, TrainConfig

AnyConfig = TrainConfig | SftConfig


@dataclass(frozen=True, slots=True)
class Breach:
    """One broken rule."""

    keys: tuple[str, ...]
    expected: str
    rule: str = ""

    def line(self, config: AnyConfig, origins: Origins) -> str:
        """``keys: expected ..., found key=value (origin), ... [rule name]``."""
        found = ", ".join(f"{key}={_show(lookup(config, key))} ({origins.near(key)})" for key in self.keys)
        return f"{self.keys[0]}: expected {self.expected}, found {found} [rule {self.rule}]"


def lookup(config: Any, key: str) -> Any:
    """Value at a key of a configuration; a key below an absent section has no value."""
    for part in key.split("."):
        if isinstance(config, list):
            config = config[int(part)]
        else:
            config = getattr(config, part, None)
    return config


def _show(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (str, int, float)):
        return str(value)
    return f"{len(value)} items" if isinstance(value, list) else "a section"
