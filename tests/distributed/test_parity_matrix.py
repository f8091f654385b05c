"""Every axis with every other: an update at any layout is the update of one rank.

``COVER`` is what the quick suite runs. Each two choices of the matrix that can meet do meet in one of its cases; all
cases run with the slow tests, those that share process groups in one start.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megarl.models.rules import ROUTING_BIAS
from megarl.parallel.grid import ParallelLayout
from tests.distributed.parity import (
    MATRIX_MODELS,
    Case,
    all_cases,
    cases_by_start,
    check,
    compare,
    expected,
    joined,
    pairs_of,
    run_all,
)
from tests.distributed.ranks import RankPool

AXES = ("tp", "pp", "vpp", "cp", "dp", "ep", "etp")
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


STARTS = cases_by_start()
OTHER_LAYOUTS = (
    Case(tp=2, sequence_parallel=True, ep=2, cap=28),
    Case(tp=4, sequence_parallel=True, pp=2, etp=2),
    Case(pp=2, vpp=2, dp=2, ep=2, cap=28, distributed=True),
    Case(cp=2, ep=2, cap=28),
    Case(tp=2, sequence_parallel=True, cp=2, dp=2, ep=4, distributed=True),
)


def name_of(start: ParallelLayout) -> str:
    return "-".join(f"{axis}{size}" for axis in AXES if (size := getattr(start, axis)) > 1) or "one"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("start", STARTS, ids=name_of)
def test_an_update_does_not_depend_on_any_layout(
    ranks: RankPool, subtests: pytest.Subtests, start: ParallelLayout
) -> None:
    """Up to 32 ranks. Starting them costs more than an update, so all cells of a start share it."""
    cases = STARTS[start]
    results = ranks(start.world_size).run(run_all, start, cases, timeout_s=600)
    for index, case in enumerate(cases):
        with subtests.test(case=str(case)):
            check(ranks, case, joined([outcomes[index] for outcomes in results], case))


@pytest.mark.slow
@pytest.mark.parametrize("layout", OTHER_LAYOUTS, ids=str)
@pytest.mark.parametrize("model", ["latent", "biased"])
def test_an_update_of_other_families_does_not_depend_on_the_layout(ranks: RankPool, model: str, layout: Case) -> None:
    compare(ranks, replace(layout, model=model))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["latent", "biased"])
def test_biases_move_with_an_update(ranks: RankPool, model: str) -> None:
    """Two updates of 0.02 towards an even load: what the comparison with one rank compares is not zero."""
    _, _, weights = expected(ranks, model)
    steps = torch.cat([weight for name, weight in weights.items() if name.endswith(ROUTING_BIAS)]) / 0.02
    torch.testing.assert_close(steps, steps.round())
    assert steps.abs().max() == 2 and steps.min() < 0 < steps.max()


def test_the_quick_cases_cover_every_pair() -> None:
    possible = set().union(*(pairs_of(case) for case in all_cases()))
    assert all(case.is_valid for case in COVER)
    assert possible - set().union(*(pairs_of(case) for case in COVER)) == set()


@pytest.mark.parametrize("model", MATRIX_MODELS)
def test_the_batch_is_worth_the_comparison(ranks: RankPool, model: str) -> None:
    """Every weight has a gradient that a wrong layout would change."""
    metrics, gradients, weights = expected(ranks, model)
    assert metrics["actor/grad_norm"] > 0.1 and metrics["actor/skipped_updates"] == 0
    assert gradients.keys() == weights.keys()
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 1e-4 and torch.isfinite(gradient).all(), name
