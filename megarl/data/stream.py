"""What prompts and training sequences share: drawing rows in order, fitting them to a length, resuming.

Invariants:
1. ``state_dict`` after n items and ``load_state_dict`` in a new process give item n + 1, in the middle of an epoch as
   well, or refuse because the data changed.
2. No item is longer than its limit; what was dropped or cut is counted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from megarl.data.order import Order
from megarl.data.sources import Row, Source
from megarl.errors import DataError
from megarl.observability.metrics import Last, Metrics

Item = TypeVar("Item")


class Stream(ABC, Generic[Item]):
    """Items made from the rows of weighted sources.

    Args:
        sources: from ``sources.open_source``.
        seed: of the order.
        shuffle: visit in a permutation, another one each epoch.

    Raises:
        DataError: no source or an empty one.
    """

    noun: str
    """What an item is called in metric names, plural."""

    def __init__(self, sources: Sequence[Source], *, seed: int, shuffle: bool) -> None:
        self._sources = list(sources)
        self._order = Order(sources, seed=seed, shuffle=shuffle)
        self._first_ids = [sum(map(len, self._sources[:number])) for number in range(len(self._sources))]
        self._counts = {"dropped": 0, "truncated": 0}

    @abstractmethod
    def _make(self, row: Row, row_id: int, source: Source) -> Item:
        """The item of a row, of whatever length."""

    @abstractmethod
    def _fit(self, item: Item, where: str) -> Item | None:
        """The item itself when it fits, a cut one, or None to drop it. Raises DataError where neither is wanted."""

    def __len__(self) -> int:
        """Rows of all sources."""
        return sum(map(len, self._sources))

    def next(self, count: int) -> list[Item]:
        """The next ``count`` items.

        Raises:
            DataError: an overlong item where that is an error, or no row that fits in a whole epoch.
        """
        items: list[Item] = []
        dropped_in_a_row = 0
        while len(items) < count:
            made, fitted = self._item(*self._order.draw())
            if fitted is None:
                self._counts["dropped"] += 1
                dropped_in_a_row += 1
                if dropped_in_a_row >= 2 * len(self):
                    raise DataError(
                        f"no {self.noun} are left: all are longer than allowed, or held out for validation",
                        fix="raise the limit on tokens in data, or validate on other data",
                    )
                continue
            dropped_in_a_row = 0
            self._counts["truncated"] += fitted is not made
            items.append(fitted)
        return items

    def first(self, count: int) -> list[Item]:
        """At most ``count`` items in stored order, none twice: for evaluation. Moves no cursor and counts nothing."""
        items: list[Item] = []
        for number, index in self._order.once():
            if len(items) == count:
                break
            fitted = self._item(number, index)[1]
            if fitted is not None:
                items.append(fitted)
        return items

    def metrics(self) -> Metrics:
        """Epoch reached, and items dropped and truncated since the start of the run."""
        return {
            "data/epoch": Last(self._order.epoch),
            f"data/{self.noun}_dropped": Last(self._counts["dropped"]),
            f"data/{self.noun}_truncated": Last(self._counts["truncated"]),
        }

    def state_dict(self) -> dict[str, Any]:
        """Position in the order and counts, as plain JSON-able values."""
        return {"order": self._order.state_dict(), "counts": dict(self._counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state. Raises DataError when the data is not the state's."""
        self._order.load_state_dict(state["order"])
        self._counts = dict(state["counts"])

    def _check_first_rows(self) -> None:
        """A missing chat template or a wrong column fails when the stream is made, not in the first step."""
        for number, source in enumerate(self._sources):
            self._make(source.row(0), self._first_ids[number], source)

    def _item(self, number: int, index: int) -> tuple[Item, Item | None]:
        source = self._sources[number]
        row = source.row(index)
        item = self._make(row, self._first_ids[number] + index, source)
        return item, self._fit(item, row.where)
