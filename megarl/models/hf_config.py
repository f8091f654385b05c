"""A Hugging Face configuration, as transformers 4 or 5 writes it, read into a spec.

Invariants:
1. Every key is either read, declared harmless, or refused: an option that changes the model and that megarl cannot
   represent never passes unseen. An unknown key passes only with an empty value (null, false, 0, "", [], {}).
2. All problems are reported in one error, each with the key and its value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.errors import ModelError
from megarl.models.family import Family
from megarl.models.hf_experts import expert_keys, read_experts, read_latent_attention
from megarl.models.spec import ModelSpec, RopeScaling, YarnScaling

SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_position",
}

READ = {
    *SIZES,
    "model_type",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "initializer_range",
}

HARMLESS = {
    # What wrote the file and how to load it.
    *("_name_or_path", "_commit_hash", "_attn_implementation_autoset", "architectures", "transformers_version"),
    *("torch_dtype", "dtype", "auto_map", "return_dict", "use_cache", "problem_type", "id2label", "label2id"),
    *(
        "num_labels",
        "finetuning_task",
        "task_specific_params",
        "tokenizer_class",
        "unsloth_version",
    ),
    *("unsloth_fixed", "transformers.js_config"),
    # Generation settings that transformers 4 kept in the model's configuration.
    *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "temperature"),
    *("diversity_penalty", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty"),
    *("num_return_sequences", "output_scores", "return_dict_in_generate", "suppress_tokens", "bad_words_ids"),
    *("begin_suppress_tokens", "encoder_no_repeat_ngram_size", "no_repeat_ngram_size", "prefix", "sep_token_id"),
    *("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values"),
    *("exponential_decay_length_penalty",),
    # The same products computed in slices.
    *("pretraining_tp",),
}

COMMON_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_dropout": (0, None),
    "quantization_config": (None,),
    "is_encoder_decoder": (False, None),
    "rope_interleaved": (False, None),
    "chunk_size_feed_forward": (0, None),
}


def read_spec(config: Mapping[str, Any], family: Family, *, where: str) -> ModelSpec:
    """The spec of a configuration of this family. Raises ModelError listing all that cannot be represented."""
    problems: list[str] = []
    sizes = _read_sizes(config, family, problems)
    problems += _refused_options(config, family)
    theta, scaling, rotary = _read_rope(config, family, problems)
    moe = read_experts(config, family, sizes.get("num_layers", 0), problems)
    mla = read_latent_attention(config, family, problems)
    if mla is not None:
        sizes["head_dim"] = mla.nope_head_dim + mla.rope_head_dim
    qk_norm = config.get(family.qk_norm_key, False) if family.qk_norm_key is not None else family.qk_norm
    eps = _positive(config, "rms_norm_eps", 1e-6, problems)
    init_std = _positive(config, "initializer_range", 0.02, problems)
    tied = config.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        problems.append(f"tie_word_embeddings is {tied!r}, which is neither true nor false")
    if problems:
        raise ModelError(
            f"megarl's {family.name} cannot represent this configuration: " + "; ".join(problems),
            where=where,
            fix="use a checkpoint that lacks these options, such as an unquantized one, or another model",
        )
    return ModelSpec(
        family=family.name,
        rms_norm_eps=eps,
        rope_theta=theta,
        rope_scaling=scaling,
        tied_embeddings=tied,
        qkv_bias=family.qkv_bias,
        qk_norm=bool(qk_norm),
        bos_token_id=_first(_token_ids(config, "bos_token_id")),
        eos_token_ids=_token_ids(config, "eos_token_id"),
        pad_token_id=_first(_token_ids(config, "pad_token_id")),
        init_std=init_std,
        rotary_fraction=rotary,
        moe=moe,
        mla=mla,
        **sizes,
    )


def _read_sizes(config: Mapping[str, Any], family: Family, problems: list[str]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for key, field in SIZES.items():
        value = config.get(key)
        if value is None:
            value = family.defaults.get(key)
            derivable = key in family.defaults or (key == "num_key_value_heads" and key in config)
            if value is None and derivable and {"hidden_size", "num_heads"} <= sizes.keys():
                heads = sizes["num_heads"]
                value = heads if key == "num_key_value_heads" else sizes["hidden_size"] // heads
        if value is None:
            problems.append(f"{key} is missing")
        elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
            problems.append(f"{key} is {value!r}, which is no positive integer")
        else:
            sizes[field] = value
    if not problems:
        if sizes["num_heads"] % sizes["num_kv_heads"]:
            problems.append(f"{sizes['num_heads']} heads do not divide into {sizes['num_kv_heads']} key-value heads")
        if sizes["head_dim"] % 2:
            problems.append(f"head_dim {sizes['head_dim']} is odd, which rotary embeddings cannot halve")
    return sizes


def _refused_options(config: Mapping[str, Any], family: Family) -> list[str]:
    problems = [f"{key} is missing" for key in family.required if key not in config]
    only = {**COMMON_ONLY, **family.only}
    known = READ | HARMLESS | expert_keys(family) | set(family.unused) | {family.qk_norm_key}
    for key, value in config.items():
        if key in family.unused:
            continue
        if key in only:
            if value not in only[key]:
                accepted = " or ".join(repr(choice) for choice in only[key] if choice is not None) or "null"
                problems.append(f"{key} is {value!r}, only {accepted} is supported")
        elif key == "layer_types":
            if kinds := {kind for kind in value or () if kind != "full_attention"}:
                problems.append(f"layer_types has {', '.join(map(repr, sorted(kinds)))}, only 'full_attention' works")
        elif key not in known and value not in _EMPTY:
            problems.append(f"{key} is {value!r}, an option megarl does not know")
    return problems


_EMPTY: tuple[Any, ...] = (None, False, 0, "", [], {})


def _read_rope(
    config: Mapping[str, Any], family: Family, problems: list[str]
) -> tuple[float, RopeScaling | YarnScaling | None, float]:
    """Base frequency, scaling and part of a head, from ``rope_parameters`` (transformers 5) or the older keys."""
    options: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, Mapping) or any(isinstance(entry, Mapping) for entry in value.values()):
            problems.append(f"{key} is {value!r}, only one set of parameters for all layers is supported")
            return 10000.0, None, 1.0
        options.update(value)
    theta = options.pop("rope_theta", config.get("rope_theta", 10000.0))
    if "rope_theta" in config and config["rope_theta"] != theta:
        problems.append(f"rope_theta is {config['rope_theta']!r} and in rope_parameters {theta!r}")
    if not isinstance(theta, int | float) or isinstance(theta, bool) or theta <= 0:
        problems.append(f"rope_theta is {theta!r}, which is no positive number")
        theta = 10000.0
    legacy = options.pop("type", None)
    kind = options.pop("rope_type", legacy)
    default = family.partial_rotary if family.partial_rotary is not None else 1.0
    rotary = options.pop("partial_rotary_factor", config.get("partial_rotary_factor", default))
    rotary = default if rotary is None else rotary
    if rotary != 1 and family.partial_rotary is None:
        problems.append(f"partial_rotary_factor is {rotary!r}, only 1 is supported")
    scaling: RopeScaling | YarnScaling | None = None
    if kind == "llama3":
        scaling = _read_llama3(options, problems)
    elif kind == "yarn" and family.latent:
        scaling = _read_yarn(options, problems)
    elif kind not in (None, "default"):
        supported = "'default' and 'yarn'" if family.latent else "'default' and 'llama3'"
        problems.append(f"rope_type is {kind!r}, only {supported} are supported")
        options.clear()
    problems.extend(f"rope parameter {key} is {value!r}, which megarl does not know" for key, value in options.items())
    return float(theta), scaling, float(rotary)


def _read_yarn(options: dict[str, Any], problems: list[str]) -> YarnScaling:
    """YaRN with the defaults of transformers' DeepSeek models."""
    values: dict[str, float] = {}
    for key, default in (
        ("factor", None),
        ("original_max_position_embeddings", None),
        ("beta_fast", 32.0),
        ("beta_slow", 1.0),
        ("mscale", 1.0),
        ("mscale_all_dim", 0.0),
    ):
        value = options.pop(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
            problems.append(f"rope scaling's {key} is {value!r}, which is no number of at least 0")
            value = 1.0
        values[key] = float(value)
    return YarnScaling(
        factor=values["factor"],
        original_max_position=int(values["original_max_position_embeddings"]),
        beta_fast=values["beta_fast"],
        beta_slow=values["beta_slow"],
        mscale=values["mscale"],
        mscale_all_dim=values["mscale_all_dim"],
    )


def _read_llama3(options: dict[str, Any], problems: list[str]) -> RopeScaling | None:
    """Megarl's llama3 scaling; Megatron-Core has all but the factor as constants (``rotary_pos_embedding.py``)."""
    factor = options.pop("factor", None)
    if not isinstance(factor, int | float) or isinstance(factor, bool) or factor < 1:
        problems.append(f"rope scaling's factor is {factor!r}, which is no number of at least 1")
        factor = 1.0
    fixed = RopeScaling(float(factor))
    constants = {
        "low_freq_factor": fixed.low_freq_factor,
        "high_freq_factor": fixed.high_freq_factor,
        "original_max_position_embeddings": fixed.original_max_position,
    }
    for key, constant in constants.items():
        if (value := options.pop(key, None)) != constant:
            problems.append(f"rope scaling's {key} is {value!r}, Megatron-Core has {constant:g} built in")
    return fixed


def _positive(config: Mapping[str, Any], key: str, default: float, problems: list[str]) -> float:
    value = config.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        problems.append(f"{key} is {value!r}, which is no positive number")
        return default
    return float(value)


def _token_ids(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    value = config.get(key)
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _first(ids: tuple[int, ...]) -> int | None:
    return ids[0] if ids else None
