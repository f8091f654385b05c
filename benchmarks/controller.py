"""The controller's own time and memory per step at 8, 64 and 512 simulated ranks, with the real step and dispatch.

Usage: python benchmarks/controller.py [--ranks N ...] [--prompts 512] [--samples 8] [--steps 3] [--latency-scale X]

What runs is megarl's: ``controller/step.py``, worker groups with their splits and collections over a real Ray cluster,
the rollout and reward roles, batch joins, advantages, minibatches, metrics. What is simulated are the workers: two Ray
actors that stand for all ranks, answer with data of the right shape, and take the seconds the step-time model predicts
for the phase, times ``--latency-scale`` (0.005). Weights are published by one call on each rank and engine, without
transfer.

The driver's own time is its CPU time (all its threads): the simulated workers share the machine's cores, so wall time
would count them too. It is compared with the predicted step of the same configuration; the target is 5 % at 512 ranks.
The last line is one JSON object; ``value`` is own seconds over predicted seconds at the largest number of ranks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import ray
import torch

from megarl.config.load import load_train
from megarl.config.schema import TrainConfig
from megarl.controller.cluster import Cluster
from megarl.controller.dispatch import Member, Watch, WorkerGroup
from megarl.controller.publish import DeviceTurns
from megarl.controller.roles import (
    ActorRole,
    ReferenceRole,
    Roles,
    make_correction,
    make_estimator,
    make_kl,
)
from megarl.controller.rollout import RolloutRole
from megarl.controller.scoring import RewardRole
from megarl.controller.step import policy_step
from megarl.controller.workers import TrainWorker
from megarl.data.batch import Ragged
from megarl.data.prompts import Prompt
from megarl.errors import SetupError
from megarl.observability.metrics import Last, Mean
from megarl.observability.trace import Timeline, listening, span
from megarl.planning.gpus import gpu_named
from megarl.planning.known_models import spec_of
from megarl.planning.search import placement_of, workload
from megarl.planning.step_time import StepTime, response_lengths, step_time
from megarl.rewards.pool import RewardPool
from megarl.rollout.engine import Completion, Request, WeightSpan
from megarl.rollout.sampling import Sampling

TARGET = 0.05
PROMPT_TOKENS = 256
VOCABULARY = 50_000
UPDATES = 16
START_ATTEMPTS = 4
CALLS_AT_ONCE = 4096
PHASES = {
    "generate": "rollout",
    "log_probs": "old_log_probs",
    "ref_log_probs": "ref_log_probs",
    "update_policy": "update_actor",
    "commit": "weight_sync",
}


class SimulatedRanks:
    """Many ranks in one process: each call waits as its phase does and answers with data of the right shape."""

    def __init__(self, seconds: dict[str, float], speakers: list[int], lengths: list[int], vocab_size: int) -> None:
        self._seconds = seconds
        self._speakers = set(speakers)
        generator = np.random.default_rng(1)
        self._responses = [generator.integers(3, vocab_size, length, np.int32) for length in lengths]
        self._log_probs = [-generator.random(length, np.float32) for length in lengths]
        self._version = 0

    async def _wait(self, method: str) -> None:
        await asyncio.sleep(self._seconds[PHASES[method]])

    async def watch(self, rank: int) -> None:
        await asyncio.Event().wait()

    async def generate(
        self, rank: int, requests: list[Request], sampling: Sampling, n: int
    ) -> list[tuple[int, list[Completion]]]:
        await self._wait("generate")
        return [(one.request_id, [self._completion(one.seed + sample) for sample in range(n)]) for one in requests]

    def _completion(self, seed: int) -> Completion:
        index = seed % len(self._responses)
        # Copies: pickle would write an array that it has seen as a reference.
        tokens, log_probs = self._responses[index].copy(), self._log_probs[index].copy()
        return Completion(tokens, log_probs, "stop", (WeightSpan(self._version, 0, len(tokens)),))

    async def log_probs(self, rank: int, batch: Any, **options: Any) -> dict[str, Ragged] | None:
        await self._wait("log_probs")
        names = ["log_probs", *(["entropy"] if options.get("with_entropy") else [])]
        return self._columns(rank, batch, names)

    async def ref_log_probs(self, rank: int, batch: Any, **options: Any) -> dict[str, Ragged] | None:
        await self._wait("ref_log_probs")
        return self._columns(rank, batch, ["log_probs"])

    def _columns(self, rank: int, batch: Any, names: list[str]) -> dict[str, Ragged] | None:
        if rank not in self._speakers:
            return None
        responses = batch.ragged("responses")
        return {name: responses.with_values(torch.full((len(responses.values),), -0.5)) for name in names}

    async def update_policy(self, rank: int, batch: Any, minibatches: list[list[int]], update: Any) -> Any:
        await self._wait("update_policy")
        return {"actor/loss": Mean(0.1, 1.0), "actor/lr": Last(1e-6)} if rank in self._speakers else None

    async def commit(self, rank: int, version: int) -> None:
        await self._wait("commit")
        self._version = version


class Handle:
    """A rank as the controller sees an actor: ``handle.method.remote(...)``."""

    def __init__(self, host: Any, rank: int) -> None:
        self._host = host
        self._rank = rank

    def __getattr__(self, name: str) -> Any:
        host, rank = self._host, self._rank

        class Method:
            def remote(self, *args: Any, **kwargs: Any) -> Any:
                return getattr(host, name).remote(rank, *args, **kwargs)

        return Method()


class SimulatedPublisher:
    """A weight update as calls: one on every rank and every engine."""

    def __init__(self, members: Sequence[Member], watch: Watch) -> None:
        self._members = list(members)
        self._watch = watch

    def publish(self, version: int) -> int:
        self._watch.get({member.handle.commit.remote(version): member for member in self._members})
        return version

    def metrics(self) -> dict[str, Any]:
        return {}


@dataclass
class Measured:
    """One number of ranks: seconds a step and memory after each."""

    ranks: int
    predicted: StepTime
    own_s: list[float]
    wall_s: list[float]
    slept_s: float
    phases_s: dict[str, float]
    rss_bytes: list[int]


def word_tokenizer() -> Any:
    """A word for each id, as many as a real vocabulary has: small ids would be shared objects and cost nothing."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(VOCABULARY)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")))


def configuration(ranks: int, prompts: int, samples: int) -> TrainConfig:
    """grpo_70b on so many GPUs: actor and engines at tensor-parallel size 8, four stages where there are enough."""
    pp = 4 if ranks >= 64 else 1
    keys = {
        "cluster.num_nodes": max(1, ranks // 8),
        "actor.layout.pp": pp,
        "actor.layout.dp": ranks // (8 * pp),
        "rollout.replicas": ranks // 8,
        "rollout.samples_per_prompt": samples,
        "data.prompts_per_step": prompts,
        "algorithm.minibatch_size": max(1, prompts * samples // UPDATES),
    }
    return load_train("grpo_70b", [f"{key}={value}" for key, value in keys.items()]).config


def measure(ranks: int, arguments: argparse.Namespace, tokenizer: Any) -> Measured:
    """Some steps at one number of ranks; the first warms up and is not counted."""
    config = configuration(ranks, arguments.prompts, arguments.samples)
    spec, _ = spec_of(config.model.path)
    work = workload(config, mean_prompt=PROMPT_TOKENS)
    predicted = step_time(spec, gpu_named("h100"), work, placement_of(config))
    seconds = {name: predicted.phases.get(name, 0.0) * arguments.latency_scale for name in PHASES.values()}
    lengths = [round(x) for x in response_lengths(509, work.response_tokens, work.longest_response)]
    layout = config.actor.layout.grid()
    places = [(rank, layout.coordinate(rank)) for rank in range(layout.world_size)]
    speakers = [rank for rank, at in places if at.tp == 0 and at.pp == layout.pp - 1]
    host_class = ray.remote(max_concurrency=CALLS_AT_ONCE, num_cpus=0)(SimulatedRanks)
    training, engines = (host_class.remote(seconds, speakers, lengths, len(tokenizer)) for _ in range(2))

    def members(role: str, host: Any, count: int) -> list[Member]:
        handles = [Handle(host, rank) for rank in range(count)]
        return [Member(role, rank, handle, handle.watch.remote()) for rank, handle in enumerate(handles)]

    actors, replicas = (
        members("actor", training, layout.world_size),
        members("rollout", engines, config.rollout.replicas),
    )
    watch = Watch(600.0)
    watch.add([*actors, *replicas])
    group = WorkerGroup(TrainWorker, actors, layout, watch)
    rollout, algorithm = RolloutRole(replicas, config.rollout, watch, seed=1), config.algorithm
    prompts = [Prompt(i, "p", list(range(i, i + PROMPT_TOKENS)), "1", "simulated") for i in range(arguments.prompts)]
    with RewardPool("regex", pattern="(1)", workers=2) as pool:
        pool.ready()
        reward = RewardRole(pool, tokenizer)
        roles = Roles(
            actor=ActorRole(group, algorithm, rollout.sampling, seed=1),
            rollout=rollout,
            reward=reward,
            weights=SimulatedPublisher([*actors, *replicas], watch),
            turns=DeviceTurns(False, [group], replicas, watch),
            estimator=make_estimator(algorithm),
            correction=make_correction(algorithm.correction),
            kl=make_kl(algorithm.kl),
            reference=ReferenceRole(group, temperature=rollout.sampling.temperature),
        )
        result = Measured(ranks, predicted, [], [], sum(seconds.values()), {}, [])
        version, process = 0, psutil.Process()
        for step in range(1, arguments.steps + 2):
            timeline = Timeline()
            own, started = time.process_time(), time.monotonic()
            with listening(timeline), span("step"):
                done = policy_step(roles, lambda count: prompts[:count], config, step=step, version=version)
            version = done.version
            del done
            if step > 1:
                result.own_s.append(time.process_time() - own)
                result.wall_s.append(time.monotonic() - started)
                result.phases_s = timeline.seconds(depth=1)
                result.rss_bytes.append(process.memory_info().rss)
    for host in (training, engines):
        ray.kill(host)
    return result


def report(measured: Sequence[Measured], samples: int) -> dict[str, Any]:
    """Print a row for each number of ranks; returns what the last line says."""
    print(
        f"{'ranks':>5} {'own s':>7} {'predicted s':>11} {'share':>7} {'wall-slept s':>12} {'RSS GiB':>8} {'growth':>8}"
    )
    rows = []
    for one in measured:
        own = sorted(one.own_s)[len(one.own_s) // 2]
        wall = min(one.wall_s) - one.slept_s
        growth = (one.rss_bytes[-1] - one.rss_bytes[0]) / max(1, len(one.rss_bytes) - 1)
        share = own / one.predicted.step_s
        rows.append({
            "ranks": one.ranks, "own_s": round(own, 3), "predicted_s": round(one.predicted.step_s, 1),
            "share": round(share, 4), "wall_without_latency_s": round(wall, 2),
            "rss_gib": round(one.rss_bytes[-1] / 2**30, 2), "growth_mib_per_step": round(growth / 2**20, 1),
            "phases_s": {name: round(value, 2) for name, value in one.phases_s.items()},
        })  # fmt: skip
        print(
            f"{one.ranks:>5} {own:>7.2f} {one.predicted.step_s:>11.1f} {share:>7.1%} {wall:>12.2f} "
            f"{one.rss_bytes[-1] / 2**30:>8.2f} {growth / 2**20:>7.1f}M"
        )
    last = rows[-1]
    return {
        "name": "controller",
        "value": last["share"],
        "unit": "driver's own seconds / predicted seconds of a step",
        "target": TARGET,
        "holds": last["share"] <= TARGET,
        "samples": samples,
        "rows": rows,
        "hardware": f"{psutil.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB",
    }


def start_ray() -> Cluster:
    """A cluster of its own; Ray gives up on a busy machine after 30 s, so it is tried again."""
    for attempt in range(1, START_ATTEMPTS + 1):
        cluster = Cluster()
        try:
            cluster.open(None, num_slots=4, num_gpus=0)
            return cluster
        except SetupError:
            cluster.close()
            if attempt == START_ATTEMPTS:
                raise
    raise AssertionError("unreachable")


def main() -> int:
    """Returns 0 where the target is met."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--latency-scale", type=float, default=0.005)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cluster = start_ray()
    try:
        tokenizer = word_tokenizer()
        measured = [measure(ranks, arguments, tokenizer) for ranks in arguments.ranks]
    finally:
        cluster.close()
    result = report(measured, arguments.prompts * arguments.samples)
    print(json.dumps(result))
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
