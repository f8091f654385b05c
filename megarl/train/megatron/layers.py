"""Layer specifications: which modules a transformer layer is made of, on CPU and with Transformer Engine.

On CPU it is Megatron-Core's ``local`` specification with modules of ours in its slots, instead of patches: ``RMSNorm``
(``norm.py``), because Megatron's torch norm refuses sequence parallelism, ``PackedAttention``, because its attention
refuses packed sequences, and ``LatentSelfAttention`` (``latent.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.transformer_block import LayerNormImpl, TransformerBlockSubmodules

from megarl.models.spec import ModelSpec
from megarl.platform.device import LayerImplementation
from megarl.train.megatron.attention import PackedAttention
from megarl.train.megatron.latent import LatentSelfAttention
from megarl.train.megatron.norm import RMSNorm


def decoder_spec(implementation: LayerImplementation, spec: ModelSpec, layers: Sequence[int]) -> Any:
    """Specification of a chunk's layers (global indices) and final norm, as GPTModel takes it."""
    kinds = {layer: spec.has_experts(layer) for layer in layers}
    made = {kind: _layer_spec(implementation, spec, with_experts=kind) for kind in set(kinds.values())}
    # Megatron-Core's is Transformer Engine's norm where that is installed.
    norm = LayerNormImpl if implementation == "transformer_engine" else RMSNorm
    return TransformerBlockSubmodules(layer_specs=[made[kinds[layer]] for layer in layers], layer_norm=norm)


def _layer_spec(implementation: LayerImplementation, spec: ModelSpec, *, with_experts: bool) -> Any:
    is_latent = spec.mla is not None
    num_experts = spec.moe.num_experts if with_experts and spec.moe is not None else None
    if implementation == "transformer_engine":
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=num_experts,
            moe_grouped_gemm=with_experts,
            qk_layernorm=spec.qk_norm or is_latent,
            multi_latent_attention=is_latent,
        )
    layer = get_gpt_layer_local_spec(
        num_experts=num_experts, qk_layernorm=spec.qk_norm, normalization="RMSNorm", multi_latent_attention=is_latent
    )
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if is_latent:
        layer.submodules.self_attention.module = LatentSelfAttention
    if spec.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return layer
