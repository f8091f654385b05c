"""Which process of an engine died first.

When one process of an engine dies vLLM ends the others and reports only that the engine is dead, after up to ten
seconds. Looking at the processes themselves names the first within ``_PERIOD_S``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import psutil

_PERIOD_S = 0.2


class Liveness:
    """Watches processes by id.

    Args:
        processes: what each process is called, by its id.
    """

    def __init__(self, processes: Mapping[int, str]) -> None:
        self.death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._processes = {pid: (name, psutil.Process(pid)) for pid, name in processes.items()}
        self._task = asyncio.create_task(self._watch())

    def stop(self) -> None:
        """Stop watching."""
        self._task.cancel()
        if not self.death.done():
            self.death.cancel()

    async def _watch(self) -> None:
        while True:
            dead = [f"{name} (process {pid})" for pid, (name, process) in self._processes.items() if _is_dead(process)]
            if dead:
                # Ranks come before the scheduler, which often follows a rank within milliseconds.
                self.death.set_result(dead[0])
                return
            await asyncio.sleep(_PERIOD_S)


def _is_dead(process: psutil.Process) -> bool:
    try:
        # is_running compares start times, so a reused id does not pass for the process.
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
