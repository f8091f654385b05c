"""Qwen3-MoE: RMS norms on each head's query and key, no biases, no shared experts, some layers may be dense."""

from __future__ import annotations

from megarl.models.families.dense import DENSE_DECODER, DENSE_DROPPED
from megarl.models.families.experts import expert_rules
from megarl.models.family import ExpertKeys, Family

QWEN3_MOE = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    rules=DENSE_DECODER + expert_rules(),
    dropped=DENSE_DROPPED,
    qk_norm=True,
    experts=ExpertKeys(
        num_experts=("num_experts", "num_local_experts"),
        ffn="moe_intermediate_size",
        normalize=("norm_topk_prob", False),
        sparse_step="decoder_sparse_step",
    ),
    only={"use_sliding_window": (False,), "attention_bias": (False,), "output_router_logits": (False, None)},
    unused=("sliding_window", "max_window_layers"),
    defaults={"head_dim": None, "num_key_value_heads": None},
)
