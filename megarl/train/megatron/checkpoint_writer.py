"""One rank's file of a checkpoint in torch's distributed format: planned with the others, copied, written, read back.

A save has four parts. Planning and finishing are collective and small; copying holds up the training; writing is long,
needs no other rank and no device, and may run in a thread while the training goes on.

Invariants:
1. Nothing is collective while a thread writes: its messages would mix with the training's.
2. What is written in the background was copied before: an update after ``copy`` returns does not reach the file.
3. A file counts as written only when it was synced and read back with the checksum of what was in memory.
4. A failure of one rank is known to all of them at the end (``gather``), and to none before.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

from megarl.errors import CheckpointError
from megarl.weights.files.file_checksum import FileChecksum, checksum_of
from megarl.weights.files.torch_archive import lay_out, tensor_value

_ALIGNMENT = 64
DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True)
class Written:
    """What a rank has to say about its file.

    Args:
        name: of the file; None if the rank had nothing to write.
        num_bytes: its size.
        checksum: of its bytes (``weights.files.file_checksum``).
        results: where each entry lies, for the checkpoint's index.
        error: why it is not there, as one line.
    """

    name: str | None
    num_bytes: int = 0
    checksum: str = ""
    results: list[WriteResult] = field(default_factory=list)
    error: str | None = None


class HostCopy:
    """Memory of the host that holds one rank's share of a checkpoint while it is written; kept for the next one."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Contiguous copies, complete when this returns."""
        starts, size = [], 0
        for tensor in tensors:
            starts.append(size)
            size += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        if len(self._buffer) < size:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # let go of the old one first
            self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        copies = []
        for start, tensor in zip(starts, tensors, strict=True):
            place = self._buffer[start : start + tensor.numel() * tensor.element_size()]
            copies.append(place.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True))
        return copies


class RankFile(torch_strategy.TorchDistSaveShardedStrategy):
    """Megarl's part in ``dist_checkpointing.save``: that only plans here; ``write`` and ``finish`` do the rest.

    Megatron's writer forks from a process full of threads, starts a manager process on first use (3 to 4 s), and
    reports a failed write only after all ranks have passed a barrier. The files are the same format.

    Args:
        host: where to copy tensors before this rank goes on; None leaves them where they are until they are written.
        synchronize: waits for the device's copies.
    """

    def __init__(self, host: HostCopy | None, synchronize: Callable[[], None]) -> None:
        super().__init__("torch_dist", 1)
        self.seconds: dict[str, float] = {}
        self._host = host
        self._synchronize = synchronize
        self._directory = Path()
        self._items: list[tuple[WriteItem, Tensor | bytes]] = []
        self._metadata: Any = None
        self._thread: threading.Thread | None = None
        self._written: Written | None = None

    # -- planning and copying ----------------------------------------------------------------------------------------

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Agree on who writes what, and copy it; collective."""
        started = time.perf_counter()
        self._directory = Path(checkpoint_dir)
        # The name maps that come back with it are for loading.
        state = torch_strategy._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)[0]
        state = torch_strategy.mcore_to_pyt_state_dict(state, False)
        planner = torch_strategy.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        ranks = _DistWrapper(None, True, 0)

        def local() -> Any:
            planner.set_up_planner(state, is_coordinator=ranks.is_coordinator)
            return planner.create_local_plan()

        def together(plans: list[Any]) -> list[Any]:
            plans, self._metadata = planner.create_global_plan(plans)
            return plans

        plan = planner.finish_plan(ranks.reduce_scatter("plan", local, together))
        self.seconds["plan"] = time.perf_counter() - started
        started = time.perf_counter()
        self._items = [(item, self._data(planner, item)) for item in plan.items]
        if self._host is not None:
            tensors = [(item, data) for item, data in self._items if isinstance(data, Tensor)]
            copies = self._host.copy([data for _, data in tensors])
            self._synchronize()
            others: list[tuple[WriteItem, Tensor | bytes]] = [
                (item, data) for item, data in self._items if not isinstance(data, Tensor)
            ]
            self._items = others + [(item, copy) for (item, _), copy in zip(tensors, copies, strict=True)]
        self.seconds["copy"] = time.perf_counter() - started

    @staticmethod
    def _data(planner: Any, item: WriteItem) -> Tensor | bytes:
        data = planner.resolve_data(item)
        return data.getvalue() if item.type == WriteItemType.BYTE_IO else data.detach()

    # -- writing -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Write in a thread."""
        self._thread = threading.Thread(target=self.write, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_written(self) -> bool:
        """Whether the thread is done, well or not."""
        return self._thread is None or not self._thread.is_alive()

    def write(self) -> None:
        """Write this rank's file, sync it, read it back; a failure is kept for ``gather``."""
        try:
            self._written = self._write() if self._items else Written(None)
        except CheckpointError as error:
            self._written = Written(None, error=str(error))
        except (OSError, RuntimeError, ValueError, KeyError, MemoryError) as error:
            self._written = Written(None, error=f"{type(error).__name__}: {error}")
        self._items = []

    def _write(self) -> Written:
        started = time.perf_counter()
        name = f"__{dist.get_rank()}_0.distcp"
        path = self._directory / name
        results, checksum, position = [], FileChecksum(), 0
        with open(path, "wb", buffering=0) as file:
            for item, data in self._items:
                start = position
                for part in _parts(data, start):
                    _write_all(file.fileno(), part)
                    checksum.add(position, part)
                    position += len(part)
                info = _StorageInfo(name, start, position - start)
                results.append(WriteResult(index=item.index, size_in_bytes=position - start, storage_data=info))
            os.fsync(file.fileno())
        self.seconds["write"] = time.perf_counter() - started
        started = time.perf_counter()
        found = checksum_of(path, from_disk=True)
        if found != checksum.hex():
            raise CheckpointError(
                f"{name} reads back as {found}, written was {checksum.hex()}", where=str(path), fix="check the disk"
            )
        self.seconds["verify"] = time.perf_counter() - started
        return Written(name, position, checksum.hex(), results)

    # -- finishing ---------------------------------------------------------------------------------------------------

    def gather(self) -> list[Written]:
        """What every rank has written, after all are done; collective.

        Raises:
            CheckpointError: a rank could not write; on every rank, naming it.
        """
        if self._thread is not None:
            self._thread.join()
        everywhere: list[Written] = [Written(None)] * dist.get_world_size()
        dist.all_gather_object(
            everywhere, Written(None, error="nothing was written") if self._written is None else self._written
        )
        if failed := [(rank, one.error) for rank, one in enumerate(everywhere) if one.error is not None]:
            rank, error = failed[0]
            raise CheckpointError(f"cannot write the checkpoint: {error}", where=f"{self._directory}, rank {rank}")
        return everywhere

    def write_index(self, everywhere: Sequence[Written]) -> None:
        """Write the index of all files; on rank 0."""
        writer = dcp.FileSystemWriter(self._directory, sync_files=True)
        writer.finish(self._metadata, [one.results for one in everywhere])


def _parts(data: Tensor | bytes, start: int) -> list[Tensor]:
    """What stands in the file for an entry, as pieces of uint8 [n] on the CPU: a tensor inside torch's archive."""
    if isinstance(data, bytes):
        return [torch.frombuffer(bytearray(data), dtype=torch.uint8)] if data else []
    tensor = data.cpu().contiguous()
    num_bytes = tensor.numel() * tensor.element_size()
    archive = lay_out(tensor_value(0, DTYPES[tensor.dtype], tuple(tensor.shape)), (num_bytes,), start)
    pieces: Mapping[int, Tensor] = {
        position: torch.frombuffer(bytearray(content), dtype=torch.uint8)
        for position, content in archive.segments
        if content
    } | {archive.data_begin[0]: tensor.reshape(-1).view(torch.uint8)}
    return [piece for _, piece in sorted(pieces.items()) if len(piece)]


def _write_all(descriptor: int, data: Tensor) -> None:
    view = memoryview(data.numpy())
    while len(view):
        view = view[os.write(descriptor, view[: 1 << 30]) :]
