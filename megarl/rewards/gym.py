"""reasoning-gym's own scorers. ``metadata`` of the prompts says which task and item (``data/sources.GymSource``)."""

from __future__ import annotations

from typing import Any

from megarl.data.gym import make_dataset
from megarl.rewards.base import RewardInput, Scored
from megarl.rewards.regex import compile_pattern, extract


class GymReward:
    """The task's score of the response, or of what ``pattern`` extracts from it; an item solved in full is accurate.

    Scorers of a few tasks read the task's options, so there is one dataset per task and options.
    """

    def __init__(self, pattern: str | None = None) -> None:
        self._pattern = None if pattern is None else compile_pattern(pattern)
        self._datasets: dict[str, Any] = {}
        import reasoning_gym  # noqa: F401  # a second, paid before the process says that it is ready

    def __call__(self, sample: RewardInput) -> Scored:
        if not isinstance(sample.metadata, dict) or not {"task", "options", "entry"} <= sample.metadata.keys():
            raise TypeError(
                f"the sample of {sample.data_source!r} is no reasoning-gym item: its metadata lacks task and entry"
            )
        task, options = sample.metadata["task"], sample.metadata["options"]
        key = f"{task} {sorted(options.items())!r}"
        if key not in self._datasets:
            self._datasets[key] = make_dataset(task, options, size=1, seed=0)
        answer = sample.response.strip() if self._pattern is None else extract(self._pattern, sample.response)
        score = float(self._datasets[key].score_answer(answer, sample.metadata["entry"]))
        return {"score": score, "accuracy": float(score >= 1.0)}
