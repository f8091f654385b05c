"""Addresses and ports of a job.

Invariants:
1. The head's ports are a block derived from the job id, below the ephemeral range, and every one of them was free when
   probed: two jobs on one node do not meet.
2. A node is known by the address from which it reaches its peer, not by what its host name resolves to.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

from megarl.errors import SetupError

FIRST_PORT = 20_000
BLOCK = 16
# Linux hands out ephemeral ports from 32768 on.
NUM_BLOCKS = (32_768 - FIRST_PORT) // BLOCK


@dataclass(frozen=True, slots=True)
class HeadPorts:
    """Ports of Ray's head node; the other nodes take what is free, since nobody has to know theirs beforehand."""

    base: int

    @property
    def gcs(self) -> int:
        return self.base

    def options(self) -> list[str]:
        """``ray start`` options that keep every server of the head inside the block."""
        return [
            f"--port={self.gcs}",
            f"--ray-client-server-port={self.base + 1}",
            f"--node-manager-port={self.base + 2}",
            f"--object-manager-port={self.base + 3}",
            f"--dashboard-agent-listen-port={self.base + 4}",
            f"--dashboard-agent-grpc-port={self.base + 5}",
            f"--runtime-env-agent-port={self.base + 6}",
            f"--metrics-export-port={self.base + 7}",
        ]


def candidate_blocks(job_id: int) -> list[int]:
    """First ports of all blocks in the order a job tries them; neighbours in time start at different ones."""
    start = job_id % NUM_BLOCKS
    return [FIRST_PORT + BLOCK * ((start + index) % NUM_BLOCKS) for index in range(NUM_BLOCKS)]


def head_ports(job_id: int) -> HeadPorts:
    """The first block of the job whose ports are all free on this node. Raises SetupError if there is none."""
    for base in candidate_blocks(job_id):
        if all(is_free(port) for port in range(base, base + BLOCK)):
            return HeadPorts(base)
    raise SetupError(f"no {BLOCK} consecutive free ports between {FIRST_PORT} and 32767", where=socket.gethostname())


def is_free(port: int) -> bool:
    """Whether a TCP port can be bound on every interface of this node."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def address_towards(peer: str) -> str:
    """This node's IPv4 address on the route to ``peer`` (host name or address); nothing is sent.

    Raises:
        SetupError: the peer's name does not resolve, or there is no route to it.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((peer, 9))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise SetupError(f"no route from {socket.gethostname()} to {peer}: {error}") from error
