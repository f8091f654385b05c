"""The parts of a Hugging Face configuration that describe experts and latent attention.

Which keys a family has is data (``ExpertKeys``); everything wrong goes to ``problems``, as in ``hf_config``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.models.family import Family
from megarl.models.spec import LatentAttention, MixtureOfExperts

_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def expert_keys(family: Family) -> set[str]:
    """The configuration's keys that this module reads for a family."""
    keys = set(_LATENT) | {"qk_head_dim"} if family.latent else set()
    if family.experts is not None:
        e = family.experts
        keys |= {*e.num_experts, e.ffn, "num_experts_per_tok", "router_aux_loss_coef"}
        keys |= {key for key in (e.num_shared, e.shared_ffn, e.first_dense, e.sparse_step, e.scale) if key}
        keys |= {e.normalize[0]} if e.normalize else set()
        keys |= set(e.groups or ()) | ({"mlp_only_layers"} if e.sparse_step else set())
    return keys


def read_experts(
    config: Mapping[str, Any], family: Family, num_layers: int, problems: list[str]
) -> MixtureOfExperts | None:
    """The expert layers of a configuration, None for a dense family."""
    keys = family.experts
    if keys is None:
        return None
    named = [key for key in keys.num_experts if key in config] or [keys.num_experts[0]]
    num_experts = _size(config, named[0], problems)
    if any(config[key] != num_experts for key in named[1:]):
        problems.append(f"{' and '.join(named)} differ")
    top_k = _size(config, "num_experts_per_tok", problems)
    ffn = _size(config, keys.ffn, problems)
    shared = 0
    if keys.num_shared is not None and config.get(keys.num_shared) is not None:
        shared = ffn * _size(config, keys.num_shared, problems, least=0)
    if keys.shared_ffn is not None:
        shared = _size(config, keys.shared_ffn, problems)
    groups, top_groups = 1, 1
    if keys.groups is not None and config.get(keys.groups[0]) is not None:
        groups, top_groups = (_size(config, key, problems) for key in keys.groups)
    normalize = True if keys.normalize is None else config.get(*keys.normalize)
    scale = 1.0 if keys.scale is None else config.get(keys.scale, 1.0)
    if not problems and (top_k > num_experts or num_experts % groups or top_groups > groups):
        problems.append(
            f"{top_k} of {num_experts} experts from {top_groups} of {groups} groups cannot be chosen by any router"
        )
    return MixtureOfExperts(
        num_experts=num_experts,
        top_k=top_k,
        ffn_hidden_size=ffn,
        dense_layers=_dense_layers(config, family, num_layers, problems),
        shared_ffn_hidden_size=shared,
        shared_gate=keys.shared_gate and shared > 0,
        score=keys.score,
        normalize_top_k=bool(normalize),
        expert_bias=keys.expert_bias,
        routed_scale=_number(scale, keys.scale or "scale", problems),
        num_groups=groups,
        top_groups=top_groups,
        aux_loss_coef=_number(config.get("router_aux_loss_coef", 0.0), "router_aux_loss_coef", problems),
    )


def read_latent_attention(config: Mapping[str, Any], family: Family, problems: list[str]) -> LatentAttention | None:
    """The latent attention of a configuration, None for a family with attention by heads."""
    if not family.latent:
        return None
    q_lora = None if config.get("q_lora_rank") is None else _size(config, "q_lora_rank", problems)
    kv_lora, nope, rope, value = (_size(config, key, problems) for key in _LATENT[1:])
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        problems.append(f"num_key_value_heads is {kv_heads!r}, latent attention has a key for each of {heads!r} heads")
    if rope % 2:
        problems.append(f"qk_rope_head_dim {rope} is odd, which rotary embeddings cannot halve")
    return LatentAttention(q_lora, kv_lora, nope, rope, value)


def _dense_layers(config: Mapping[str, Any], family: Family, num_layers: int, problems: list[str]) -> tuple[int, ...]:
    """Layers without experts, by the family's way of naming them."""
    keys = family.experts
    assert keys is not None
    dense: set[int] = set()
    if keys.first_dense is not None:
        first = config.get(keys.first_dense, 0) or 0
        if not isinstance(first, int) or isinstance(first, bool) or not 0 <= first <= num_layers:
            problems.append(f"{keys.first_dense} is {first!r}, expected 0 to {num_layers}")
        else:
            dense |= set(range(first))
    if keys.sparse_step is not None:
        step = config.get(keys.sparse_step, 1)
        named = config.get("mlp_only_layers") or []
        if not isinstance(step, int) or isinstance(step, bool) or step < 1:
            problems.append(f"{keys.sparse_step} is {step!r}, which is no positive integer")
        elif not all(isinstance(layer, int) and 0 <= layer < num_layers for layer in named):
            problems.append(f"mlp_only_layers is {named!r}, expected layers from 0 to {num_layers - 1}")
        else:
            dense |= set(named) | {layer for layer in range(num_layers) if (layer + 1) % step}
    return tuple(sorted(dense))


def _size(config: Mapping[str, Any], key: str, problems: list[str], *, least: int = 1) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        problems.append(
            f"{key} is {value!r}, expected an integer of at least {least}" if key in config else f"{key} is missing"
        )
        return 1
    return value


def _number(value: Any, key: str, problems: list[str]) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        problems.append(f"{key} is {value!r}, which is no number")
        return 1.0
    return float(value)
