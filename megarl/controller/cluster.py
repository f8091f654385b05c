"""Ray for one run: a private cluster that ends with the run, or a connection to one that Slurm or the user started.

Invariants:
1. A cluster started here writes to its own temporary directory and listens on ports of its own: two runs on one machine
   do not meet, and the user's home is not touched.
2. After ``close`` no process started for the run is left on this machine, even if the run failed at any point, and no
   shared memory that was theirs.
"""

from __future__ import annotations

import functools
import logging
import re
import secrets
import shutil
import signal
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import ray

from megarl.controller.shared_memory import mapped_files, remove_unused
from megarl.errors import SetupError
from megarl.platform import env, signals

logger = logging.getLogger(__name__)

# Put into the environment of every process of the run, so that what is left of it can be found by its own mark.
RUN_MARK = "MEGARL_RUN_ID"

# Time for processes to end by themselves before they are killed.
_TERM_GRACE_S = 2.0
_KILL_ROUNDS = 3
# Time for the head of a given cluster to take a connection.
_CONNECT_S = 30.0


class Cluster:
    """A Ray connection for the life of a run: ``open`` it when processes are needed, ``close`` it in any case.

    From its making on, every process started by this one carries the run's mark.
    """

    def __init__(self) -> None:
        self.run_id = secrets.token_hex(8)
        self._temporary: Path | None = None
        self._before: dict[str, str | None] = {}
        self._started_s = time.time()
        self._shared_memory: set[Path] = set()
        self._set({RUN_MARK: self.run_id})

    def open(self, address: str | None, *, num_slots: int, num_gpus: int) -> None:
        """Connect to the cluster at ``address``, or start one on this machine.

        Raises:
            SetupError: none answers there, or none comes up here.
        """
        # Ray logs at every start that it uses the token which is given to it below.
        logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
        # Ray prints what it thinks of a dead worker on the driver's standard output, whatever log_to_driver says; the
        # controller reports the death itself, with role, rank and phase.
        ray._private.worker.print_to_stdstream = _note_ray_message
        try:
            if address is not None:
                self._connect(address)
            else:
                self._start(num_slots, num_gpus)
        except SystemExit as ending:
            # While ray.init runs, SIGTERM meets Ray's own handler, which exits with the number of the signal.
            if ending.code == signal.SIGTERM:
                raise signals.Terminated(signal.SIGTERM) from None
            raise
        finally:
            signals.install()

    def _connect(self, address: str) -> None:
        try:
            # Ray itself tries for minutes where nobody listens.
            if (place := re.fullmatch(r"([\w.-]+):(\d+)", address)) is not None:
                socket.create_connection((place[1], int(place[2])), timeout=_CONNECT_S).close()
            ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
        except OSError as error:  # refused, no route, no such host, or no answer in time
            raise SetupError(
                f"no Ray cluster answers at {address}: {error}",
                where="cluster.ray_address",
                fix="check the address and the authentication token, or leave ray_address empty to start one",
            ) from error

    def _start(self, num_slots: int, num_gpus: int) -> None:
        self._set(
            {
                # Without it Ray would write a token into the user's home.
                "RAY_AUTH_TOKEN": _token(),
                "RAY_USAGE_STATS_ENABLED": "0",
                # Ray starts workers at niceness 15: anything else on the machine would starve the run.
                "RAY_worker_niceness": "0",
                # Idle workers that Ray starts in advance are never used: those of the run have their own environment.
                "RAY_prestart_worker_first_driver": "0",
            }
        )
        try:
            # Ray keeps sockets below this directory, and socket paths are limited to 107 bytes: keep it short.
            self._temporary = Path(tempfile.mkdtemp(prefix="megarl-"))
            ray.init(
                address="local",
                # Processes are placed by slots; ranks of a CPU run share the cores, so a slot is not a core.
                num_cpus=max(num_slots, 1) + 1,
                num_gpus=num_gpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.WARNING,
                object_store_memory=self._object_store_bytes(),
                _temp_dir=str(self._temporary),
            )
        except Exception as error:
            # What Ray raises for what it does not find or get; and, bare, for a node that is not up after 30 s.
            if not isinstance(error, OSError | RuntimeError | ValueError) and type(error) is not Exception:
                raise
            raise SetupError(
                f"Ray did not start: {(str(error).splitlines() or [type(error).__name__])[0]}",
                where=str(self._temporary or tempfile.gettempdir()),
                fix="the directory for temporary files needs space and a short path: set TMPDIR=/tmp or another; if "
                "Ray came up too slowly, start again when the machine has less to do",
            ) from error

    def _set(self, variables: dict[str, str]) -> None:
        self._before |= {name: env.text(name) for name in variables}
        env.update(variables)

    @staticmethod
    def _object_store_bytes() -> int:
        # Ray's default is 30 % of memory. A step's batch is small beside weights, which do not pass through the store.
        memory = psutil.virtual_memory().total
        shared = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").exists() else memory
        return int(max(128 * 2**20, min(0.1 * memory, 0.5 * shared, 16 * 2**30)))

    def worker_environment(self, variables: dict[str, str]) -> dict[str, Any]:
        """Ray's runtime environment for a worker process of this run."""
        return {"env_vars": {**variables, RUN_MARK: self.run_id}}

    def note_shared_memory(self) -> None:
        """Remember what the run's processes share now: ``close`` removes what is left of it.

        Called while they are alive, since nothing tells afterwards whose a file was.
        """
        self._shared_memory |= mapped_files(process.pid for process in marked_processes(self.run_id))

    def close(self) -> None:
        """Disconnect, end everything that carries the run's mark on this machine, and remove what it left."""
        self.note_shared_memory()
        # Also after a ray.init that was interrupted half-way: it ends the processes that Ray knows of by then.
        ray.shutdown()
        leftovers = marked_processes(self.run_id)
        for process in leftovers:
            _signal(process, signal.SIGTERM)
        psutil.wait_procs(leftovers, timeout=_TERM_GRACE_S)
        # What is killed may have started others meanwhile.
        for _ in range(_KILL_ROUNDS):
            if not (alive := marked_processes(self.run_id)):
                break
            for process in alive:
                _signal(process, signal.SIGKILL)
            psutil.wait_procs(alive, timeout=_TERM_GRACE_S)
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
        remove_unused(self._shared_memory, since_s=self._started_s)
        env.restore(self._before)


@functools.cache
def _token() -> str:
    """Ray reads its token once in the life of a process: clusters that one process starts in turn share it."""
    return secrets.token_hex(32)


def marked_processes(run_id: str) -> list[psutil.Process]:
    """Processes on this machine that were started for a run, this one and its ancestors excepted."""
    own = {psutil.Process().pid, *(parent.pid for parent in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        if process.pid in own:
            continue
        try:
            if process.environ().get(RUN_MARK) == run_id:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def _note_ray_message(data: dict[str, Any], ignore_prefix: bool) -> None:
    for line in data["lines"]:
        logger.debug("ray: %s", line)


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        logger.debug("process %d had ended already", process.pid)


def wait_for_nodes(num_nodes: int, timeout_s: float) -> list[dict[str, Any]]:
    """Alive nodes of the cluster, in a stable order, once there are enough.

    Raises:
        SetupError: fewer than ``num_nodes`` joined in time; names those that did.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        nodes = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeManagerAddress"])
        if len(nodes) >= num_nodes:
            return nodes[:num_nodes]
        if time.monotonic() > deadline:
            there = ", ".join(node["NodeManagerHostname"] for node in nodes)
            raise SetupError(
                f"{len(nodes)} of {num_nodes} nodes joined the Ray cluster within {timeout_s:.0f} s: {there}",
                where="cluster.num_nodes",
                fix="look into the logs of the missing nodes, or raise cluster.start_timeout_s",
            )
        time.sleep(0.5)
