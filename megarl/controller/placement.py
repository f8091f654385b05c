"""Which device every process of the run gets: first as numbers, then as Ray actors.

A *slot* is one device (a GPU, or a CPU share) of one node. Slots are numbered node by node, so that consecutive ranks,
and with them tensor-parallel groups, stay inside a node.

Invariants:
1. ``plan_placement`` is pure: the same configuration gives the same slots.
2. An engine's tensor-parallel ranks are consecutive slots of one node.
3. Colocated roles share slots and take turns; split roles never share one.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.schema import SftConfig, TrainConfig
from megarl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Placement:
    """Slots of every role: ``actor[rank]``, ``critic[rank]`` and ``rollout[replica]`` (a tuple of tp slots)."""

    slots_per_node: int
    num_nodes: int
    actor: tuple[int, ...]
    critic: tuple[int, ...]
    rollout: tuple[tuple[int, ...], ...]

    def node(self, slot: int) -> int:
        return slot // self.slots_per_node

    def users(self, slot: int) -> int:
        """Processes of training roles that share a slot."""
        return self.actor.count(slot) + self.critic.count(slot)


def plan_placement(config: TrainConfig | SftConfig) -> Placement:
    """Assign slots to roles.

    On CUDA a slot is a GPU. On CPU slots are as many as the roles need on one node, since ranks share the cores.

    Raises:
        ConfigError: the roles do not fit on the stated nodes, or an engine's ranks would straddle nodes.
    """
    cluster = config.cluster
    actor_size = config.actor.layout.world_size
    critic = config.critic if isinstance(config, TrainConfig) else None
    critic_size = critic.layout.world_size if critic is not None else 0
    rollout = config.rollout if isinstance(config, TrainConfig) else None
    rollout_size = rollout.replicas * rollout.tp if rollout is not None else 0
    train_size = max(actor_size, critic_size)
    needed = max(train_size, rollout_size) if cluster.placement == "colocated" else train_size + rollout_size
    if cluster.device == "cpu":
        slots_per_node = -(-needed // cluster.num_nodes)
        if rollout is not None:
            slots_per_node = -(-slots_per_node // rollout.tp) * rollout.tp
    else:
        slots_per_node = cluster.gpus_per_node
    available = slots_per_node * cluster.num_nodes
    if needed > available:
        raise ConfigError(
            f"the roles need {needed} devices ({cluster.placement}: actor {actor_size}, critic {critic_size}, "
            f"rollout {rollout_size}) and the cluster has {available}",
            where="cluster.num_nodes, cluster.gpus_per_node",
            fix="add nodes, or make actor.layout, critic.layout or rollout.replicas smaller",
        )
    first = 0 if cluster.placement == "colocated" else train_size
    replicas: list[tuple[int, ...]] = []
    if rollout is not None:
        if cluster.placement == "split" and first % rollout.tp:
            first += rollout.tp - first % rollout.tp
        for replica in range(rollout.replicas):
            slots = tuple(range(first + replica * rollout.tp, first + (replica + 1) * rollout.tp))
            if slots[-1] >= available or slots[0] // slots_per_node != slots[-1] // slots_per_node:
                raise ConfigError(
                    f"rollout engine {replica} would need devices {slots[0]}-{slots[-1]}, with {slots_per_node} a node "
                    f"and {available} in all",
                    where="rollout.tp",
                    fix="choose rollout.tp that divides the devices of a node, and enough nodes",
                )
            replicas.append(slots)
    return Placement(
        slots_per_node=slots_per_node,
        num_nodes=cluster.num_nodes,
        actor=tuple(range(actor_size)),
        critic=tuple(range(critic_size)),
        rollout=tuple(replicas),
    )
