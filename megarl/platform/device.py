"""What megarl needs of a device, so that the code above does not ask whether it runs on CPU or CUDA.

Invariants:
1. ``torch.cuda`` is named in this package only.
2. Importing this module loads no torch; ``get_device`` does.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Protocol

from megarl.errors import SetupError

if TYPE_CHECKING:
    import torch

LayerImplementation = Literal["local", "transformer_engine"]


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of this process: tensors alive, their peak since the last reset, taken from the device; the device's."""

    allocated_bytes: int
    peak_bytes: int
    reserved_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Introduction:
    """What a process says of itself at the start: the device's name, and the kernels that were found, in words."""

    device: str
    kernels: tuple[str, ...]


@dataclass(slots=True)
class PassMemory:
    """What a pass took beside the tensors that were there before it.

    Args:
        held_bytes: tensors alive before it.
        working_bytes: most that was alive above them; 0 until the pass has ended.
    """

    held_bytes: int = 0
    working_bytes: int = 0


class Device(Protocol):
    """A kind of device as one process sees it."""

    name: str
    """``cpu`` or ``cuda``."""
    collective_backend: str
    """Backend of torch.distributed: ``gloo`` or ``nccl``."""
    layer_implementation: LayerImplementation
    """Which of Megatron-Core's layer specifications runs here."""

    @property
    def torch_device(self) -> torch.device:
        """Where tensors of this process live."""
        ...

    def bind(self, local_rank: int) -> None:
        """Make the ``local_rank``-th device this process's own. Raises SetupError if there is none."""
        ...

    def process_group_options(self, timeout: timedelta) -> dict[str, Any]:
        """Keyword arguments of ``torch.distributed.init_process_group`` beside rank, world size and store."""
        ...

    def prepare_megatron(self) -> None:
        """Import Megatron-Core and make it run here; once per process, later calls do nothing. Raises SetupError."""
        ...

    def check_fp8(self, recipe: str) -> None:
        """Raises SetupError where matrices cannot be multiplied in FP8 with this recipe of Transformer Engine's."""
        ...

    def synchronize(self) -> None:
        """Wait for everything this process has queued."""
        ...

    def now(self) -> float:
        """Seconds of a monotonic clock, read after ``synchronize``."""
        ...

    def introduce(self) -> Introduction:
        """Its name and the kernels megarl's models run with here."""
        ...

    def memory(self) -> MemoryUse:
        """Memory in use."""
        ...

    watching_is_free: bool
    """Whether ``watch_pass`` costs nothing, so that every pass can be watched."""

    def watch_pass(self, held_bytes: int) -> AbstractContextManager[PassMemory]:
        """Measure the tensors of what runs inside.

        Args:
            held_bytes: state that the caller knows of, taken for what was alive before where the device cannot tell.
        """
        ...

    def empty_cache(self) -> None:
        """Give cached memory back, before another process on the same device needs it."""
        ...

    def seed(self, seed: int) -> None:
        """Seed the generators of this device and of the host."""
        ...

    def rng_state(self) -> dict[str, torch.Tensor]:
        """State of the generators of this device and of the host."""
        ...

    def set_rng_state(self, state: dict[str, torch.Tensor]) -> None:
        """Restore what ``rng_state`` returned."""
        ...


class MemorySharing(Protocol):
    """How memory of one device is shown to another process that uses the device too."""

    device_id: str
    """Names the device on every machine."""

    def export(self, buffer: torch.Tensor) -> bytes:
        """A handle of a buffer, for one process."""
        ...

    def attach(self, handle: bytes) -> torch.Tensor:
        """The buffer behind a handle, while the process that exported it keeps it."""
        ...

    def synchronize(self) -> None:
        """Wait for what this process has queued on the device."""
        ...


def memory_sharing(device: torch.device) -> MemorySharing | None:
    """Sharing of a device's memory; None for the CPU, whose memory is shared as files are."""
    if device.type != "cuda":
        return None
    from megarl.platform.cuda import CudaMemorySharing

    return CudaMemorySharing(device)


def get_device(name: str) -> Device:
    """The device called ``cpu`` or ``cuda``. Raises SetupError for another name, or where CUDA is missing."""
    if name == "cpu":
        from megarl.platform.cpu import CpuDevice

        return CpuDevice()
    if name == "cuda":
        from megarl.platform.cuda import CudaDevice

        return CudaDevice()
    raise SetupError(f"device {name!r} is unknown", fix="use cpu or cuda")
