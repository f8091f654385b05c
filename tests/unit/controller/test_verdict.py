"""Of several failures at about the same time, the first cause is the one reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from megarl.controller import dispatch
from megarl.controller.dispatch import Member, Watch
from megarl.errors import CheckpointError, HangError, MegarlError, NodeError, RolloutError, SyncError, WorkerError
from megarl.observability.trace import span

DIED = """\
The actor died unexpectedly before finishing this task.
\tclass_name: TrainWorker
\tactor_id: 0123
\tpid: 4242
\tnamespace: 5
\tip: 10.0.0.1
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker \
unexpectedly exits with a connection error code 2. End of file. There are some potential root causes. (1) ..."""


class Outcomes:
    """Stands for ray: a ref is a name, and each name has the moment it is ready and what it gives then."""

    def __init__(self, outcomes: dict[str, tuple[float, Any]]) -> None:
        self.outcomes = outcomes
        self.now = 0.0

    def wait(self, refs: Sequence[str], *, num_returns: int, timeout: float | None) -> tuple[list[str], list[str]]:
        times = sorted(self.outcomes[ref][0] for ref in refs if ref in self.outcomes)
        until = self.now + timeout if timeout is not None else float("inf")
        if len(times) >= num_returns:
            until = min(until, max(self.now, times[num_returns - 1]))
        self.now = until
        ready = [ref for ref in refs if ref in self.outcomes and self.outcomes[ref][0] <= self.now]
        return ready[:num_returns], [ref for ref in refs if ref not in ready[:num_returns]]

    def get(self, ref: str, *, timeout: float) -> Any:
        outcome = self.outcomes[ref][1]
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


def raised(error: Exception) -> RayTaskError:
    return RayTaskError("update", "traceback", error)


def death(account: str = DIED) -> ActorDiedError:
    error = ActorDiedError()
    error.error_msg = account
    return error


def judge(monkeypatch: pytest.MonkeyPatch, outcomes: dict[str, tuple[float, Any]]) -> tuple[MegarlError, float]:
    """The error of a call on actor ranks 0 and 1 beside an engine, and when it was raised."""
    ray = Outcomes(outcomes)
    monkeypatch.setattr(dispatch, "ray", ray)
    watch = Watch(600.0)
    actors = [Member("actor", rank, None, f"watch actor {rank}") for rank in range(2)]
    watch.add([*actors, Member("rollout", 0, None, "watch rollout 0")])
    with span("update_actor"), pytest.raises(MegarlError) as caught:
        watch.get({f"call actor {member.rank}": member for member in actors})
    return caught.value, ray.now


def test_a_death_comes_before_what_it_did_to_its_peers(monkeypatch: pytest.MonkeyPatch):
    error, now = judge(
        monkeypatch,
        {
            "call actor 0": (1.0, raised(RuntimeError("Connection closed by peer"))),
            "call actor 1": (1.4, death()),
            "watch actor 1": (1.4, death()),
        },
    )
    assert isinstance(error, WorkerError)
    assert (error.role, error.rank, error.phase) == ("actor", 1, "update_actor")
    assert error.cause == "process 4242 was killed or crashed"
    assert now == pytest.approx(1.4)


def test_the_death_of_a_process_that_was_not_called_ends_the_call(monkeypatch: pytest.MonkeyPatch):
    error, now = judge(monkeypatch, {"watch rollout 0": (7.0, death())})
    assert isinstance(error, WorkerError) and (error.role, error.rank) == ("rollout", 0)
    assert now == 7.0


def test_a_dead_process_of_an_engine_comes_before_the_update_it_broke(monkeypatch: pytest.MonkeyPatch):
    error, _ = judge(
        monkeypatch,
        {
            "call actor 0": (1.0, raised(SyncError("connection closed"))),
            "watch rollout 0": (1.1, raised(RolloutError("rollout replica 0 rank 1 (process 7) died"))),
        },
    )
    assert isinstance(error, RolloutError)
    assert str(error) == "rollout replica 0 rank 1 (process 7) died [phase update_actor]"


def test_what_a_rank_raised_on_purpose_comes_before_what_it_did_to_others(monkeypatch: pytest.MonkeyPatch):
    full = CheckpointError("the disk is full", where="step_000001")
    error, now = judge(
        monkeypatch,
        {"call actor 1": (1.0, raised(RuntimeError("closed"))), "call actor 0": (1.5, raised(full))},
    )
    assert error is full
    assert now == pytest.approx(1.0 + Watch.grace_s)


def test_the_unforeseen_names_rank_phase_and_exception(monkeypatch: pytest.MonkeyPatch):
    error, _ = judge(monkeypatch, {"call actor 1": (1.0, raised(ZeroDivisionError("division by zero\nmore")))})
    assert isinstance(error, WorkerError)
    assert error.problem == "actor rank 1 failed in phase update_actor: ZeroDivisionError: division by zero"
    assert "logs/actor-1.log" in str(error)


@pytest.mark.parametrize(
    ("account", "reason"),
    [
        (DIED, "process 4242 was killed or crashed"),
        (DIED.replace("SYSTEM_ERROR", "NODE_OUT_OF_MEMORY"), "process 4242 died (NODE_OUT_OF_MEMORY)"),
        ("\tpid: 7\nThe actor died because its node has died. Node Id: 3", "process 7 died with its node"),
        (
            "The actor died because of an error raised in its creation task, ray::X()\n  File\nOSError: no space",
            "the process did not start: OSError: no space",
        ),
        ("", "the process was killed or crashed"),
    ],
)
def test_rays_account_of_a_death_in_one_clause(account: str, reason: str):
    assert dispatch._death_reason(account) == reason


def test_a_call_that_does_not_end_names_who_is_late(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatch, "ray", Outcomes({"call 0": (1.0, "done")}))
    member = Member("actor", 3, None, "watch")
    with pytest.raises(HangError, match="no answer within 2 s from actor rank 3"):
        Watch(600.0).get({"call 1": member}, timeout_s=2.0)


def test_observers_see_what_is_waited_for_at_the_start_and_at_every_tick_and_may_end_the_wait(
    monkeypatch: pytest.MonkeyPatch,
):
    ray = Outcomes({"call 0": (1.5, "done")})
    monkeypatch.setattr(dispatch, "ray", ray)
    seen: list[tuple[float, list[str]]] = []

    def observe(pending: Mapping[str, Member]) -> None:
        seen.append((ray.now, list(pending)))
        if ray.now >= 4.0:
            raise KeyError("enough")

    watch = Watch(600.0)
    watch.observers.append(observe)
    calls = {f"call {rank}": Member("actor", rank, None, None) for rank in range(2)}
    with pytest.raises(KeyError):
        watch.get(calls)
    assert seen == [
        (0.0, ["call 0", "call 1"]),
        (1.0, ["call 0", "call 1"]),
        *((now, ["call 1"]) for now in (1.5, 2.5, 3.5, 4.5)),
    ]


def test_a_process_that_died_with_its_node_is_the_nodes_failure(monkeypatch: pytest.MonkeyPatch):
    account = "\tpid: 7\nThe actor died because its node has died. Node Id: 3"
    error, _ = judge(monkeypatch, {"watch actor 1": (1.0, death(account))})
    assert isinstance(error, NodeError) and error.rank == 1


class Counted(Outcomes):
    """Also counts how often it is asked."""

    waits = gets = 0

    def wait(self, *arguments: Any, **options: Any) -> tuple[list[str], list[str]]:
        self.waits += 1
        return super().wait(*arguments, **options)

    def get(self, ref: str, *, timeout: float) -> Any:
        self.gets += 1
        return super().get(ref, timeout=timeout)


def test_results_that_come_together_cost_two_looks_and_one_fetch_each(monkeypatch: pytest.MonkeyPatch):
    """At hundreds of ranks a look for each result would cost more than the results."""
    ray = Counted({f"call {rank}": (1.0 if rank < 90 else 2.0, rank) for rank in range(100)})
    monkeypatch.setattr(dispatch, "ray", ray)
    members = [Member("actor", rank, None, f"watch {rank}") for rank in range(100)]
    watch = Watch(600.0)
    watch.add(members)
    assert watch.get({f"call {member.rank}": member for member in members}) == list(range(100))
    assert (ray.waits, ray.gets) == (4, 100)
