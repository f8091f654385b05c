"""From an allocation to a finished run: the cluster's commands, the order they start in, and their end.

Order: configuration checked, head, workers (one srun), barrier, driver. Whatever ends first ends the rest.

Invariants:
1. A wrong configuration starts no process.
2. Nothing sleeps a fixed time: the barrier ends when the last node has joined, or names the missing at its deadline.
3. The token that lets processes into the cluster is made for this attempt and travels in the environment, never on a
   command line, where other users of a node could read it.
4. When ``run`` returns, no process it started is left on any node.
"""

from __future__ import annotations

import logging
import secrets
import shlex
import signal
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.errors import SetupError
from megarl.launch import slurm
from megarl.launch.network import HeadPorts, address_towards, candidate_blocks, head_ports
from megarl.launch.node import node_resource
from megarl.launch.slurm import Allocation
from megarl.launch.supervise import Child, Children

logger = logging.getLogger(__name__)

# Ray's own settings for a cluster of hundreds of nodes, where all of them join and load code at once.
CLUSTER_SETTINGS = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_gcs_server_request_timeout_seconds": "120",
    # On SIGTERM a node would wait up to 30 s for its actors to leave; a run that is over has nothing to wait for.
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
}


@dataclass(frozen=True, slots=True)
class Program:
    """What the job is for: ``megarl COMMAND PRESET key=value ...``, or any other command for trying out a cluster."""

    driver: tuple[str, ...]
    slots: int | None = None
    """Placement slots of a node where they are not GPUs (CPU runs): ranks share cores, so a slot is not a core."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Every command of a job, known before any of them starts."""

    allocation: Allocation
    address: str
    logs: Path
    head: tuple[str, ...]
    workers: tuple[str, ...] | None
    barrier: tuple[str, ...]
    driver: tuple[str, ...]

    def text(self) -> str:
        """The plan for a person, each command as a shell would take it."""
        job = self.allocation
        rows = [
            ("job", f"{job.job_name} ({job.job_id or 'not submitted'}), attempt {job.restarts + 1}"),
            ("nodes", f"{len(job.nodes)}: {', '.join(job.nodes)}"),
            ("each node", f"{job.cpus} CPUs, {job.gpus} GPUs"),
            ("cluster", f"head {job.head} at {self.address}, logs in {self.logs}"),
            ("environment", " ".join(f"{k}={v}" for k, v in CLUSTER_SETTINGS.items()) + " RAY_AUTH_TOKEN=(made here)"),
            ("1 head", shlex.join(self.head)),
            ("2 workers", shlex.join(self.workers) if self.workers else "none: one node"),
            ("3 barrier", shlex.join(self.barrier)),
            ("4 driver", shlex.join(self.driver)),
        ]
        return "\n".join(f"{name + ':':<13}{value}" for name, value in rows)


def plan(allocation: Allocation, program: Program, *, settings: Mapping[str, str], is_dry_run: bool) -> Plan:
    """The commands of a job.

    Args:
        allocation: nodes and what each has.
        program: what the driver runs.
        settings: the environment's MEGARL_* entries: MEGARL_ENV (``apptainer:IMAGE`` or ``pyxis:IMAGE``; otherwise the
            interpreter that runs this), MEGARL_LOG_DIR, MEGARL_JOIN_TIMEOUT_S, MEGARL_TMPDIR.
        is_dry_run: choose no real address and probe no port.

    Raises:
        SetupError: MEGARL_ENV names no known kind, no free ports, or no route between the nodes.
    """
    kind, _, image = settings.get("MEGARL_ENV", "").partition(":")
    if kind not in ("", "apptainer", "pyxis") or bool(kind) != bool(image):
        raise SetupError(
            f"MEGARL_ENV={kind}:{image} is not known", fix="use apptainer:IMAGE or pyxis:IMAGE, or unset it"
        )
    prefix = ["apptainer", "exec", *(["--nv"] if allocation.gpus else []), image] if kind == "apptainer" else []
    python = "python3" if kind else sys.executable
    if is_dry_run:
        host, ports = "HEAD_ADDRESS", HeadPorts(candidate_blocks(allocation.job_id)[0])
    else:
        peer = slurm.address(allocation.workers[0]) if allocation.workers else "127.0.0.1"
        host, ports = address_towards(peer), head_ports(allocation.job_id)
    address = f"{host}:{ports.gcs}"
    attempt = f"{allocation.job_id}.{allocation.restarts}"
    logs = Path(settings.get("MEGARL_LOG_DIR", "runs/slurm")) / f"{allocation.job_name}-{attempt}"
    # Socket paths are limited to 107 bytes, and Ray appends 70 to this.
    mark = zlib.crc32(f"{allocation.job_name}-{attempt}".encode())
    temporary = Path(settings.get("MEGARL_TMPDIR", "/tmp")) / f"mr{mark:08x}"
    cpus = allocation.cpus if program.slots is None else program.slots + 1
    node = [
        *prefix, python, "-m", "megarl.launch.node", f"--address={address}", f"--cpus={cpus}",
        f"--gpus={allocation.gpus}", f"--temporary={temporary}",
    ]  # fmt: skip
    container = image if kind == "pyxis" else None

    def here(command: Sequence[str], log: str) -> tuple[str, ...]:
        """On the batch node: directly, or through srun where only srun can enter the container."""
        if container is None:
            return tuple(command)
        return tuple(slurm.srun([allocation.head], command, cpus=allocation.cpus, log=log, container=container))

    timeout = settings.get("MEGARL_JOIN_TIMEOUT_S", "300")
    expected = [f"{node_resource(name)}" for name in allocation.nodes]
    return Plan(
        allocation=allocation,
        address=address,
        logs=logs,
        head=here([*node, "--head", f"--name={allocation.head}"], str(logs / f"ray-{allocation.head}.log")),
        workers=tuple(
            slurm.srun(
                allocation.workers, node, cpus=allocation.cpus, log=str(logs / "ray-%N.log"), container=container
            )
        )
        if allocation.workers
        else None,
        barrier=here(
            [*prefix, python, "-m", "megarl.controller.membership", address, f"--deadline-s={timeout}", *expected],
            str(logs / "barrier.log"),
        ),
        driver=here([*prefix, *_with_address(program.driver, address, len(allocation.nodes), python)], "/dev/stdout"),
    )


def _with_address(driver: Sequence[str], address: str, num_nodes: int, python: str) -> list[str]:
    """The driver's command; a megarl run is told where its cluster is, before the user's own keys, which win."""
    if driver[:1] != ("megarl",):
        return list(driver)
    _, command, preset, *keys = driver
    cluster = [f"cluster.ray_address={address}", f"cluster.num_nodes={num_nodes}"]
    return [python, "-m", "megarl", command, preset, *cluster, *keys]


def run(plan: Plan, environment: Mapping[str, str], *, grace_s: float = 20.0) -> int:
    """Start the cluster and the driver in it, and end both.

    Args:
        plan: commands.
        environment: of this process; children get it with Ray's settings and the token.
        grace_s: time the driver has after a signal to end by itself.

    Returns:
        The driver's exit code; 128 + N after signal N; 3 when the cluster did not come up or lost a node.
    """
    plan.logs.mkdir(parents=True, exist_ok=True)
    children = Children()
    # Until the driver runs, a signal has nobody to go to: it ends the launch.
    children.forward([signal.SIGTERM, signal.SIGINT], None)
    variables = {
        **environment,
        **CLUSTER_SETTINGS,
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ADDRESS": plan.address,
    }
    try:
        head_log = plan.logs / f"ray-{plan.allocation.head}.log"
        nodes = [children.start("head", plan.head, environment=variables, log=head_log)]
        if plan.workers:
            # srun answers SIGTERM by killing its tasks at once; SIGUSR1 it hands on, and node.py ends on it.
            nodes.append(
                children.start(
                    "workers", plan.workers, environment=variables, log=plan.logs / "srun.log",
                    end_signal=signal.SIGUSR1,
                )
            )  # fmt: skip
        barrier = children.start("barrier", plan.barrier, environment=variables)
        first = _wait(children, [barrier, *nodes])
        if first is not barrier or barrier.process.returncode:
            return _no_cluster(first, plan, children.received)
        driver = children.start("driver", plan.driver, environment=variables)
        children.forward([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2], driver)
        first = _wait(children, [driver, *nodes], grace_s=grace_s)
        if first is None or first is driver:
            code = driver.process.poll()
            logger.info("the driver ended with exit code %s", code)
            if code is None or code < 0:
                return 128 + (children.received or signal.SIGKILL if code is None else -code)
            return code
        logger.error("lost the %s (exit code %s); see %s", _what(first), first.process.returncode, plan.logs)
        return 3
    finally:
        children.end_all()


def _what(child: Child) -> str:
    return "head node" if child.name == "head" else "worker nodes"


def _wait(children: Children, group: Sequence[Child], *, grace_s: float = 0.0) -> Child | None:
    """The first of a group to end; None when a terminating signal came and the grace after it has passed."""
    ended: Child | None = None
    while ended is None and children.received not in (signal.SIGTERM, signal.SIGINT):
        ended = children.first_exit(group, deadline_s=0.2)
    if ended is None:
        logger.info("received %s", children.received.name if children.received else "")
        ended = children.first_exit(group[:1], deadline_s=grace_s)
    return ended


def _no_cluster(first: Child | None, plan: Plan, received: signal.Signals | None) -> int:
    if first is None:
        return 128 + (received or signal.SIGTERM)
    if first.name == "barrier":
        logger.error("not every node joined the cluster; their logs are in %s", plan.logs)
    else:
        logger.error("the %s ended before the cluster was up (exit code %s); see %s", _what(first),
                     first.process.returncode, plan.logs)  # fmt: skip
    return 3
