"""Every command of a job as data, before any of them runs.

Invariant: a dry run and a job have the same plan, except for the address and the ports, which only a job can choose.
"""

from __future__ import annotations

import shlex
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

# Ray's own settings for a cluster of hundreds of nodes, where all of them join and load code at once.
CLUSTER_SETTINGS = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_gcs_server_request_timeout_seconds": "120",
    # A node whose cores and file system are busy with a model answers late; its real loss is seen by srun, at once.
    "RAY_health_check_timeout_ms": "30000",
    # Workers are placed by the run; Ray would start one for each core of each node beforehand.
    "RAY_prestart_worker_first_driver": "0",
    # On SIGTERM a node would wait up to 30 s for its actors to leave; a run that is over has nothing to wait for.
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
}


@dataclass(frozen=True, slots=True)
class Program:
    """What the job is for: ``megarl COMMAND PRESET key=value ...``, or any other command for trying out a cluster.

    Args:
        driver: the command.
        slots: placement slots of a node where they are not GPUs (CPU runs): ranks share cores, so a slot is no core.
        stop_within_s: seconds after SIGUSR1 within which the driver ends; None for one that does not know the signal.
    """

    driver: tuple[str, ...]
    slots: int | None = None
    stop_within_s: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Every command of a job, known before any of them starts."""

    allocation: Allocation
    address: str
    logs: Path
    preflight: tuple[str, ...]
    head: tuple[str, ...]
    workers: tuple[str, ...] | None
    barrier: tuple[str, ...]
    driver: tuple[str, ...]
    stop_within_s: float | None = None

    def text(self) -> str:
        """The plan for a person, each command as a shell would take it."""
        job = self.allocation
        rows = [
            ("job", job.described),
            ("nodes", f"{len(job.nodes)}: {', '.join(job.nodes)}"),
            ("each node", f"{job.cpus} CPUs, {job.gpus} GPUs"),
            ("cluster", f"head {job.head} at {self.address}, logs in {self.logs}"),
            ("environment", " ".join(f"{k}={v}" for k, v in CLUSTER_SETTINGS.items()) + " RAY_AUTH_TOKEN=(made here)"),
            ("0 preflight", shlex.join(self.preflight)),
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
    # Socket paths are limited to 107 bytes, and Ray appends 70 to this. The place of the logs tells jobs of the same
    # name and number apart, whose nodes are one machine: each removes its own folder at the end.
    mark = zlib.crc32(str(logs.absolute()).encode())
    temporary = Path(settings.get("MEGARL_TMPDIR", "/tmp")) / f"mr{mark:08x}"
    cpus = allocation.cpus if program.slots is None else program.slots + 1
    node = [
        *prefix, python, "-m", "megarl.launch.node", f"--address={address}", f"--cpus={cpus}",
        f"--gpus={allocation.gpus}", f"--temporary={temporary}",
    ]  # fmt: skip
    look = [
        *prefix, python, "-m", "megarl.launch.preflight", f"--folder={logs / 'preflight'}",
        f"--temporary={temporary.parent}", f"--gpus={allocation.gpus}",
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
        preflight=tuple(
            slurm.srun(
                allocation.nodes,
                look,
                cpus=allocation.cpus,
                log=str(logs / "preflight-%N.log"),
                container=container,
                ends_together=False,
            )
        ),
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
        driver=here([*prefix, *_with_address(program, address, len(allocation.nodes), python)], "/dev/stdout"),
        stop_within_s=program.stop_within_s,
    )


def _with_address(program: Program, address: str, num_nodes: int, python: str) -> list[str]:
    """The driver's command; a megarl run is told of its cluster and its time, before the user's own keys, which win."""
    if program.driver[:1] != ("megarl",):
        return list(program.driver)
    _, command, preset, *keys = program.driver
    told = [f"cluster.ray_address={address}", f"cluster.num_nodes={num_nodes}"]
    if program.stop_within_s is not None:
        told.append(f"run.stop_within_s={program.stop_within_s:g}")
    return [python, "-m", "megarl", command, preset, *told, *keys]
