"""GLM-4.5 and 4.6 (mixture of experts): q, k, v biases, DeepSeek-V3's routing, half of a head with position."""

from __future__ import annotations

from megarl.models.families.deepseek import DEEPSEEK_DROPPED, SIGMOID_EXPERTS
from megarl.models.families.dense import DENSE_DECODER
from megarl.models.families.experts import expert_rules, shared_expert_rules
from megarl.models.family import Family

GLM4_MOE = Family(
    name="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    rules=DENSE_DECODER + expert_rules() + shared_expert_rules("mlp.shared_experts"),
    dropped=DEEPSEEK_DROPPED,
    qkv_bias=True,
    qk_norm_key="use_qk_norm",
    partial_rotary=0.5,
    experts=SIGMOID_EXPERTS,
    only={"attention_bias": (True,)},
    required=("attention_bias",),
    unused=("quantization_config", "num_nextn_predict_layers"),
    defaults={"head_dim": 128},
)
