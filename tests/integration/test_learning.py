"""Thirty steps raise reward and accuracy: PPO with a critic, KL in the reward, KL in the loss; letters and sums."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

from megarl.models.tiny import tiny_config, write_tiny
from tests.integration.runs import Run, finished, layout, small, write_model, write_prompts

pytestmark = pytest.mark.slow

STEPS = 30

CASES = {
    # The critic's layout is its own: one rank beside the actor's two.
    "ppo": ("ppo_tiny", [*layout("critic", (1, 1, 1)), "critic.warmup_steps=2"]),
    "kl-in-reward": ("grpo_tiny", ["algorithm.kl.where=reward", "algorithm.kl.coef=0.01"]),
    "kl-in-loss": ("grpo_tiny", ["algorithm.kl.where=loss", "algorithm.kl.coef=0.01"]),
}

UNSAVED = [f"run.steps={STEPS}", "checkpoint.at_end=false", "checkpoint.export_hf=false", "logging.console=plain"]


def accuracies(run: Run) -> list[float]:
    """Held-out accuracy at each evaluation."""
    return [numbers["val/accuracy"] for numbers in run.validations.values()]


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides: a random model is to write lowercase letters."""
    place = tmp_path_factory.mktemp("letters")
    return [
        *small(write_model(place / "model"), write_prompts(place / "prompts.jsonl")),
        *UNSAVED,
        "data.prompts_per_step=16",
        "rollout.samples_per_prompt=8",
        "rollout.max_num_seqs=128",
        "algorithm.minibatch_size=64",
        "actor.optimizer.lr=1e-3",
        # Sampled as in training: the likeliest token of a random model says nothing about the others.
        "validation.temperature=1.0",
        "validation.prompts=64",
    ]


@pytest.mark.parametrize("case", CASES)
def test_a_random_model_learns_to_write_letters(tmp_path: Path, letters: list[str], case: str):
    preset, options = CASES[case]
    run = finished("train", preset, tmp_path / "run", *letters, *options)
    scores = [numbers["critic/score/mean"] for numbers in run.steps.values()]
    assert len(scores) == STEPS
    assert fmean(scores[-3:]) > fmean(scores[:3]) + 0.3
    start, end = accuracies(run)
    assert start < 0.1
    assert end > start + 0.3
    penalty = {"kl-in-reward": "actor/reward_kl_penalty", "kl-in-loss": "actor/kl_loss"}.get(case)
    if penalty is not None:  # the policy moves away from the reference, and the measured distance is finite
        distances = [numbers[penalty] for numbers in run.steps.values()]
        assert distances[0] < 0.1 < distances[-1] < 20
    if case == "ppo":  # the critic tells returns apart, at least while there is something to tell
        assert max(numbers["critic/vf_explained_var"] for numbers in run.steps.values()) > 0.1


def test_adapters_of_a_frozen_random_model_learn_to_write_letters(tmp_path: Path, letters: list[str]):
    """The reference policy of the KL is the actor without adapters; the critic has adapters of its own."""
    # Wide weights: the frozen head is to tell tokens apart as far as the adapters turn the hidden states.
    model = write_tiny(tmp_path / "model", tiny_config(num_hidden_layers=2, initializer_range=0.1))
    options = ["actor.lora.rank=16", "critic.lora.rank=16", "actor.optimizer.lr=5e-3", "critic.optimizer.lr=5e-3"]
    penalty = ["algorithm.kl.where=loss", "algorithm.kl.coef=0.003"]
    critic = [*layout("critic", (1, 1, 1)), "critic.warmup_steps=2"]
    run = finished("train", "ppo_tiny", tmp_path / "run", *letters, f"model.path={model}", *options, *penalty, *critic)
    scores = [numbers["critic/score/mean"] for numbers in run.steps.values()]
    assert fmean(scores[-3:]) > fmean(scores[:3]) + 0.3
    distances = [numbers["actor/kl_loss"] for numbers in run.steps.values() if "actor/kl_loss" in numbers]
    assert distances[0] < distances[-1] and distances[-1] > 0.1
    for role in ("actor", "critic"):
        assert run.steps[STEPS][f"{role}/trainable_parameters"] < 0.3 * run.steps[STEPS][f"memory/{role}/weights"] / 4


@pytest.mark.timeout(800)  # the first of them makes the warm start
@pytest.mark.parametrize("case", CASES)
def test_a_model_that_has_seen_sums_learns_to_solve_them(tmp_path: Path, warm_start: Path, case: str):
    preset, options = CASES[case]
    every = ["validation.every_steps=null", f"model.path={warm_start}"]
    start, end = accuracies(finished("train", preset, tmp_path / "run", *UNSAVED, *every, *options))
    assert end > start + 0.25
