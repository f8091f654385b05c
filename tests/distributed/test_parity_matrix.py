"""Every axis with every other: an update at any layout is the update of one rank.

``COVER`` is what the quick suite runs. Each two choices of the matrix that can meet do meet in one of its cases; all
cases run with the slow tests.
"""

from __future__ import annotations

import pytest
import torch

from tests.distributed.parity import MODELS, Case, all_cases, compare, expected, pairs_of
from tests.distributed.ranks import RankPool

COVER = (
    Case(model="tied", pp=2, vpp=2),
    Case(model="experts", tp=2, sequence_parallel=True, ep=2),
    Case(model="experts", cp=2, dp=2, ep=2, etp=2, distributed=True),
    Case(model="experts", tp=2, sequence_parallel=True, pp=2, vpp=2, etp=2, cap=28, distributed=True),
    Case(model="untied", tp=2, sequence_parallel=True, dp=2, distributed=True),
    Case(model="experts", pp=2, vpp=2, dp=2, ep=2, cap=28),
    Case(model="experts", tp=4, sequence_parallel=True, ep=2, etp=2),
    Case(model="untied", pp=2, vpp=2, cp=2),
    Case(model="tied", tp=2, cp=2, cap=28),
    Case(model="tied", pp=2, dp=2, distributed=True),
    Case(model="untied", tp=4, pp=2, vpp=2, cap=28),
    Case(model="tied", tp=4, sequence_parallel=True, cp=2, cap=28),
    Case(model="tied", tp=4, sequence_parallel=True, dp=2, distributed=True),
)


@pytest.mark.parametrize("case", COVER, ids=str)
def test_an_update_does_not_depend_on_the_layout(ranks: RankPool, case: Case) -> None:
    compare(ranks, case)


def test_an_update_does_not_depend_on_a_spelled_pipeline(ranks: RankPool) -> None:
    compare(ranks, Case(model="experts", pp=2, vpp=2, dp=2, ep=2, cap=28, pipeline="Et|tt||tL"))


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in all_cases() if case not in COVER], ids=str)
def test_an_update_does_not_depend_on_any_layout(ranks: RankPool, case: Case) -> None:
    compare(ranks, case)


def test_the_quick_cases_cover_every_pair() -> None:
    possible = set().union(*(pairs_of(case) for case in all_cases()))
    assert all(case.is_valid for case in COVER)
    assert possible - set().union(*(pairs_of(case) for case in COVER)) == set()


@pytest.mark.parametrize("model", MODELS)
def test_the_batch_is_worth_the_comparison(ranks: RankPool, model: str) -> None:
    """Every weight has a gradient that a wrong layout would change."""
    metrics, gradients, weights = expected(ranks, model)
    assert metrics["actor/grad_norm"] > 0.1 and metrics["actor/skipped_updates"] == 0
    assert gradients.keys() == weights.keys()
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 1e-4 and torch.isfinite(gradient).all(), name
