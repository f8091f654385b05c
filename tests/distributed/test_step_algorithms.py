"""The controller's step under every algorithm and correction by name, on a real Megatron model of one rank.

Sampling, scoring and publishing are stood in for, so that it takes seconds: samples are random, with the log-probs of
the model itself, as an engine with its weights would give. ``tests/integration/test_algorithms_live.py`` is the same on
real processes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch

from megarl.config.load import group_presets, load_train
from megarl.config.schema import TrainConfig
from megarl.config.schema.correction_presets import CORRECTION_PRESETS
from megarl.controller.dispatch import Member
from megarl.controller.publish import DeviceTurns
from megarl.controller.roles import (
    ActorRole,
    CriticRole,
    ReferenceRole,
    Roles,
    make_correction,
    make_estimator,
    make_kl,
)
from megarl.controller.rollout import RolloutRole
from megarl.controller.scoring import RewardRole
from megarl.controller.step import policy_step
from megarl.data.batch import Batch, Ragged
from megarl.data.prompts import Prompt
from megarl.observability.metrics import Metrics, values
from megarl.parallel.grid import ParallelLayout
from megarl.rewards.base import RewardInput, RewardResult
from megarl.rollout.engine import Completion, Request, WeightSpan
from megarl.rollout.sampling import Sampling
from megarl.train.megatron.engine import MegatronEngine
from tests.distributed.engines import make_engine
from tests.distributed.models import QWEN2
from tests.distributed.ranks import Rank, RankPool

TINY = replace(QWEN2, vocab_size=37, num_layers=1, hidden_size=16, ffn_hidden_size=24, num_heads=2, num_kv_heads=1)

SMALL = ["data.prompts_per_step=4", "rollout.samples_per_prompt=4", "rollout.sampling.max_tokens=8"]
SMALL += ["reward.kind=function", "reward.path='a:b'", "actor.layout.tp=1", "rollout.tp=1"]

ALGORITHMS = {preset.name: [f"algorithm={preset.name}"] for preset in group_presets("algorithm")}
CORRECTIONS = {name: [f"algorithm.correction.preset={name}"] for name in CORRECTION_PRESETS}
OTHERS = {
    "current": ["algorithm.minibatch_size=null", "algorithm.old_log_probs=current"],
    "gdpo": ["algorithm.advantage.kind=gdpo", "algorithm.shaping.weights={length: 0.1, even: 1.0}"],
    "optimal_token_baseline": ["algorithm.advantage.kind=optimal_token_baseline"],
    "shaping": ["algorithm.shaping.weights={length: 0.1, score: 1.0}", "algorithm.shaping.clip_high=1.0"],
    "truncated": ["rollout.sampling.top_p=0.9"],
}


class Group:
    """An engine, a reference and a critic as worker groups of one rank."""

    def __init__(self, engine: MegatronEngine, reference: MegatronEngine | None = None) -> None:
        self.engine, self.reference = engine, reference

    def log_probs(self, batch: Batch, **options: Any) -> Any:
        return self.engine.log_probs(batch, **options)

    def ref_log_probs(self, batch: Batch, **options: Any) -> Any:
        assert self.reference is not None
        return self.reference.log_probs(batch, **options)

    def values(self, batch: Batch) -> Any:
        return {"values": self.engine.values(batch)}

    def update_policy(self, batch: Batch, minibatches: Any, update: Any) -> Any:
        return self.engine.update_policy(batch, update, minibatches)

    def update_values(self, batch: Batch, minibatches: Any, update: Any) -> Any:
        return self.engine.update_values(batch, update, minibatches)


class Answer:
    """What a remote call will return."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Watch:
    def get(self, calls: dict[Answer, Member]) -> list[Any]:
        return [call.value for call in calls]


class Sampler:
    """Random tokens with the model's own log-probs."""

    def __init__(self, engine: MegatronEngine) -> None:
        self.engine = engine
        self.generate = SimpleNamespace(remote=self._generate)

    def _generate(self, requests: Sequence[Request], sampling: Sampling, n: int) -> Answer:
        rows = [(request, number) for request in requests for number in range(1 if request.is_greedy else n)]
        tokens = [self._tokens(request.seed + number, sampling.max_tokens) for request, number in rows]
        prompts = [torch.tensor(request.prompt_token_ids) for request, _ in rows]
        batch = Batch.create(prompts=Ragged.from_rows(prompts), responses=Ragged.from_rows(tokens))
        columns = self.engine.log_probs(batch)
        assert columns is not None
        answers: dict[int, list[Completion]] = {}
        for (request, _), row, log_probs in zip(rows, tokens, columns["log_probs"].rows(), strict=True):
            span = (WeightSpan(0, 0, len(row)),)
            done = Completion(row.to(torch.int32).numpy(), log_probs.float().numpy(), "stop", span)
            answers.setdefault(request.request_id, []).append(done)
        return Answer(list(answers.items()))

    def _tokens(self, seed: int, longest: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed % 2**31)
        length = int(torch.randint(1, longest + 1, (1,), generator=generator))
        return torch.randint(0, TINY.vocab_size, (length,), generator=generator)


class Pool:
    """Scores by what the response is."""

    def score(self, samples: Sequence[RewardInput]) -> list[RewardResult]:
        words = [[int(word) for word in sample.response.split()] for sample in samples]
        return [RewardResult(sum(w) % 7 / 7, {"length": float(len(w)), "even": float(w[-1] % 2 == 0)}) for w in words]


class Tokenizer:
    def batch_decode(self, rows: list[list[int]], *, skip_special_tokens: bool) -> list[str]:
        return [" ".join(map(str, row)) for row in rows]


def draw(count: int) -> list[Prompt]:
    return [Prompt(number, "", [1 + number % 5, 2], None, "source") for number in range(count)]


def roles_of(config: TrainConfig, actor: Group, critic: Group) -> Roles:
    algorithm, watch = config.algorithm, cast(Any, Watch())
    rollout = RolloutRole([Member("rollout", 0, Sampler(actor.engine), None)], config.rollout, watch, seed=1)
    group = cast(Any, actor)
    return Roles(
        actor=ActorRole(group, algorithm, rollout.sampling, seed=1),
        rollout=rollout,
        reward=RewardRole(cast(Any, Pool()), cast(Any, Tokenizer())),
        weights=cast(Any, SimpleNamespace(publish=lambda version: version, metrics=Metrics)),
        turns=DeviceTurns(False, [], [], watch),
        estimator=make_estimator(algorithm),
        correction=make_correction(algorithm.correction),
        kl=make_kl(algorithm.kl),
        reference=None if algorithm.kl.where == "none" else ReferenceRole(group, temperature=1.0),
        critic=None if config.critic is None else CriticRole(cast(Any, critic), config.critic, algorithm, seed=1),
    )


def run(rank: Rank, configs: list[TrainConfig]) -> list[dict[str, float]]:
    groups = rank.start(ParallelLayout())
    settings: dict[str, Any] = {"distributed": False, "cap": 200}
    actor = Group(make_engine(TINY, groups, **settings), make_engine(TINY, groups, trained=False))
    critic = Group(make_engine(TINY, groups, head="value", **settings))
    start = {name: weight.detach().clone() for name, weight in actor.engine.parameters().items()}
    seen = []
    for config in configs:
        result = policy_step(roles_of(config, actor, critic), draw, config, step=1, version=0)
        seen.append(values(result.metrics))
        with torch.no_grad():
            for name, weight in actor.engine.parameters().items():
                weight.copy_(start[name])
    return seen


def steps(ranks: RankPool, cases: dict[str, list[str]]) -> dict[str, dict[str, float]]:
    base = [*SMALL, "algorithm.minibatch_size=8"]
    configs = [
        load_train("grpo_tiny", [*(SMALL if "algorithm.minibatch_size=null" in case else base), *case]).config
        for case in cases.values()
    ]
    (seen,) = ranks(1).run(run, configs, timeout_s=200.0)
    return dict(zip(cases, seen, strict=True))


def check(name: str, numbers: dict[str, float]) -> None:
    assert all(math.isfinite(value) for value in numbers.values()), (name, numbers)
    assert numbers["actor/grad_norm"] > 0 and numbers["actor/skipped_updates"] == 0, (name, numbers)


def test_every_algorithm_by_name_takes_a_step(ranks: RankPool):
    whole = {"opo": ["algorithm.minibatch_size=null"]}
    for name, numbers in steps(ranks, {n: [*case, *whole.get(n, [])] for n, case in ALGORITHMS.items()}).items():
        check(name, numbers)
        assert ("critic/vf_loss" in numbers) == (name == "ppo")
        assert ("filter/rounds" in numbers) == (name == "dapo")
        assert numbers["critic/advantages/max"] > numbers["critic/advantages/min"]


def test_every_correction_by_name_takes_a_step(ranks: RankPool):
    for name, numbers in steps(ranks, CORRECTIONS).items():
        # On the weights that sampled both policies are the same: nothing is rejected, and weights are 1.
        is_bypass = name.startswith("bypass")
        if not is_bypass:
            check(name, numbers)
            assert abs(numbers["rollout_corr/kl"]) < 1e-5
        assert ("rollout_corr/rollout_rs_masked_fraction" in numbers) == ("_rs" in name), name
        assert ("rollout_corr/rollout_is_mean" in numbers) == (
            not is_bypass and name.endswith(("_is", "tis", "icepop", "seq_is_rs"))
        ), name
        assert "rollout_corr/kl" in numbers and ("actor/old_entropy" in numbers) == (not is_bypass)
        assert ("actor/entropy" in numbers) == is_bypass


def test_modes_and_inputs_of_the_others(ranks: RankPool):
    seen = steps(ranks, OTHERS)
    for name, numbers in seen.items():
        check(name, numbers)
    assert seen["current"]["training/rollout_log_probs_diff/max"] < 1e-5 and "actor/entropy" in seen["current"]
    assert seen["shaping"]["critic/score/max"] <= 1.0
    # Log-probs under top-p are of another distribution: the two are not compared.
    assert not [name for name in seen["truncated"] if name.startswith(("rollout_corr/", "training/rollout"))]


def test_greedy_responses_are_sampled_and_not_trained_on(ranks: RankPool):
    cases = {"remax": ["algorithm.advantage.kind=remax"], "grpo": []}
    seen = steps(ranks, cases)
    assert seen["remax"]["rollout/tokens"] > seen["grpo"]["rollout/tokens"]
    assert seen["remax"]["response_length/mean"] == seen["grpo"]["response_length/mean"]
