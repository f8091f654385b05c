"""What every run has, whichever loop runs in it: directory, logs, console, trackers, checkpoints, processes.

Invariant: leaving the session ends every process of the run and releases its directory, however the run ended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from megarl.config.origin import Loaded, write_resolved
from megarl.config.schema import SftConfig, TrainConfig
from megarl.config.schema.roles import ModelConfig
from megarl.controller.checkpoints import (
    CheckpointStore,
    contents_of,
    find_resume,
    fresh_parts,
    read_state,
    step_name,
)
from megarl.controller.cluster import Cluster, wait_for_nodes
from megarl.controller.dispatch import Watch, WorkerGroup
from megarl.controller.hang import HangWatch
from megarl.controller.memory import measured_memory
from megarl.controller.placement import plan_placement
from megarl.controller.processes import Processes
from megarl.controller.saving import Saver
from megarl.controller.speed import PhaseWork, peak_of, speed
from megarl.controller.state import RunDirectory, RunState, write_json
from megarl.controller.stopping import Stopping
from megarl.data.prompts import PromptSource
from megarl.data.sft import SftSource
from megarl.errors import DataError, StoppedError
from megarl.models.registry import load_spec
from megarl.observability.console import Console
from megarl.observability.ending import UNFORESEEN, ending_of, write_ending
from megarl.observability.heartbeat import heartbeat
from megarl.observability.logs import set_context, set_up_logging
from megarl.observability.memory import memory_lines
from megarl.observability.metrics import Metrics, values
from megarl.observability.sinks import Sinks, open_sinks
from megarl.observability.trace import Timeline, listening, write_chrome_trace
from megarl.platform import env, signals
from megarl.platform.device import Introduction
from megarl.weights.files.safetensors_reader import SafetensorsReader, check_model

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class Session:
    """The surroundings of one run.

    Args:
        config: the run's configuration.
        directory: where it writes.
        store: its checkpoints.
        resume: the checkpoint to continue from, or None.
        state: where to continue; step 0 at the start.
        fresh: parts that the checkpoint lacks and that may start afresh.
        console: what a person sees.
        sinks: where numbers go.
        timeline: phases finished since the last logged step.
        history: all earlier ones.
        watch: waits on worker processes.
        stopping: says when a run that was told to stop gives up its step.
        cluster: Ray; opened by ``start_processes``.
        started: monotonic seconds at which the session was opened.
        forecast: what was said about the run beforehand.
        peak_flops: of a training rank's GPU, once ``introduce`` knows it.
    """

    config: TrainConfig | SftConfig
    directory: RunDirectory
    store: CheckpointStore
    resume: Path | None
    state: RunState
    fresh: frozenset[str]
    console: Console
    sinks: Sinks
    timeline: Timeline
    history: Timeline
    watch: Watch
    stopping: Stopping
    cluster: Cluster
    started: float
    forecast: Mapping[str, Any] | None
    _stack: ExitStack
    peak_flops: float | None = None

    def hold(self, resource: AbstractContextManager[T]) -> T:
        """Enter a context that is left when the session closes, before everything entered earlier."""
        return self._stack.enter_context(resource)

    def start_processes(self) -> Processes:
        """Ray, and the slots of this run reserved on it.

        Raises:
            ConfigError: the roles do not fit on the stated nodes.
            SetupError: nodes or devices are missing.
        """
        config = self.config.cluster
        placement = plan_placement(self.config)
        num_slots = placement.slots_per_node * placement.num_nodes
        num_gpus = num_slots if config.device == "cuda" else 0
        self.cluster.open(config.ray_address, num_slots=num_slots, num_gpus=num_gpus)
        wait_for_nodes(config.num_nodes, config.start_timeout_s)
        return self.hold(Processes(self.cluster, config, placement, self.watch))

    def load_roles(self, groups: Mapping[str, WorkerGroup]) -> None:
        """Continue roles from the checkpoint, if there is one, but for what starts afresh.

        Raises:
            CheckpointError: a file is damaged or does not fit the role.
        """
        if self.resume is None:
            return
        for role, group in groups.items():
            if f"{role}/model" not in self.fresh:
                parts = [name.removeprefix(f"{role}/") for name in self.fresh if name.startswith(f"{role}/")]
                group.load(self.resume / role, parts)

    def introduce(self, groups: Mapping[str, WorkerGroup]) -> None:
        """Say what each role runs on and which kernels it found."""
        peaks = {} if self.forecast is None else self.forecast["peak_flops"]
        for role, group in groups.items():
            ranks: list[Introduction] = group.introduce()
            self.console.note(f"{role}: {len(ranks)} ranks on {ranks[0].device}; {', '.join(ranks[0].kernels)}")
            self.peak_flops = peak_of(ranks[0].device, peaks)

    def load_data(self, source: PromptSource | SftSource) -> None:
        """Continue the data after the last item of the checkpoint.

        Raises:
            DataError: its data, weights or seed are others than now, and ``resume.allow_fresh`` does not name data.
        """
        if not self.state.prompts or "data" in self.fresh:
            return
        try:
            source.load_state_dict(self.state.prompts)
        except DataError as error:
            if "data" not in self.config.resume.allow_fresh:
                raise
            self.console.note(f"data start afresh: {error}")

    def measured_memory(self, groups: Mapping[str, WorkerGroup]) -> Metrics:
        """Memory of the roles beside the forecast; asks every rank."""
        return measured_memory(groups, None if self.forecast is None else self.forecast["ranks"])

    def keep_spans(self) -> None:
        """Move the finished phases into the history: those before the first step are not part of it."""
        self.history.spans += self.timeline.take().spans

    def log_step(self, step: int, metrics: Metrics, work: Mapping[str, PhaseWork]) -> None:
        """Numbers of a finished step with its phases' seconds and speed, to the sinks and the console."""
        numbers, seconds = values(metrics), self.timeline.seconds(depth=1)
        for phase, elapsed_s in seconds.items():
            numbers[f"timing_s/{phase}"] = elapsed_s
        numbers |= speed(work, seconds, self.peak_flops)
        numbers["timing_s/step"] = sum(self.timeline.seconds(depth=0).values())
        tokens = numbers.get("perf/total_num_tokens")
        if tokens is not None:
            numbers["perf/tokens_per_s"] = tokens / numbers["timing_s/step"]
        waited_s = numbers.pop("perf/waited_s", None)
        if waited_s is not None:
            numbers["perf/controller_share"] = 1.0 - waited_s / numbers["timing_s/step"]
        self.keep_spans()
        self.sinks.log(step, numbers)
        self.console.step(step, numbers)
        for line in memory_lines(numbers):
            self.console.note(line)

    def log_validation(self, step: int, metrics: Metrics, samples: Sequence[Mapping[str, Any]]) -> None:
        """Numbers and samples of a held-out evaluation."""
        numbers = values(metrics)
        self.keep_spans()
        self.sinks.log(step, numbers)
        self.console.note(
            f"step {step} held out: "
            + " | ".join(f"{name.removeprefix('val/')} {x:.4g}" for name, x in numbers.items())
        )
        self.console.samples(samples)

    def stop(self, finished: RunState, saver: Saver) -> NoReturn:
        """End a run that was told to stop: save the state after its last finished step unless that is done already.

        Raises:
            StoppedError: always.
        """
        saver.finish()
        newest = self.store.newest()
        if finished.step > 0 and (newest is None or newest.name != step_name(finished.step)):
            saver.save(finished)
            saver.finish()
        raise StoppedError(
            f"told to stop; it goes on after step {finished.step} of {self.config.run.steps}",
            where=str(self.directory.root),
            fix="start it again to go on",
        )

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the run's summary: its presence says that the run ended well."""
        write_json(self.directory.summary, {**summary, "seconds": round(time.monotonic() - self.started, 1)})


def _open_store(config: TrainConfig | SftConfig, directory: Path) -> CheckpointStore:
    saving = config.checkpoint
    return CheckpointStore(
        directory, saving.keep, keep_every_steps=saving.keep_every_steps, contents=contents_of(config)
    )


def _open_sinks(config: TrainConfig | SftConfig, directory: RunDirectory, state: RunState, lines: int | None) -> Sinks:
    return open_sinks(
        directory.root,
        tensorboard=config.logging.tensorboard,
        wandb_project=config.logging.wandb_project,
        wandb_timeout_s=config.logging.wandb_timeout_s,
        name=config.run.name,
        config=config.model_dump(mode="json"),
        resume_step=state.step,
        resume_lines=lines if state.step > 0 else None,
    )


@contextmanager
def open_session(loaded: Loaded[Any], forecast: Mapping[str, Any] | None = None) -> Iterator[Session]:
    """Open a run.

    Args:
        loaded: its configuration with origins.
        forecast: what was said about it beforehand, kept as ``forecast.json`` for the report.

    Raises:
        ConfigError: the run directory is in use, or must not be continued.
        CheckpointError: the checkpoint to continue from is incomplete.
    """
    config: TrainConfig | SftConfig = loaded.config
    started = time.monotonic()
    with ExitStack() as stack:
        # Workers may run in another working directory.
        directory = RunDirectory(Path(config.run.dir).absolute())
        directory.open()
        stack.callback(directory.close)
        store = _open_store(config, directory.checkpoints)
        resume = find_resume(config.run.resume, store)
        state = RunState(0, 0) if resume is None else read_state(resume)
        fresh = frozenset() if resume is None else fresh_parts(resume, store.contents, config.resume.allow_fresh)
        write_resolved(loaded, directory.root)
        if forecast is not None:
            write_json(directory.root / "forecast.json", forecast)
        set_up_logging("controller", 0, directory=directory.logs)
        if config.run.resume == "auto":
            for name, wrong in store.damaged().items():
                logger.warning("%s is damaged and not continued from: %s", name, "; ".join(wrong))
        set_context(node=env.text("SLURMD_NODENAME"))
        sinks = _open_sinks(config, directory, state, None if "metrics" in fresh else state.metrics_lines)
        stack.callback(sinks.close)
        if directory.attempt > 1:
            logger.info("attempt %d", directory.attempt)
        console = Console(config.logging.console, config.run.steps, first_step=state.step)
        stack.callback(console.close)
        timeline, stopping = Timeline(), Stopping(config.run.stop_within_s)
        hang = HangWatch(config.cluster.hang, directory.logs)
        watch = Watch(config.cluster.hang.timeout_s)
        watch.observers += [stopping.check, hang.check]
        stack.enter_context(listening(timeline))
        stack.enter_context(listening(stopping))
        stack.enter_context(listening(hang))
        stack.enter_context(listening(console))
        stack.enter_context(heartbeat(directory.logs / "controller.heartbeat.json"))
        if resume is not None:
            anew = f"; afresh: {', '.join(sorted(fresh))}" if fresh else ""
            console.note(f"continuing {directory.root} after step {state.step} from {resume}{anew}")
        history = Timeline()
        stack.callback(_write_timeline, directory.root / "timeline.json", history)
        # Made here, since its mark is for the reward's processes too; closed before the console and the directory.
        cluster = Cluster()
        stack.callback(cluster.close)
        try:
            yield Session(
                config,
                directory,
                store,
                resume,
                state,
                fresh,
                console,
                sinks,
                timeline,
                history,
                watch,
                stopping,
                cluster,
                started,
                forecast,
                stack,
            )
        except BaseException as error:  # whatever it is, the directory says so
            _keep_ending(directory.ending, error)
            raise
        finally:
            signals.hold()


def check_weights(model: ModelConfig) -> None:
    """Read the headers of the weights a run starts from, so that what is wrong is found before anything starts.

    Raises:
        ModelError: no weights, a missing or truncated file, or tensors that are not the model's.
    """
    if model.init == "checkpoint":
        with SafetensorsReader(model.path) as reader:
            check_model(reader, load_spec(model.path))


def _keep_ending(path: Path, error: BaseException) -> None:
    code = getattr(error, "exit_code", getattr(error, "code", None))
    if isinstance(error, KeyboardInterrupt):
        code = signals.INTERRUPTED
    try:
        write_ending(path, ending_of(error, code if isinstance(code, int) else UNFORESEEN))
    except OSError as unwritable:  # a full disk must not hide what ended the run
        logger.warning("cannot write %s: %s", path, unwritable)


def _write_timeline(path: Path, history: Timeline) -> None:
    try:
        write_chrome_trace(path, [history])
    except OSError as error:  # a full disk must not hide what ended the run
        logger.warning("cannot write %s: %s", path, error)
