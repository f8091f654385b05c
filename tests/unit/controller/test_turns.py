"""Each role's own offload key decides whether it leaves a shared device while engines sample."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config.load import load_train
from megarl.controller.publish import WeightPublisher
from megarl.controller.roles import device_turns
from megarl.observability.metrics import Last
from megarl.train.engine import Moved
from megarl.weights.sync import SyncReport


class Group:
    """A role's workers: notes what they are told."""

    def __init__(self, role: str, told: list[str]) -> None:
        self.role, self.told = role, told

    def offload(self) -> list[Moved]:
        self.told.append(f"{self.role} leaves")
        return [Moved(1, 1.0), Moved(2, 0.5)]

    def onload(self) -> list[Moved]:
        self.told.append(f"{self.role} returns")
        return [Moved(3, 1.0)]


def turns(told: list[str], *keys: str) -> Any:
    def remote(name: str) -> Any:
        return SimpleNamespace(remote=lambda *tags: told.append(f"engine {name}"))

    engine = SimpleNamespace(handle=SimpleNamespace(sleep=remote("sleeps"), wake_up=remote("wakes")))
    watch = SimpleNamespace(get=lambda calls: None)
    config = load_train("ppo_7b", keys).config
    return device_turns(config, Group("actor", told), Group("critic", told), [engine], watch)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("keys", "leaving"),
    [
        ((), ["actor", "critic"]),
        (("critic.engine.offload=false",), ["actor"]),
        (("actor.engine.offload=false",), ["critic"]),
    ],
)
def test_only_roles_with_offload_leave(keys: tuple[str, ...], leaving: list[str]):
    told: list[str] = []
    both = turns(told, *keys)
    both.to_sampling()
    both.to_training()
    assert told == [
        *(f"{role} leaves" for role in leaving),
        "engine wakes",
        "engine sleeps",
        *(f"{role} returns" for role in leaving),
    ]
    assert both.metrics()["offload/to_host_bytes"] == Last(2 * len(leaving))


def test_without_offload_nobody_takes_turns():
    told: list[str] = []
    neither = turns(told, "actor.engine.offload=false", "critic.engine.offload=false")
    neither.to_sampling()
    neither.to_training()
    assert told == []


def test_all_actor_ranks_gather_weights_before_some_send_them(monkeypatch: pytest.MonkeyPatch):
    told: list[str] = []

    def publish(version: int) -> SyncReport:
        told.append(f"session sends {version}")
        return SyncReport(version=version, num_bytes=0, seconds=0.0, send_seconds=0.0, load_seconds=0.0)

    session = SimpleNamespace(publish=publish, schedule=None)
    monkeypatch.setattr("megarl.controller.publish.SyncSession", lambda *_, **__: session)
    actor = SimpleNamespace(members=[], gather_weights=lambda: told.append("actor gathers"))
    config = load_train("ppo_7b", ()).config
    publisher = WeightPublisher(actor, [], config.rollout, config.sync, turns(told), SimpleNamespace())  # type: ignore[arg-type]
    publisher.publish(7)
    assert [line for line in told if "engine" not in line] == [
        "actor gathers", "session sends 7", "actor leaves", "critic leaves",
    ]  # fmt: skip
