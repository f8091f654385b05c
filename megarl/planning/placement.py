"""Whether the roles suit the nodes: what Slurm gave, groups that cross nodes, GPUs and replicas without work."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megarl.config.schema import SftConfig, TrainConfig
from megarl.planning.finding import Finding
from megarl.planning.model_fit import trained


@dataclass(frozen=True, slots=True)
class Nodes:
    """What a job has: nodes, and GPUs of one (None: not known)."""

    count: int
    gpus: int | None
    source: str


def nodes_of_slurm(variables: Mapping[str, str]) -> Nodes | None:
    """The allocation that this process runs in, from the environment's SLURM_* entries; None outside a job."""
    count = variables.get("SLURM_JOB_NUM_NODES") or variables.get("SLURM_NNODES")
    if "SLURM_JOB_ID" not in variables or count is None:
        return None
    gpus = variables.get("SLURM_GPUS_ON_NODE")
    is_number = gpus is not None and gpus.isdigit()
    return Nodes(int(count), int(gpus) if gpus is not None and is_number else None, f"job {variables['SLURM_JOB_ID']}")


def memory_of_slurm(variables: Mapping[str, str]) -> int | None:
    """Bytes of host memory that the job has on this node: Slurm's, or the node's where it has all; None outside."""
    if "SLURM_JOB_ID" not in variables:
        return None
    all_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    given = variables.get("SLURM_MEM_PER_NODE", "")
    return min(int(given) * 2**20, all_bytes) if given.isdigit() and int(given) > 0 else all_bytes


def check_placement(config: TrainConfig | SftConfig, nodes: Nodes | None) -> Iterator[Finding]:
    """Placement beyond the configuration's own rules (``roles_fit_the_cluster``, ``engine_fits_a_node``).

    Args:
        config: the run's configuration.
        nodes: the allocation; None where there is none.
    """
    cluster = config.cluster
    if nodes is not None and nodes.count != cluster.num_nodes:
        problem = f"expected the {nodes.count} nodes of {nodes.source}, found {cluster.num_nodes}"
        fix = f"set cluster.num_nodes={nodes.count}, or ask Slurm for --nodes={cluster.num_nodes}"
        yield Finding("placement", "cluster.num_nodes", problem, fix)
    if nodes is not None and nodes.gpus is not None and nodes.gpus < cluster.gpus_per_node:
        problem = f"expected at most the {nodes.gpus} GPUs that {nodes.source} has on a node, found "
        fix = f"set cluster.gpus_per_node={nodes.gpus}, or ask Slurm for --gpus-per-node={cluster.gpus_per_node}"
        yield Finding("placement", "cluster.gpus_per_node", f"{problem}{cluster.gpus_per_node}", fix)
    if cluster.device == "cpu" or cluster.gpus_per_node == 0:
        return
    for role, part in trained(config):
        if cluster.gpus_per_node % part.layout.tp:
            problem = f"groups of {part.layout.tp} cross the nodes' {cluster.gpus_per_node} GPUs: every layer would "
            problem += "wait for the network between nodes"
            fix = f"choose {role}.layout.tp that divides {cluster.gpus_per_node}"
            yield Finding("placement", f"{role}.layout.tp", problem, fix, level="warning")
    yield from _idle(config)


def _idle(config: TrainConfig | SftConfig) -> Iterator[Finding]:
    cluster = config.cluster
    available = cluster.num_nodes * cluster.gpus_per_node
    train = max(part.layout.world_size for _, part in trained(config))
    engines = config.rollout.replicas * config.rollout.tp if isinstance(config, TrainConfig) else 0
    if cluster.placement == "split":
        if train + engines < available:
            problem = f"{available - train - engines} of {available} GPUs have no role"
            yield Finding("placement", "cluster.num_nodes", problem, "add replicas or ranks", level="warning")
        return
    for key, used, what in (("actor.layout.dp", train, "training"), ("rollout.replicas", engines, "sampling")):
        if 0 < used < available:
            problem = f"{available - used} of {available} GPUs are idle while {what} runs"
            fix = f"raise {key} so that {what} uses all {available}, or use fewer nodes"
            yield Finding("placement", key, problem, fix, level="warning")


def check_batch(config: TrainConfig | SftConfig) -> Iterator[Finding]:
    """How a batch divides into minibatches, replicas and pipeline microbatches; the rules see to the rest."""
    for role, part in trained(config):
        key, rows = update_rows(config, role)
        layout = part.layout
        if rows % layout.dp:
            problem = f"{rows} rows of an update do not divide among {layout.dp} data-parallel ranks: some get one more"
            fix = f"choose {key} a multiple of {role}.layout.dp={layout.dp}"
            yield Finding("batch", key, problem, fix, level="warning")
        # Virtual stages shorten a stage's slots, and with them what it waits at both ends.
        slots = rows // layout.dp * layout.vpp
        if layout.pp > 1 and slots < 2 * layout.pp:
            idle = (layout.pp - 1) / (slots + layout.pp - 1) if slots else 1.0
            problem = (
                f"a rank gets at most {rows // layout.dp} microbatches an update for {layout.pp} pipeline stages, "
                f"so each stage idles {idle:.0%} of the time"
            )
            fix = f"raise {key}, or lower {role}.layout.pp or {role}.layout.dp"
            yield Finding("batch", f"{role}.layout.pp", problem, fix, level="warning")
    if isinstance(config, TrainConfig):
        prompts = config.data.prompts_per_step
        if prompts % config.rollout.replicas:
            problem = f"{prompts} prompts do not divide among {config.rollout.replicas} engines"
            fix = "choose data.prompts_per_step a multiple of rollout.replicas"
            yield Finding("batch", "rollout.replicas", problem, fix, level="warning")


def update_rows(config: TrainConfig | SftConfig, role: str) -> tuple[str, int]:
    """The key that says how many rows an optimizer update has, and the number."""
    if isinstance(config, SftConfig):
        return "data.sequences_per_step", config.data.sequences_per_step
    batch = config.data.prompts_per_step * config.rollout.samples_per_prompt
    if role == "critic" and config.critic is not None and config.critic.minibatch_size is not None:
        return "critic.minibatch_size", config.critic.minibatch_size
    if config.algorithm.minibatch_size is not None:
        return "algorithm.minibatch_size", config.algorithm.minibatch_size
    return "data.prompts_per_step", batch
