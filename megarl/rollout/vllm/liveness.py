"""Which process of an engine died first.

When one process of an engine dies vLLM ends the others and reports only that the engine is dead, after up to ten
seconds. The kernel says which process ended, at once, through a file descriptor per process.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping


class Liveness:
    """Watches processes of this machine by id, on the running event loop.

    Args:
        processes: what each process is called, by its id.
    """

    def __init__(self, processes: Mapping[int, str]) -> None:
        self._loop = asyncio.get_running_loop()
        self.death: asyncio.Future[str] = self._loop.create_future()
        self._open: list[int] = []
        for pid, name in processes.items():
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._note(f"{name} (process {pid})")
                continue
            self._open.append(descriptor)
            # Readable once the process has ended, whoever its parent is.
            self._loop.add_reader(descriptor, self._note, f"{name} (process {pid})")

    def stop(self) -> None:
        """Stop watching; ``death`` is cancelled unless somebody died."""
        for descriptor in self._open:
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
        self._open.clear()
        if not self.death.done():
            self.death.cancel()

    def _note(self, who: str) -> None:
        """The first death counts; the others follow from it."""
        if not self.death.done():
            self.death.set_result(who)
        for descriptor in self._open:
            self._loop.remove_reader(descriptor)
