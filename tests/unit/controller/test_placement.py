"""Slots of every role."""

from __future__ import annotations

import pytest

from megarl.config.schema import TrainConfig
from megarl.controller.placement import plan_placement
from megarl.errors import ConfigError


def config(**parts):
    base = {"model": {"path": "m"}, "data": {"train": [{"kind": "reasoning_gym", "task": "chain_sum"}]}}
    return TrainConfig.model_validate(base | parts)


def test_colocated_roles_share_slots_and_split_roles_do_not():
    parts = {
        "actor": {"layout": {"tp": 2, "dp": 2}},
        "rollout": {"tp": 2, "replicas": 2},
        "critic": {"layout": {"tp": 2}},
    }
    together = plan_placement(config(cluster={"gpus_per_node": 4}, **parts))
    assert together.actor == (0, 1, 2, 3)
    assert together.critic == (0, 1)
    assert together.rollout == ((0, 1), (2, 3))
    assert [together.users(slot) for slot in range(4)] == [2, 2, 1, 1]
    apart = plan_placement(config(cluster={"gpus_per_node": 8, "placement": "split"}, **parts))
    assert apart.rollout == ((4, 5), (6, 7))


def test_an_engine_never_straddles_nodes():
    with pytest.raises(ConfigError, match="rollout engine 0 would need devices 0-7, with 4 a node"):
        plan_placement(config(cluster={"gpus_per_node": 4, "num_nodes": 2}, rollout={"tp": 8}))


def test_too_few_devices_are_named_with_what_needs_them():
    with pytest.raises(ConfigError, match=r"need 16 devices .*actor 16.* has 8"):
        plan_placement(config(actor={"layout": {"tp": 8, "pp": 2}}))


def test_cpu_slots_follow_the_roles():
    placement = plan_placement(
        config(cluster={"device": "cpu", "gpus_per_node": 0}, actor={"layout": {"tp": 2}}, rollout={"tp": 2})
    )
    assert placement.slots_per_node == 2
    assert placement.rollout == ((0, 1),)
