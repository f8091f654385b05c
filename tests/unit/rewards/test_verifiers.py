"""Each kind of reward on its own, in this process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megarl.data.sources import GymSource
from megarl.errors import RewardError
from megarl.rewards.base import RewardInput, as_result
from megarl.rewards.math import MathReward
from megarl.rewards.regex import RegexReward
from megarl.rewards.registry import KINDS, RewardSpec, build


@pytest.mark.parametrize("task", ["chain_sum", "countdown", "decimal_arithmetic"])
def test_a_gym_items_own_answer_scores_one(task):
    scorer = build(RewardSpec("reasoning_gym"))
    row = GymSource(task, size=3, seed=5).row(2)
    right = as_result(scorer(RewardInput(row.prompt, f" {row.answer}\n", row.answer, task, row.metadata)))
    wrong = as_result(scorer(RewardInput(row.prompt, "no idea", row.answer, task, row.metadata)))
    assert right.score == 1.0 and right.extra["accuracy"] == 1.0
    assert wrong.score < 1.0 and wrong.extra["accuracy"] == 0.0


def test_a_gym_scorer_sees_the_options_of_its_task():
    scorer = build(RewardSpec("reasoning_gym", pattern=r"answer: (\S+)"))
    row = GymSource("chain_sum", {"min_terms": 2, "max_terms": 2}, size=1).row(0)
    assert as_result(scorer(RewardInput("", f"so answer: {row.answer} ok", row.answer, "", row.metadata))).score == 1.0
    assert as_result(scorer(RewardInput("", str(row.answer), row.answer, "", row.metadata))).score < 1.0
    with pytest.raises(TypeError, match="no reasoning-gym item"):
        scorer(RewardInput("", "1", metadata={}))


@pytest.mark.parametrize(
    ("answer", "response", "score"),
    [
        (r"\frac{1}{2}", "The answer is $0.5$", 1),
        ("3", r"so \boxed{3}", 1),
        ("x^2+1", "$1+x^2$", 1),
        ("3x+2", r"\boxed{3}", 0),
        ("12", "it is 13", 0),
        ("12", "no number", 0),
        (12, "12", 1),
    ],
)
def test_math_verify_compares_values(answer, response, score):
    result = as_result(MathReward()(RewardInput("", response, answer)))
    assert result.score == result.extra["accuracy"] == score


def test_math_verify_extracts_with_the_pattern_and_refuses_a_bad_reference():
    assert as_result(MathReward(r"####\s*(.+)$")(RewardInput("", "9 apples\n#### 1/4", "0.25"))).score == 1
    assert as_result(MathReward(r"####\s*(.+)$")(RewardInput("", "1/4", "0.25"))).score == 0
    with pytest.raises(TypeError, match="needs an answer"):
        MathReward()(RewardInput("", "1", None))
    with pytest.raises(ValueError, match="cannot read the reference"):
        MathReward()(RewardInput("", "1", ""))


def test_math_verify_that_takes_too_long_is_a_failure_not_a_wrong_answer(monkeypatch):
    reward = MathReward(timeout_s=1)
    timed_out = reward._timed_out

    def parse(text, **options):
        assert options["parsing_timeout"] == 1
        raise timed_out("Operation timed out!")

    monkeypatch.setattr(reward, "_library", type("Library", (), {"parse": staticmethod(parse)}))
    with pytest.raises(TimeoutError, match="read for 1 s"):
        reward(RewardInput("", "1", "1"))


@pytest.mark.parametrize(
    ("pattern", "response", "answer", "score"),
    [
        (r"#### (\d+)", "#### 4 no, #### 5", "5", 1),
        (r"#### (\d+)", "#### 5 no, #### 4", "5", 0),
        (r"#### (\d+)", "5", "5", 0),
        (r"\d+", "is 5", 5, 1),
        (r"<think>.*</think>", "<think>a\nb</think>", None, 1),
        (r"<think>.*</think>", "none", None, 0),
        (r"a(b)?", "a", "b", 0),
    ],
)
def test_regex_takes_the_last_match(pattern, response, answer, score):
    assert as_result(RegexReward(pattern)(RewardInput("", response, answer))).score == score


def test_kinds_are_those_of_the_configuration():
    from megarl.config.schema.data import RewardConfig

    assert set(RewardConfig.model_fields["kind"].annotation.__args__) == set(KINDS)
    with pytest.raises(RewardError, match="one of reasoning_gym"):
        build(RewardSpec("code"))


def test_scoring_processes_start_without_torch_and_numpy():
    code = (
        "import sys, megarl.rewards.worker, megarl.rewards.gym; "
        "from megarl.rewards.registry import *; build(RewardSpec('regex', pattern='a')); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'pydantic', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
