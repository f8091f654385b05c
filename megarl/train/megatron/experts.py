"""Mixture-of-experts layers: a spec's router and experts as Megatron-Core's options, and whose gradients are summed.

Tokens reach the ranks of their experts by all-to-all and none is dropped. The router computes in float32. On CPU the
experts of a rank run one after another, with Transformer Engine as grouped matrix products.

Invariants:
1. Everything a spec says of its experts reaches Megatron-Core; what cannot is ``MixtureOfExperts.not_trained``.
2. An expert's gradient is summed over the ranks that hold that expert, whatever the tensor-parallel degrees.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron.core.transformer.moe.router import TopKRouter
from torch import nn

from megarl.errors import LayoutError
from megarl.models.spec import ModelSpec
from megarl.parallel.grid import ParallelLayout

EXPERTS = ".mlp.experts."
"""In the name of every parameter that belongs to one expert, in both of Megatron-Core's naming schemes."""

EXPERT_BIAS = ".mlp.router.expert_bias"
"""End of the name of the buffer with a bias that chooses experts (DeepSeek-V3, arXiv:2412.19437, 2.1.2)."""


def expert_options(spec: ModelSpec, layout: ParallelLayout, *, grouped: bool) -> dict[str, Any]:
    """Options of Megatron-Core's TransformerConfig about experts; of a dense model, what defaults contradict.

    Args:
        spec: the model.
        layout: its degrees.
        grouped: the experts of a rank are one module (Transformer Engine).

    Raises:
        LayoutError: Megatron-Core trains experts in this layout in no way.
    """
    # Of a dense model too: the default dispatcher contradicts packs of different lengths.
    options: dict[str, Any] = {"moe_token_dispatcher_type": "alltoall"}
    moe = spec.moe
    if moe is None:
        return options
    if layout.tp > 1 and not layout.sequence_parallel:
        raise LayoutError(
            f"experts with tp={layout.tp} need sequence parallelism, or each rank would route every token",
            fix="set sequence_parallel=true",
        )
    is_pre_softmax = moe.score == "softmax" and not moe.normalize_top_k
    return options | {
        "num_moe_experts": moe.num_experts,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_router_topk": moe.top_k,
        "moe_router_score_function": moe.score,
        "moe_router_pre_softmax": is_pre_softmax,
        "moe_router_topk_scaling_factor": None if moe.routed_scale == 1.0 else moe.routed_scale,
        "moe_router_dtype": "fp32",
        "moe_router_num_groups": moe.num_groups if moe.num_groups > 1 else None,
        "moe_router_group_topk": moe.top_groups if moe.num_groups > 1 else None,
        "moe_router_enable_expert_bias": moe.expert_bias,
        # Megatron-Core's update of the bias counts padding, and tokens of recomputed layers twice: balance.py has ours.
        "moe_router_bias_update_rate": 0.0,
        "moe_router_load_balancing_type": "none",
        "moe_layer_freq": [int(spec.has_experts(layer)) for layer in range(spec.num_layers)] if moe.dense_layers else 1,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size or None,
        "moe_shared_expert_gate": moe.shared_gate,
        "moe_grouped_gemm": grouped,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
    }


def are_grouped(names: Iterable[str]) -> bool:
    """Whether parameters of these names hold all experts of a rank in one module."""
    return any(EXPERTS + "linear_fc" in name for name in names)


def leave_counting_to_us(model: nn.Module) -> None:
    """Keep Megatron-Core's routers from counting tokens for their own update of the bias that chooses experts.

    ``balance.py`` counts them, without padding. Megatron-Core compiles its count at the first use in every process
    (``jit_fuser``, transformer/moe/router.py:531 in 0.16.1): seconds, and a compiler where there may be none.
    """
    for module in model.modules():
        if isinstance(module, TopKRouter):
            module._apply_expert_bias = _count_nothing


def _count_nothing(*_: Any, **__: Any) -> None: ...


def mark_experts(model: nn.Module) -> None:
    """Tell DistributedDataParallel which gradients are summed over the replicas of an expert alone.

    Megatron-Core tells it where ep > 1 only (tensor_parallel/layers.py:886 in 0.16.1). With ep = 1 and experts that
    are cut otherwise than the rest of the layer, each tensor-parallel rank would keep the gradient of its own tokens.
    Experts have an optimizer of their own at every layout, so that a checkpoint continues at any other.
    """
    for name, parameter in model.named_parameters():
        if EXPERTS in name:
            parameter.allreduce = False  # type: ignore[attr-defined]
