"""The rounds of sampling of one step: one, or under ``algorithm.filter`` until enough groups have unequal scores.

Invariants:
1. Prompts are drawn in the order of the data, and only when they are going to be sampled: a resumed run goes on behind
   the last one drawn. How many a round draws depends on nothing but the scores before it.
2. A step trains on whole groups, at most as many as it has prompts; how many are missing is counted.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from megarl.algorithms.shaping import GroupFilter
from megarl.config.schema.algorithm import FilterConfig
from megarl.controller.shaping import component
from megarl.data.batch import Batch
from megarl.data.prompts import Prompt
from megarl.observability.metrics import Mean, Metrics
from megarl.rewards.base import SCORE

logger = logging.getLogger(__name__)


class Rounds:
    """While ``wanted``: sample and score ``prompts()``, then ``admit`` the batch. At the end ``batch()``.

    Args:
        draw: the next so many prompts of the data.
        num_groups: prompts a step trains on.
        settings: the group filter; None is one round that keeps everything.
    """

    def __init__(self, draw: Callable[[int], list[Prompt]], num_groups: int, settings: FilterConfig | None) -> None:
        self.num_drawn = 0
        """Prompts drawn so far, those of the present round included."""
        self._draw = draw
        self._num_groups = num_groups
        self._settings = settings
        self._filter = None if settings is None else GroupFilter(num_groups, settings.max_rounds)
        self._num_rounds = 0
        self._admitted: list[Batch] = []
        self._first: Batch | None = None
        self._scores = Mean(0.0, 0.0)

    @property
    def wanted(self) -> bool:
        """Whether to sample another round."""
        return self._filter.may_continue if self._filter is not None else self._num_rounds == 0

    @property
    def is_last(self) -> bool:
        """Whether the present round is the last one whatever its scores."""
        return self._settings is None or self._num_rounds >= self._settings.max_rounds

    def prompts(self) -> list[Prompt]:
        """The prompts of the next round: as many as the step has, later as many as probably fill it."""
        count = self._num_groups
        if self._filter is not None and self._num_rounds:
            share = (self._num_groups - self._filter.missing) / max(self.num_drawn, 1)
            count = min(count, math.ceil(self._filter.missing / share)) if share > 0 else count
        self._num_rounds += 1
        self.num_drawn += count
        return self._draw(count)

    def admit(self, batch: Batch) -> None:
        """Take a scored round.

        Raises:
            DataError: the filter's metric is no component of the reward.
        """
        self._first = batch if self._first is None else self._first
        if self._filter is None or self._settings is None:
            self._admitted.append(batch)
            return
        scores = batch.tensor("scores")
        self._scores = self._scores.merge(Mean(float(scores.double().sum()), len(batch)))
        metric = scores if self._settings.metric == SCORE else component(batch, self._settings.metric)
        rows = self._filter.admit(metric, batch.tensor("group_id")).tolist()
        if rows:
            self._admitted.append(batch.select(rows))

    def batch(self) -> Batch:
        """The rows to train on. Where no group at all has unequal scores, the first round as it is: zero advantages."""
        if not self._admitted:
            logger.warning("no group of this step has unequal scores; it trains on the first round unfiltered")
            assert self._first is not None
            return self._first
        return self._admitted[0] if len(self._admitted) == 1 else Batch.concat(self._admitted)

    def metrics(self) -> Metrics:
        """Counts of the filter, and the mean score of all that was sampled, kept or not."""
        return {} if self._filter is None else {**self._filter.metrics(), "filter/score": self._scores}
