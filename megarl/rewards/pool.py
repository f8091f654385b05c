"""Scoring processes: every batch comes back whole, in order, within its time.

Invariants:
1. ``score`` returns one result per sample, in order. An exception, a wrong return type, a time-out and the death of the
   process are failed results with the configured score; the other samples of the batch are not touched by it.
2. A sample that runs longer than its time is ended by killing its process, by pid, and the group of processes it
   started; a new one takes its place.
3. After ``close``, or the death of the parent, no process is left.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Self

from megarl.errors import RewardError
from megarl.platform import env
from megarl.rewards.base import RewardInput, RewardResult
from megarl.rewards.regex import compile_pattern
from megarl.rewards.registry import RewardSpec
from megarl.rewards.worker import Numbered

_logger = logging.getLogger(__name__)

_KEPT_MESSAGES = 10
_LARGEST_CHUNK = 64
# A process answers a time-out of asynchronous code by itself; killing it is for code that does not let it.
_ASYNC_GRACE_S = 1.0
# How often observers are called.
_TICK_S = 1.0
# Longest wait for the end of a process that was killed.
_REAP_S = 10.0


@dataclass(slots=True)
class _Worker:
    """One scoring process; ``doing`` holds the samples it has not answered, the running one first."""

    process: subprocess.Popen[bytes]
    connection: Any
    started: float
    is_ready: bool = False
    is_async: bool = False
    doing: deque[Numbered] = field(default_factory=deque)
    since: float = 0.0
    death: str | None = None


class RewardPool:
    """A reward in ``workers`` processes of its own. Keyword arguments are those of the configuration's reward.

    The processes start at once and load in the background; ``ready`` or the first ``score`` waits for them.

    Args:
        kind: reasoning_gym, math_verify, regex or function.
        path: of the user's function.
        pattern: regular expression.
        workers: number of processes.
        timeout_s: time for one sample.
        failure_score: score of a failed sample.
        start_timeout_s: time for a process to load the reward.

    Raises:
        RewardError: the pattern is no regular expression.
    """

    def __init__(
        self,
        kind: str = "reasoning_gym",
        *,
        path: str | None = None,
        pattern: str | None = None,
        workers: int = 2,
        timeout_s: float = 10.0,
        failure_score: float = 0.0,
        start_timeout_s: float = 120.0,
    ) -> None:
        if pattern is not None:
            compile_pattern(pattern)
        self._spec = RewardSpec(kind, path, pattern, timeout_s)
        self._timeout_s = timeout_s
        self._failure_score = failure_score
        self._start_timeout_s = start_timeout_s
        self._lock = threading.Lock()
        self._is_closed = False
        self.num_failed = 0
        """Failed samples since the pool was made."""
        self.failures: list[str] = []
        """The first few failures in words."""
        self.observers: list[Callable[[], None]] = []
        """Called while samples are scored; may raise to end it, which costs the processes that score."""
        self._workers = [self._spawn() for _ in range(workers)]

    # -- use ---------------------------------------------------------------------------------------------------------

    def ready(self) -> None:
        """Wait until every process has loaded the reward.

        Raises:
            RewardError: it cannot be loaded; says why.
        """
        with self._lock:
            self._await_ready()

    def score(self, samples: Sequence[RewardInput]) -> list[RewardResult]:
        """One result per sample, in order. Callable from any thread; calls follow one another.

        Raises:
            RewardError: the pool is closed, or the reward cannot be loaded (any more).
        """
        with self._lock:
            if self._is_closed:
                raise RewardError("the reward pool is closed")
            self._replace_dead()
            self._await_ready()
            return self._score(samples)

    async def score_async(self, samples: Sequence[RewardInput]) -> list[RewardResult]:
        """``score`` in a thread."""
        return await asyncio.to_thread(self.score, samples)

    def close(self) -> None:
        """End all processes; safe to call twice."""
        with self._lock:
            self._is_closed = True
            while self._workers:
                _end(self._workers.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.process.pid for worker in self._workers]

    # -- scoring -----------------------------------------------------------------------------------------------------

    def _score(self, samples: Sequence[RewardInput]) -> list[RewardResult]:
        results: list[RewardResult | None] = [None] * len(samples)
        waiting: deque[Numbered] = deque()
        for number, sample in enumerate(samples):
            try:
                waiting.append((number, pickle.dumps(sample)))
            except (pickle.PicklingError, AttributeError, TypeError) as error:  # what unpicklable objects raise
                results[number] = self._failed(f"the sample cannot be pickled: {error}")
        # Several chunks a process: the last ones even out samples of unequal cost.
        chunk = max(1, min(_LARGEST_CHUNK, len(samples) // (4 * len(self._workers))))
        try:
            while waiting or any(worker.doing for worker in self._workers):
                for observe in self.observers:
                    observe()
                for position, worker in enumerate(self._workers):
                    if reason := self._verdict(worker):
                        if worker.doing:
                            number, _ = worker.doing.popleft()
                            results[number] = self._failed(reason)
                            waiting.extendleft(reversed(worker.doing))
                        worker = self._workers[position] = self._replacement(worker, reason)
                    if worker.is_ready and not worker.doing and waiting:
                        size = min(_LARGEST_CHUNK if worker.is_async else chunk, len(waiting))
                        _send(worker, [waiting.popleft() for _ in range(size)])
                self._receive(results)
        except BaseException:
            # Also Ctrl-C: late answers of this batch must not be taken for answers of the next one.
            for worker in self._workers:
                if worker.doing:
                    _end(worker)
            raise
        return [result for result in results if result is not None]

    def _receive(self, results: list[RewardResult | None]) -> None:
        """Take what has arrived, waiting until something does or a time is up."""
        if not any(worker.doing or not worker.is_ready for worker in self._workers):
            return
        left_s = min(self._deadline(worker) for worker in self._workers) - time.monotonic()
        if self.observers:
            left_s = min(left_s, _TICK_S)
        by_connection = {worker.connection: worker for worker in self._workers}
        for connection in wait(list(by_connection), timeout=max(0.0, left_s)):
            worker = by_connection[connection]
            try:
                while worker.connection.poll():
                    self._take(worker, worker.connection.recv(), results)
            except (EOFError, OSError):
                worker.death = _cause_of_death(worker)

    def _take(self, worker: _Worker, message: tuple[Any, Any], results: list[RewardResult | None]) -> None:
        if not worker.is_ready:
            _start(worker, message)
            return
        number, result = message
        # Answers of asynchronous code come in any order.
        worker.doing = deque(entry for entry in worker.doing if entry[0] != number)
        worker.since = time.monotonic()
        results[number] = result if isinstance(result, RewardResult) else self._failed(result)

    def _verdict(self, worker: _Worker) -> str | None:
        """Why the process is to be replaced, or None."""
        if worker.death is not None:
            return worker.death
        if time.monotonic() < self._deadline(worker):
            return None
        if worker.is_ready:
            return f"TimeoutError: no score within {self._timeout_s:g} s"
        return f"the scoring process did not load the reward within {self._start_timeout_s:g} s"

    def _deadline(self, worker: _Worker) -> float:
        if not worker.is_ready:
            return worker.started + self._start_timeout_s
        if not worker.doing:
            return math.inf
        return worker.since + self._timeout_s + (_ASYNC_GRACE_S if worker.is_async else 0.0)

    def _failed(self, reason: str) -> RewardResult:
        self.num_failed += 1
        if len(self.failures) < _KEPT_MESSAGES:
            self.failures.append(reason)
            _logger.warning("scoring a sample failed: %s", reason)
        return RewardResult(self._failure_score, {}, reason)

    # -- processes ---------------------------------------------------------------------------------------------------

    def _spawn(self) -> _Worker:
        ours, theirs = socket.socketpair()
        # A stopped process would otherwise block the sender for ever once the buffer is full.
        limit_s = max(1, math.ceil(self._timeout_s))
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", limit_s, 0))
        with theirs:
            environment = env.copy()
            # The worker finds what this process finds, a user's module in the working directory included.
            environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
            environment["OMP_NUM_THREADS"] = "1"
            process = subprocess.Popen(
                [sys.executable, "-m", "megarl.rewards.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # Ctrl-C is the parent's to handle, and the group can be ended as one
            )
        connection: Any = Connection(ours.detach())
        connection.send(self._spec)
        return _Worker(process, connection, time.monotonic())

    def _replacement(self, worker: _Worker, reason: str) -> _Worker:
        _end(worker)
        if not worker.is_ready:
            raise RewardError(f"the reward could not be loaded: {reason}", fix="its output above says why")
        return self._spawn()

    def _replace_dead(self) -> None:
        """Processes that died between batches took no sample with them."""
        for position, worker in enumerate(self._workers):
            if worker.process.returncode is not None or _has_exited(worker):
                _logger.warning("scoring process %d had ended; a new one takes its place", worker.process.pid)
                self._workers[position] = self._replacement(worker, "the scoring process had ended")

    def _await_ready(self) -> None:
        for worker in self._workers:
            if worker.is_ready:
                continue
            try:
                if worker.connection.poll(max(0.0, self._deadline(worker) - time.monotonic())):
                    _start(worker, worker.connection.recv())
            except (EOFError, OSError):
                worker.death = _cause_of_death(worker)
            if not worker.is_ready:
                self._replacement(worker, self._verdict(worker) or "no answer")


def _send(worker: _Worker, chunk: list[Numbered]) -> None:
    worker.doing.extend(chunk)
    worker.since = time.monotonic()
    try:
        worker.connection.send(chunk)
    except OSError:
        # It died just now or does not read; the end of its connection or its deadline will say so.
        _logger.debug("cannot send to scoring process %d", worker.process.pid)


def _start(worker: _Worker, message: tuple[str, Any]) -> None:
    state, detail = message
    if state == "broken":
        raise detail
    worker.is_ready, worker.is_async = True, detail


def _has_exited(worker: _Worker) -> bool:
    # Without reaping it: while the process is a zombie, its group is still its own and can be killed.
    return os.waitid(os.P_PID, worker.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _cause_of_death(worker: _Worker, patience_s: float = 1.0) -> str:
    """In words, for a process whose connection has ended."""
    until = time.monotonic() + patience_s
    while not _has_exited(worker):
        if time.monotonic() > until:
            return "the scoring process closed its connection"
        time.sleep(0.01)
    state = os.waitid(os.P_PID, worker.process.pid, os.WEXITED | os.WNOWAIT)
    if state is not None and state.si_code == os.CLD_EXITED:
        return f"the scoring process exited with code {state.si_status}"
    return f"the scoring process was killed by signal {state.si_status if state else '?'}"


def _end(worker: _Worker) -> None:
    """End a process and the group it leads, and wait for it."""
    worker.connection.close()
    if worker.process.returncode is None:
        os.killpg(worker.process.pid, signal.SIGKILL)
        try:
            worker.process.wait(timeout=_REAP_S)
        except subprocess.TimeoutExpired:  # the kernel holds it in a call, on a file system that hangs
            _logger.warning("scoring process %d was killed and has not ended yet", worker.process.pid)
