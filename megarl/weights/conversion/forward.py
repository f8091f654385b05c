"""A forward pass from Megatron's parameters as they lie in files, without Megatron, layer by layer, in float32.

Formulas: RMSNorm (arXiv:1910.07467), rotary embeddings of halves (arXiv:2104.09864, as Llama's checkpoints have them),
grouped-query attention (arXiv:2305.13245), latent attention (arXiv:2405.04434), SwiGLU (arXiv:2002.05202).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from megarl.errors import CheckpointError
from megarl.models.rules import NamingScheme
from megarl.models.spec import ModelSpec, RopeScaling, YarnScaling

Parameters = Callable[[str, int | None], list[Tensor]]
"""A parameter by its name inside the layer (or the model) and its layer: a shard for each tensor-parallel rank."""


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
    first = "self_attention.linear_qkv.layer_norm_weight" if fused and not spec.mla else "input_layernorm.weight"
    for layer in range(spec.num_layers):
        normed = rms_norm(hidden, read(first, layer)[0], spec.rms_norm_eps)
        if spec.mla is None:
            hidden = hidden + attention(spec, read, layer, normed, angles)
        else:
            hidden = hidden + latent_attention(spec, naming, read, layer, normed, angles)
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


def latent_attention(
    spec: ModelSpec, naming: NamingScheme, read: Parameters, layer: int, x: Tensor, angles: Tensor
) -> Tensor:
    """Causal attention over latents; every rank's heads in turn, their projections added up. [S, H] to [S, H].

    The part of a key with position is one for all heads, and pairs of neighbours turn together, not halves.
    """
    mla = spec.mla
    assert mla is not None
    name_of_norm = "linear_{}_up_proj.layer_norm_weight" if naming == "te" else "{}_layernorm.weight"
    down = torch.cat(read("self_attention.linear_kv_down_proj.weight", layer))
    latent, key_turned = (x @ down.T).split([mla.kv_lora_rank, mla.rope_head_dim], dim=-1)
    latent = rms_norm(latent, read("self_attention." + name_of_norm.format("kv"), layer)[0], spec.rms_norm_eps)
    key_turned = rotate(_halves(key_turned), angles)
    if mla.q_lora_rank is None:
        asked, queries = x, read("self_attention.linear_q_proj.weight", layer)
    else:
        asked = x @ torch.cat(read("self_attention.linear_q_down_proj.weight", layer)).T
        asked = rms_norm(asked, read("self_attention." + name_of_norm.format("q"), layer)[0], spec.rms_norm_eps)
        queries = read("self_attention.linear_q_up_proj.weight", layer)
    held = zip(
        queries,
        read("self_attention.linear_kv_up_proj.weight", layer),
        read("self_attention.linear_proj.weight", layer),
        strict=True,
    )
    total = torch.zeros_like(x)
    for ask, keep, output in held:
        query = (asked @ ask.T).view(len(x), -1, mla.nope_head_dim + mla.rope_head_dim).transpose(0, 1)
        plain, turned = query.split([mla.nope_head_dim, mla.rope_head_dim], dim=-1)
        both = (latent @ keep.T).view(len(x), -1, mla.nope_head_dim + mla.v_head_dim).transpose(0, 1)
        key, value = both.split([mla.nope_head_dim, mla.v_head_dim], dim=-1)
        scores = plain @ key.transpose(1, 2) + rotate(_halves(turned), angles) @ key_turned.T
        scores = scores * _latent_scale(spec)
        mask = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        context = scores.masked_fill(mask, -torch.inf).softmax(-1) @ value
        total = total + context.transpose(0, 1).reshape(len(x), -1) @ output.T
    return total


def _halves(x: Tensor) -> Tensor:
    """Neighbours that turn together, as the halves that ``rotate`` turns."""
    return torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)


def _latent_scale(spec: ModelSpec) -> float:
    """Factor of the scores, which DeepSeek's YaRN changes too."""
    mla, scaling = spec.mla, spec.rope_scaling
    assert mla is not None
    scale = 1 / math.sqrt(mla.nope_head_dim + mla.rope_head_dim)
    if isinstance(scaling, YarnScaling) and scaling.mscale_all_dim:
        scale *= _yarn_scale(scaling.factor, scaling.mscale_all_dim) ** 2
    return scale


def route(spec: ModelSpec, read: Parameters, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and indices [S, K] of each token's experts.

    Softmax (arXiv:2401.04088) or sigmoid scores; a bias that only chooses, and a choice inside the best groups, whose
    score is the sum of their best two experts with such a bias (arXiv:2412.19437, 2.1.2), else their best one
    (arXiv:2405.04434, 2.2.2).
    """
    moe = spec.moe
    assert moe is not None
    logits = x @ read("mlp.router.weight", layer)[0].T
    scores = logits.softmax(-1) if moe.score == "softmax" else logits.sigmoid()
    choice = scores + read("mlp.router.expert_bias", layer)[0] if moe.expert_bias else scores
    if moe.num_groups > 1:
        groups = choice.view(len(x), moe.num_groups, -1)
        best = groups.topk(2 if moe.expert_bias else 1, dim=-1).values.sum(-1).topk(moe.top_groups, dim=-1).indices
        is_open = torch.zeros(len(x), moe.num_groups, dtype=torch.bool).scatter(1, best, True)
        choice = groups.masked_fill(~is_open[..., None], -torch.inf).flatten(1)
    chosen = choice.topk(moe.top_k, dim=-1).indices
    weights = scores.gather(1, chosen)
    if moe.normalize_top_k:
        weights = weights / weights.sum(-1, keepdim=True)
    return moe.routed_scale * weights, chosen


def experts(spec: ModelSpec, read: Parameters, layer: int, x: Tensor) -> Tensor:
    """The chosen experts by their weights, and the shared experts with their gate where there are."""
    moe = spec.moe
    assert moe is not None
    weights, chosen = route(spec, read, layer, x)
    total = torch.zeros_like(x)
    for expert in chosen.unique().tolist():
        token, place = (chosen == expert).nonzero(as_tuple=True)
        output = feed_forward(read, layer, x[token], f"mlp.experts.local_experts.{expert}.")
        total.index_add_(0, token, weights[token, place, None] * output)
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
    """Angles [S, D / 2] of rotary embeddings, scaled as Llama 3.1 or YaRN do where the model is."""
    size = int(spec.head_dim * spec.rotary_fraction) if spec.mla is None else spec.mla.rope_head_dim
    frequencies = spec.rope_theta ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    scaling = spec.rope_scaling
    if isinstance(scaling, RopeScaling):
        wavelength = 2 * math.pi / frequencies
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        smooth = (scaling.original_max_position / wavelength - low) / (high - low)
        frequencies = frequencies * (smooth.clamp(0, 1) + (1 - smooth.clamp(0, 1)) / scaling.factor)
    elif isinstance(scaling, YarnScaling):
        frequencies = frequencies * _yarn_factors(scaling, spec.rope_theta, size)
    return (torch.arange(length, dtype=torch.float64)[:, None] * frequencies).float()


def _yarn_factors(scaling: YarnScaling, theta: float, size: int) -> Tensor:
    """[D / 2] factors of the frequencies (arXiv:2309.00071, 3.2): slow ones become longer by ``factor``, fast stay."""
    if _yarn_scale(scaling.factor, scaling.mscale) != _yarn_scale(scaling.factor, scaling.mscale_all_dim):
        raise CheckpointError("logits are not compared for YaRN with unequal mscale and mscale_all_dim")
    # The pair of dims that turns so often over the original length.
    turns = torch.tensor([scaling.beta_fast, scaling.beta_slow], dtype=torch.float64)
    dims = size * (scaling.original_max_position / (2 * math.pi * turns)).log() / (2 * math.log(theta))
    low, high = max(math.floor(dims[0]), 0), min(math.ceil(dims[1]), size - 1)
    ramp = ((torch.arange(size // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return (1 - ramp) + ramp / scaling.factor


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary embedding of [..., S, D]: the first half of the rotated part with the second."""
    size = 2 * angles.shape[1]
    first, second = x[..., :size].chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([turned, x[..., size:]], dim=-1)
