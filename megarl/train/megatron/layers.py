"""Layer specifications: which modules a transformer layer is made of, on CPU and with Transformer Engine.

On CPU it is Megatron-Core's ``local`` specification with two modules of ours in its slots, instead of patches:
``RMSNorm``, because Megatron's torch norm refuses sequence parallelism (transformer/torch_norm.py:33), and
``PackedAttention``, because its attention refuses packed sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.transformer_block import LayerNormImpl, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.models.spec import ModelSpec
from megarl.platform.device import LayerImplementation
from megarl.train.megatron.attention import PackedAttention


class RMSNorm(torch.nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dim (arXiv:1910.07467), statistics in float32.

    Under sequence parallelism each rank normalises its own tokens, and the flag on the weight makes Megatron-Core sum
    its gradient over the tensor-parallel ranks (distributed/finalize_model_grads.py).
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalised tensor in the shape and dtype of ``hidden``."""
        return torch.nn.functional.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


def decoder_spec(implementation: LayerImplementation, spec: ModelSpec, layers: Sequence[int]) -> Any:
    """Specification of a chunk's layers (global indices) and final norm, as GPTModel takes it."""
    kinds = {layer: spec.has_experts(layer) for layer in layers}
    made = {kind: _layer_spec(implementation, spec, with_experts=kind) for kind in set(kinds.values())}
    # Megatron-Core's is Transformer Engine's norm where that is installed.
    norm = LayerNormImpl if implementation == "transformer_engine" else RMSNorm
    return TransformerBlockSubmodules(layer_specs=[made[kinds[layer]] for layer in layers], layer_norm=norm)


def _layer_spec(implementation: LayerImplementation, spec: ModelSpec, *, with_experts: bool) -> Any:
    num_experts = spec.moe.num_experts if with_experts and spec.moe is not None else None
    if implementation == "transformer_engine":
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=num_experts, moe_grouped_gemm=with_experts, qk_layernorm=spec.qk_norm
        )
    layer = get_gpt_layer_local_spec(num_experts=num_experts, qk_layernorm=spec.qk_norm, normalization="RMSNorm")
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if spec.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return layer
