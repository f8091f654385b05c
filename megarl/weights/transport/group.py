"""One sender and all receivers as a process group of their own, whose waits end when anybody fails.

The group is built on a store that the sender hosts. The store also carries the first failure: a rank that gives up
writes its reason there, and whoever waits for a broadcast reads it within ``_CHECK_S``.

Invariants:
1. The default process group is neither needed nor touched: trainer and engines have their own.
2. ``wait`` ends: with the data, with the first failure anybody reported, with the loss of a peer, or at the time-out.
3. A buffer handed to ``broadcast`` is not to be touched before ``wait`` returned.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

Backend = Literal["gloo", "nccl"]

_FAILED = "failed"
_POLL_S = 0.0002
_CHECK_S = 0.05
_STORE_TIMEOUT = timedelta(seconds=30)

# Dropping a gloo group with a broadcast in flight would block until that broadcast times out. Such groups of failed
# sessions are kept: a thread and some sockets each, in a process that is about to heal or to end.
_ABANDONED: list[Any] = []


class TransportError(Exception):
    """A broadcast that will not complete; ``from_peer`` if another rank gave the reason."""

    def __init__(self, cause: str, *, from_peer: bool = False) -> None:
        super().__init__(cause)
        self.cause = cause
        self.from_peer = from_peer


@dataclass(frozen=True, slots=True)
class Address:
    """Where a sender's store listens."""

    host: str
    port: int


def open_store(host: str) -> dist.TCPStore:
    """A store at this host on a free port."""
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT)


class Channel:
    """Broadcasts of one sender. Rank 0 sends.

    Args:
        store: the sender's own store, or its address.
        rank: 0 for the sender, 1 and up for receivers.
        size: 1 + number of receivers.
        backend: gloo for host memory, nccl for device memory.
        timeout_s: of joining, and of every broadcast.

    Raises:
        TransportError: not all ranks came.
    """

    def __init__(
        self, store: dist.TCPStore | Address, rank: int, size: int, *, backend: Backend, timeout_s: float
    ) -> None:
        self.is_sender = rank == 0
        self._timeout_s = timeout_s
        self._pending: set[Any] = set()
        try:
            if isinstance(store, Address):
                local_host = _route_to(store)
                client = dist.TCPStore(store.host, store.port, is_master=False, timeout=timedelta(seconds=timeout_s))
                client.set_timeout(_STORE_TIMEOUT)
            else:
                local_host, client = store.host, store
            self._store = client
            self._group = _process_group(client, rank, size, backend, local_host, timeout_s)
        except (RuntimeError, OSError) as error:  # torch's store and group errors derive from RuntimeError
            raise TransportError(f"no connection within {timeout_s:.0f} s: {_first_line(error)}") from error

    def broadcast(self, buffer: Tensor) -> Any:
        """Start sending or filling a contiguous buffer; complete after ``wait``."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        work = self._group.broadcast([buffer], options)
        self._pending.add(work)
        return work

    def wait(self, work: Any, *, deadline: float) -> None:
        """Wait for a broadcast until ``deadline`` (of ``time.monotonic``). Raises TransportError."""
        next_check = time.monotonic() + _CHECK_S
        while not work.is_completed():
            now = time.monotonic()
            if now > deadline:
                raise TransportError("no data within the time-out")
            if now > next_check:
                self._raise_reported()
                next_check = now + _CHECK_S
            time.sleep(_POLL_S)
        self._pending.discard(work)
        try:
            work.wait()
        except RuntimeError as error:
            self._raise_reported()
            raise TransportError(_first_line(error)) from error

    def fail(self, cause: str) -> None:
        """Tell all others why this rank gives up; the first reason stays."""
        try:
            self._store.compare_set(_FAILED, "", cause)
        except RuntimeError:  # the sender, and with it the store, is gone: its absence tells the others
            return

    def close(self) -> None:
        """Leave the group."""
        if self._pending:
            _ABANDONED.append((self._group, self._store, list(self._pending)))
        self._pending.clear()
        del self._group

    def _raise_reported(self) -> None:
        try:
            cause = self._store.get(_FAILED).decode() if self._store.check([_FAILED]) else None
        except RuntimeError as error:
            raise TransportError("the sender is gone") from error
        if cause is not None:
            raise TransportError(cause, from_peer=True)


def _process_group(
    store: dist.TCPStore, rank: int, size: int, backend: Backend, local_host: str, timeout_s: float
) -> Any:
    timeout = timedelta(seconds=timeout_s)
    if backend == "gloo":
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timeout
        # Without a device gloo resolves the machine's host name, which in containers often leads nowhere.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=local_host)]
        return dist.ProcessGroupGloo(dist.PrefixStore("group", store), rank, size, options)
    nccl = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    return nccl(dist.PrefixStore("group", store), rank, size, options)


def _route_to(address: Address) -> str:
    """This host's address on the way to another; connecting a datagram socket sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address.host, address.port))
        return str(probe.getsockname()[0])


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def byte_buffer(num_bytes: int, device: torch.device | str) -> Tensor:
    """An uninitialised [num_bytes] uint8 buffer."""
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)
