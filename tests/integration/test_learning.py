"""Thirty steps from random weights raise reward and accuracy: PPO with a critic, KL in the reward, KL in the loss."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

from tests.integration.runs import Run, finished, layout, small, write_model, write_prompts

pytestmark = pytest.mark.slow

STEPS = 30

CASES = {
    # The critic's layout is its own: one rank beside the actor's two.
    "ppo": ("ppo_tiny", [*layout("critic", (1, 1, 1)), "critic.warmup_steps=2"]),
    "kl-in-reward": ("grpo_tiny", ["algorithm.kl.where=reward", "algorithm.kl.coef=0.01"]),
    "kl-in-loss": ("grpo_tiny", ["algorithm.kl.where=loss", "algorithm.kl.coef=0.01"]),
}


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    place = tmp_path_factory.mktemp("learning")
    return [
        *small(write_model(place / "model"), write_prompts(place / "prompts.jsonl")),
        f"run.steps={STEPS}",
        "data.prompts_per_step=16",
        "rollout.samples_per_prompt=8",
        "rollout.max_num_seqs=128",
        "algorithm.minibatch_size=64",
        "actor.optimizer.lr=1e-3",
        # Sampled as in training: the likeliest token of a random model says nothing about the others.
        "validation.temperature=1.0",
        "validation.prompts=64",
        "checkpoint.at_end=false",
        "checkpoint.export_hf=false",
    ]


@pytest.mark.parametrize("case", CASES)
def test_reward_and_accuracy_rise(tmp_path: Path, overrides: list[str], case: str):
    preset, options = CASES[case]
    run: Run = finished("train", preset, tmp_path / "run", *overrides, *options)
    scores = [numbers["critic/score/mean"] for numbers in run.steps.values()]
    assert len(scores) == STEPS
    assert fmean(scores[-3:]) > fmean(scores[:3]) + 0.3
    accuracy = [numbers["val/accuracy"] for numbers in run.validations.values()]
    assert accuracy[0] < 0.1
    assert accuracy[-1] > accuracy[0] + 0.3
    penalty = {"kl-in-reward": "actor/reward_kl_penalty", "kl-in-loss": "actor/kl_loss"}.get(case)
    if penalty is not None:  # the policy has moved, and the measured distance is finite
        kls = [numbers[penalty] for numbers in run.steps.values()]
        assert kls[0] < 0.01 < kls[-1] < 20
    if case == "ppo":
        assert fmean([numbers["critic/vf_explained_var"] for numbers in run.steps.values()][-5:]) > 0
