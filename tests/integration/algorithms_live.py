"""One set of real processes under many algorithms: trainer, critic and engine start once, the algorithm is swapped.

What an algorithm is lives on the driver (``Roles``) and in what each call brings along, so the same workers train under
any of them; weights and optimizer go back to the start from a checkpoint.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from megarl.config.load import load_train
from megarl.config.schema import TrainConfig
from megarl.controller.dispatch import Watch, WorkerGroup
from megarl.controller.loop import held_out_prompts, start_roles, training_prompts
from megarl.controller.roles import (
    ActorRole,
    CriticRole,
    ReferenceRole,
    Roles,
    check_algorithm,
    make_correction,
    make_estimator,
    make_kl,
)
from megarl.controller.rollout import RolloutRole
from megarl.controller.scoring import RewardRole
from megarl.controller.session import open_session
from megarl.controller.step import policy_step
from megarl.controller.validation import validate
from megarl.data.prompts import Prompt
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.observability.metrics import values
from megarl.rewards.pool import RewardPool

CRITIC = [
    "algorithm.advantage.kind=gae",
    "critic.engine.dtype=float32",
    "critic.engine.microbatch_tokens=4096",
    "critic.optimizer.lr=1e-3",
]
"""Overrides that start a critic beside the actor."""


@dataclass
class Live:
    """Processes of a run of ``ppo``, and the overrides they were started with."""

    overrides: list[str]
    config: TrainConfig
    roles: Roles
    groups: dict[str, WorkerGroup]
    tokenizer: Tokenizer
    held_out: list[Prompt]
    start: Path
    watch: Watch
    version: int = 0
    numbers: list[dict[str, float]] = field(default_factory=list)

    def under(self, overrides: Sequence[str]) -> tuple[TrainConfig, Roles]:
        """Configuration and roles of another algorithm; what the processes were started with must not change."""
        config = load_train("grpo_tiny", [*self.overrides, *overrides]).config
        check_algorithm(config)
        algorithm, seed, critic = config.algorithm, config.run.seed, config.critic
        rollout = RolloutRole(self.roles.rollout.members, config.rollout, self.watch, seed=seed)
        sampling = rollout.sampling
        roles = replace(
            self.roles,
            actor=ActorRole(self.groups["actor"], algorithm, sampling, seed=seed),
            rollout=rollout,
            estimator=make_estimator(algorithm),
            correction=make_correction(algorithm.correction),
            kl=make_kl(algorithm.kl),
            reference=ReferenceRole(self.groups["actor"], temperature=sampling.temperature)
            if algorithm.kl.where != "none"
            else None,
            critic=None if critic is None else CriticRole(self.groups["critic"], critic, algorithm, seed=seed),
        )
        return config, roles

    def steps(self, count: int, overrides: Sequence[str], *, first: int = 1) -> list[dict[str, float]]:
        """Metrics of so many steps."""
        config, roles = self.under(overrides)
        prompts = training_prompts(config, self.tokenizer, self.held_out)
        seen = []
        for step in range(first, first + count):
            result = policy_step(roles, prompts.next, config, step=step, version=self.version)
            self.version = result.version
            seen.append(values(result.metrics))
        return seen

    def reset(self) -> None:
        """Weights and optimizers as at the start, in the engines too."""
        for role, group in self.groups.items():
            group.load(self.start / role, ())
        self.version = self.roles.weights.publish(self.version + 1)

    def accuracy(self, step: int) -> float:
        """Held-out accuracy."""
        result = validate(self.roles, self.held_out, self.config.validation, step=step)
        return values(result.metrics)["val/accuracy"]


@contextmanager
def live(place: Path, overrides: Sequence[str]) -> Iterator[Live]:
    """Real processes: an actor with a reference, a critic, a rollout engine."""
    common = [f"run.dir={place / 'run'}", "logging.console=off", "logging.tensorboard=false", *overrides]
    started_with = [*common, *CRITIC, "algorithm.kl.where=loss", "algorithm.kl.coef=0.001"]
    loaded = load_train("grpo_tiny", started_with)
    config = loaded.config
    tokenizer = load_tokenizer(config.model.path)
    held_out = held_out_prompts(config, tokenizer)
    with open_session(loaded) as session:
        pool = session.hold(RewardPool(**config.reward.model_dump()))
        roles, groups = start_roles(session, config, RewardRole(pool, tokenizer))
        start = place / "start"
        for role, group in groups.items():
            (start / role).mkdir(parents=True)
            group.save(start / role, False)
        yield Live(common, config, roles, groups, tokenizer, held_out, start, session.watch)
    # Ray leaves its handles of ended processes to the garbage collector, which warns of them: not at some later time.
    gc.collect()
