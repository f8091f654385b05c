"""Transfers inside a machine: the source packs into memory that its readers see, and tells them through a socket.

The sender's two slots are anonymous shared memory, or device memory shared by handle (CUDA IPC). Whoever connects to
the sender's socket gets both; nothing has a name in a file system, so nothing can be left behind.

Invariants:
1. A slot is written again only after every reader of its last bucket said that it is done.
2. A closed socket is the loss of a peer: waits end at once.
3. Only processes of the same user are served.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait

import torch
from torch import Tensor

from megarl.platform.device import MemorySharing
from megarl.weights.transport.board import CHECK_S, Board, TransportError

_MESSAGE = struct.Struct("<q")
_HEADER = struct.Struct("<qq")
# A reader says who it is as soon as it has connected.
_HELLO_S = 10.0


class Slots:
    """Two buffers of a sender, in memory that others can map.

    Args:
        num_bytes: of one.
        device: where they live.
        sharing: how others see it; None for host memory, whatever the device.
    """

    def __init__(self, num_bytes: int, device: torch.device | str, sharing: MemorySharing | None = None) -> None:
        self.num_bytes = num_bytes
        self.sharing = sharing
        self.descriptor = -1
        if sharing is None:
            self.descriptor = os.memfd_create("megarl-weights")
            os.ftruncate(self.descriptor, 2 * num_bytes)
            both = _mapped(self.descriptor, 2 * num_bytes)
        else:
            both = torch.empty(2 * num_bytes, dtype=torch.uint8, device=device)
        self._both = both
        self.buffers = (both[:num_bytes], both[num_bytes:])

    def handle(self) -> bytes:
        """What a reader attaches to, beside the descriptor."""
        return b"" if self.sharing is None else self.sharing.export(self._both)

    def close(self) -> None:
        """Give the descriptor back; the memory goes with its last user."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1


class Outlet:
    """The sender's end of a host link.

    Args:
        slots: what readers are shown.
    """

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self._readers: dict[int, socket.socket] = {}
        self._done: dict[int, int] = {}
        self._names: Mapping[int, str] = {}
        self._board: Board | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # The abstract namespace: the kernel picks a free name, which ends with the socket.
        self._listener.bind("")
        self._listener.listen(1024)

    @property
    def name(self) -> bytes:
        """Where readers connect."""
        name = self._listener.getsockname()
        return name if isinstance(name, bytes) else str(name).encode()

    def accept(self, readers: Mapping[int, str], board: Board, *, deadline: float) -> None:
        """Wait for all readers, by destination with their names. Raises TransportError."""
        self._board, self._names = board, readers
        while missing := readers.keys() - self._readers.keys():
            if not wait([self._listener], CHECK_S):
                board.check(deadline, [readers[reader] for reader in sorted(missing)])
                continue
            connection, _ = self._listener.accept()
            if not _is_own(connection):
                connection.close()
                continue
            connection.settimeout(_HELLO_S)
            reader = _MESSAGE.unpack(_exactly(connection, _MESSAGE.size))[0]
            # Each reader's handle of device memory counts as one use of it.
            handle = self.slots.handle()
            descriptors = [] if self.slots.descriptor < 0 else [self.slots.descriptor]
            header = _HEADER.pack(self.slots.num_bytes, len(handle))
            socket.send_fds(connection, [header], descriptors)
            connection.sendall(handle)
            self._readers[reader], self._done[reader] = connection, -1
        board.arrived()

    def begin(self) -> None:
        """An update starts, whose buckets are numbered from the beginning."""
        self._done = dict.fromkeys(self._readers, -1)

    def publish(self, number: int, readers: Sequence[int]) -> None:
        """Tell readers that a bucket is packed. Raises TransportError."""
        if self.slots.sharing is not None:
            self.slots.sharing.synchronize()
        for reader in readers:
            try:
                self._readers[reader].sendall(_MESSAGE.pack(number))
            except OSError as error:
                raise self._lost(reader) from error

    def wait(self, number: int, readers: Sequence[int], *, deadline: float) -> None:
        """Wait until all readers are done with a bucket. Raises TransportError."""
        assert self._board is not None
        waiting = {self._readers[reader]: reader for reader in readers if self._done[reader] < number}
        while waiting:
            ready = wait(list(waiting), CHECK_S)
            for connection in ready:
                assert isinstance(connection, socket.socket)
                reader = waiting[connection]
                try:
                    self._done[reader] = _MESSAGE.unpack(_exactly(connection, _MESSAGE.size))[0]
                except OSError as error:
                    raise self._lost(reader) from error
                if self._done[reader] >= number:
                    del waiting[connection]
            if not ready:
                self._board.check(deadline, [self._names[reader] for reader in waiting.values()])
        self._board.arrived()

    def close(self) -> None:
        """Leave; readers see it at once."""
        for connection in [*self._readers.values(), self._listener]:
            with contextlib.suppress(OSError):
                connection.close()
        self.slots.close()

    def _lost(self, reader: int) -> TransportError:
        assert self._board is not None
        return lost(self._board, self._names.get(reader, f"reader {reader}"))


class Inlet:
    """A reader's end of a host link.

    Args:
        name: of the sender's socket.
        destination: who reads.
        source: how messages call the sender.
        board: of the session.
        sharing: for device memory.
        timeout_s: to connect.

    Raises:
        TransportError: the sender is not there.
    """

    def __init__(
        self,
        name: bytes,
        destination: int,
        source: str,
        board: Board,
        sharing: MemorySharing | None,
        *,
        timeout_s: float,
    ) -> None:
        self._board, self._source, self._sharing = board, source, sharing
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect(name)
            self._socket.sendall(_MESSAGE.pack(destination))
            header, descriptors, _, _ = socket.recv_fds(self._socket, _HEADER.size, 1)
            header += _exactly(self._socket, _HEADER.size - len(header)) if header else b""
            num_bytes, handle_bytes = _HEADER.unpack(header)
            handle = _exactly(self._socket, handle_bytes)
        except (OSError, struct.error) as error:
            self._socket.close()
            raise TransportError(f"{source} cannot be reached on this machine: {error}") from error
        if descriptors:
            both = _mapped(descriptors[0], 2 * num_bytes)
            os.close(descriptors[0])
        elif sharing is None:
            raise TransportError(f"{source} shares device memory, which this end has none of")
        else:
            both = sharing.attach(handle)
        self.buffers = (both[:num_bytes], both[num_bytes:])

    def wait(self, number: int, *, deadline: float) -> None:
        """Wait until a bucket is packed. Raises TransportError."""
        while not wait([self._socket], CHECK_S):
            self._board.check(deadline, [self._source])
        self._board.arrived()
        try:
            found = _MESSAGE.unpack(_exactly(self._socket, _MESSAGE.size))[0]
        except OSError as error:
            raise lost(self._board, self._source) from error
        if found != number:
            raise TransportError(f"{self._source} sent bucket {found}, expected {number}")

    def release(self, number: int) -> None:
        """Tell the sender that the bucket has been read. Raises TransportError."""
        if self._sharing is not None:
            self._sharing.synchronize()
        try:
            self._socket.sendall(_MESSAGE.pack(number))
        except OSError as error:
            raise lost(self._board, self._source) from error

    def close(self) -> None:
        """Leave; the sender sees it at once."""
        self._socket.close()


def lost(board: Board, who: str) -> TransportError:
    """What to raise when a peer's socket is closed: the reason on the board, where there is one in time."""
    for _ in range(10):
        try:
            board.raise_reported()
        except TransportError as error:
            return error
        time.sleep(CHECK_S)
    return TransportError(f"{who} is gone")


def _mapped(descriptor: int, num_bytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)


def _exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """Raises ConnectionError where the peer closed."""
    found = b""
    while len(found) < num_bytes:
        part = connection.recv(num_bytes - len(found))
        if not part:
            raise ConnectionError("closed")
        found += part
    return found


def _is_own(connection: socket.socket) -> bool:
    """Whether the peer runs under this user."""
    _, user, _ = struct.unpack("iii", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.getuid())
