"""CUDA with NCCL and Transformer Engine: the only module of megarl that names ``torch.cuda``.

Invariants:
1. A process owns one device; nothing is allocated before ``bind``.
2. The process group is bound to that device, so that NCCL never guesses it from the rank.
3. A collective that exceeds its time-out ends the process (see ``env._CUDA``); it does not hang.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from megarl.errors import SetupError
from megarl.platform import env
from megarl.platform.device import Introduction, LayerImplementation, MemoryUse, PassMemory
from megarl.platform.packages import fused_kernels, has_transformer_engine, import_megatron

# Place of the device's index among the arguments of ``rebuild_cuda_tensor``.
_DEVICE_ARGUMENT = 6
# Functions of transformer_engine.pytorch (quantization.py in 2.20.2).
_FP8_QUESTIONS = {
    "blockwise": "is_fp8_block_scaling_available",
    "tensorwise": "is_fp8_available",
    "mxfp8": "is_mxfp8_available",
}


class CudaDevice:
    """One GPU of this process. Raises SetupError where torch sees none."""

    name = "cuda"
    collective_backend = "nccl"
    layer_implementation: LayerImplementation = "transformer_engine"
    watching_is_free = True

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise SetupError(
                "torch finds no CUDA device",
                fix="install a CUDA build of torch, ask the scheduler for GPUs, or set cluster.device=cpu",
            )
        self._index: int | None = None

    @property
    def torch_device(self) -> torch.device:
        """The bound device. Raises SetupError before ``bind``."""
        if self._index is None:
            raise SetupError("no CUDA device is bound to this process yet", fix="call bind first")
        return torch.device("cuda", self._index)

    def bind(self, local_rank: int) -> None:
        """Own the ``local_rank``-th visible device; 0 where CUDA_VISIBLE_DEVICES shows one only, as Ray sets it."""
        count = torch.cuda.device_count()
        if not 0 <= local_rank < count:
            raise SetupError(
                f"local rank {local_rank} has no device: {count} are visible",
                where=f"CUDA_VISIBLE_DEVICES={env.text('CUDA_VISIBLE_DEVICES')}",
                fix="start as many processes on a node as it has devices",
            )
        self._index = local_rank
        torch.cuda.set_device(local_rank)

    def process_group_options(self, timeout: timedelta) -> dict[str, Any]:
        """NCCL bound to this device. The communicator is made here rather than in the first collective."""
        return {"backend": self.collective_backend, "timeout": timeout, "device_id": self.torch_device}

    def prepare_megatron(self) -> None:
        """Import Megatron-Core. Raises SetupError without Transformer Engine, whose layers a GPU run is made of."""
        if not has_transformer_engine():
            raise SetupError(
                "Transformer Engine is not installed", fix="pip install 'megarl[gpu]' on a machine with a CUDA toolkit"
            )
        # Megatron-Core reads it when tensor-parallel communication overlaps with computation; Blackwell needs no limit.
        env.set_defaults({"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
        import_megatron()

    def check_fp8(self, recipe: str) -> None:
        """Ask Transformer Engine. Raises SetupError with its reason."""
        try:
            from transformer_engine import pytorch as te

            ask = getattr(te, _FP8_QUESTIONS[recipe])
        except (ImportError, AttributeError) as error:
            raise SetupError(
                f"Transformer Engine has no FP8 with {recipe} scales ({error})",
                where=f"engine.fp8_recipe={recipe}",
                fix="install the version of 'megarl[gpu]', or set engine.fp8=null",
            ) from error
        is_available, reason = ask(return_reason=True)
        if not is_available:
            raise SetupError(
                f"{torch.cuda.get_device_name(self.torch_device)} cannot: {reason}",
                where=f"engine.fp8_recipe={recipe}",
                fix="choose another engine.fp8_recipe, or engine.fp8=null",
            )

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def now(self) -> float:
        """Seconds of a monotonic clock after all queued work."""
        self.synchronize()
        return time.perf_counter()

    def introduce(self) -> Introduction:
        """The GPU's name, and the packages with fused kernels."""
        return Introduction(torch.cuda.get_device_name(self.torch_device), fused_kernels())

    def memory(self) -> MemoryUse:
        """Memory of torch's allocator on the bound device; other processes' is in ``total`` minus what is free."""
        device = self.torch_device
        _, total = torch.cuda.mem_get_info(device)
        return MemoryUse(
            allocated_bytes=torch.cuda.memory_allocated(device),
            peak_bytes=torch.cuda.max_memory_allocated(device),
            reserved_bytes=torch.cuda.memory_reserved(device),
            total_bytes=total,
        )

    @contextmanager
    def watch_pass(self, held_bytes: int) -> Iterator[PassMemory]:
        """What torch's allocator counts; it knows what was alive before."""
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        measured = PassMemory(torch.cuda.memory_allocated(self.torch_device))
        yield measured
        measured.working_bytes = torch.cuda.max_memory_allocated(self.torch_device) - measured.held_bytes

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)  # seeds the host's generator and every device's

    def rng_state(self) -> dict[str, torch.Tensor]:
        return {"host": torch.get_rng_state(), "device": torch.cuda.get_rng_state(self.torch_device)}

    def set_rng_state(self, state: dict[str, torch.Tensor]) -> None:
        torch.set_rng_state(state["host"].cpu())
        torch.cuda.set_rng_state(state["device"].cpu(), self.torch_device)


class CudaMemorySharing:
    """CUDA IPC between processes on one GPU (``platform.device.MemorySharing``).

    A handle opens on the GPU its memory is on, which need not have the same index in both processes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.device_id = str(torch.cuda.get_device_properties(device).uuid)

    def export(self, buffer: torch.Tensor) -> bytes:
        """A handle of a buffer, for one process; the buffer must outlive its use there."""
        _, arguments = reduce_tensor(buffer)
        return pickle.dumps(arguments)

    def attach(self, handle: bytes) -> torch.Tensor:
        """The buffer behind a handle of a process of this user."""
        arguments = list(pickle.loads(handle))
        arguments[_DEVICE_ARGUMENT] = self._device.index
        shared: torch.Tensor = rebuild_cuda_tensor(*arguments)
        return shared

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)
