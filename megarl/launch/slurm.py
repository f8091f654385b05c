"""What Slurm gave the job, and how a command is started on its nodes.

Invariants:
1. ``from_script`` reads the same ``#SBATCH`` lines that sbatch reads, so a dry run shows what a submission would get.
2. Commands of a job are built here as lists and run by ``supervise``; what runs here asks or tells Slurm, in minutes.
"""

from __future__ import annotations

import logging
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megarl.errors import SetupError

logger = logging.getLogger(__name__)

ATTEMPTS, AGAIN_S = 4, 5.0
"""How often scontrol is asked, and after how long again."""

ANSWER_S = 20.0
"""How long a node has to start a task that does nothing."""

TELL_S = 3.0
"""How long the controller has to say how the nodes are, while Slurm already ends the job."""

_STATE_FLAGS = "*~#!%$@^-"
"""What scontrol appends to a node's state: not responding, power saving, maintenance, reboot, planned."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """Nodes of a job, the batch node first; CPUs and GPUs are those of one node."""

    job_id: int
    job_name: str
    nodes: tuple[str, ...]
    cpus: int
    gpus: int
    restarts: int = 0

    @property
    def head(self) -> str:
        return self.nodes[0]

    def only(self, nodes: Sequence[str]) -> Allocation:
        """The same job on some of its nodes."""
        return replace(self, nodes=tuple(node for node in self.nodes if node in nodes))

    @property
    def described(self) -> str:
        """The job and its attempt, for messages."""
        return f"{self.job_name} ({self.job_id or 'not submitted'}), attempt {self.restarts + 1}"

    @property
    def workers(self) -> tuple[str, ...]:
        return self.nodes[1:]


def from_environment(variables: Mapping[str, str], batch_node: str | None = None) -> Allocation:
    """The allocation this process runs in.

    Args:
        variables: the environment's SLURM_* entries.
        batch_node: node this process runs on; None takes SLURMD_NODENAME.

    Raises:
        SetupError: not inside a job.
    """
    if "SLURM_JOB_ID" not in variables:
        raise SetupError(
            "not inside a Slurm job: SLURM_JOB_ID is not set",
            fix="submit the script with sbatch, or set DRY_RUN=1 to see what it would run",
        )
    nodes = hostnames(variables["SLURM_JOB_NODELIST"])
    here = batch_node or variables.get("SLURMD_NODENAME", nodes[0])
    return Allocation(
        job_id=int(variables["SLURM_JOB_ID"]),
        job_name=variables.get("SLURM_JOB_NAME", "megarl"),
        nodes=(here, *(node for node in nodes if node != here)),
        cpus=int(variables.get("SLURM_CPUS_ON_NODE", "1")),
        gpus=_gpus(variables),
        restarts=int(variables.get("SLURM_RESTART_COUNT", "0")),
    )


def hostnames(nodelist: str) -> tuple[str, ...]:
    """Expand Slurm's list, such as ``gpu[01-03,07]``. Raises SetupError when scontrol does not answer."""
    return tuple(_scontrol("show", "hostnames", nodelist).split())


def address(node: str) -> str:
    """The address Slurm itself uses for a node; its name need not resolve. Raises SetupError as ``hostnames``."""
    found = re.search(r"\bNodeAddr=(\S+)", _scontrol("show", "node", "-o", node))
    return found.group(1) if found else node


def _scontrol(*words: str) -> str:
    """Asked again where it fails: a controller that is restarting, or busy, is no reason to lose a job."""
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(AGAIN_S)
        try:
            result = subprocess.run(["scontrol", *words], capture_output=True, text=True, timeout=60)
        except OSError as error:
            raise SetupError(f"scontrol cannot be run: {error}", fix="is Slurm in PATH?") from error
        except subprocess.TimeoutExpired:
            said = "nothing within 60 s"
            continue
        if result.returncode == 0:
            return result.stdout
        said = " ".join(result.stderr.split()) or f"exit code {result.returncode}"
        logger.warning("scontrol %s: %s", " ".join(words), said)
    fix = "see whether Slurm's controller answers, and submit the job again"
    raise SetupError(f"scontrol {' '.join(words)} fails: {said}", fix=fix)


def _gpus(variables: Mapping[str, str]) -> int:
    if count := variables.get("SLURM_GPUS_ON_NODE"):
        return int(count)
    # gpu:h100:8 and 8 both occur here.
    return int(variables.get("SLURM_GPUS_PER_NODE", "0").rsplit(":", 1)[-1] or 0)


def from_script(script: Path) -> Allocation:
    """The allocation a script's ``#SBATCH`` lines ask for, with made-up node names.

    Raises:
        SetupError: the script cannot be read.
    """
    lines = re.findall(r"^#SBATCH\s+--([\w-]+)(?:[= ](\S+))?", _read(script), flags=re.MULTILINE)
    options = {name: value for name, value in lines}
    least = int(options.get("nodes", "1").split("-")[0])
    width = max(3, len(str(least)))
    gpus = options.get("gpus-per-node") or options.get("gres", "gpu:0").removeprefix("gpu")
    return Allocation(
        job_id=0,
        job_name=options.get("job-name", script.stem),
        nodes=tuple(f"node{index:0{width}d}" for index in range(1, least + 1)),
        cpus=int(options.get("cpus-per-task", "1")),
        gpus=int(gpus.rsplit(":", 1)[-1] or 0),
    )


def requeue(job_id: int, without: Sequence[str] = ()) -> None:
    """Put a running job back into the queue, which ends it, and keep it away from some nodes.

    Raises:
        SetupError: Slurm refuses.
    """
    # Slurm ends every process of the job, this one and scontrol too: those that it starts inherit being deaf to that.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _scontrol("requeue", str(job_id))
    if without:  # only now, since Slurm changes the nodes of a job that waits, not of one that runs
        _scontrol("update", f"JobId={job_id}", f"ExcNodeList={','.join(without)}")


def wanted_nodes(script: Path, settings: Mapping[str, str], allocated: int) -> int:
    """How many of the allocated nodes the run uses; the others are spares.

    Args:
        script: its ``--nodes=MIN-MAX`` asks for spares beyond MIN.
        settings: MEGARL_NODES says so where the range was given to sbatch.
        allocated: nodes of the job.

    Raises:
        SetupError: MEGARL_NODES is no number of nodes, or more than there are.
    """
    given = settings.get("MEGARL_NODES")
    if given is None:
        match = re.search(r"^#SBATCH\s+--nodes[= ](\d+)-(\d+)\b", _read(script), flags=re.MULTILINE)
        return int(match[1]) if match and int(match[1]) <= allocated <= int(match[2]) else allocated
    if not given.isdigit() or not 1 <= int(given) <= allocated:
        raise SetupError(f"MEGARL_NODES={given}, expected 1 to {allocated}, the nodes of the job")
    return int(given)


def signal_lead_s(script: Path) -> int | None:
    """Seconds before the time limit at which a script wants SIGUSR1 (``--signal=B:USR1@600``); None: not at all."""
    match = re.search(r"^#SBATCH\s+--signal[= ]B:(?:SIG)?USR1@(\d+)", _read(script), flags=re.MULTILINE)
    return int(match[1]) if match else None


def _read(script: Path) -> str:
    try:
        return script.read_text(encoding="utf-8")
    except OSError as error:
        raise SetupError(f"cannot read the batch script {script}: {error}") from error


def is_lost(node: str, environment: Mapping[str, str]) -> bool:
    """Whether Slurm cannot start a task of this job on a node; takes ``ANSWER_S`` at most. False if it cannot be asked.

    Slurm calls a silent node lost after minutes, a step on it may say nothing at all.
    """
    try:
        result = subprocess.run(
            srun([node], ["true"], cpus=1, log="/dev/null"),
            capture_output=True, text=True, timeout=ANSWER_S, env=dict(environment), stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return False
    return node in unreachable(result.stderr)


def called_down(nodes: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Those of the nodes that Slurm's controller has given up; none if it does not answer within ``TELL_S``."""
    if not nodes:
        return []
    try:
        result = subprocess.run(
            ["scontrol", "show", "node", "-o", ",".join(nodes)],
            capture_output=True, text=True, timeout=TELL_S, env=dict(environment), stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return []
    states = re.findall(r"NodeName=(\S+).*?\bState=(\S+)", result.stdout)
    return [name for name, state in states if "DOWN" in {part.strip(_STATE_FLAGS) for part in state.split("+")}]


def unreachable(log: str) -> dict[str, list[str]]:
    """Nodes on which srun could not start a task, by what it says, with the reason."""
    found = re.findall(r"^srun: error: Task launch for \S+ failed on node (\S+?): (.*)$", log, flags=re.MULTILINE)
    return {node: [f"Slurm cannot start a task there: {reason}"] for node, reason in found}


def srun(
    nodes: Sequence[str],
    command: Sequence[str],
    *,
    cpus: int,
    log: str,
    container: str | None = None,
    ends_together: bool = True,
) -> list[str]:
    """One step with one task on each of the nodes.

    Args:
        nodes: where it runs; all are started by this one call.
        command: what each task executes.
        cpus: CPUs of a task.
        log: output file; Slurm puts the node's name for ``%N``.
        container: image of a Pyxis container the tasks run in.
        ends_together: whether the end of one task ends the others.
    """
    return [
        "srun",
        f"--nodes={len(nodes)}",
        f"--ntasks={len(nodes)}",
        "--ntasks-per-node=1",
        f"--nodelist={','.join(nodes)}",
        f"--cpus-per-task={cpus}",
        # The batch step holds the node's resources already; without this the step waits for them forever.
        "--overlap",
        "--export=ALL",
        "--input=none",
        # One lost node ends the step, and with it the run: a cluster with a hole would hang in its next collective.
        f"--kill-on-bad-exit={int(ends_together)}",
        f"--wait={10 if ends_together else 0}",
        f"--output={log}",
        "--open-mode=append",
        *([f"--container-image={container}", "--no-container-mount-home"] if container else []),
        *command,
    ]
