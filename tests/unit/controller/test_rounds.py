"""The group filter: which prompts are drawn, which groups are kept, when it ends."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from megarl.config.schema.algorithm import FilterConfig
from megarl.controller.rounds import Rounds
from megarl.data.batch import Batch
from megarl.data.prompts import Prompt, PromptSource
from megarl.data.sources import open_source
from megarl.errors import DataError
from megarl.observability.metrics import values
from tests.unit.controller.batches import scored
from tests.unit.data.chars import char_tokenizer


class Prompts:
    """Prompts 0, 1, 2, ... in order; those in ``mixed`` get unequal scores."""

    def __init__(self, mixed: Sequence[int]) -> None:
        self.mixed = set(mixed)
        self.drawn: list[int] = []

    def next(self, count: int) -> list[Prompt]:
        start = len(self.drawn)
        self.drawn += range(start, start + count)
        return [Prompt(number, "", [5], None, "") for number in range(start, start + count)]

    def score(self, prompts: Sequence[Prompt], first: int) -> Batch:
        """Two responses each."""
        scores = [float(row and prompt.prompt_id in self.mixed) for prompt in prompts for row in (0, 1)]
        return scored(scores, [prompt.prompt_id for prompt in prompts for _ in (0, 1)], first=2 * first)


def run(prompts: Prompts, num_groups: int, settings: FilterConfig | None) -> Rounds:
    rounds = Rounds(prompts.next, num_groups, settings)
    while rounds.wanted:
        first = rounds.num_drawn
        rounds.admit(prompts.score(rounds.prompts(), first))
    return rounds


def groups_of(rounds: Rounds) -> list[int]:
    return rounds.batch().tensor("group_id").tolist()[::2]


def test_without_a_filter_there_is_one_round_and_nothing_is_dropped():
    prompts = Prompts(mixed=[])
    rounds = Rounds(prompts.next, 4, None)
    assert rounds.wanted
    rounds.prompts()
    assert rounds.is_last
    rounds.admit(prompts.score([Prompt(i, "", [5], None, "") for i in range(4)], 0))
    assert not rounds.wanted and len(rounds.batch()) == 8 and rounds.metrics() == {}


def test_groups_of_equal_scores_are_replaced_in_the_order_of_the_data():
    prompts = Prompts(mixed=[1, 3, 4, 5, 8, 9])
    rounds = run(prompts, 4, FilterConfig())
    # Two of four passed, so two missing ones ask for four prompts; the second round fills the step.
    assert groups_of(rounds) == [1, 3, 4, 5]
    assert prompts.drawn == list(range(8))
    ids = rounds.batch().tensor("sample_id")
    assert len(ids.unique()) == len(ids) == 8
    numbers = values(rounds.metrics())
    assert numbers == {
        "filter/rounds": 2, "filter/groups_seen": 8, "filter/groups_dropped": 4, "filter/groups_surplus": 0,
        "filter/groups_missing": 0, "filter/score": 4 / 16,
    }  # fmt: skip


def test_surplus_groups_are_counted_and_later_rounds_are_no_larger_than_the_first():
    prompts = Prompts(mixed=[0, *range(4, 20)])
    rounds = run(prompts, 4, FilterConfig())
    assert groups_of(rounds) == [0, 4, 5, 6]
    assert prompts.drawn == list(range(8))
    assert values(rounds.metrics())["filter/groups_surplus"] == 1


def test_a_bound_on_rounds_leaves_a_smaller_step():
    prompts = Prompts(mixed=[2])
    rounds = run(prompts, 3, FilterConfig(max_rounds=2))
    assert groups_of(rounds) == [2] and len(prompts.drawn) == 6
    assert values(rounds.metrics())["filter/groups_missing"] == 2


def test_a_step_without_any_signal_trains_on_its_first_round():
    rounds = run(Prompts(mixed=[]), 2, FilterConfig(max_rounds=3))
    assert groups_of(rounds) == [0, 1]
    assert values(rounds.metrics())["filter/groups_missing"] == 2


def test_the_last_allowed_round_is_known_to_be_the_last():
    rounds = Rounds(Prompts([]).next, 2, FilterConfig(max_rounds=2))
    rounds.prompts()
    assert not rounds.is_last
    rounds.prompts()
    assert rounds.is_last


def test_the_metric_may_be_a_component():
    batch = scored([0.0, 1.0, 1.0, 1.0], [0, 0, 1, 1], components=[{"form": f} for f in (1.0, 1.0, 0.0, 1.0)])
    rounds = Rounds(Prompts([]).next, 2, FilterConfig(metric="form", max_rounds=1))
    rounds.prompts()
    rounds.admit(batch)
    assert groups_of(rounds) == [1]
    other = Rounds(Prompts([]).next, 2, FilterConfig(metric="shape"))
    with pytest.raises(DataError, match=r"'shape'.*form, score"):
        other.admit(batch)


def test_a_resumed_run_goes_on_behind_the_last_prompt_drawn(tmp_path: Path):
    """With the real data source, stopped after a step that took several rounds."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"p{number}"}) + "\n" for number in range(20)))

    def source() -> PromptSource:
        return PromptSource(
            [open_source({"kind": "file", "path": str(file), "weight": 1.0})],
            char_tokenizer(),
            max_prompt_tokens=20,
            seed=5,
        )

    def step(prompts: PromptSource) -> tuple[list[int], int]:
        scorer, rounds = Prompts(mixed=[1, 3, 4, 9, 10, 11, 17]), Rounds(prompts.next, 2, FilterConfig())
        while rounds.wanted:
            first = rounds.num_drawn
            rounds.admit(scorer.score(rounds.prompts(), first))
        return groups_of(rounds), rounds.num_drawn

    unbroken, stopped = source(), source()
    steps = [step(unbroken) for _ in range(3)]
    assert max(drawn for _, drawn in steps) > 2
    step(stopped)
    resumed = source()
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert [step(resumed) for _ in range(2)] == steps[1:]
    assert resumed.metrics() == unbroken.metrics()
