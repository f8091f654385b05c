"""A Megatron checkpoint's forward pass without Megatron, layer by layer, beside transformers' on the same tokens.

The parameters are taken as they lie in the files (``linear_qkv`` interleaved by group, ``linear_fc1`` as gate and up of
each rank) and never pass through the rules that wrote them: a wrong rule, which a round trip would undo, shows here.
Needs torch, and transformers for the comparison. Llama-like dense models, and expert models with softmax routing.

Formulas: RMSNorm (arXiv:1910.07467), rotary embeddings of halves (arXiv:2104.09864, as Llama's checkpoints have them),
grouped-query attention (arXiv:2305.13245), SwiGLU (arXiv:2002.05202).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from megarl.errors import CheckpointError
from megarl.models.rules import NamingScheme
from megarl.models.spec import ModelSpec, RopeScaling
from megarl.weights.conversion.dist_view import dist_key
from megarl.weights.conversion.source import Source
from megarl.weights.files.arrays import TORCH_NAMES, Array
from megarl.weights.files.legacy import read_legacy
from megarl.weights.files.torch_dist import DistCheckpoint, chunk_array, read_torch_dist

TOLERANCE = 1e-4
"""Largest difference of a hidden state, relative to the largest entry of that layer's output, in float32."""

Parameters = Callable[[str, int | None], list[Tensor]]
"""A parameter by its name inside the layer (or the model) and its layer: a shard for each tensor-parallel rank."""


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
        CheckpointError: a Hugging Face directory, or a model whose forward pass is not here.
    """
    spec = source.spec
    routed = spec.moe is not None and (spec.moe.score != "softmax" or spec.moe.num_groups > 1)
    if routed or spec.mla is not None or source.value_head:
        raise CheckpointError(
            f"logits of {spec.family} are not compared: latent attention, routing in groups and critics are left out",
            fix="leave out --logits",
        )
    if spec.moe is not None and source.format != "torch_dist":
        raise CheckpointError("logits of expert models are compared for torch_dist only", fix="reshard it first")
    if source.format == "torch_dist":
        return _of_dist(read_torch_dist(source.directory), source.naming or "te")
    if source.format == "legacy":
        return _of_legacy(source)
    raise CheckpointError("a Hugging Face directory has no Megatron parameters to compute with")


def _tensor(array: Array) -> Tensor:
    raw = np.fromfile(array.path, np.uint8, array.num_bytes, offset=array.begin)
    values: Tensor = torch.from_numpy(raw).view(getattr(torch, TORCH_NAMES[array.dtype])).view(array.shape).float()
    return values


def _of_dist(checkpoint: DistCheckpoint, naming: NamingScheme) -> Parameters:
    def read(name: str, layer: int | None) -> list[Tensor]:
        full = name if layer is None else f"decoder.layers.{layer}.{name}"
        key, lead = dist_key(full, False, maps_norms=naming == "local")
        if key not in checkpoint.tensors:
            key, lead = dist_key(full, True, maps_norms=naming == "local")
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


def forward(spec: ModelSpec, naming: NamingScheme, read: Parameters, tokens: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Outputs of the embedding, of every layer and of the head, in float32.

    Args:
        spec: the model.
        naming: of the parameters.
        read: the parameters.
        tokens: [S] int64, one sequence.

    Yields:
        name and output: [S, H] of the embedding and the layers, [S, V] of the head.
    """
    rows = torch.cat(read("embedding.word_embeddings.weight", None))
    hidden = rows[tokens]
    yield "embedding", hidden
    angles = rotary_angles(spec, len(tokens))
    fused = naming == "te"
    first = "self_attention.linear_qkv.layer_norm_weight" if fused else "input_layernorm.weight"
    for layer in range(spec.num_layers):
        normed = rms_norm(hidden, read(first, layer)[0], spec.rms_norm_eps)
        hidden = hidden + attention(spec, read, layer, normed, angles)
        is_routed = spec.has_experts(layer)
        second = "mlp.linear_fc1.layer_norm_weight" if fused and not is_routed else "pre_mlp_layernorm.weight"
        normed = rms_norm(hidden, read(second, layer)[0], spec.rms_norm_eps)
        hidden = hidden + (experts(spec, read, layer, normed) if is_routed else feed_forward(read, layer, normed))
        yield f"layer {layer}", hidden
    hidden = rms_norm(hidden, read("decoder.final_layernorm.weight", None)[0], spec.rms_norm_eps)
    head = rows if spec.tied_embeddings else torch.cat(read("output_layer.weight", None))
    yield "logits", hidden @ head[: spec.vocab_size].T


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / rms(x) * weight`` over the last dim."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def attention(spec: ModelSpec, read: Parameters, layer: int, x: Tensor, angles: Tensor) -> Tensor:
    """Causal grouped-query attention; every rank's heads in turn, their projections added up. [S, H] to [S, H]."""
    weights = read("self_attention.linear_qkv.weight", layer)
    biases: Sequence[Tensor | None] = [None] * len(weights)
    if spec.qkv_bias:
        biases = read("self_attention.linear_qkv.bias", layer)
    outputs = read("self_attention.linear_proj.weight", layer)
    per_group = spec.num_heads // spec.num_kv_heads
    total = torch.zeros_like(x)
    for weight, bias, output in zip(weights, biases, outputs, strict=True):
        mixed = functional.linear(x, weight, bias).view(len(x), -1, per_group + 2, spec.head_dim)
        query, key, value = mixed[:, :, :per_group], mixed[:, :, per_group], mixed[:, :, per_group + 1]
        if spec.qk_norm:
            query = rms_norm(query, read("self_attention.q_layernorm.weight", layer)[0], spec.rms_norm_eps)
            key = rms_norm(key, read("self_attention.k_layernorm.weight", layer)[0], spec.rms_norm_eps)
        query, key = rotate(query.permute(1, 2, 0, 3), angles), rotate(key.permute(1, 0, 2), angles)
        scores = torch.einsum("gpsd,gtd->gpst", query, key) / math.sqrt(spec.head_dim)
        mask = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        mix = scores.masked_fill(mask, -torch.inf).softmax(-1)
        context = torch.einsum("gpst,tgd->sgpd", mix, value).reshape(len(x), -1)
        total = total + context @ output.T
    return total


def experts(spec: ModelSpec, read: Parameters, layer: int, x: Tensor) -> Tensor:
    """Softmax routing to the top experts (arXiv:2401.04088), and the shared experts with their gate where there are."""
    moe = spec.moe
    assert moe is not None
    scores = (x @ read("mlp.router.weight", layer)[0].T).softmax(-1)
    weights, chosen = scores.topk(moe.top_k, dim=-1)
    if moe.normalize_top_k:
        weights = weights / weights.sum(-1, keepdim=True)
    total = torch.zeros_like(x)
    for expert in chosen.unique().tolist():
        token, place = (chosen == expert).nonzero(as_tuple=True)
        output = feed_forward(read, layer, x[token], f"mlp.experts.local_experts.{expert}.")
        total.index_add_(0, token, moe.routed_scale * weights[token, place, None] * output)
    if moe.shared_ffn_hidden_size:
        shared = feed_forward(read, layer, x, "mlp.shared_experts.")
        if moe.shared_gate:
            shared = shared * (x @ read("mlp.shared_experts.gate_weight", layer)[0].T).sigmoid()
        total = total + shared
    return total


def feed_forward(read: Parameters, layer: int, x: Tensor, module: str = "mlp.") -> Tensor:
    """SwiGLU; every rank's rows in turn."""
    total = torch.zeros_like(x)
    weights = zip(read(module + "linear_fc1.weight", layer), read(module + "linear_fc2.weight", layer), strict=True)
    for both, down in weights:
        gate, up = (x @ both.T).chunk(2, dim=-1)
        total = total + (functional.silu(gate) * up) @ down.T
    return total


def rotary_angles(spec: ModelSpec, length: int) -> Tensor:
    """Angles [S, D / 2] of rotary embeddings, scaled as Llama 3.1 does where the model is."""
    size = int(spec.head_dim * spec.rotary_fraction)
    frequencies = spec.rope_theta ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    scaling = spec.rope_scaling
    if isinstance(scaling, RopeScaling):
        wavelength = 2 * math.pi / frequencies
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        smooth = (scaling.original_max_position / wavelength - low) / (high - low)
        frequencies = frequencies * (smooth.clamp(0, 1) + (1 - smooth.clamp(0, 1)) / scaling.factor)
    elif scaling is not None:
        raise CheckpointError(f"logits are not compared for {type(scaling).__name__}")
    return (torch.arange(length, dtype=torch.float64)[:, None] * frequencies).float()


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary embedding of [..., S, D]: the first half of the rotated part with the second."""
    size = 2 * angles.shape[1]
    first, second = x[..., :size].chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([turned, x[..., size:]], dim=-1)


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
