"""Qwen1.5-MoE and Qwen2-MoE: biases on q, k and v, shared experts behind a sigmoid gate, some layers may be dense."""

from __future__ import annotations

from megarl.models.families.dense import DENSE_DECODER, DENSE_DROPPED
from megarl.models.families.experts import expert_rules, shared_expert_rules
from megarl.models.family import ExpertKeys, Family

QWEN2_MOE = Family(
    name="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    rules=DENSE_DECODER + expert_rules() + shared_expert_rules("mlp.shared_expert"),
    dropped=DENSE_DROPPED,
    qkv_bias=True,
    experts=ExpertKeys(
        num_experts=("num_experts",),
        ffn="moe_intermediate_size",
        shared_ffn="shared_expert_intermediate_size",
        shared_gate=True,
        normalize=("norm_topk_prob", False),
        sparse_step="decoder_sparse_step",
    ),
    only={"use_sliding_window": (False,), "qkv_bias": (True,), "output_router_logits": (False, None)},
    unused=("sliding_window", "max_window_layers"),
    defaults={"head_dim": None},
)
