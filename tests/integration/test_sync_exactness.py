"""After every update the engines hold the very model that an export gives to ``transformers``, in float32."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.load import load_train
from megarl.config.schema import TrainConfig
from megarl.controller.dispatch import WorkerGroup
from megarl.controller.loop import start_roles, training_prompts
from megarl.controller.roles import Roles
from megarl.controller.scoring import RewardRole
from megarl.controller.session import open_session
from megarl.controller.step import policy_step
from megarl.data.batch import Batch
from megarl.data.prompts import PromptSource
from megarl.data.tokenizer import load_tokenizer
from megarl.models.tiny import tiny_config, write_tiny
from megarl.observability.metrics import values
from megarl.rewards.pool import RewardPool
from tests.integration.runs import layout, small, write_prompts

# transformers', vLLM's and Ray's own; warnings of megarl stay errors.
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning", "ignore::ResourceWarning"
)

UPDATES = 5

MISMATCH = "training/rollout_log_probs_diff/mean"


@dataclass(frozen=True)
class Parts:
    """A run's processes, as the loop has them."""

    config: TrainConfig
    roles: Roles
    groups: dict[str, WorkerGroup]
    prompts: PromptSource


@contextmanager
def started(overrides: Sequence[str]) -> Iterator[Parts]:
    """What ``controller.loop.train`` brings up before its first step."""
    loaded = load_train("grpo_tiny", list(overrides))
    config = loaded.config
    tokenizer = load_tokenizer(config.model.path)
    prompts = training_prompts(config, tokenizer, ())
    with open_session(loaded) as session:
        pool = session.hold(RewardPool(**config.reward.model_dump()))
        roles, groups = start_roles(session, config, RewardRole(pool, tokenizer))
        yield Parts(config, roles, groups, prompts)
    # Ray leaves its handles of ended processes to the garbage collector, which warns of them: not at some later time.
    gc.collect()


class Exported:
    """An exported directory, under transformers."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    @torch.no_grad()
    def log_probs(self, samples: Batch) -> list[torch.Tensor]:
        """[T, V] of each response: log-probs of every token after each prefix."""
        result = []
        for prompt, response in zip(samples["prompts"].rows(), samples["responses"].rows(), strict=True):
            logits = self.model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
            result.append(logits.log_softmax(-1))
        return result


def chosen(log_probs: Sequence[torch.Tensor], samples: Batch) -> torch.Tensor:
    """Log-probs of the tokens that were sampled, flat."""
    tokens = samples["responses"].values
    return torch.cat(list(log_probs)).gather(1, tokens[:, None])[:, 0]


# With adapters the reference policy is the actor without them, and engines get weights that they are merged into.
ADAPTERS = ["actor.lora.rank=8", "actor.optimizer.lr=1e-2"]

CASES = [
    pytest.param((1, 1, 2), 1, 2, True, [], id="dp2-to-two-engines-tied"),
    pytest.param((2, 1, 1), 2, 1, True, [], id="tp2-to-tp2-tied"),
    pytest.param((2, 1, 1), 1, 1, False, [], id="tp2-to-tp1-untied"),
    pytest.param((2, 2, 1), 2, 1, False, [], id="tp2-pp2-to-tp2-untied"),
    pytest.param((1, 2, 1), 1, 1, True, [], id="pp2-to-tp1-tied"),
    pytest.param((2, 1, 1), 1, 1, True, ADAPTERS, id="tp2-to-tp1-adapters"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("degrees", "rollout_tp", "replicas", "is_tied", "further"), CASES)
def test_greedy_tokens_and_log_probs_equal_the_exported_models(
    tmp_path: Path, degrees: tuple[int, int, int], rollout_tp: int, replicas: int, is_tied: bool, further: list[str]
):
    # Wide initial weights: the likeliest token leads by far more than the engines differ.
    config = tiny_config(num_hidden_layers=2, initializer_range=0.15, tie_word_embeddings=is_tied)
    write_tiny(tmp_path / "model", config)
    options = [
        f"run.dir={tmp_path / 'run'}", *layout("actor", degrees), f"rollout.tp={rollout_tp}",
        f"rollout.replicas={replicas}", "logging.console=off", "logging.tensorboard=false",
        "actor.optimizer.lr=3e-3", "algorithm.minibatch_size=null", "algorithm.kl.where=loss", "algorithm.kl.coef=0.01",
        "algorithm.policy_loss.entropy_coef=0.01", "sync.verify=values",
        *further,
    ]  # fmt: skip
    with started([*small(tmp_path / "model", write_prompts(tmp_path / "prompts.jsonl")), *options]) as parts:
        asked, greedy = parts.prompts.first(8), parts.roles.rollout.sampling.greedy()
        before: Exported | None = None
        distances = []
        for step in range(1, UPDATES + 1):
            result = policy_step(parts.roles, parts.prompts.next, parts.config, step=step, version=step - 1)
            numbers = values(result.metrics)
            assert result.version == step
            assert numbers[MISMATCH] < 1e-4
            assert numbers["weight_sync/values_difference"] < 1e-4 < 1e-3 < numbers["weight_sync/values_change"]
            distances.append(numbers["actor/kl_loss"])

            samples = parts.roles.rollout.sample(asked, greedy, n=1, step=step, stream=1)
            parts.groups["actor"].export_hf(tmp_path / f"hf-{step}")
            exported = Exported(tmp_path / f"hf-{step}")
            expected = exported.log_probs(samples)
            assert {span.version for spans in samples["weight_versions"] for span in spans} == {step}
            assert samples["responses"].values.tolist() == torch.cat(expected).argmax(-1).tolist()
            served = samples["rollout_log_probs"].values
            torch.testing.assert_close(served, chosen(expected, samples), rtol=0, atol=1e-3)
            trained, _ = parts.roles.actor.add_old_log_probs(samples)
            torch.testing.assert_close(trained["old_log_probs"].values, chosen(expected, samples), rtol=0, atol=1e-3)
            if before is not None:  # an update that did not arrive would show
                assert (served - chosen(before.log_probs(samples), samples)).abs().max() > 1e-2
            before = exported
        # The reference stays what the policy was.
        assert distances[0] == pytest.approx(0.0, abs=1e-6)
        assert min(distances[1:]) > 1e-4
        assert_bypass(parts, version=UPDATES)


def assert_bypass(parts: Parts, *, version: int) -> None:
    """One more step, with the engines' log-probs taken for the old ones."""
    algorithm = parts.config.algorithm.model_copy(update={"old_log_probs": "bypass"})
    config = parts.config.model_copy(update={"algorithm": algorithm})
    result = policy_step(parts.roles, parts.prompts.next, config, step=version + 1, version=version)
    numbers = values(result.metrics)
    assert MISMATCH not in numbers
    assert result.batch["old_log_probs"].equal(result.batch["rollout_log_probs"])
    # One update a step: the policy that is updated is the one that sampled, as far as both agree.
    assert abs(numbers["actor/ppo_kl"]) < 1e-4
    assert numbers["actor/pg_clipfrac"] == 0
