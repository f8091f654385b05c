"""The rollout workers: thin asynchronous Ray actors, each around one engine replica.

The engine's own processes (scheduler, tensor-parallel ranks) are children of the worker; the death of any of them ends
``watch``, which the controller waits on.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from megarl.config.schema.roles import RolloutConfig
from megarl.controller.dispatch import Member
from megarl.controller.workers import enter_worker
from megarl.errors import RolloutError
from megarl.observability.stacks import Stack, frames_of, stacks_of_process
from megarl.observability.trace import span
from megarl.rollout.engine import Completion, Request
from megarl.rollout.sampling import Sampling
from megarl.weights.region import Shape
from megarl.weights.row_sums import Share
from megarl.weights.sync import InFlight, RankConnection, RankLayout, ReceiverReport

logger = logging.getLogger(__name__)


F = TypeVar("F", bound=Callable[..., Any])


def as_phase(method: F) -> F:
    """While the method runs it is the phase of this process, in its heartbeat."""

    @functools.wraps(method)
    async def entry(*args: Any, **kwargs: Any) -> Any:
        with span(method.__name__):
            return await method(*args, **kwargs)

    return entry  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """Everything a rollout worker is told.

    Args:
        model_dir: Hugging Face directory; its weights are not read, the first update brings them.
        config: the rollout role.
        device: cpu or cuda.
        max_model_len: longest prompt plus response.
        seed: of the engine; requests bring their own.
        can_sleep: whether the engine shares its device with training in turns.
        collective_timeout_s: time-out of collectives among its ranks.
        logs: directory of the run's log files.
    """

    model_dir: Path
    config: RolloutConfig
    device: Literal["cpu", "cuda"]
    max_model_len: int
    seed: int
    can_sleep: bool
    collective_timeout_s: float
    logs: Path


class RolloutWorker:
    """One engine replica; its methods are those of ``rollout.engine.RolloutEngine``."""

    def __init__(self, plan: EnginePlan, replica: int) -> None:
        self._plan = plan
        self._replica = replica
        self._start_ended = asyncio.Event()
        self._start_failure: Exception | None = None
        enter_worker("rollout", replica, plan.logs)

    @as_phase
    async def start(self) -> None:
        """Build the engine."""
        try:
            await self._start()
        except Exception as error:  # the process entry point: whatever it is ends ``watch`` as well
            logger.exception("the engine did not start")
            self._start_failure = error
            if isinstance(error, RolloutError):
                self._explain(error)
            raise
        finally:
            self._start_ended.set()

    async def _start(self) -> None:
        # vLLM takes seconds to import and reads its environment when it does: only here, in the worker.
        from megarl.rollout.vllm.engine import VllmEngine

        plan = self._plan
        self._engine = VllmEngine(
            plan.model_dir,
            plan.config,
            device=plan.device,
            max_model_len=plan.max_model_len,
            seed=plan.seed,
            replica=self._replica,
            can_sleep=plan.can_sleep,
            collective_timeout_s=plan.collective_timeout_s,
        )
        await self._engine.start()

    def _explain(self, error: RolloutError) -> None:
        """The exception says only that a process of vLLM did not start; that process printed why into our output."""
        cause = first_error((self._plan.logs / f"rollout-{self._replica}.out").read_text(errors="replace"))
        if cause is not None:
            error.problem = f"the engine did not start: {cause}"
        error.fix = f"the whole story is in logs/rollout-{self._replica}.out in the run directory"

    async def watch(self) -> None:
        """Returns when the engine is stopped; fails when it does not start or a process of it dies."""
        await self._start_ended.wait()
        if self._start_failure is not None:
            raise self._start_failure
        await self._engine.watch()

    async def stacks(self) -> list[Stack]:
        """Where the tasks of this process are that wait for the engine, and where the engine's own processes are."""
        waiting = [task.get_stack() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        # The frames of a task that waits are its own: those of the loop that resumes it are not below them.
        tasks = [Stack("engine", tuple(frames_of(one)[-1] for one in stack)) for stack in waiting if stack]
        # Each costs a process, some for seconds: all at once.
        others = [
            asyncio.to_thread(stacks_of_process, pid, name)
            for pid, name in (self._engine.processes if self._start_ended.is_set() else {}).items()
        ]
        return [*tasks, *(stack for found in await asyncio.gather(*others) for stack in found)]

    async def stop(self) -> None:
        """End all processes of the engine."""
        if self._start_ended.is_set() and self._start_failure is None:
            await self._engine.stop()

    @as_phase
    async def generate(
        self, requests: Sequence[Request], sampling: Sampling, n: int
    ) -> list[tuple[int, list[Completion]]]:
        """``n`` samples of every request."""
        return await self._engine.generate(requests, sampling, n)

    @as_phase
    async def layout(self, shapes: Mapping[str, Shape]) -> Sequence[RankLayout]:
        """Where its ranks want which parts of the model."""
        return await self._engine.layout(shapes)

    @as_phase
    async def connect(self, connections: Sequence[RankConnection]) -> None:
        """Connect its ranks to the senders."""
        await self._engine.connect(connections)

    @as_phase
    async def receive(
        self, version: int, timeout_s: float, digest: str, share: Share | None, in_flight: InFlight
    ) -> ReceiverReport:
        """Take what the senders send."""
        return await self._engine.receive(version, timeout_s, digest, share, in_flight)

    @as_phase
    async def score(self, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """Log-probs of given tokens."""
        return await self._engine.score(rows)

    @as_phase
    async def commit(self, version: int) -> None:
        """Put the received weights in force."""
        await self._engine.commit(version)

    async def poison(self, reason: str) -> None:
        """Refuse to sample until the next commit."""
        await self._engine.poison(reason)

    async def abort(self) -> None:
        """End the samples under way."""
        await self._engine.abort()

    @as_phase
    async def sleep(self) -> None:
        """Give device memory back."""
        await self._engine.sleep()

    @as_phase
    async def wake_up(self, tags: Sequence[str]) -> None:
        """Take it again."""
        await self._engine.wake_up(tags)


def first_error(output: str) -> str | None:
    """The first exception named in the output of an engine's processes; theirs are prefixed by process and time."""
    named = (re.search(r"(?:^|\] |\s)(\w+(?:Error|Exception): \S.*)$", line) for line in output.splitlines())
    return next((match[1] for match in named if match is not None), None)


def start_engines(members: Sequence[Member]) -> dict[Any, Member]:
    """Begin starting all engines; the calls to wait for."""
    return {member.handle.start.remote(): member for member in members}
