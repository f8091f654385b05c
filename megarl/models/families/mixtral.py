"""Mixtral: every layer a mixture of experts with softmax routing, no shared experts, no biases."""

from __future__ import annotations

from megarl.models.families.dense import ATTENTION, DENSE_DROPPED, OUTSIDE_LAYERS
from megarl.models.families.experts import expert_rules
from megarl.models.family import ExpertKeys, Family

MIXTRAL = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    rules=OUTSIDE_LAYERS + ATTENTION + expert_rules("block_sparse_moe", gate="w1", up="w3", down="w2"),
    dropped=DENSE_DROPPED,
    experts=ExpertKeys(num_experts=("num_local_experts",), ffn="intermediate_size"),
    # Jitter is noise in training; output_router_logits adds a loss. Neither is what megarl trains with.
    only={"sliding_window": (None,), "router_jitter_noise": (0, None), "output_router_logits": (False, None)},
    defaults={"head_dim": None, "num_key_value_heads": 8},
)
