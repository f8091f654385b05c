"""The pool of rank processes, one for the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """``ranks(n).run(function, *args)``; see ``ranks.py``."""
    pool = RankPool()
    yield pool
    pool.shut_down()
