"""Point-to-point transfers between ends as a process group of their own, whose waits end when anybody fails.

Invariants:
1. The default process group is neither needed nor touched.
2. ``wait`` ends: with the data, with the first failure anybody reported, with the loss of a peer, or at the deadline.
3. How long the group waited for its members says nothing about how long a transfer may take.
4. A buffer handed to ``send`` or ``receive`` is not to be touched before ``wait`` returned.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from megarl.weights.transport.board import Board, TransportError, first_line

Backend = Literal["gloo", "nccl"]

_POLL_S = 0.0002
# Time for the failure that made a connection break to reach the board, which names it better.
_REPORT_GRACE_S = 0.5


def _abandon(*held: Any) -> None:
    """Keep objects beyond the end of the interpreter.

    Dropping a gloo group with a transfer in flight would block until that transfer times out, and at the interpreter's
    end it would abort the process. Such groups of failed sessions stay, with the store they use: a thread and some
    sockets each, in a process that is about to heal or to end.
    """
    for one in held:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


class Transfer:
    """A buffer sent or received, until ``deadline``; ``peer`` is how messages call the other end."""

    def __init__(self, work: Any, buffer: Tensor, peer: str, deadline: float) -> None:
        self.work, self.buffer, self.peer, self.deadline = work, buffer, peer, deadline
        self.done = threading.Event()
        self.error: RuntimeError | None = None


class Network:
    """This end's part of the group.

    Args:
        board: of the session.
        rank: in the group.
        size: of the group.
        backend: gloo for host memory, nccl for device memory.
        timeout_s: of joining.

    Raises:
        TransportError: not all ends came.
    """

    def __init__(self, board: Board, rank: int, size: int, *, backend: Backend, timeout_s: float) -> None:
        self._board = board
        self._pending = 0
        try:
            self._group = _process_group(board, rank, size, backend, timeout_s)
        except (RuntimeError, OSError) as error:  # torch's group errors derive from RuntimeError
            board.raise_reported()
            raise TransportError(f"no connection within {timeout_s:.0f} s: {first_line(error)}") from error
        self._waiter: queue.SimpleQueue[Transfer | None] | None = None
        if backend == "gloo":
            self._waiter = queue.SimpleQueue()
            threading.Thread(target=_wait_in_turn, args=(self._waiter,), daemon=True, name="weight-sync").start()

    def send(self, buffer: Tensor, peer: int, number: int, *, name: str, deadline: float) -> Transfer:
        """Start sending a contiguous buffer to a rank of the group.

        Args:
            buffer: uint8.
            peer: in the group.
            number: of the buffer, the same at both ends.
            name: how messages call the peer.
            deadline: of ``time.monotonic``.
        """
        return self._started(Transfer(self._group.send([buffer], peer, number), buffer, name, deadline))

    def receive(self, buffer: Tensor, peer: int, number: int, *, name: str, deadline: float) -> Transfer:
        """Start filling a contiguous buffer with what a rank of the group sends under the same number."""
        return self._started(Transfer(self._group.recv([buffer], peer, number), buffer, name, deadline))

    def wait(self, transfer: Transfer) -> None:
        """Wait until it is complete. Raises TransportError."""
        if self._waiter is not None:
            while not transfer.done.wait(0.02):
                self._board.check(transfer.deadline, [transfer.peer])
        else:
            while not transfer.work.is_completed():
                self._board.check(transfer.deadline, [transfer.peer])
                time.sleep(_POLL_S)
            try:
                transfer.work.wait()
            except RuntimeError as error:
                transfer.error = error
        if transfer.error is not None:
            grace = time.monotonic() + _REPORT_GRACE_S
            while time.monotonic() < grace:
                self._board.raise_reported()
                time.sleep(_POLL_S * 50)
            raise TransportError(f"{transfer.peer}: {first_line(transfer.error)}") from transfer.error
        self._pending -= 1
        self._board.arrived()

    def close(self) -> None:
        """Leave the group."""
        if self._waiter is not None:
            self._waiter.put(None)
        if self._pending:
            _abandon(self._group, self._board.store)
        del self._group

    def _started(self, transfer: Transfer) -> Transfer:
        self._pending += 1
        if self._waiter is not None:
            self._waiter.put(transfer)
        return transfer


def _wait_in_turn(transfers: queue.SimpleQueue[Transfer | None]) -> None:
    """A gloo transfer does not say that it is complete unless somebody waits for it: this thread does, in order."""
    while (transfer := transfers.get()) is not None:
        # Of itself it would wait as long as the group waited for its members. Who is late is told by the board first.
        left_s = max(0.0, transfer.deadline - time.monotonic()) + _REPORT_GRACE_S
        try:
            transfer.work.wait(timedelta(seconds=left_s))
        except RuntimeError as error:
            transfer.error = error
        transfer.done.set()


def _process_group(board: Board, rank: int, size: int, backend: Backend, timeout_s: float) -> Any:
    store = dist.PrefixStore("group", board.store)
    if backend == "gloo":
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        # Without a device gloo resolves the machine's host name, which in containers often leads nowhere.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=board.local_host)]
        return dist.ProcessGroupGloo(store, rank, size, options)
    nccl = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return nccl(store, rank, size, options)
