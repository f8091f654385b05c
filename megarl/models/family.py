"""What a model family declares: the options it can represent and its weight rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megarl.models.rules import Dropped, Rule


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
        only: configuration keys with the values the family can represent; any other value is refused. A missing
            key is fine.
        unused: keys that change nothing, whatever their value, given ``only``.
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
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    defaults: Mapping[str, int | None] = field(default_factory=dict)
    required: tuple[str, ...] = ()
