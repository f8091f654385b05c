"""Tiny models for distributed tests: awkward on purpose, and filled with the same numbers in every layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from megarl.models.spec import MixtureOfExperts, ModelSpec, RopeScaling
from megarl.parallel.groups import ParallelGroups
from megarl.platform.device import get_device
from megarl.train.megatron.initialize import random_weights
from megarl.train.megatron.model import Chunk, Head, Recompute, build_model, named_weights
from megarl.weights.layout import megatron_regions
from megarl.weights.pieces import fill

QWEN2 = ModelSpec(
    family="qwen2",
    vocab_size=131,
    hidden_size=48,
    ffn_hidden_size=72,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=64,
    rms_norm_eps=1e-6,
    rope_theta=10_000.0,
    tied_embeddings=True,
    qkv_bias=True,
    init_std=0.2,
)
QWEN3 = replace(QWEN2, family="qwen3", qkv_bias=False, qk_norm=True, head_dim=16)
LLAMA3 = replace(
    QWEN2, family="llama", qkv_bias=False, tied_embeddings=False, rope_theta=500_000.0, rope_scaling=RopeScaling(8.0)
)
MIXTRAL = replace(
    LLAMA3, family="mixtral", rope_scaling=None, moe=MixtureOfExperts(num_experts=4, top_k=2, ffn_hidden_size=40)
)
QWEN2_MOE = replace(
    QWEN2,
    family="qwen2_moe",
    moe=MixtureOfExperts(
        num_experts=6,
        top_k=3,
        ffn_hidden_size=40,
        dense_layers=(1,),
        shared_ffn_hidden_size=56,
        shared_gate=True,
        normalize_top_k=False,
    ),
)


def parameters(chunk: torch.nn.Module) -> dict[str, Tensor]:
    """The chunk's parameters by Megatron's name."""
    return dict(chunk.named_parameters())


def build(
    spec: ModelSpec,
    groups: ParallelGroups,
    *,
    head: Head = "lm",
    dtype: torch.dtype = torch.float32,
    recompute: Recompute = "none",
    seed: int = 5,
) -> Chunk:
    """This rank's chunk with weights that do not depend on the layout."""
    (chunk,) = build_model(spec, groups, device=get_device("cpu"), dtype=dtype, head=head, recompute=recompute)
    regions = megatron_regions(spec, groups.layout, groups.coordinate, value_head=head == "value")
    fill(regions, named_weights([chunk]), random_weights(spec, seed=seed))
    randomize_vectors(chunk, parameters(chunk))
    return chunk


@torch.no_grad()
def randomize_vectors(chunk: torch.nn.Module, params: Mapping[str, Tensor]) -> None:
    """Norms away from one, so that a norm in the wrong place shows; replicated, hence equal in every layout."""
    for name, parameter in params.items():
        if name.endswith("norm.weight"):
            parameter.copy_(1 + 0.3 * torch.sin(torch.arange(parameter.numel()) + len(name.split(".")[-2])))
