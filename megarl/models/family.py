"""What a model family declares: the options it can represent and its weight rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megarl.models.rules import Dropped, Rule


@dataclass(frozen=True, slots=True)
class ExpertKeys:
    """Where a family's configuration says what its experts are; an absent optional key has no meaning for the family.

    Args:
        num_experts: key of the routed experts' number, and others that transformers has written for it.
        ffn: key of a routed expert's feed-forward size.
        num_shared: key of the number of shared experts, each of ``ffn`` rows.
        shared_ffn: key of the shared experts' feed-forward size together.
        shared_gate: they have a sigmoid gate.
        score: how logits become scores.
        expert_bias: a bias chooses experts.
        normalize: key that says whether the chosen weights are divided by their sum, and its default; None: they are.
        first_dense: key of the number of dense layers at the start.
        sparse_step: key of the distance between expert layers; ``mlp_only_layers`` names further dense ones.
        groups: keys of the number of groups and of those a token may choose from.
        scale: key of the routed output's factor.
    """

    num_experts: tuple[str, ...]
    ffn: str
    num_shared: str | None = None
    shared_ffn: str | None = None
    shared_gate: bool = False
    score: Literal["softmax", "sigmoid"] = "softmax"
    expert_bias: bool = False
    normalize: tuple[str, bool] | None = None
    first_dense: str | None = None
    sparse_step: str | None = None
    groups: tuple[str, str] | None = None
    scale: str | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """One ``model_type`` of Hugging Face.

    Args:
        name: the configuration's ``model_type``.
        architecture: the class name checkpoints carry.
        rules: where each weight lives.
        dropped: tensors a checkpoint may carry and the model does not hold.
        qkv_bias: biases on q, k and v.
        qk_norm: an RMS norm on each head's query and key.
        qk_norm_key: key that says whether there is one.
        experts: the configuration's keys of expert layers; None for a dense family.
        latent: multi-head latent attention.
        partial_rotary: default of ``partial_rotary_factor`` where the family has it.
        only: configuration keys with the values the family can represent; any other value is refused. A missing
            key is fine.
        unused: keys that change nothing in the model, whatever their value, given ``only``.
        defaults: what transformers takes for a missing ``num_key_value_heads`` or ``head_dim`` (None: derived from
            the other sizes); a key without a default here must be in the configuration.
        required: further keys that must be in the configuration.
    """

    name: str
    architecture: str
    rules: tuple[Rule, ...]
    dropped: tuple[Dropped, ...] = ()
    qkv_bias: bool = False
    qk_norm: bool = False
    qk_norm_key: str | None = None
    experts: ExpertKeys | None = None
    latent: bool = False
    partial_rotary: float | None = None
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    defaults: Mapping[str, int | None] = field(default_factory=dict)
    required: tuple[str, ...] = ()
