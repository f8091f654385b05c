"""Bytes of tensors alive and their peak: what CUDA's allocator counts, for a CPU that counts nothing.

Every operation passes through Python meanwhile, so the CPU device counts one pass of a kind, not all of them.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveMemory(TorchDispatchMode):
    """Counts storages that operations make while it is entered, until they are freed; backward passes included.

    ``peak_bytes`` is above what was alive on entry, which is not counted. Temporaries inside one kernel are not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._seen: set[int] = set()

    def __enter__(self) -> LiveMemory:
        super().__enter__()
        return self

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_iter((args, kwargs)):  # what was alive before is no news
            if isinstance(value, torch.Tensor):
                self._pass_over(value.untyped_storage())
        result = function(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor):
                self._count(value.untyped_storage())
        return result

    def _pass_over(self, storage: torch.UntypedStorage) -> None:
        if (identity := storage._cdata) not in self._seen:
            self._seen.add(identity)
            # Its address may be given to another one once it is free.
            weakref.finalize(storage, self._seen.discard, identity)

    def _count(self, storage: torch.UntypedStorage) -> None:
        identity = storage._cdata
        if identity in self._seen or not storage.nbytes():
            return
        self._seen.add(identity)
        size = storage.nbytes()
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._free, identity, size)

    def _free(self, identity: int, size: int) -> None:
        self._seen.discard(identity)
        self.live_bytes -= size
