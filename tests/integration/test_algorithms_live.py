"""Every algorithm, correction and shaping of the configuration through real steps: Megatron-Core, vLLM, Ray."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megarl.config.algorithm_rules import GROUP_ESTIMATORS, LOSS_OPTIONS, OTHER_ESTIMATORS
from megarl.config.load import group_presets
from megarl.config.schema.correction_presets import CORRECTION_PRESETS
from tests.integration.algorithms_live import Live, live
from tests.integration.runs import layout, small, write_model, write_prompts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning", "ignore::ResourceWarning"
    ),
]

OWN = "tests.integration.own_algorithm"


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    place = tmp_path_factory.mktemp("algorithms")
    overrides = [
        *small(write_model(place / "model"), write_prompts(place / "prompts.jsonl")),
        *layout("actor", (1, 1, 1)),
        "rollout.tp=1",
        "actor.optimizer.lr=1e-5",
    ]
    with live(place, overrides) as started:
        yield started


def without_nan(numbers: dict[str, float]) -> bool:
    return all(value == value for value in numbers.values())


@pytest.mark.parametrize("name", [preset.name for preset in group_presets("algorithm")])
def test_an_algorithm_by_name_trains(processes: Live, name: str):
    whole = ["algorithm.minibatch_size=null"] if name == "opo" else []  # the processes' overrides set it
    first, second = processes.steps(2, [f"algorithm={name}", *whole])
    assert without_nan(first) and without_nan(second)
    assert first["actor/grad_norm"] > 0 and second["training/rollout_log_probs_diff/mean"] < 1e-4
    if name == "dapo":
        assert {"filter/rounds", "filter/groups_dropped", "reward/overlong_penalty"} <= first.keys()
    if name == "remax":  # a prompt more to answer than samples
        assert first["rollout/tokens"] > first["response_length/mean"] * 32
    if name == "ppo":
        assert first["critic/vf_loss"] > 0


@pytest.mark.parametrize("kind", sorted(GROUP_ESTIMATORS | OTHER_ESTIMATORS))
def test_an_estimator_trains(processes: Live, kind: str):
    (numbers,) = processes.steps(1, [f"algorithm.advantage.kind={kind}"])
    assert without_nan(numbers) and numbers["actor/grad_norm"] > 0
    assert numbers["critic/advantages/max"] > numbers["critic/advantages/min"]


@pytest.mark.parametrize("kind", sorted(LOSS_OPTIONS))
def test_a_loss_trains(processes: Live, kind: str):
    rows = ["algorithm.policy_loss.aggregation=seq-mean-token-mean"] if kind in ("gspo", "geo_mean") else []
    options = ["algorithm.policy_loss.options={dro_beta: 0.1}"] if kind == "dro" else []
    (numbers,) = processes.steps(1, [f"algorithm.policy_loss.kind={kind}", *rows, *options])
    assert without_nan(numbers) and numbers["actor/grad_norm"] > 0


@pytest.mark.parametrize("name", CORRECTION_PRESETS)
def test_a_correction_by_name_trains(processes: Live, name: str):
    (numbers,) = processes.steps(1, [f"algorithm.correction.preset={name}"])
    assert without_nan(numbers) and numbers["actor/grad_norm"] > 0
    assert abs(numbers["rollout_corr/kl"]) < 1e-3
    if "_rs" in name:
        assert "rollout_corr/rollout_rs_masked_fraction" in numbers


def test_components_with_weights_and_bounds_become_the_score(processes: Live):
    shaping = ["algorithm.shaping.weights={letters: 0.5, score: 1}", "algorithm.shaping.clip_high=2.0"]
    (numbers,) = processes.steps(1, [*shaping, "algorithm.shaping.length_factor=0.1", "algorithm.shaping.whiten=true"])
    assert 0 < numbers["critic/score/max"] <= 2.0
    assert numbers["reward/letters"] > 0 and numbers["reward/clipfrac"] >= 0
    assert abs(numbers["critic/rewards/mean"]) < 1e-5


def test_estimators_and_losses_of_ones_own(processes: Live):
    loss = [f"algorithm.policy_loss.kind='{OWN}:squared'", "algorithm.policy_loss.options={pull: 0.1}"]
    (numbers,) = processes.steps(
        1, [f"algorithm.advantage.kind='{OWN}:centered'", "algorithm.advantage.options={scale: 2.0}", *loss]
    )
    assert numbers["adv/own"] == 2.0 and "actor/own_ratio" in numbers and numbers["actor/grad_norm"] > 0
    (numbers,) = processes.steps(1, [f"algorithm.advantage.kind='{OWN}:above_greedy'"])
    assert numbers["rollout/tokens"] > numbers["response_length/mean"] * 32
