"""``megarl train`` and ``megarl sft`` from the command line on tiny random models: real Megatron-Core, vLLM and Ray."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.observability.report import report
from megarl.weights.files.torch_dist import chunk_array, read_torch_dist
from tests.integration.runs import REWARDS, Run, finished, layout, small, sources, write_model, write_prompts

MISMATCH = "training/rollout_log_probs_diff/mean"

PPO = [
    "run.steps=3",
    *layout("actor", (1, 2, 1)),
    "rollout.tp=1",
    "algorithm.kl.where=reward",
    "algorithm.kl.coef=0.1",
    "algorithm.kl.adaptive=true",
    "critic.warmup_steps=1",
    "algorithm.epochs=2",
    "checkpoint.every_steps=2",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def overrides(place: Path) -> list[str]:
    # An accuracy that is neither 0 nor 1 from the start.
    often = [f"reward.path={REWARDS}:some_letter", "validation.temperature=1.0"]
    return [*small(write_model(place / "model"), write_prompts(place / "prompts.jsonl")), *often]


@pytest.fixture(scope="module")
def grpo(place: Path, overrides: list[str]) -> Run:
    """Four steps at actor TP 2 and rollout TP 2, the preset's, with a checkpoint every second step."""
    options = ["run.steps=4", "checkpoint.every_steps=2", "validation.every_steps=3"]
    return finished("train", "grpo_tiny", place / "grpo", *overrides, *options)


@pytest.fixture(scope="module")
def resumed(place: Path, grpo: Run, overrides: list[str]) -> Run:
    """The same run as if it had been killed in step 4, continued by the same command."""
    directory = place / "resumed"
    shutil.copytree(grpo.directory, directory)
    shutil.rmtree(directory / "checkpoints" / "step_000004")
    (directory / "summary.json").unlink()
    with (directory / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 4, "metr')
    options = ["run.steps=4", "checkpoint.every_steps=2", "validation.every_steps=3"]
    options += ["checkpoint.background=true", "checkpoint.export_hf_every=1"]
    return finished("train", "grpo_tiny", directory, *overrides, *options)


@pytest.fixture(scope="module")
def ppo(place: Path, overrides: list[str]) -> Run:
    """PPO: actor PP 2, critic on one rank, rollout TP 1, KL in the reward, one step in which only the critic learns."""
    return finished("train", "ppo_tiny", place / "ppo", *overrides, *PPO)


def computed(numbers: dict[str, float]) -> dict[str, float]:
    """What does not depend on the clock."""
    measured = ("timing_s/", "perf/", "memory/", "rollout/tokens_per_s", "weight_sync/")
    return {name: value for name, value in numbers.items() if not name.startswith(measured)}


def test_the_trainer_and_the_engine_agree_on_log_probs_in_every_step(grpo: Run, ppo: Run):
    """Step 1 shows that both are the same model; later steps, that every update reached the engine."""
    for run in (grpo, ppo):
        assert [numbers[MISMATCH] < 1e-4 for numbers in run.steps.values()] == [True] * len(run.steps)


def test_every_update_is_published_under_the_next_version(grpo: Run, ppo: Run):
    versions = [numbers["training/weight_version"] for numbers in grpo.steps.values()]
    assert versions == [1, 2, 3, 4]
    assert grpo.summary["version"] == 4
    # While only the critic learns the actor's weights stay what they are.
    assert [numbers["training/weight_version"] for numbers in ppo.steps.values()] == [0, 1, 2]


def test_a_step_reports_what_a_person_looks_for(grpo: Run):
    assert list(grpo.steps) == [1, 2, 3, 4]
    for numbers in grpo.steps.values():
        assert all(value is not None for value in numbers.values()), numbers
        assert {
            "critic/score/mean", "response_length/mean", "response_length/clip_ratio", "prompt_length/mean",
            "actor/loss", "actor/pg_loss", "actor/pg_clipfrac", "actor/ppo_kl", "actor/grad_norm", "actor/lr",
            "reward/letters", "reward/failed", "perf/tokens_per_s", "weight_sync/bytes", "data/epoch",
            *(f"timing_s/{phase}" for phase in (
                "rollout", "reward", "old_log_probs", "advantages", "update_actor", "weight_sync", "step")),
        } <= numbers.keys()  # fmt: skip
        assert numbers["reward/failed"] == 0
        assert 0 < numbers["actor/grad_norm"] < 100
        assert numbers["critic/score/min"] <= numbers["critic/score/mean"] <= numbers["critic/score/max"]
    assert list(grpo.validations) == [0, 3, 4]


def test_the_run_directory_holds_what_its_documentation_says(grpo: Run):
    directory = grpo.directory
    for name in ("resolved.yaml", "resolved.json", "timeline.json", "summary.json", "logs/actor-1.log"):
        assert (directory / name).is_file(), name
    assert list((directory / "tensorboard").iterdir())
    assert "steps: 4" in (directory / "resolved.yaml").read_text()
    assert grpo.checkpoints == ["step_000002", "step_000004"]
    assert json.loads((directory / "checkpoints" / "latest").read_text()) == "step_000004"
    assert grpo.summary["steps"] == 4
    assert 0 < grpo.summary["accuracy_start"] < 1
    assert grpo.summary["accuracy_start"] == grpo.validations[0]["val/accuracy"]
    assert grpo.summary["accuracy_end"] == grpo.validations[4]["val/accuracy"]


def test_the_state_in_memory_is_what_was_forecast(grpo: Run, ppo: Run):
    for run in (grpo, ppo):
        ranks = json.loads((run.directory / "forecast.json").read_text())["ranks"]
        last = run.steps[max(run.steps)]
        for role in {"actor", "critic"} & ranks.keys():
            for part in ("weights", "gradients", "optimizer"):
                assert last[f"memory/{role}/{part}"] == pytest.approx(ranks[role][part], rel=0.002), (role, part)
                assert last[f"memory/{role}/{part}_forecast"] == ranks[role][part]
            state = sum(last[f"memory/{role}/{part}"] for part in ("weights", "gradients", "optimizer"))
            assert last[f"memory/{role}/update_activations"] > 0
            assert last[f"memory/{role}/update_peak"] >= state + last[f"memory/{role}/update_activations"]
    assert "actor optimizer" in report(grpo.directory)


def test_the_export_is_a_model_for_transformers(grpo: Run, place: Path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(grpo.directory / "hf")
    model = AutoModelForCausalLM.from_pretrained(grpo.directory / "hf", dtype=torch.float32)
    ids = tokenizer("say 3:", return_tensors="pt").input_ids
    assert torch.isfinite(model(ids).logits).all()
    start = AutoModelForCausalLM.from_config(model.config)
    assert {name: p.shape for name, p in model.named_parameters()} == {
        name: p.shape for name, p in start.named_parameters()
    }


def test_a_resumed_run_is_the_run_that_was_not_interrupted(grpo: Run, resumed: Run):
    assert "after step 2" in resumed.output
    assert list(resumed.steps) == [1, 2, 3, 4]
    assert list(resumed.validations) == [0, 3, 4]
    for step in (3, 4):
        assert computed(resumed.steps[step]) == pytest.approx(computed(grpo.steps[step]), rel=1e-4, abs=1e-5)
    assert resumed.checkpoints == ["step_000002", "step_000004"]
    states = [json.loads((run.directory / "checkpoints/step_000004/state.json").read_text()) for run in (grpo, resumed)]
    assert states[0] == states[1]
    kept = ("steps", "version", "accuracy_start", "accuracy_end")
    assert [resumed.summary[name] for name in kept] == [grpo.summary[name] for name in kept]


def stored_bytes(directory: Path) -> dict[tuple[str, int], bytes]:
    """Weights and optimizer state of a role's part of a checkpoint."""
    found = {}
    for key, tensor in read_torch_dist(directory).tensors.items():
        for number, chunk in enumerate(tensor.chunks):
            array = chunk_array(chunk, tensor)
            with array.path.open("rb") as file:
                file.seek(array.begin)
                found[key, number] = file.read(array.num_bytes)
    return found


def test_a_resumed_run_ends_bit_for_bit_like_the_other(grpo: Run, resumed: Run):
    """Weights and optimizer state, hence also samples, their scores and their order."""
    one, other = (stored_bytes(run.directory / "checkpoints" / "step_000004" / "actor") for run in (grpo, resumed))
    assert any("exp_avg_sq" in key for key, _ in one)
    assert one.keys() == other.keys() and [key for key in one if one[key] != other[key]] == []
    model = (grpo.directory / "hf" / "model.safetensors").read_bytes()
    assert (resumed.directory / "hf" / "model.safetensors").read_bytes() == model
    exports = resumed.directory / "exports"
    assert [path.name for path in exports.iterdir()] == ["step_000004"]
    assert (exports / "step_000004" / "model.safetensors").read_bytes() == model


@pytest.mark.slow
def test_a_run_goes_on_at_another_layout_as_at_its_own(tmp_path: Path, grpo: Run, overrides: list[str]):
    """The third step from the checkpoint of the second: the same samples, and weights to 1e-5."""
    start = f"run.resume={grpo.directory / 'checkpoints' / 'step_000002'}"
    options = ["run.steps=3", "validation.at_end=false", start]
    runs = [
        finished("train", "grpo_tiny", tmp_path / name, *overrides, *options, *layout("actor", degrees))
        for name, degrees in (("same", (2, 1, 1)), ("other", (1, 2, 2)))
    ]
    same, other = (run.steps[3] for run in runs)
    assert same["actor/grad_norm"] > 0
    assert computed(other) == pytest.approx(computed(same), rel=1e-4, abs=1e-5)
    one, two = (load_file(run.directory / "hf" / "model.safetensors") for run in runs)
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.slow
def test_critic_reference_and_kl_controller_go_on_where_they_were(tmp_path: Path, ppo: Run, overrides: list[str]):
    """Into another directory, from a checkpoint by its path."""
    start = f"run.resume={ppo.directory / 'checkpoints' / 'step_000002'}"
    run = finished("train", "ppo_tiny", tmp_path / "run", *overrides, *PPO, start)
    assert list(run.steps) == [3]
    assert computed(run.steps[3]) == pytest.approx(computed(ppo.steps[3]), rel=1e-4, abs=1e-5)


def test_ppo_trains_a_critic_of_its_own_layout(ppo: Run):
    first, *later = ppo.steps.values()
    assert "actor/loss" not in first
    for numbers in ppo.steps.values():
        assert numbers["critic/vf_loss"] > 0
        assert numbers["timing_s/update_critic"] > 0
    assert all("actor/loss" in numbers for numbers in later)
    losses = [numbers["critic/vf_loss"] for numbers in ppo.steps.values()]
    assert losses[-1] < losses[0]


def test_kl_in_the_reward_is_zero_until_the_policy_moves(ppo: Run):
    penalties = [numbers["actor/reward_kl_penalty"] for numbers in ppo.steps.values()]
    assert penalties[:2] == pytest.approx([0.0, 0.0], abs=1e-6)
    assert penalties[2] > 0
    # The adaptive coefficient sinks while the KL is below its target.
    coefficients = [numbers["actor/reward_kl_penalty_coeff"] for numbers in ppo.steps.values()]
    assert 0.1 == pytest.approx(coefficients[0]) and coefficients[0] > coefficients[1] > coefficients[2]


def test_sft_lowers_the_loss_and_exports(place: Path, overrides: list[str]):
    model = next(text for text in overrides if text.startswith("model.path="))
    run = finished(
        "sft", "sft_tiny", place / "sft", model, *sources(place / "prompts.jsonl"), "run.steps=4",
        "data.sequences_per_step=32", "eval_every_steps=2", "logging.console=plain",
        "actor.optimizer.schedule.warmup_steps=1",
    )  # fmt: skip
    losses = [numbers["val/loss"] for numbers in run.validations.values()]
    assert list(run.validations) == [2, 4]
    assert losses[1] < losses[0] < 5.6
    assert run.summary["val_loss"] == losses[-1]
    assert run.checkpoints == ["step_000004"]
    assert (run.directory / "hf" / "config.json").is_file()
    assert (run.directory / "resolved.yaml").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("rollout_tp", [1, 2])
@pytest.mark.parametrize("degrees", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2)], ids=str)
def test_every_layout_agrees_with_the_engine(
    tmp_path: Path, overrides: list[str], degrees: tuple[int, int, int], rollout_tp: int
):
    options = [
        "run.steps=2", *layout("actor", degrees), f"rollout.tp={rollout_tp}", "checkpoint.at_end=false",
        "checkpoint.export_hf=false", "validation.at_start=false", "validation.at_end=false",
    ]  # fmt: skip
    run = finished("train", "grpo_tiny", tmp_path / "run", *overrides, *options)
    assert all(numbers[MISMATCH] < 1e-4 for numbers in run.steps.values())
    assert [numbers["training/weight_version"] for numbers in run.steps.values()] == [1, 2]
