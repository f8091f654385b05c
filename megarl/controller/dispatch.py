"""One call on a group of workers: how arguments are split, whose results count, and how a failure becomes one verdict.

Invariants:
1. A worker method that a group may call declares its split and its collection; calling any other is an error.
2. Rows come back in the order they went in, whatever rank computed them.
3. Which rows form a minibatch does not depend on the number of data-parallel ranks.
4. A call on a group ends: with results, or with a ``WorkerError`` or the worker's own ``MegarlError`` naming the first
   cause, also when the process that fails is not one of those called.
"""

from __future__ import annotations

import functools
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import ray
import torch
from ray.exceptions import RayActorError, RayError, RayTaskError

from megarl.data.balance import SequenceCost, balance, inverse
from megarl.data.batch import Batch, Ragged
from megarl.errors import HangError, MegarlError, NodeError, WorkerError
from megarl.observability.metrics import merge
from megarl.observability.trace import current_phase, forget_phase, span
from megarl.parallel.grid import ParallelLayout

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

# From Ray's account of the death of an actor.
NODE_DIED = "node has died"


class Split(Enum):
    """How a call's arguments reach the ranks."""

    BROADCAST = "broadcast"  # every rank gets all arguments
    ROWS = "rows"  # the first argument is a Batch: one part per data-parallel rank, balanced by cost
    MINIBATCHES = "minibatches"  # (Batch, minibatches): parts hold their rows and their share of every minibatch
    PER_RANK = "per_rank"  # every positional argument is a list with one item per rank


class Collect(Enum):
    """Which ranks' results make up the call's result."""

    ALL = "all"  # the list of every rank's result
    FIRST = "first"  # rank 0's
    COLUMNS = "columns"  # dict of Ragged columns from (last stage, tp 0) of each data-parallel rank, rows in order
    METRICS = "metrics"  # metrics of (last stage, tp 0, dp 0); the engine has reduced them over the grid


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Declaration of one worker method."""

    split: Split
    collect: Collect


def dispatch(*, split: Split = Split.BROADCAST, collect: Collect = Collect.ALL) -> Callable[[F], F]:
    """Declare how a worker method is called on a group."""

    def declare(method: F) -> F:
        @functools.wraps(method)
        def entry(*args: Any, **kwargs: Any) -> Any:
            # The process entry point: whatever ends the call, its traceback belongs into this rank's own log.
            try:
                with span(method.__name__):
                    return method(*args, **kwargs)
            except Exception:
                logger.exception("%s failed", method.__name__)
                raise

        entry.__dispatch__ = Dispatch(split, collect)  # type: ignore[attr-defined]
        return entry  # type: ignore[return-value]

    return declare


@dataclass(frozen=True, slots=True)
class Member:
    """One worker process: who it is and how to reach it."""

    role: str
    rank: int
    handle: Any
    sentinel: Any  # ref of a call that ends only when the process does
    node: str | None = None  # where it runs, in a run on several nodes


class Watch:
    """Waits for remote calls while watching every process of the run, so that a death anywhere ends the wait."""

    # How long after a failure a death may be reported that caused it: a dead process makes its peers' collectives fail
    # some hundred milliseconds before Ray reports the death.
    grace_s = 3.0
    # How often observers are called during a wait.
    tick_s = 1.0

    # Longest fetch of a result that is there already.
    fetch_s = 60.0

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        """Of calls that bring none of their own."""
        self.members: list[Member] = []
        self.observers: list[Callable[[Mapping[Any, Member]], None]] = []
        """Called with the calls that are waited for, at the start of a wait and while it lasts; may raise to end it."""
        self.waited_s = 0.0
        """Seconds spent waiting for workers since the start."""

    def add(self, members: Sequence[Member]) -> None:
        self.members.extend(members)

    def get(self, calls: Mapping[Any, Member], timeout_s: float | None = None) -> list[Any]:
        """Results of ``{ref: member}`` in order.

        Raises:
            MegarlError: what a worker raised on purpose.
            WorkerError: a process died or raised something unforeseen, or the time-out passed.
            Exception: what an observer raised.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        pending = dict(calls)
        results: dict[Any, Any] = {}
        sentinels = {member.sentinel: member for member in self.members}
        while pending:
            for observe in self.observers:
                observe(pending)
            wait_s = max(0.0, deadline - time.monotonic())
            is_tick = bool(self.observers) and wait_s > self.tick_s
            if is_tick:
                wait_s = self.tick_s
            started = time.monotonic()
            refs = [*pending, *sentinels]
            ready, _ = ray.wait(refs, num_returns=1, timeout=wait_s)
            self.waited_s += time.monotonic() - started
            if ready:
                # A look at hundreds of refs costs milliseconds: one for all that have come since, not one for each.
                ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
            elif is_tick:
                continue
            else:
                late = sorted({f"{calls[ref].role} rank {calls[ref].rank}" for ref in pending})
                first = next(iter(pending.values()))
                raise HangError(
                    role=first.role,
                    rank=first.rank,
                    node=first.node,
                    phase=current_phase(),
                    cause=f"no answer within {timeout_s:.0f} s from {', '.join(late)}",
                    fix="look into the logs of these ranks; raise the time-out if the phase is only slow",
                )
            for ref in ready:
                try:
                    results[ref] = ray.get(ref, timeout=self.fetch_s)
                except RayError as error:
                    raise self._verdict(calls, sentinels, ref, error) from error
                pending.pop(ref, None)
                sentinels.pop(ref, None)  # one that returns without an error means that the process was told to stop
        return [results[ref] for ref in calls]

    def _verdict(
        self, calls: Mapping[Any, Member], sentinels: Mapping[Any, Member], first: Any, error: RayError
    ) -> MegarlError:
        """The first cause: a death before what it did to others, what was raised on purpose before what was not."""
        failures: dict[Any, RayError] = {first: error}
        if first not in sentinels:
            ray.wait(list(sentinels), num_returns=1, timeout=self.grace_s)
        refs = [ref for ref in {**sentinels, **calls} if ref != first]
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0) if refs else ([], [])
        for ref in ready:
            try:
                ray.get(ref, timeout=self.fetch_s)
            except RayError as another:
                failures[ref] = another
        members = {**calls, **sentinels}
        # A sentinel fails by the death of its process, or of a process that its process answers for.
        for ref in sorted(failures, key=lambda ref: ref not in sentinels):
            if _is_death(failures[ref]):
                return _died(members[ref], failures[ref])
        for ref in sorted(failures, key=lambda ref: ref not in sentinels):
            own = unwrap(failures[ref])
            if isinstance(own, MegarlError):
                if ref in sentinels and own.where is None:
                    own.where = f"phase {current_phase()}"
                return own
        return _raised(members[first], unwrap(error))


def _died(member: Member, error: RayError) -> WorkerError:
    account = str(error)
    kind = NodeError if NODE_DIED in account else WorkerError
    return kind(
        role=member.role,
        rank=member.rank,
        node=member.node,
        phase=current_phase(),
        cause=_death_reason(account),
        fix=f"see logs/{member.role}-{member.rank}.out in the run directory; a process that was killed often met the "
        "end of the host's memory",
    )


def _raised(member: Member, cause: BaseException) -> WorkerError:
    text = str(cause).strip().splitlines()
    return WorkerError(
        role=member.role,
        rank=member.rank,
        node=member.node,
        phase=current_phase(),
        cause=f"{type(cause).__name__}: {text[0] if text else 'no message'}",
        fix=f"the traceback is in logs/{member.role}-{member.rank}.log in the run directory",
    )


def _is_death(error: BaseException) -> bool:
    return isinstance(error, RayActorError) and not isinstance(error, RayTaskError)


def _death_reason(account: str) -> str:
    """Ray's account of an actor's death, several lines and its guesses, as one clause."""
    lines = [line.strip() for line in account.splitlines() if line.strip()]
    if "creation task" in account:
        return f"the process did not start: {lines[-1]}"
    process = re.search(r"\bpid: (\d+)", account)
    who = f"process {process[1]}" if process else "the process"
    if NODE_DIED in account:
        return f"{who} died with its node"
    exit_type = re.search(r"Worker exit type: (\w+)", account)
    if exit_type is None or exit_type[1] == "SYSTEM_ERROR":
        return f"{who} was killed or crashed"
    return f"{who} died ({exit_type[1]})"


def unwrap(error: BaseException) -> BaseException:
    """The exception a remote call raised, without Ray's wrapping."""
    if isinstance(error, RayTaskError):
        if not isinstance(error.cause, BaseException):
            return error
        forget_phase(error.cause)
        return error.cause
    return error


class WorkerGroup:
    """The processes of one role, called as one.

    ``group.method(...)`` calls ``method`` of the worker class on every rank, as the method's ``dispatch`` declares.

    Args:
        worker_class: class of the processes.
        members: the processes, by rank.
        layout: the role's layout.
        watch: waits for calls.
        cost: of a sequence, by which rows are spread over data-parallel ranks; its tokens if None.
    """

    def __init__(
        self,
        worker_class: type,
        members: Sequence[Member],
        layout: ParallelLayout,
        watch: Watch,
        cost: SequenceCost | None = None,
    ) -> None:
        self._worker_class = worker_class
        self.members = list(members)
        self.layout = layout
        self._watch = watch
        self._cost = SequenceCost() if cost is None else cost

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._worker_class, name, None)
        declared = getattr(method, "__dispatch__", None)
        if declared is None:
            raise AttributeError(f"{self._worker_class.__name__}.{name} is not declared with @dispatch")

        def call(*args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
            return self._call(name, declared, args, kwargs, timeout_s)

        return call

    def _call(
        self, name: str, declared: Dispatch, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float | None
    ) -> Any:
        per_rank, order = self._split(declared.split, args)
        calls = {
            getattr(member.handle, name).remote(*per_rank[member.rank], **kwargs): member for member in self.members
        }
        results = self._watch.get(calls, timeout_s)
        return self._collect(declared.collect, results, order)

    def _split(self, split: Split, args: tuple[Any, ...]) -> tuple[list[tuple[Any, ...]], list[list[int]]]:
        world_size, dp = self.layout.world_size, self.layout.dp
        if split is Split.BROADCAST:
            shared = tuple(ray.put(arg) if isinstance(arg, Batch) else arg for arg in args)
            return [shared] * world_size, []
        if split is Split.PER_RANK:
            return [tuple(arg[rank] for arg in args) for rank in range(world_size)], []
        batch = args[0]
        costs = self._cost.of(batch.sequence_lengths.tolist())
        if split is Split.ROWS:
            parts = shares_of(costs, dp)
            rest: list[tuple[Any, ...]] = [args[1:]] * dp
        else:
            parts, local = split_minibatches(costs, args[1], dp)
            rest = [(local[d], *args[2:]) for d in range(dp)]
        # One object per data-parallel rank; its tensor and pipeline ranks read the same one.
        refs = [ray.put(batch.select(part)) for part in parts]
        per_rank = []
        for rank in range(world_size):
            d = self.layout.coordinate(rank).dp
            per_rank.append((refs[d], *rest[d]))
        return per_rank, parts

    def _collect(self, collect: Collect, results: list[Any], order: list[list[int]]) -> Any:
        if collect is Collect.ALL:
            return results
        if collect is Collect.FIRST:
            return results[0]
        last = self.layout.pp - 1
        speakers = [
            rank
            for rank in range(self.layout.world_size)
            if (at := self.layout.coordinate(rank)).pp == last and at.tp == 0 and at.cp == 0
        ]
        if collect is Collect.METRICS:
            return merge([results[speakers[0]]])
        back = inverse(order)
        return {
            name: Ragged.concat([results[rank][name] for rank in speakers]).select(back)
            for name in results[speakers[0]]
        }


def shares_of(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Rows of each part, balanced by cost; with fewer rows than parts the last parts are empty."""
    if len(costs) < parts:
        return [[row] for row in range(len(costs))] + [[] for _ in range(parts - len(costs))]
    return balance(costs, parts, equal_counts=False)


def split_minibatches(
    costs: Sequence[float], minibatches: Sequence[Sequence[int]], dp: int
) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Share every minibatch among data-parallel ranks.

    Args:
        costs: cost of each row.
        minibatches: rows of each optimizer update; a row may be in several (one per epoch).
        dp: number of data-parallel ranks.

    Returns:
        The rows each rank needs, and for each rank its minibatches as indices into those rows.
    """
    rows: list[list[int]] = [[] for _ in range(dp)]
    place: list[dict[int, int]] = [{} for _ in range(dp)]
    local: list[list[list[int]]] = [[] for _ in range(dp)]
    for minibatch in minibatches:
        parts = shares_of([costs[row] for row in minibatch], dp)
        for d, part in enumerate(parts):
            share = []
            for row in (minibatch[index] for index in part):
                if row not in place[d]:
                    place[d][row] = len(rows[d])
                    rows[d].append(row)
                share.append(place[d][row])
            local[d].append(share)
    return rows, local


def make_minibatches(
    num_rows: int, minibatch_size: int | None, *, epochs: int, shuffle: bool, seed: int
) -> list[list[int]]:
    """Rows of every optimizer update of one step, in order; the same for any layout.

    A last minibatch smaller than ``minibatch_size`` is kept: no row is left out.
    """
    size = num_rows if minibatch_size is None else min(minibatch_size, num_rows)
    generator = torch.Generator().manual_seed(seed)
    minibatches = []
    for _ in range(epochs):
        order = torch.randperm(num_rows, generator=generator).tolist() if shuffle else list(range(num_rows))
        minibatches += [order[start : start + size] for start in range(0, num_rows, size)]
    return minibatches
