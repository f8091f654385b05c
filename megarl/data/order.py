"""The order in which rows of several sources are visited: seeded, proportional to weights, resumable exactly.

Invariants:
1. After k draws each source was drawn within one of ``k * weight / sum(weights)`` times.
2. A source is visited once in full before any of its rows comes again; each epoch has its own permutation.
3. The order depends on seed, sources and weights alone, not on a library's random generator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from megarl.data.sources import Source
from megarl.errors import DataError

Keys: TypeAlias = npt.NDArray[np.uint64]


class Order:
    """A cursor over weighted sources.

    Args:
        sources: at least one, none empty, weights positive.
        seed: of the permutations.
        shuffle: visit each source in a permutation, another one each epoch; else as it is stored.
    """

    def __init__(self, sources: Sequence[Source], *, seed: int, shuffle: bool) -> None:
        if not sources:
            raise DataError("there is no data source")
        for source in sources:
            if not len(source):
                raise DataError("the dataset is empty", where=source.name)
        self._sources = list(sources)
        self._seed = seed
        self._shuffle = shuffle
        total = sum(source.weight for source in sources)
        self._shares = [source.weight / total for source in sources]
        self._drawn = [0] * len(sources)
        self._permutations: dict[int, tuple[int, npt.NDArray[np.int64]]] = {}

    @property
    def epoch(self) -> float:
        """Rows drawn over rows there are."""
        return sum(self._drawn) / sum(map(len, self._sources))

    def draw(self) -> tuple[int, int]:
        """Number of the source and of its row that come next."""
        count = sum(self._drawn) + 1
        owed = [share * count - drawn for share, drawn in zip(self._shares, self._drawn, strict=True)]
        number = max(range(len(owed)), key=owed.__getitem__)
        epoch, position = divmod(self._drawn[number], len(self._sources[number]))
        self._drawn[number] += 1
        return number, self._row(number, epoch, position)

    def once(self) -> Iterator[tuple[int, int]]:
        """Every row of every source once, as stored, in proportion to the weights as long as sources last."""
        drawn = [0] * len(self._sources)
        while left := [number for number, source in enumerate(self._sources) if drawn[number] < len(source)]:
            number = min(left, key=lambda number: ((drawn[number] + 1) / self._shares[number], number))
            yield number, drawn[number]
            drawn[number] += 1

    def state_dict(self) -> dict[str, Any]:
        """What ``load_state_dict`` needs to continue after the last draw."""
        return {
            "drawn": list(self._drawn),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "shares": list(self._shares),
            "sources": [[source.name, len(source), source.fingerprint()] for source in self._sources],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the state was taken.

        Raises:
            DataError: data, weights, seed or shuffling differ, so that the order would not be continued.
        """
        mine = self.state_dict()
        changed = [f"{key} was {state[key]}, is {mine[key]}" for key in ("seed", "shuffle") if state[key] != mine[key]]
        before = [tuple(entry) for entry in state["sources"]]
        now = [tuple(entry) for entry in mine["sources"]]
        if [entry[0] for entry in before] != [entry[0] for entry in now]:
            changed.append(f"sources were {[entry[0] for entry in before]}, are {[entry[0] for entry in now]}")
        else:
            for old, new in zip(before, now, strict=True):
                if old != new:
                    changed.append(f"the rows of {new[0]} changed ({old[1]} rows before, {new[1]} now)")
            if not np.allclose(state["shares"], mine["shares"]):
                changed.append(f"weights were {state['shares']}, are {mine['shares']}")
        if changed:
            raise DataError(
                f"the run cannot continue its data order: {'; '.join(changed)}",
                fix="restore the data of the checkpoint, or start a new run from its weights",
            )
        self._drawn = list(state["drawn"])

    def _row(self, number: int, epoch: int, position: int) -> int:
        if not self._shuffle:
            return position
        cached = self._permutations.get(number)
        if cached is None or cached[0] != epoch:
            size = len(self._sources[number])
            keys = _mix(np.arange(size, dtype=np.uint64), self._seed, number, epoch)
            cached = (epoch, np.argsort(keys, kind="stable"))
            self._permutations[number] = cached
        return int(cached[1][position])


def _mix(keys: Keys, *salts: int) -> Keys:
    """Splitmix64 (Steele et al. 2014) of each key and the salts."""
    state = keys.copy()
    for salt in (*salts, 0):
        state ^= np.uint64(salt % 2**64)
        state += np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return state
