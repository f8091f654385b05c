"""Tensors in host memory that Megatron-Core's optimizer on the CPU takes for ones on a GPU.

It asks each parameter whether it is on the GPU and gives those that are a copy in pinned host
memory. Where the device is the host, parameters and copies are told apart by how they were made.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _DeviceAndHost(TorchFunctionMode):
    """Tensors are on the device but for copies that ``tensor.cpu()`` made, and what is made of these."""

    def __init__(self) -> None:
        super().__init__()
        self._host: dict[int, torch.Tensor] = {}  # kept alive, so that no other tensor gets the same identity

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__self__", None) is torch.Tensor.is_cuda:
            return id(args[0]) not in self._host
        if func is torch.Tensor.pin_memory:
            return args[0]
        result = args[0].clone() if func is torch.Tensor.cpu else func(*args, **(kwargs or {}))
        is_host = func is torch.Tensor.cpu or (bool(args) and id(args[0]) in self._host)
        if is_host and isinstance(result, torch.Tensor):
            self._host[id(result)] = result
        return result


def with_host_copies(optimizer: Any) -> None:
    """Let Megatron-Core's HybridDeviceOptimizer share out parameters that are in host memory."""
    original = optimizer._get_sub_optimizer_param_groups

    @functools.wraps(original)
    def share_out(*args: Any, **kwargs: Any) -> Any:
        with _DeviceAndHost():
            return original(*args, **kwargs)

    optimizer._get_sub_optimizer_param_groups = share_out
