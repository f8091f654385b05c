"""The processes of a run, from start to stop: one Ray actor for each training rank and each engine, on their slots.

Invariants:
1. Training ranks of one role are told their rank by slot order, so tensor-parallel groups stay inside a node.
2. A process that fails to start ends the start-up at once, with its own error.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.config.schema.run import ClusterConfig
from megarl.controller.cluster import Cluster
from megarl.controller.dispatch import Member, Watch, WorkerGroup
from megarl.controller.engines import EnginePlan, RolloutWorker
from megarl.controller.membership import NODE_RESOURCE
from megarl.controller.placement import Placement
from megarl.controller.workers import TrainPlan, TrainWorker
from megarl.data.balance import SequenceCost
from megarl.errors import SetupError
from megarl.models.registry import load_spec
from megarl.platform import env

logger = logging.getLogger(__name__)

# Time for engines to end their own processes.
_STOP_S = 10.0


class Processes:
    """Starts processes on the nodes of the cluster and keeps the watch over them.

    As a context it tells them to stop when its body ends well. After a failure their peers may wait for what is gone:
    they are left to the cluster, which kills them.
    """

    def __init__(self, cluster: Cluster, config: ClusterConfig, placement: Placement, watch: Watch) -> None:
        self._cluster = cluster
        self._config = config
        self.placement = placement
        self._watch = watch
        self._nodes = self._reserve()
        self._names = node_names(self._nodes) if placement.num_nodes > 1 else [None]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cluster.note_shared_memory()
        if kind is None:
            self._stop()

    def _stop(self) -> None:
        calls = {member.handle.stop.remote(): member for member in self._watch.members}
        ended, _ = ray.wait(list(calls), num_returns=len(calls), timeout=_STOP_S)
        for ref, member in calls.items():
            try:
                if ref in ended:
                    ray.get(ref, timeout=_STOP_S)
                else:
                    logger.warning("%s rank %d did not stop within %.0f s", member.role, member.rank, _STOP_S)
            except RayError as error:
                logger.warning("%s rank %d did not stop well: %s", member.role, member.rank, error)

    def _reserve(self) -> PlacementGroup:
        """One bundle per node with all the slots of it."""
        slots = self.placement.slots_per_node
        bundle = {"CPU": float(slots)}
        if self._config.device == "cuda":
            bundle["GPU"] = float(slots)
        group = placement_group([bundle] * self.placement.num_nodes, strategy="STRICT_SPREAD")
        if not group.wait(timeout_seconds=self._config.start_timeout_s):
            raise SetupError(
                f"the Ray cluster has no {self.placement.num_nodes} nodes with {bundle} free",
                where="cluster",
                fix="check that all nodes joined and that nothing else runs on them",
            )
        return group

    def _node(self, slot: int) -> str | None:
        return self._names[self.placement.node(slot)]

    def _options(self, slot: int, *, share: float, variables: dict[str, str]) -> dict[str, Any]:
        return {
            "num_cpus": share,
            "num_gpus": share if self._config.device == "cuda" else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._nodes, placement_group_bundle_index=self.placement.node(slot)
            ),
            "runtime_env": self._cluster.worker_environment(variables),
        }

    def train(self, plan: TrainPlan, slots: Sequence[int]) -> WorkerGroup:
        """The ranks of a training role; ``start`` them with ``start_training``."""
        variables = env.worker_environment(self._config.device, threads=1)
        remote = ray.remote(concurrency_groups={"health": 2})(TrainWorker)
        members = []
        for rank, slot in enumerate(slots):
            # Colocated roles divide a GPU among them; the engines' part is not counted by Ray.
            share = 1.0 / self.placement.users(slot)
            handle = remote.options(**self._options(slot, share=share, variables=variables)).remote(plan, rank)
            members.append(Member(plan.role, rank, handle, handle.watch.remote(), self._node(slot)))
        self._watch.add(members)
        cost = SequenceCost(*load_spec(plan.model_dir).sequence_cost(value_head=plan.head == "value"))
        return WorkerGroup(TrainWorker, members, plan.layout, self._watch, cost)

    def engines(self, plan: EnginePlan) -> list[Member]:
        """The rollout engines, starting."""
        variables = env.rollout_environment(self._config.device, threads=plan.config.threads_per_rank)
        remote = ray.remote(RolloutWorker)
        members = []
        for replica, slots in enumerate(self.placement.rollout):
            options = self._options(slots[0], share=0.0, variables=variables)
            handle = remote.options(**options, max_concurrency=1000).remote(plan, replica)
            members.append(Member("rollout", replica, handle, handle.watch.remote(), self._node(slots[0])))
        self._watch.add(members)
        return members


def node_names(group: PlacementGroup) -> list[str | None]:
    """Name of the node of each bundle: Slurm's name where a launcher gave one, else the host's."""
    nodes = {node["NodeID"]: node for node in ray.nodes()}
    bundles: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    return [_name_of(nodes[bundles[index]]) for index in sorted(bundles)]


def _name_of(node: dict[str, Any]) -> str:
    named = (name.removeprefix(NODE_RESOURCE) for name in node["Resources"] if name.startswith(NODE_RESOURCE))
    return next(named, node["NodeManagerHostname"])
