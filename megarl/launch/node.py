"""``python -m megarl.launch.node``: Ray on one node of the job, until the job ends it.

It runs on every node: in the batch step for the head, as a task of one srun for all the others. It finds the node's
address, runs ``ray start --block``, and on SIGTERM or SIGUSR1 ends Ray with everything Ray started there. Where Slurm's
daemon of the node is dead no signal comes: the head that has gone is the sign then, long before Ray gives it up.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import signal
import socket
import sys
import time
import zlib
from pathlib import Path

import psutil

from megarl.launch.network import HeadPorts, address_towards
from megarl.launch.supervise import Children
from megarl.platform import env

logger = logging.getLogger(__name__)

GIB = 2**30

LOOK_S = 2.0
"""Between two looks at the head."""

ANSWER_S = 2.0
"""How long its machine has to answer."""


def object_store_bytes(total: int, shared: int) -> int:
    """Ray's object store: batches pass through it, weights do not, so Ray's 30 % of memory would be wasted.

    Args:
        total: bytes of memory of the node.
        shared: free bytes of /dev/shm, where the store lies.
    """
    return int(max(128 * 2**20, min(0.1 * total, 0.5 * shared, 16 * GIB)))


def node_resource(name: str) -> str:
    """The custom resource by which the barrier recognises a node under Slurm's name for it."""
    return f"slurm:{name}"


def ray_start(args: argparse.Namespace) -> list[str]:
    """The ``ray start`` command of this node."""
    host, _, port = args.address.rpartition(":")
    shared = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").exists() else GIB
    store = object_store_bytes(psutil.virtual_memory().total, shared)
    if args.head:
        place = ["--head", f"--node-ip-address={host}", *HeadPorts(int(port)).options(), "--include-dashboard=false"]
    else:
        place = [f"--address={args.address}", f"--node-ip-address={address_towards(host)}"]
    return [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *place,
        f"--num-cpus={args.cpus}",
        f"--num-gpus={args.gpus}",
        f"--resources={json.dumps({node_resource(args.name): 1})}",
        f"--object-store-memory={store}",
        # Several runs share a node: Ray's default worker ports would meet, so the system hands out free ones.
        "--min-worker-port=0", "--max-worker-port=0",
        f"--temp-dir={args.temporary}",
        "--disable-usage-stats", "--log-style=record", "--log-color=false",
    ]  # fmt: skip


class Head:
    """The head as another node sees it: not up yet, there, silent or gone.

    Args:
        address: IP:PORT.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._was_there = False
        self._refusals = 0
        self._next_look = time.monotonic() + LOOK_S

    def has_gone(self) -> bool:
        """Whether its machine said twice in a row that nobody listens any more; looks every ``LOOK_S`` at most."""
        if time.monotonic() < self._next_look:
            return False
        listens = self.listens()
        self._next_look = time.monotonic() + LOOK_S
        self._was_there |= listens is True
        self._refusals = self._refusals + 1 if self._was_there and listens is False else 0
        return self._refusals >= 2

    def listens(self) -> bool | None:
        """Whether somebody does; None where the machine says nothing, as one that is busy does."""
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
        except ConnectionRefusedError:
            return False
        except OSError as error:
            logger.debug("%s does not answer: %s", self._address, error)
            return None
        return True


def main() -> int:
    """Run Ray here; returns its exit code, or 0 when it was told to end."""
    parser = argparse.ArgumentParser(prog="megarl.launch.node")
    parser.add_argument("--head", action="store_true")
    parser.add_argument("--address", required=True, help="IP:PORT of the head")
    parser.add_argument("--name", help="Slurm's name of this node; default: SLURMD_NODENAME")
    parser.add_argument("--cpus", type=int, required=True)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--temporary", type=Path, required=True)
    args = parser.parse_args()
    args.name = args.name or env.text("SLURMD_NODENAME") or socket.gethostname()
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {args.name}: %(message)s")
    # Nodes that are one machine (tests) must not share a directory, since each removes its own at the end. Names of
    # nodes can be long and socket paths are limited to 107 bytes: four digits of a checksum do.
    args.temporary = args.temporary.with_name(f"{args.temporary.name}{zlib.crc32(args.name.encode()) & 0xFFFF:04x}")

    children = Children()
    children.forward([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], None)
    ray = children.start("ray", ray_start(args), environment=env.copy())
    head = Head(args.address)
    try:
        while children.received is None:
            if children.first_exit([ray], deadline_s=0.2) is not None:
                logger.error("ray ended by itself with exit code %s", ray.process.returncode)
                return ray.process.returncode or 1
            if not args.head and head.has_gone():
                logger.error("the head at %s has gone", args.address)
                return 1
        return 0
    finally:
        children.end_all()
        shutil.rmtree(args.temporary, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
