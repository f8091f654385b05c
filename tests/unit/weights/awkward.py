"""A small model of every family whose sizes hide no mistake: all differ, the vocabulary divides by nothing."""

from __future__ import annotations

from dataclasses import replace

from megarl.models.spec import LatentAttention, MixtureOfExperts, ModelSpec


def awkward(family: str, **options: object) -> ModelSpec:
    sizes: dict[str, object] = {
        "vocab_size": 67,
        "hidden_size": 10,
        "ffn_hidden_size": 12,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 6,
        "max_position": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
    }
    return ModelSpec(family=family, **{**sizes, **options})  # type: ignore[arg-type]


_DEEPSEEK_EXPERTS = MixtureOfExperts(
    num_experts=6, top_k=2, ffn_hidden_size=8, dense_layers=(0,), shared_ffn_hidden_size=16, num_groups=2, top_groups=1
)
_SIGMOID = {"score": "sigmoid", "expert_bias": True, "routed_scale": 2.5}


def _with(moe: MixtureOfExperts, **options: object) -> MixtureOfExperts:
    return replace(moe, **options)  # type: ignore[arg-type]


AWKWARD: dict[str, ModelSpec] = {
    "llama": awkward("llama"),
    "mistral": awkward("mistral"),
    "qwen2": awkward("qwen2", qkv_bias=True),
    "qwen3": awkward("qwen3", qk_norm=True),
    "mixtral": awkward("mixtral", moe=MixtureOfExperts(num_experts=6, top_k=2, ffn_hidden_size=5)),
    "qwen2_moe": awkward(
        "qwen2_moe",
        qkv_bias=True,
        moe=MixtureOfExperts(
            num_experts=6,
            top_k=2,
            ffn_hidden_size=8,
            dense_layers=(0, 2),
            shared_ffn_hidden_size=14,
            shared_gate=True,
            normalize_top_k=False,
        ),
    ),
    "qwen3_moe": awkward(
        "qwen3_moe", qk_norm=True, moe=MixtureOfExperts(num_experts=6, top_k=2, ffn_hidden_size=8, dense_layers=(3,))
    ),
    "deepseek_v2": awkward(
        "deepseek_v2",
        num_kv_heads=4,
        head_dim=10,
        moe=_with(_DEEPSEEK_EXPERTS, num_groups=3, top_groups=2),
        mla=LatentAttention(None, kv_lora_rank=14, nope_head_dim=6, rope_head_dim=4, v_head_dim=8),
    ),
    "deepseek_v3": awkward(
        "deepseek_v3",
        num_kv_heads=4,
        head_dim=10,
        moe=_with(_DEEPSEEK_EXPERTS, **_SIGMOID),
        mla=LatentAttention(16, kv_lora_rank=14, nope_head_dim=6, rope_head_dim=4, v_head_dim=8),
    ),
    "glm4_moe": awkward(
        "glm4_moe", qkv_bias=True, qk_norm=True, rotary_fraction=0.5, moe=_with(_DEEPSEEK_EXPERTS, **_SIGMOID)
    ),
}
