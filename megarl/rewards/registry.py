"""Which reward a kind is. A further kind is one entry here and one module beside it."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.errors import RewardError
from megarl.rewards.base import Scorer

KINDS = ("reasoning_gym", "math_verify", "regex", "function")


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """Description of a reward, sent to the scoring processes.

    Args:
        kind: one of ``KINDS``.
        path: of the user's function.
        pattern: regular expression, see the kinds.
        timeout_s: of one sample.
    """

    kind: str
    path: str | None = None
    pattern: str | None = None
    timeout_s: float = 10.0


def build(spec: RewardSpec) -> Scorer:
    """The scorer of a description; imports what it needs.

    Raises:
        RewardError: unknown kind, missing argument, or what the kind cannot load.
    """
    if spec.kind == "reasoning_gym":
        from megarl.rewards.gym import GymReward

        return GymReward(spec.pattern)
    if spec.kind == "math_verify":
        from megarl.rewards.math import MathReward

        # Reading both sides and comparing must end before the pool's own, harder limit.
        return MathReward(spec.pattern, timeout_s=spec.timeout_s / 3)
    if spec.kind == "regex":
        from megarl.rewards.regex import RegexReward

        if spec.pattern is None:
            raise RewardError("a reward of kind regex needs a pattern", fix="set reward.pattern")
        return RegexReward(spec.pattern)
    if spec.kind == "function":
        from megarl.rewards.function import FunctionReward

        if spec.path is None:
            raise RewardError("a reward of kind function needs a path", fix="set reward.path")
        return FunctionReward(spec.path)
    raise RewardError(f"no reward is of kind {spec.kind!r}", fix=f"one of {', '.join(KINDS)}")
