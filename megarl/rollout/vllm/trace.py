"""Where vLLM's own loader puts every part of every checkpoint tensor on this rank, found by running it on nothing.

The model's parameters are replaced by placeholders without memory, and its ``load_weights`` is given placeholders of
the checkpoint's tensors. A view of a placeholder still knows its offset and strides, so that every copy between the
two says which box of which tensor lands in which part of which parameter. Whatever a loader computes from values
instead of copying them cannot be traced and is said so.

Invariants:
1. The model is afterwards what it was before, whatever happens.
2. A parameter that no copy reached, a copy from a computed value, and a box that is none are reasons not to use the
   trace; they never lead to regions that are wrong or missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.model_loader.reload import layerwise, meta

from megarl.weights.region import Region, Shape, contiguous_strides


class UntraceableError(Exception):
    """The loader does something that no region describes."""


@dataclass
class Trace:
    """What a run of the loader showed.

    Args:
        regions: of this rank's parameters, in the order of loading.
        dtypes: of the parameters that have regions, by name.
    """

    regions: list[Region] = field(default_factory=list)
    dtypes: dict[str, str] = field(default_factory=dict)


def trace(model: nn.Module, shapes: Mapping[str, Shape], dtype: torch.dtype) -> Trace:
    """The regions of this rank.

    Args:
        model: a loaded vLLM model, between updates.
        shapes: of the checkpoint's tensors, by canonical name.
        dtype: that the checkpoint's tensors pretend to have.

    Raises:
        UntraceableError: see invariant 2.
    """
    parameters = {id(tensor): name for name, tensor in named_tensors(model)}
    with _placeholders(model) as places:
        sources = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
        recorder = _Recorder(places, sources)
        with recorder:
            try:
                model.load_weights(iter(sources.items()))
            except (RuntimeError, NotImplementedError, AssertionError, ValueError, KeyError, TypeError) as error:
                lines = str(error).strip().splitlines() or [type(error).__name__]
                raise UntraceableError(f"its loader fails on placeholders: {lines[0]}") from error
    reached = {region.local_name for region in recorder.trace.regions}
    # Named once here, however many layers share it: a tied head has no tensor of its own.
    missing = [parameters[id(tensor)] for _, tensor in model.named_parameters() if id(tensor) in parameters]
    missing = [name for name in missing if name not in reached]
    if missing:
        raise UntraceableError("its loader leaves out " + ", ".join(missing[:10]))
    return recorder.trace


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers with their first name."""
    seen: set[int] = set()
    for prefix, layer in model.named_modules():
        for name, tensor in layerwise.get_layer_tensors(layer).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{prefix}.{name}" if prefix else name, tensor


def loadable(model: nn.Module) -> dict[str, tuple[Shape, str]]:
    """Shape and dtype of every tensor that the model's loader can fill, as it is before vLLM's post-processing."""
    found: dict[str, tuple[Shape, str]] = {}
    for prefix, layer in model.named_modules():
        parameters, buffers = layerwise.get_layerwise_info(layer).restore_metadata
        kept = {n: t for n, t in layerwise.get_layer_tensors(layer).items() if n in meta.SKIP_TENSORS}
        for name, tensor in {**parameters, **buffers, **kept}.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            found[f"{prefix}.{name}" if prefix else name] = (tuple(tensor.shape), dtype)
    return found


@contextmanager
def _placeholders(model: nn.Module) -> Iterator[dict[int, tuple[str, Tensor]]]:
    """The model with its parameters as the checkpoint sees them, without memory; by storage, their names."""
    replaced: list[tuple[nn.Module, Any]] = []
    places: dict[int, tuple[str, Tensor]] = {}
    reload = getattr(model, "_do_torchao_reload", False)
    try:
        for prefix, layer in model.named_modules():
            info = layerwise.get_layerwise_info(layer)
            if info.can_load():
                raise UntraceableError("an update is under way")
            info.kernel_tensors = layerwise.get_layer_params_buffers(layer)
            info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
            replaced.append((layer, info))
            meta.restore_layer_on_meta(layer, info)
            for name, tensor in layerwise.get_layer_tensors(layer).items():
                if hasattr(tensor, "weight_loader"):
                    tensor.weight_loader = layerwise._get_original_loader(tensor)
                # A tensor that vLLM keeps as it is (a routing bias) may belong to several layers: the first names it.
                places.setdefault(_storage(tensor), (f"{prefix}.{name}" if prefix else name, tensor))
        yield places
    finally:
        for layer, info in replaced:
            layerwise._place_kernel_tensors(layer, info)
            info.reset()
        model._do_torchao_reload = reload


class _Recorder(TorchDispatchMode):
    """Writes down copies from checkpoint placeholders into parameters, and stops at anything it does not understand.

    Args:
        places: parameters by their storage.
        sources: checkpoint placeholders by name.
    """

    def __init__(self, places: Mapping[int, tuple[str, Tensor]], sources: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.trace = Trace()
        self._places = places
        self._sources = {_storage(tensor): (name, tuple(tensor.shape)) for name, tensor in sources.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if func is torch.ops.aten.copy_.default:
            place = self._places.get(_storage(args[0]))
            if place is not None:
                self._record(*place, args[0], args[1])
                return args[0]
        elif first is not None and func is torch.ops.aten._to_copy.default and _storage(first) in self._sources:
            return first  # where and as what the bytes arrive is settled by the copy that follows
        elif first is not None and func._schema.is_mutable and _storage(first) in self._places:
            if func is not torch.ops.aten.zero_.default and not (
                func is torch.ops.aten.fill_.Scalar and args[1] == 0
            ):  # zeros are padding, which is zero in any case
                raise UntraceableError(f"its loader changes {self._places[_storage(first)][0]} by {func}")
            return first
        return func(*args, **kwargs)

    def _record(self, name: str, parameter: Tensor, place: Tensor, value: Tensor) -> None:
        source = self._sources.get(_storage(value))
        if source is None:
            raise UntraceableError(f"its loader computes {name} instead of copying it")
        tensor, shape = source
        local_shape = tuple(parameter.shape)
        if not parameter.is_contiguous():
            raise UntraceableError(f"{name} is not contiguous")
        box, strides = _box(tensor, shape, value, place, name)
        self.trace.regions.append(
            Region(
                tensor=tensor,
                tensor_shape=shape,
                box=box,
                local_name=name,
                local_shape=local_shape,
                offset=place.storage_offset() - parameter.storage_offset(),
                strides=strides,
            )
        )
        self.trace.dtypes[name] = str(place.dtype).removeprefix("torch.")


def _box(
    tensor: str, shape: Shape, value: Tensor, place: Tensor, name: str
) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
    """The box of the whole tensor that a view of it shows, and the strides with which it is written."""
    dims = [(n, s) for n, s in zip(value.shape, value.stride(), strict=True) if n != 1]
    targets = [(n, s) for n, s in zip(place.shape, place.stride(), strict=True) if n != 1]
    if [n for n, _ in dims] != [n for n, _ in targets]:
        raise UntraceableError(f"{tuple(value.shape)} of {tensor} is broadcast into {tuple(place.shape)} of {name}")
    steps = contiguous_strides(shape)
    bounds, rest = [], value.storage_offset()
    for step in steps:
        first, rest = divmod(rest, step)
        bounds.append((first, first + 1))
    strides = [1] * len(shape)
    for (size, step), (_, target) in zip(dims, targets, strict=True):
        found = [d for d, s in enumerate(steps) if s == step and shape[d] > 1 and bounds[d][1] == bounds[d][0] + 1]
        if not found or bounds[found[0]][0] + size > shape[found[0]]:
            raise UntraceableError(f"a view of {tensor} that goes into {name} is no box of it")
        bounds[found[0]] = (bounds[found[0]][0], bounds[found[0]][0] + size)
        strides[found[0]] = target
    return tuple(bounds), tuple(strides)


def _storage(tensor: Tensor) -> int:
    """Identifies the memory that views share."""
    return int(tensor.untyped_storage()._cdata)
