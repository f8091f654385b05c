"""Where the ends of a session meet, learn each other's failures, and compare digests: a small store of its own.

Invariants:
1. The first failure stays; whoever waits for anything reads it within ``CHECK_S``.
2. A board whose host, the driver, is gone counts as a failure of the session.
3. At the time-out the end that is late is named, not one that waits for it as well.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

CHECK_S = 0.05

# Waits that last so long are told to the others; at the time-out what others tell is looked at so many times.
_LONG_S = 0.1
_LOOKS = 6
_FAILED = "failed"
_NO_BOARD = "the driver, where the ends meet, cannot be reached"
_STORE_TIMEOUT = timedelta(seconds=30)


class TransportError(Exception):
    """A transfer that will not complete; ``from_peer`` if another end gave the reason."""

    def __init__(self, cause: str, *, from_peer: bool = False) -> None:
        super().__init__(cause)
        self.cause = cause
        self.from_peer = from_peer


@dataclass(frozen=True, slots=True)
class Address:
    """Where a board listens."""

    host: str
    port: int


class Board:
    """One end's view of the board.

    Args:
        store: its connection.
        local_host: this machine's address on the way to the board.
    """

    def __init__(self, store: dist.TCPStore, local_host: str) -> None:
        self.store = store
        self.local_host = local_host
        self.name = ""
        """How messages call this end."""
        self._next_check = 0.0
        self._waits_for: tuple[str, ...] = ()
        self._since = 0.0
        self._is_told = False

    @classmethod
    def host(cls, host: str) -> Board:
        """A new board at this host, on a free port."""
        return cls(dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT), host)

    @classmethod
    def join(cls, address: Address, timeout_s: float) -> Board:
        """The board at an address. Raises TransportError."""
        try:
            local_host = _route_to(address)
            timeout = timedelta(seconds=timeout_s)
            store = dist.TCPStore(address.host, address.port, is_master=False, timeout=timeout)
        except (RuntimeError, OSError) as error:  # torch's store errors derive from RuntimeError
            raise TransportError(f"no connection within {timeout_s:.0f} s: {first_line(error)}") from error
        store.set_timeout(_STORE_TIMEOUT)
        return cls(store, local_host)

    @property
    def address(self) -> Address:
        """Where others join."""
        return Address(self.local_host, self.store.port)

    def fail(self, cause: str) -> None:
        """Tell all others why this end gives up; the first reason stays."""
        try:
            self.store.compare_set(_FAILED, "", cause)
        except RuntimeError:  # the board is gone, and its absence tells the others
            return

    def check(self, deadline: float, whom: Sequence[str]) -> None:
        """While waiting for these ends: raises TransportError if an end failed or the deadline (``monotonic``) passed.

        ``arrived`` ends the wait.
        """
        now = time.monotonic()
        if self._waits_for != tuple(whom):
            self.arrived()
            self._waits_for, self._since = tuple(whom), now
        if now >= self._next_check:
            self._next_check = now + CHECK_S
            self.raise_reported()
            if not self._is_told and now - self._since > _LONG_S:
                self._tell("\n".join(whom))
        if now > deadline:
            raise TransportError(f"no answer from {', '.join(self._late(whom))} within the time-out")

    def arrived(self) -> None:
        """What this end waited for has come."""
        self._waits_for = ()
        if self._is_told:
            self._tell("")

    def _tell(self, whom: str) -> None:
        try:
            self.store.set(f"waits/{self.name}", whom)
        except RuntimeError as error:
            raise TransportError(_NO_BOARD) from error
        self._is_told = bool(whom)

    def _late(self, whom: Sequence[str]) -> list[str]:
        """Of these ends and of those they wait for in turn, the ones that wait for nobody; all if each one waits.

        Looked at for a while: one that works slowly lets others go on in between. Raises TransportError if one of them
        reports first.
        """
        late: set[str] = set()
        waiting = {self.name}
        for _ in range(_LOOKS):
            seen, left = {self.name}, list(whom)
            while left:
                name = left.pop()
                if name not in seen:
                    seen.add(name)
                    others = self._waited_for(name)
                    left += others
                    (waiting if others else late).add(name)
            self.raise_reported()
            time.sleep(_LONG_S)
        return sorted(late - waiting) or list(whom)

    def _waited_for(self, name: str) -> list[str]:
        key = f"waits/{name}"
        try:
            told = self.store.get(key).decode() if self.store.check([key]) else ""
        except RuntimeError as error:
            raise TransportError(_NO_BOARD) from error
        return told.split("\n") if told else []

    def raise_reported(self) -> None:
        """Raises TransportError if another end failed, or the board is gone."""
        try:
            cause = self.store.get(_FAILED).decode() if self.store.check([_FAILED]) else None
        except RuntimeError as error:
            raise TransportError(_NO_BOARD) from error
        if cause is not None:
            raise TransportError(cause, from_peer=True)

    def agree(self, key: str, value: str, whom: str, *, side: int, deadline: float) -> None:
        """Compare a value with ``whom``, who calls with the other side (0 or 1). Raises TransportError."""
        try:
            self.store.set(f"{key}/{side}", value)
            other = f"{key}/{1 - side}"
            while not self.store.check([other]):
                self.check(deadline, [whom])
                time.sleep(0.001)
            self.arrived()
            found = self.store.get(other).decode()
        except RuntimeError as error:
            raise TransportError(_NO_BOARD) from error
        if found != value:
            raise TransportError(f"the two ends of {key} were given different plans: {value} here, {found} there")


def machine() -> str:
    """Names the running machine: processes that give the same name can share memory."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    # Containers of one machine share the boot id but see each other only inside one network namespace.
    namespace = Path("/proc/self/ns/net")
    known = boot.read_text().strip() if boot.is_file() else ""
    return f"{known or socket.gethostname()}/{namespace.stat().st_ino if namespace.exists() else 0}"


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _route_to(address: Address) -> str:
    """This host's address on the way to another; connecting a datagram socket sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address.host, address.port))
        return str(probe.getsockname()[0])
