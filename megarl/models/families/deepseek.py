"""DeepSeek-V2 and V3 (R1, Moonlight, Kimi-K2 in V3's form): latent attention, dense first layers, shared experts.

V2 routes by softmax, V3 by sigmoid with a bias that only chooses. Multi-token-prediction layers are not trained, and an
engine that does not speculate does not load them. In both of Megatron's naming schemes the layer's norm stands apart;
Transformer Engine fuses those of the latents into the up-projections and holds the down-projections whole.
"""

from __future__ import annotations

from dataclasses import replace

from megarl.models.families.dense import DENSE_DROPPED, DENSE_MLP, OUTSIDE_LAYERS, H, M
from megarl.models.families.experts import expert_rules, shared_expert_rules
from megarl.models.family import ExpertKeys, Family
from megarl.models.rules import Dropped, Replicate, Rule, Split, Tensor

LATENT_ATTENTION: tuple[Rule, ...] = (
    Rule(M + "input_layernorm.weight", (Tensor(H + "input_layernorm.weight", ("hidden",)),), Replicate(), "layer"),
    Rule(
        M + "self_attention.linear_q_proj.weight",
        (Tensor(H + "self_attn.q_proj.weight", ("q_latent_heads", "hidden")),),
        Split(0),
        "layer",
        when=("query_direct",),
    ),
    Rule(
        M + "self_attention.linear_q_down_proj.weight",
        (Tensor(H + "self_attn.q_a_proj.weight", ("q_latent", "hidden")),),
        Split(0),
        "layer",
        te_cut=Replicate(),
        when=("query_latent",),
    ),
    Rule(
        M + "self_attention.q_layernorm.weight",
        (Tensor(H + "self_attn.q_a_layernorm.weight", ("q_latent",)),),
        Replicate(),
        "layer",
        te=M + "self_attention.linear_q_up_proj.layer_norm_weight",
        when=("query_latent",),
    ),
    Rule(
        M + "self_attention.linear_q_up_proj.weight",
        (Tensor(H + "self_attn.q_b_proj.weight", ("q_latent_heads", "q_latent")),),
        Split(0),
        "layer",
        when=("query_latent",),
    ),
    Rule(
        M + "self_attention.linear_kv_down_proj.weight",
        (Tensor(H + "self_attn.kv_a_proj_with_mqa.weight", ("kv_latent_rope", "hidden")),),
        Split(0),
        "layer",
        te_cut=Replicate(),
    ),
    Rule(
        M + "self_attention.kv_layernorm.weight",
        (Tensor(H + "self_attn.kv_a_layernorm.weight", ("kv_latent",)),),
        Replicate(),
        "layer",
        te=M + "self_attention.linear_kv_up_proj.layer_norm_weight",
    ),
    Rule(
        M + "self_attention.linear_kv_up_proj.weight",
        (Tensor(H + "self_attn.kv_b_proj.weight", ("kv_latent_heads", "kv_latent")),),
        Split(0),
        "layer",
    ),
    Rule(
        M + "self_attention.linear_proj.weight",
        (Tensor(H + "self_attn.o_proj.weight", ("hidden", "value_heads")),),
        Split(1),
        "layer",
    ),
)

DEEPSEEK_RULES = (
    OUTSIDE_LAYERS + LATENT_ATTENTION + DENSE_MLP + expert_rules() + shared_expert_rules("mlp.shared_experts")
)
DEEPSEEK_DROPPED = (
    *DENSE_DROPPED,
    Dropped(r"model\.layers\.{num_layers}\..*", "megarl does not train multi-token prediction"),
)

_UNUSED = ("quantization_config", "ep_size", "aux_loss_alpha", "seq_aux", "head_dim", "num_nextn_predict_layers")

_SOFTMAX_EXPERTS = ExpertKeys(
    num_experts=("n_routed_experts",),
    ffn="moe_intermediate_size",
    num_shared="n_shared_experts",
    normalize=("norm_topk_prob", False),
    first_dense="first_k_dense_replace",
    groups=("n_group", "topk_group"),
    scale="routed_scaling_factor",
)
SIGMOID_EXPERTS = replace(_SOFTMAX_EXPERTS, score="sigmoid", expert_bias=True, normalize=("norm_topk_prob", True))

DEEPSEEK_V2 = Family(
    name="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    rules=DEEPSEEK_RULES,
    dropped=DEEPSEEK_DROPPED,
    latent=True,
    experts=_SOFTMAX_EXPERTS,
    only={
        "attention_bias": (False,),
        "moe_layer_freq": (1,),
        "scoring_func": ("softmax",),
        "topk_method": ("greedy", "group_limited_greedy"),
        "mlp_bias": (False,),
    },
    unused=_UNUSED,
    defaults={"num_key_value_heads": None, "head_dim": None},
)

DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    rules=DEEPSEEK_RULES,
    dropped=DEEPSEEK_DROPPED,
    latent=True,
    experts=SIGMOID_EXPERTS,
    only={
        "attention_bias": (False,),
        "moe_layer_freq": (1,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "mlp_bias": (False,),
        "rope_interleave": (True,),
    },
    unused=_UNUSED,
    defaults={"num_key_value_heads": None, "head_dim": None},
)
