"""A Megatron checkpoint's forward pass without Megatron, layer by layer, beside transformers' on the same tokens.

The parameters are taken as they lie in the files (``linear_qkv`` interleaved by group, ``linear_fc1`` as gate and up of
each rank) and never pass through the rules that wrote them: a wrong rule, which a round trip would undo, shows here.
Needs torch, and transformers for the comparison. Every family; critics are left out. ``forward.py`` computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.errors import CheckpointError
from megarl.weights.conversion.dist_view import dist_key
from megarl.weights.conversion.forward import Parameters, forward
from megarl.weights.conversion.source import Source
from megarl.weights.files.arrays import TORCH_NAMES, Array
from megarl.weights.files.legacy import read_legacy
from megarl.weights.files.torch_dist import DistCheckpoint, chunk_array, read_torch_dist

TOLERANCE = 1e-4
"""Largest difference of a hidden state, relative to the largest entry of that layer's output, in float32."""


@dataclass(frozen=True)
class LayerDifference:
    """How far an output is from transformers', relative to its largest entry."""

    layer: str
    relative: float

    @property
    def is_close(self) -> bool:
        return self.relative <= TOLERANCE


def parameters_of(source: Source) -> Parameters:
    """Access to a Megatron checkpoint's parameters as they lie in the files.

    Raises:
        CheckpointError: a Hugging Face directory, a critic, or expert layers in the legacy format.
    """
    if source.value_head:
        raise CheckpointError("a critic has no logits to compare", fix="leave out --logits")
    if source.spec.moe is not None and source.format != "torch_dist":
        raise CheckpointError("logits of expert models are compared for torch_dist only", fix="reshard it first")
    if source.format == "torch_dist":
        maps_norms = source.naming == "local" and source.spec.mla is None
        return _of_dist(read_torch_dist(source.directory), maps_norms)
    if source.format == "legacy":
        return _of_legacy(source)
    raise CheckpointError("a Hugging Face directory has no Megatron parameters to compute with")


def _tensor(array: Array) -> Tensor:
    raw = np.fromfile(array.path, np.uint8, array.num_bytes, offset=array.begin)
    values: Tensor = torch.from_numpy(raw).view(getattr(torch, TORCH_NAMES[array.dtype])).view(array.shape).float()
    return values


def _of_dist(checkpoint: DistCheckpoint, maps_norms: bool) -> Parameters:
    def read(name: str, layer: int | None) -> list[Tensor]:
        full = name if layer is None else f"decoder.layers.{layer}.{name}"
        key, lead = dist_key(full, False, maps_norms=maps_norms)
        if key not in checkpoint.tensors:
            key, lead = dist_key(full, True, maps_norms=maps_norms)
        tensor = checkpoint.tensors[key]
        out = torch.zeros(tensor.shape[len(lead) :])
        for chunk in tensor.chunks:
            front, tail = chunk.box[: len(lead)], chunk.box[len(lead) :]
            if all(start <= index < stop for index, (start, stop) in zip(lead, front, strict=True)):
                held = _tensor(chunk_array(chunk, tensor))
                place = tuple(index - start for index, (start, _) in zip(lead, front, strict=True))
                out[tuple(slice(*bounds) for bounds in tail)] = held[place]
        return [out]

    return read


def _of_legacy(source: Source) -> Parameters:
    shards, layout = read_legacy(source.directory), source.layout
    assert layout is not None
    homes = {
        layer: (stage, chunk, local)
        for stage, chunk in product(range(layout.pp), range(layout.vpp))
        for local, layer in enumerate(layout.layers_of_stage(source.spec.num_layers, stage, chunk))
    }

    def read(name: str, layer: int | None) -> list[Tensor]:
        if layer is None:
            stage, chunk = (0, 0) if name.startswith("embedding") else (layout.pp - 1, layout.vpp - 1)
            full = name
        else:
            stage, chunk, local = homes[layer]
            full = f"decoder.layers.{local}.{name}"
        prefix = f"model{chunk}." if layout.vpp > 1 else ""
        return [_tensor(shards[tp, stage, 0].arrays[prefix + full]) for tp in range(layout.tp)]

    return read


@torch.no_grad()
def compare_layers(source: Source, model_directory: Path, tokens: Sequence[int]) -> Iterator[LayerDifference]:
    """Differences of each layer's output from transformers', in order; the first that is not close is where to look.

    Args:
        source: the Megatron checkpoint.
        model_directory: the Hugging Face directory it came from.
        tokens: one sequence.
    """
    ids = torch.tensor(list(tokens))
    read = parameters_of(source)
    expected = _transformers_outputs(model_directory, ids)
    for name, output in forward(source.spec, source.naming or "te", read, ids):
        reference = expected[name]
        relative = (output - reference).abs().max() / reference.abs().max().clamp(min=1e-30)
        yield LayerDifference(name, float(relative))


def _transformers_outputs(directory: Path, tokens: Tensor) -> Mapping[str, Tensor]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    outputs: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            outputs[name] = hidden[0] if hidden.dim() == 3 else hidden

        return hook

    model.model.embed_tokens.register_forward_hook(keep("embedding"))
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(keep(f"layer {index}"))
    outputs["logits"] = model(tokens[None]).logits[0]
    return outputs
