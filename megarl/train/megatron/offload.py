"""Weights, gradients and optimizer state to host memory between phases, so that a colocated role can use the device.

Megatron's parameters are views into buffers, and the optimizer holds views of the same buffers. So storages are moved,
not tensors: a storage is copied to pinned host memory and resized to zero bytes, and every view is valid again once it
is restored.

Invariants:
1. Each storage moves once, however many tensors view it, and comes back with the same bytes at its own address' views.
2. Gradients are scratch: their storages are freed without a copy and come back as zeros.
3. Host buffers are kept for the next time: pinning memory is slow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megarl.platform.device import Device
from megarl.train.engine import Moved
from megarl.train.megatron import host_optimizer
from megarl.train.megatron.optimizer import Optimizer


def unique_storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Storages behind the tensors by their identity, those without bytes left out."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = storage
    return found


def weight_tensors(chunks: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Parameters and buffers of chunks, and the flat buffers Megatron keeps parameters in."""
    for chunk in chunks:
        for parameter in chunk.parameters():
            yield parameter.data
        # DistributedDataParallel shadows the method with its list of flat buffers.
        yield from nn.Module.buffers(chunk)
        for flat in _flat_buffers(chunk):
            if flat.param_data is not None:
                yield flat.param_data


def gradient_tensors(chunks: Iterable[nn.Module]) -> Iterator[Tensor]:
    """The flat gradient buffers of chunks wrapped in DistributedDataParallel."""
    for chunk in chunks:
        for flat in _flat_buffers(chunk):
            yield flat.grad_data


def optimizer_tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    """Moments and float32 copies on the device; where those are views of weights, these are named again."""
    for inner in optimizer.torch_optimizers():
        if host_optimizer.is_hybrid(inner):
            yield from host_optimizer.device_tensors(inner)
        else:
            yield from host_optimizer.tensors_of(inner)


def host_tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    """What an optimizer that is partly on the host keeps there."""
    for inner in optimizer.torch_optimizers():
        if host_optimizer.is_hybrid(inner):
            yield from host_optimizer.host_tensors(inner)


def _flat_buffers(chunk: nn.Module) -> list[Any]:
    return [*chunk.__dict__.get("buffers", []), *chunk.__dict__.get("expert_parallel_buffers", [])]


class Offloader:
    """Moves one model's state between device and host.

    Args:
        chunks: the model's chunks, wrapped or bare.
        optimizer: its optimizer, if it is trained.
        device: where it computes.
    """

    def __init__(self, chunks: Sequence[nn.Module], optimizer: Optimizer | None, device: Device) -> None:
        self._chunks = chunks
        self._optimizer = optimizer
        self._device = device
        self._host: dict[int, Tensor] = {}
        self._moved: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []

    @property
    def is_offloaded(self) -> bool:
        """Whether the state is on the host."""
        return bool(self._moved)

    @torch.no_grad()
    def offload(self) -> Moved:
        """Free the device's memory; does nothing if it is free already."""
        if self._moved:
            return Moved()
        started_s = self._device.now()
        gradients = unique_storages(gradient_tensors(self._chunks))
        kept = unique_storages(self._kept_tensors())
        for order, (address, storage) in enumerate((kept | gradients).items()):
            size = storage.nbytes()
            host = None if address in gradients else self._host_buffer(order, size)
            if host is not None:
                host.copy_(_bytes_of(storage), non_blocking=True)
            self._moved.append((storage, size, host))
        self._device.synchronize()
        for storage, _, _ in self._moved:
            storage.resize_(0)
        self._device.empty_cache()
        return Moved(self._copied_bytes(), self._device.now() - started_s)

    @torch.no_grad()
    def onload(self) -> Moved:
        """Bring the state back; does nothing if it is there."""
        started_s, num_bytes = self._device.now(), self._copied_bytes()
        for storage, size, host in self._moved:
            storage.resize_(size)
            if host is None:
                _bytes_of(storage).zero_()
            else:
                _bytes_of(storage).copy_(host, non_blocking=True)
        self._moved.clear()
        return Moved(num_bytes, self._device.now() - started_s)

    def _copied_bytes(self) -> int:
        return sum(size for _, size, host in self._moved if host is not None)

    def _kept_tensors(self) -> Iterator[Tensor]:
        yield from weight_tensors(self._chunks)
        if self._optimizer is not None:
            yield from optimizer_tensors(self._optimizer)

    def _host_buffer(self, order: int, size: int) -> Tensor:
        # Storages come in the same order each time, so a buffer of the same size is the same storage's.
        buffer = self._host.get(order)
        if buffer is None or buffer.numel() != size:
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=self._device.name == "cuda")
            self._host[order] = buffer
        return buffer


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def total_bytes(storages: Mapping[int, torch.UntypedStorage]) -> int:
    """Bytes of the storages together."""
    return sum(storage.nbytes() for storage in storages.values())
