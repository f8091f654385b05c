"""CUDA's names over the CPU, for Megatron-Core's modules alone: a copy of torch's namespace, and tensor methods."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")

# --- the namespace Megatron's modules see ---


class _NullStream:
    """Stands for a CUDA stream or event: on CPU everything has already happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> _NullStream:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None

    def record_event(self, *_: Any) -> _NullStream:
        return self


class _CudaOnCpu(ModuleType):
    """``torch.cuda`` with the CPU as its only device."""

    Stream = Event = _NullStream

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_device(self) -> torch.device:
        return _CPU

    def synchronize(self, *_: Any) -> None: ...

    def empty_cache(self) -> None: ...

    def current_stream(self, *_: Any) -> _NullStream:
        return _NullStream()

    default_stream = current_stream

    def stream(self, _: Any) -> nullcontext[None]:
        return nullcontext()

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *_: Any) -> None:
        torch.set_rng_state(state)


class _TorchOnCpu(ModuleType):
    """A copy of torch's namespace, so that look-ups cost what they cost in torch; late additions are forwarded."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _is_cuda(device: Any) -> bool:
    return device is not None and str(device).startswith("cuda")


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The factory function with ``device="cuda"`` read as the CPU."""

    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return create


@functools.cache
def torch_on_cpu() -> ModuleType:
    """A copy of torch's namespace in which the CUDA device is the CPU."""
    namespace = _TorchOnCpu("torch")
    vars(namespace).update(vars(torch))
    for name in ("tensor", "empty", "zeros", "ones", "full", "arange", "empty_like", "zeros_like"):
        setattr(namespace, name, _on_cpu(getattr(torch, name)))
    namespace.cuda = _CudaOnCpu("torch.cuda")  # type: ignore[attr-defined]
    return namespace


# --- tensor methods that name CUDA ---


class _CpuTensorsAsCuda(TorchFunctionMode):
    """``tensor.cuda()`` returns the tensor, and ``tensor.type()`` names the CUDA type that Megatron compares with."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


def call_with_cpu_tensors_as_cuda(owner: Any, name: str) -> None:
    """Replace ``owner.name`` by itself under ``_CpuTensorsAsCuda``."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _CpuTensorsAsCuda():
            return original(*args, **kwargs)

    setattr(owner, name, call)
