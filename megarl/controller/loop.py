"""``megarl train``: the run around the step. Prompts in, steps, validation, checkpoints, the trained model out."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from megarl.config.origin import Loaded
from megarl.config.schema import TrainConfig
from megarl.config.schema.data import SourceConfig
from megarl.controller.dispatch import WorkerGroup
from megarl.controller.engines import EnginePlan, start_engines
from megarl.controller.roles import Roles, build_roles, check_algorithm, takes_turns
from megarl.controller.saving import Saver
from megarl.controller.scoring import RewardRole
from megarl.controller.session import Session, check_weights, open_session
from megarl.controller.speed import step_work
from megarl.controller.state import RunState
from megarl.controller.step import StepResult, policy_step
from megarl.controller.stopping import AbandonedError
from megarl.controller.validation import validate
from megarl.controller.workers import TrainPlan
from megarl.data.prompts import Prompt, PromptSource
from megarl.data.sources import open_source
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.observability.logs import set_context
from megarl.observability.metrics import Last, Metrics, Sum, values
from megarl.observability.trace import span
from megarl.platform import signals
from megarl.rewards.pool import RewardPool

logger = logging.getLogger(__name__)


def train(loaded: Loaded[TrainConfig], forecast: Mapping[str, Any] | None = None) -> int:
    """Run ``megarl train``; returns the exit code. ``forecast`` is kept in the run directory for the report.

    Raises:
        MegarlError: whatever ends the run; the class decides the exit code.
    """
    config = loaded.config
    # What needs no process fails first, in seconds: algorithm, weights, tokenizer, data, reward.
    check_algorithm(config)
    check_weights(config.model)
    tokenizer = load_tokenizer(config.model.path)
    held_out = held_out_prompts(config, tokenizer)
    prompts = training_prompts(config, tokenizer, held_out)
    with open_session(loaded, forecast) as session:
        pool = session.hold(RewardPool(**config.reward.model_dump()))
        pool.observers.append(session.stopping.check)
        reward = RewardRole(pool, tokenizer)
        with span("start"):
            pool.ready()
            roles, groups = start_roles(session, config, reward)
        session.keep_spans()
        Run(session, config, roles, groups, prompts, held_out).go()
    return 0


def held_out_prompts(config: TrainConfig, tokenizer: Tokenizer) -> list[Prompt]:
    """The first ``validation.prompts`` prompts of the held-out sources; none where there are no sources.

    Raises:
        DataError: a source is missing, empty, or lacks a column.
    """
    if not config.data.validation:
        return []
    source = _prompt_source(config, config.data.validation, tokenizer, is_held_out=True, held_out=())
    return source.first(config.validation.prompts)


def training_prompts(config: TrainConfig, tokenizer: Tokenizer, held_out: Sequence[Prompt]) -> PromptSource:
    """The training prompts; a text that is held out is never drawn, whichever source it comes from.

    Raises:
        DataError: a source is missing, empty, or lacks a column.
    """
    texts = {prompt.text for prompt in held_out}
    return _prompt_source(config, config.data.train, tokenizer, is_held_out=False, held_out=texts)


def _prompt_source(
    config: TrainConfig,
    sources: Sequence[SourceConfig],
    tokenizer: Tokenizer,
    *,
    is_held_out: bool,
    held_out: Collection[str],
) -> PromptSource:
    data = config.data
    return PromptSource(
        [open_source(source.model_dump()) for source in sources],
        tokenizer,
        max_prompt_tokens=data.max_prompt_tokens,
        overlong="drop" if is_held_out and data.overlong == "error" else data.overlong,
        system_prompt=data.system_prompt,
        apply_chat_template=data.apply_chat_template,
        seed=config.run.seed,
        shuffle=data.shuffle and not is_held_out,
        held_out=held_out,
    )


def start_roles(session: Session, config: TrainConfig, reward: RewardRole) -> tuple[Roles, dict[str, WorkerGroup]]:
    """Bring up all processes, load checkpoints, and give the engines their first weights."""
    processes = session.start_processes()
    engines = processes.engines(engine_plan(config, session.directory.logs))
    starting = start_engines(engines)
    if takes_turns(config):
        # Engines measure free memory when they start, and hold it until they are put to sleep.
        session.watch.get(starting, config.cluster.start_timeout_s)
        session.watch.get({member.handle.sleep.remote(): member for member in engines})
    groups = {"actor": processes.train(actor_plan(config, session.directory.logs), processes.placement.actor)}
    if config.critic is not None:
        groups["critic"] = processes.train(critic_plan(config, session.directory.logs), processes.placement.critic)
    for group in groups.values():
        group.start(group.rendezvous())
    session.introduce(groups)
    session.load_roles(groups)
    session.watch.get(starting, config.cluster.start_timeout_s)
    roles = build_roles(config, groups["actor"], groups.get("critic"), engines, reward, session.watch)
    if session.state.kl and "kl" not in session.fresh:
        roles.kl.load_state_dict(session.state.kl)
    with span("weight_sync"):
        # Engines start without weights of their own: the first update makes them hold the actor's.
        roles.weights.publish(session.state.version)
    session.cluster.note_shared_memory()
    return roles, groups


class Run:
    """The steps of one run and what happens between them."""

    def __init__(
        self,
        session: Session,
        config: TrainConfig,
        roles: Roles,
        groups: dict[str, WorkerGroup],
        prompts: PromptSource,
        held_out: Sequence[Prompt],
    ) -> None:
        self.session = session
        self.config = config
        self.roles = roles
        self.groups = groups
        self.prompts = prompts
        self.held_out = held_out
        self.version = session.state.version
        self.results = dict(session.state.results)
        self.saver = Saver(
            session.store,
            groups,
            config.checkpoint,
            session.directory.exports,
            note_seconds=session.stopping.note_save,
        )
        session.load_data(prompts)
        self.finished = self._state(session.state.step)
        """After the last step that was finished: what a run that is told to stop saves."""

    def go(self) -> None:
        """All steps that are left, then the last checkpoint, the export and the summary.

        Raises:
            StoppedError: it was told to stop (SIGUSR1), saved itself and stopped.
        """
        try:
            self._steps()
        except AbandonedError:
            self._abandon()
        self._finish()

    def _steps(self) -> None:
        config, first = self.config, self.session.state.step
        if config.validation.at_start and first == 0:
            self._validate(0)
        for step in range(first + 1, config.run.steps + 1):
            set_context(step=step, version=self.version)
            waited_s = self._waited_s()
            self.session.keep_spans()
            with span("step"):
                result = policy_step(
                    self.roles,
                    self.prompts.next,
                    config,
                    step=step,
                    version=self.version,
                )
            self.version = result.version
            self.finished = self._state(step)
            # Every rank is asked, so not in each step; the second has the optimizer's state and all passes behind it.
            memory = self.session.measured_memory(self.groups) if step in (first + 2, config.run.steps) else {}
            waited: Metrics = {"perf/waited_s": Last(self._waited_s() - waited_s)}
            metrics = {**result.metrics, **self._extra_metrics(step, result), **memory, **waited}
            self.session.log_step(step, metrics, step_work(config, result.batch.sequence_lengths))
            last = step == config.run.steps
            if self.session.stopping.is_asked and not last:
                self.session.stop(self._finished_state(), self.saver)
            every = config.validation.every_steps
            if (every is not None and step % every == 0) or (last and config.validation.at_end):
                self._validate(step)
            self.saver.look()
            if signals.take_save() or self.saver.is_due(step, config.run.steps):
                self.saver.save(self._finished_state())
        self.saver.finish()

    def _extra_metrics(self, step: int, result: StepResult) -> Metrics:
        return {
            **self.prompts.metrics(),
            "perf/total_num_tokens": Sum(int(result.batch.sequence_lengths.sum())),
            "training/global_step": Last(step),
            "training/weight_version": Last(result.version),
        }

    def _waited_s(self) -> float:
        """Seconds this process has waited for others: the rest of a step is the controller's own share."""
        return self.session.watch.waited_s + self.roles.reward.waited_s

    def _validate(self, step: int) -> None:
        if not self.held_out:
            return
        with span("validation"):
            result = validate(self.roles, self.held_out, self.config.validation, step=step)
        accuracy = values(result.metrics)["val/accuracy"]
        self.results = {"accuracy_start": accuracy} | self.results | {"accuracy_end": accuracy}
        self.session.log_validation(step, result.metrics, result.samples)

    def _state(self, step: int) -> RunState:
        return RunState(step, self.version, self.prompts.state_dict(), self.roles.kl.state_dict(), self.results)

    def _finished_state(self) -> RunState:
        """After the last finished step, with the held-out numbers and lines of metrics known by now."""
        return replace(self.finished, results=dict(self.results), metrics_lines=self.session.sinks.num_lines)

    def _abandon(self) -> NoReturn:
        """Give up what is under way: engines end their samples, training takes the device to save from it."""
        self.session.console.note(f"told to stop: what comes after step {self.finished.step} is given up")
        self.roles.rollout.abort(self.config.run.stop_within_s)
        self.roles.turns.to_training()
        self.session.stop(self._finished_state(), self.saver)

    def _finish(self) -> None:
        hf = self.session.directory.hf
        if self.config.checkpoint.export_hf:
            with span("export"):
                shutil.rmtree(hf, ignore_errors=True)
                self.groups["actor"].export_hf(hf)
        self.session.finish(
            {
                "steps": self.config.run.steps,
                "version": self.version,
                "accuracy_start": self.results.get("accuracy_start"),
                "accuracy_end": self.results.get("accuracy_end"),
                "hf": str(hf) if self.config.checkpoint.export_hf else None,
            }
        )


def updates_per_step(config: TrainConfig, minibatch_size: int | None, epochs: int) -> int:
    """Optimizer updates of one step."""
    responses = config.data.prompts_per_step * config.rollout.samples_per_prompt
    return epochs * (-(-responses // minibatch_size) if minibatch_size is not None else 1)


def actor_plan(config: TrainConfig, logs: Path) -> TrainPlan:
    """What the actor's ranks are told."""
    actor = config.actor
    return TrainPlan(
        role="actor",
        model_dir=Path(config.model.path).absolute(),
        random_init=config.model.init == "random",
        layout=actor.layout.grid(),
        device=config.cluster.device,
        engine=actor.engine,
        optimizer=actor.optimizer,
        head="lm",
        seed=config.run.seed,
        total_updates=config.run.steps
        * updates_per_step(config, config.algorithm.minibatch_size, config.algorithm.epochs),
        with_reference=config.algorithm.kl.where != "none" and actor.lora is None,
        lora=actor.lora,
        collective_timeout_s=config.cluster.collective_timeout_s,
        logs=logs,
    )


def critic_plan(config: TrainConfig, logs: Path) -> TrainPlan:
    """What the critic's ranks are told."""
    critic = config.critic
    assert critic is not None
    size = config.algorithm.minibatch_size if critic.minibatch_size is None else critic.minibatch_size
    return TrainPlan(
        role="critic",
        model_dir=Path(config.model.path if critic.path is None else critic.path).absolute(),
        random_init=critic.path is None and config.model.init == "random",
        layout=critic.layout.grid(),
        device=config.cluster.device,
        engine=critic.engine,
        optimizer=critic.optimizer,
        head="value",
        seed=config.run.seed,
        total_updates=config.run.steps * updates_per_step(config, size, critic.epochs),
        with_reference=False,
        lora=critic.lora,
        collective_timeout_s=config.cluster.collective_timeout_s,
        logs=logs,
    )


def engine_plan(config: TrainConfig, logs: Path) -> EnginePlan:
    """What the rollout engines are told."""
    rollout, longest = config.rollout, config.data.max_prompt_tokens + config.rollout.sampling.max_tokens
    return EnginePlan(
        model_dir=Path(config.model.path).absolute(),
        config=rollout,
        device=config.cluster.device,
        max_model_len=longest if rollout.max_model_len is None else rollout.max_model_len,
        seed=config.run.seed,
        can_sleep=takes_turns(config),
        collective_timeout_s=config.cluster.collective_timeout_s,
        logs=logs,
    )
