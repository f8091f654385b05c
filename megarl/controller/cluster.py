"""Ray for one run: a private cluster that ends with the run, or a connection to one that Slurm or the user started.

Invariants:
1. A cluster started here writes to its own temporary directory and listens on ports of its own: two runs on one machine
   do not meet, and the user's home is not touched.
2. After ``close`` no process started for the run is left on this machine, even if the run failed at any point.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import ray

from megarl.errors import SetupError
from megarl.platform import env

logger = logging.getLogger(__name__)

# Put into the environment of every process of the run, so that what is left of it can be found by its own mark.
RUN_MARK = "MEGARL_RUN_ID"


class Cluster:
    """A Ray connection for the life of a run."""

    def __init__(self, address: str | None, *, num_slots: int, num_gpus: int) -> None:
        self.run_id = secrets.token_hex(8)
        self._temporary: Path | None = None
        # The mark goes into this process's environment, and from there into Ray's and the workers'.
        env.update({RUN_MARK: self.run_id})
        if address is not None:
            try:
                ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
            except ConnectionError as error:
                raise SetupError(
                    f"no Ray cluster answers at {address}: {error}",
                    where="cluster.ray_address",
                    fix="check the address and the authentication token, or leave ray_address empty to start one",
                ) from error
            return
        # Ray keeps sockets below this directory, and socket paths are limited to 107 bytes: keep it short.
        self._temporary = Path(tempfile.mkdtemp(prefix="megarl-"))
        env.update(
            {
                # Without it Ray would write a token into the user's home.
                "RAY_AUTH_TOKEN": secrets.token_hex(32),
                "RAY_USAGE_STATS_ENABLED": "0",
            }
        )
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

    @staticmethod
    def _object_store_bytes() -> int:
        # Ray's default is 30 % of memory. A step's batch is small beside weights, which do not pass through the store.
        memory = psutil.virtual_memory().total
        shared = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").exists() else memory
        return int(max(128 * 2**20, min(0.1 * memory, 0.5 * shared, 16 * 2**30)))

    def worker_environment(self, variables: dict[str, str]) -> dict[str, Any]:
        """Ray's runtime environment for a worker process of this run."""
        return {"env_vars": {**variables, RUN_MARK: self.run_id}}

    def close(self) -> None:
        """Disconnect, end everything that carries the run's mark on this machine, and remove temporary files."""
        if ray.is_initialized():
            ray.shutdown()
        leftovers = marked_processes(self.run_id)
        for process in leftovers:
            _signal(process, signal.SIGTERM)
        _, alive = psutil.wait_procs(leftovers, timeout=3)
        for process in alive:
            _signal(process, signal.SIGKILL)
        psutil.wait_procs(alive, timeout=3)
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)


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
