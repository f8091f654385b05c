"""A dozen steps under each algorithm by name raise held-out accuracy: sums, from the quick start's warm start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.config.load import group_presets
from tests.integration.algorithms_live import Live, live
from tests.integration.runs import layout

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning", "ignore::ResourceWarning"
    ),
]

STEPS = 12


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory, warm_start: Path) -> Iterator[Live]:
    overrides = [
        f"model.path={warm_start}",
        *layout("actor", (1, 1, 1)),
        "rollout.tp=1",
    ]
    with live(tmp_path_factory.mktemp("learning"), overrides) as started:
        yield started


@pytest.mark.timeout(900)  # the first of them makes the warm start
@pytest.mark.parametrize("name", [preset.name for preset in group_presets("algorithm")])
def test_an_algorithm_by_name_learns(processes: Live, name: str):
    processes.reset()
    start = processes.accuracy(0)
    seen = processes.steps(STEPS, [f"algorithm={name}"])
    end = processes.accuracy(STEPS)
    scores = [numbers["critic/score/mean"] for numbers in seen]
    print(f"{name}: accuracy {start:.2f} -> {end:.2f}, score {scores[0]:.2f} -> {scores[-1]:.2f}")
    assert len(seen) == STEPS
    assert end > start + 0.25
