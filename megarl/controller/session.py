"""What every run has, whichever loop runs in it: directory, logs, console, trackers, checkpoints, processes.

Invariant: leaving the session ends every process of the run and releases its directory, however the run ended.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from megarl.config.origin import Loaded, write_resolved
from megarl.config.schema import SftConfig, TrainConfig
from megarl.controller.cluster import Cluster, wait_for_nodes
from megarl.controller.dispatch import Watch
from megarl.controller.placement import plan_placement
from megarl.controller.processes import Processes
from megarl.controller.state import CheckpointStore, RunDirectory, RunState, find_resume, read_state, write_json
from megarl.observability.console import Console
from megarl.observability.heartbeat import heartbeat
from megarl.observability.logs import set_up_logging
from megarl.observability.metrics import Metrics, values
from megarl.observability.sinks import Sinks, open_sinks
from megarl.observability.trace import Timeline, listening, write_chrome_trace

logger = logging.getLogger(__name__)

TERMINATED = 143


@dataclass(slots=True)
class Session:
    """The surroundings of one run.

    Args:
        config: the run's configuration.
        directory: where it writes.
        store: its checkpoints.
        resume: the checkpoint to continue from, or None.
        state: where to continue; step 0 at the start.
        console: what a person sees.
        sinks: where numbers go.
        timeline: phases finished since the last logged step.
        history: all earlier ones.
        watch: waits on worker processes.
        started: monotonic seconds at which the session was opened.
    """

    config: TrainConfig | SftConfig
    directory: RunDirectory
    store: CheckpointStore
    resume: Path | None
    state: RunState
    console: Console
    sinks: Sinks
    timeline: Timeline
    history: Timeline
    watch: Watch
    started: float
    _stack: ExitStack

    def start_processes(self) -> Processes:
        """Ray, and the slots of this run reserved on it.

        Raises:
            ConfigError: the roles do not fit on the stated nodes.
            SetupError: nodes or devices are missing.
        """
        cluster = self.config.cluster
        placement = plan_placement(self.config)
        num_slots = placement.slots_per_node * placement.num_nodes
        ray = Cluster(cluster.ray_address, num_slots=num_slots, num_gpus=num_slots if cluster.device == "cuda" else 0)
        self._stack.callback(ray.close)
        # Ray installs a handler of its own that would skip the clean-up of what it does not know.
        signal.signal(signal.SIGTERM, _terminate)
        wait_for_nodes(cluster.num_nodes, cluster.start_timeout_s)
        return Processes(ray, cluster, placement, self.watch)

    def keep_spans(self) -> None:
        """Move the finished phases into the history: those before the first step are not part of it."""
        self.history.spans += self.timeline.take().spans

    def log_step(self, step: int, metrics: Metrics) -> None:
        """Numbers of a finished step with its phases' seconds, to the sinks and the console."""
        numbers = values(metrics)
        for phase, seconds in self.timeline.seconds(depth=1).items():
            numbers[f"timing_s/{phase}"] = seconds
        numbers["timing_s/step"] = sum(self.timeline.seconds(depth=0).values())
        tokens = numbers.get("perf/total_num_tokens")
        if tokens is not None:
            numbers["perf/tokens_per_s"] = tokens / numbers["timing_s/step"]
        self.keep_spans()
        self.sinks.log(step, numbers)
        self.console.step(step, numbers)

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

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the run's summary: its presence says that the run ended well."""
        write_json(self.directory.summary, {**summary, "seconds": round(time.monotonic() - self.started, 1)})


@contextmanager
def open_session(loaded: Loaded[Any]) -> Iterator[Session]:
    """Open a run.

    Raises:
        ConfigError: the run directory is in use, or must not be continued.
        CheckpointError: the checkpoint to continue from is incomplete.
    """
    config: TrainConfig | SftConfig = loaded.config
    started = time.monotonic()
    with ExitStack() as stack:
        directory = RunDirectory(Path(config.run.dir))
        directory.open()
        stack.callback(directory.close)
        store = CheckpointStore(directory.checkpoints, config.checkpoint.keep)
        resume = find_resume(config.run.resume, store)
        state = RunState(0, 0) if resume is None else read_state(resume)
        write_resolved(loaded, directory.root)
        set_up_logging("controller", 0, directory=directory.logs)
        sinks = open_sinks(
            directory.root,
            tensorboard=config.logging.tensorboard,
            wandb_project=config.logging.wandb_project,
            name=config.run.name,
            config=config.model_dump(mode="json"),
            resume_step=state.step,
        )
        stack.callback(sinks.close)
        console = Console(config.logging.console, config.run.steps, first_step=state.step)
        stack.callback(console.close)
        timeline = Timeline()
        stack.enter_context(listening(timeline))
        stack.enter_context(listening(console))
        stack.enter_context(heartbeat(directory.logs / "controller.heartbeat.json"))
        if resume is not None:
            console.note(f"continuing {directory.root} after step {state.step} from {resume}")
        history = Timeline()
        stack.callback(lambda: write_chrome_trace(directory.root / "timeline.json", [history]))
        yield Session(
            config, directory, store, resume, state, console, sinks, timeline, history, Watch(), started, stack
        )


def _terminate(_: int, __: FrameType | None) -> NoReturn:
    raise SystemExit(TERMINATED)
