"""A vLLM model as something to write weights into.

They are written in place where vLLM keeps them as they come, else layer by layer before its own post-processing.

Invariants:
1. Values are written before vLLM's post-processing (packing for the CPU, fused experts), which then runs as after a
   fresh load and leaves its result in the memory that captured graphs know.
2. What no region fills (rows beyond the vocabulary) is zero.
3. Beside the model there is at most the memory of layers of which a part has arrived and a part has not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload, layerwise
from vllm.model_executor.model_loader.reload import meta as reload_meta

from megarl.weights.pieces import region_view
from megarl.weights.region import Region


class IncompleteError(RuntimeError):
    """Weights of the model that the update did not bring."""


class DirectTarget:
    """Traced regions, written where they belong.

    Args:
        model: vLLM's.
        model_config: vLLM's.
        regions: all that an update brings, by which layers are known to be complete.
        device: of the model.
    """

    def __init__(self, model: nn.Module, model_config: Any, regions: Iterable[Region], device: torch.device) -> None:
        self._model, self._model_config, self._device = model, model_config, device
        self._modules = dict(model.named_modules())
        self._sizes: dict[str, int] = {}
        self._filled: dict[str, int] = {}
        for region in regions:
            layer = region.local_name.rpartition(".")[0]
            self._sizes[layer] = self._sizes.get(layer, 0) + region.numel
            self._filled[region.local_name] = self._filled.get(region.local_name, 0) + region.numel
        self._left: dict[str, int] = {}
        self._places: dict[str, dict[str, Tensor]] = {}

    def begin(self) -> None:
        """An update starts: nothing has arrived."""
        drop_expert_kernels(self._model, self._device)
        self._left, self._places = dict(self._sizes), {}

    def place(self, region: Region) -> Tensor:
        """See ``intake.Target``."""
        layer, _, name = region.local_name.rpartition(".")
        if layer not in self._places:
            self._places[layer] = self._opened(layer)
        return region_view(region, self._places[layer][name])

    def written(self, region: Region) -> None:
        """See ``intake.Target``; completes the layer with its last region."""
        name = region.local_name.rpartition(".")[0]
        self._left[name] -= region.numel
        if self._left[name]:
            return
        del self._left[name], self._places[name]
        layer = self._modules[name]
        info = layerwise.get_layerwise_info(layer)
        if info.kernel_tensors is not None:
            layerwise._layerwise_process(layer, info)

    def finish(self) -> None:
        """All has arrived. Raises IncompleteError if not."""
        if self._left:
            raise IncompleteError("not all has arrived of " + ", ".join(sorted(self._left)[:10]))
        for layer in self._model.modules():
            if isinstance(getattr(layer, "quant_method", None), UnquantizedEmbeddingMethod):
                # Written in place, tied or not; on the CPU a head multiplies with a copy packed from the old values.
                layer.quant_method.process_weights_after_loading(layer)
            elif is_deferred_attention_layer(layer):
                layer.process_weights_after_loading(self._model_config.dtype)

    def restore(self) -> None:
        """The update will not be finished: layers get the tensors they had, some with new values."""
        restore_layers(self._model)

    def _opened(self, name: str) -> dict[str, Tensor]:
        """A layer's tensors, to be written."""
        layer = self._modules[name]
        if not keeps_weights(layer, self._device):
            info = layerwise.get_layerwise_info(layer)
            info.kernel_tensors = layerwise.get_layer_params_buffers(layer)
            info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
            reload_meta.restore_layer_on_meta(layer, info)
            reload_meta.materialize_layer(layer, info)
        tensors: dict[str, Tensor] = layerwise.get_layer_tensors(layer)
        for local, tensor in tensors.items():
            filled = self._filled.get(f"{name}.{local}" if name else local)
            if filled is not None and filled < tensor.numel():
                tensor.data.zero_()
        return tensors


class LoaderTarget:
    """For models whose loader cannot be traced: whole tensors go through it inside vLLM's layerwise reload.

    Args:
        model: vLLM's.
        model_config: vLLM's.
        regions: one for each whole tensor.
        dtypes: of the tensors.
        device: of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        model_config: Any,
        regions: Iterable[Region],
        dtypes: Mapping[str, str],
        device: torch.device,
    ) -> None:
        self._model, self._model_config, self._device = model, model_config, device
        self._sizes = {region.local_name: (region.local_shape, region.numel) for region in regions}
        self._dtypes = dtypes
        self._left: dict[str, int] = {}
        self._tensors: dict[str, Tensor] = {}
        self._missing: set[str] = set()

    def begin(self) -> None:
        """An update starts: layers' tensors go out of use."""
        drop_expert_kernels(self._model, self._device)
        # Listed before the reload, which gives a tied head a parameter of its own.
        self._missing = {name for name, _ in self._model.named_parameters()}
        self._left = {name: numel for name, (_, numel) in self._sizes.items()}
        self._tensors = {}
        initialize_layerwise_reload(self._model)

    def place(self, region: Region) -> Tensor:
        """See ``intake.Target``. The tensor is new every time: the reload keeps references to unfinished layers'."""
        name = region.local_name
        if name not in self._tensors:
            dtype = getattr(torch, self._dtypes[name])
            self._tensors[name] = torch.empty(self._sizes[name][0], dtype=dtype, device=self._device)
        return region_view(region, self._tensors[name])

    def written(self, region: Region) -> None:
        """See ``intake.Target``; loads the tensor with its last part."""
        name = region.local_name
        self._left[name] -= region.numel
        if not self._left[name]:
            del self._left[name]
            self._missing -= set(self._model.load_weights(iter([(name, self._tensors.pop(name))])) or ())

    def finish(self) -> None:
        """All has arrived. Raises IncompleteError if not."""
        if self._left or self._missing:
            raise IncompleteError("no tensor reached " + ", ".join(sorted({*self._left, *self._missing})[:10]))
        finalize_layerwise_reload(self._model, self._model_config)
        for layer in layers_with_shared_parameters(self._model):
            # vLLM leaves a layer alone that no tensor reached, as a tied head: its parameter holds the new values, the
            # copy packed for the CPU the old ones.
            layer.quant_method.process_weights_after_loading(layer)

    def restore(self) -> None:
        """See ``DirectTarget``."""
        restore_layers(self._model)


def keeps_weights(layer: nn.Module, device: torch.device) -> bool:
    """Whether a layer computes with its weights as they were loaded, so that they can be written in place."""
    method = getattr(layer, "quant_method", None)
    if not isinstance(method, QuantizeMethodBase) or type(method) is UnquantizedEmbeddingMethod:
        return True
    return device.type == "cuda" and type(method) is UnquantizedLinearMethod


def drop_expert_kernels(model: nn.Module, device: torch.device) -> None:
    """VLLM packs experts for the CPU only where no kernel exists yet; on an update it would keep raw weights."""
    if device.type != "cpu":
        return
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def layers_with_shared_parameters(model: nn.Module) -> list[Any]:
    """Layers with a parameter that is also another layer's, such as a tied embedding and head."""
    owners: dict[int, list[nn.Module]] = {}
    for layer in model.modules():
        for parameter in layer.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(layer)
    shared = {id(layer): layer for layers in owners.values() if len(layers) > 1 for layer in layers}
    return [layer for layer in shared.values() if hasattr(layer, "quant_method")]


def restore_layers(model: nn.Module) -> None:
    """Ends an update that will not be finished: layers get the tensors they had before it."""
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)
        info.reset()
    layerwise.LOADING_LAYERS.clear()
