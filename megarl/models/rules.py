"""Weight rules as data: which Megatron parameter holds which Hugging Face tensors, and how it is cut.

One declaration serves both directions and every layout; ``megarl/weights/layout.py`` turns it into rectangles.

Invariants:
1. A rule names its tensors with templates whose only variable is ``{layer}``: the stage-local index on Megatron's
   side, the global index on Hugging Face's.
2. A rule states the full Hugging Face shape of each tensor in named dims of the spec, so that a layout needs no
   checkpoint and a checkpoint can be checked against it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from megarl.models.spec import ModelSpec

NamingScheme = Literal["local", "te"]
"""Megatron's module names: its own layers (``local``) or Transformer Engine's fused ones (``te``)."""

Dim = Literal["vocab", "hidden", "ffn", "query", "kv", "head", "one"]
Stage = Literal["first", "layer", "last"]
Flag = Literal["tied", "untied", "lm", "value", "pipelined", "qkv_bias", "qk_norm"]

VALUE_HEAD = "score.weight"
"""Hugging Face name of a critic's head, as in its sequence-classification models; shape [1, hidden]."""


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every tensor-parallel rank holds the whole tensor."""


@dataclass(frozen=True, slots=True)
class Split:
    """Tensor-parallel rank t holds the t-th equal part of one dim.

    ``padded``: the dim is the vocabulary, rounded up to ``ParallelLayout.padded_vocab_size`` before it is cut.
    """

    dim: int
    padded: bool = False


@dataclass(frozen=True, slots=True)
class GroupedQKV:
    """Rows interleaved by key-value group, then cut into equal parts.

    For group g of ``num_kv_heads``: the rows of its queries, then its key, then its value (Megatron-Core
    ``core/transformer/attention.py``). The three Hugging Face tensors are q, k, v, in this order.
    """


@dataclass(frozen=True, slots=True)
class Stack:
    """Every Hugging Face tensor is cut into equal parts of rows; a rank stacks its part of each (gate, then up)."""


Cut = Replicate | Split | GroupedQKV | Stack


@dataclass(frozen=True, slots=True)
class Tensor:
    """A canonical tensor: its Hugging Face name and its shape in named dims."""

    name: str
    shape: tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """One Megatron parameter and the Hugging Face tensors it holds.

    Args:
        megatron: name with Megatron's own layers.
        hf: the tensors it holds.
        cut: how tensor parallelism cuts it.
        stage: pipeline stage it lives on; ``layer`` means once per layer.
        te: name with Transformer Engine's layers, where it differs.
        when: the model and layout must have all of these.
        is_copy: a second home of a tensor that another rule owns (the tied head of the last stage).
    """

    megatron: str
    hf: tuple[Tensor, ...]
    cut: Cut
    stage: Stage
    te: str | None = None
    when: tuple[Flag, ...] = ()
    is_copy: bool = False

    def local_name(self, naming: NamingScheme, layer: int | None = None) -> str:
        """Megatron's parameter name, for a stage-local layer index where the rule is per layer."""
        template = self.te if naming == "te" and self.te is not None else self.megatron
        return template if layer is None else template.format(layer=layer)


@dataclass(frozen=True, slots=True)
class Dropped:
    """A tensor that checkpoints may carry and the model does not hold; ``name`` is a regular expression."""

    name: str
    reason: str
    when: tuple[Flag, ...] = ()


def dim_size(spec: ModelSpec, dim: Dim) -> int:
    """The size of a named dim."""
    sizes: dict[Dim, int] = {
        "vocab": spec.vocab_size,
        "hidden": spec.hidden_size,
        "ffn": spec.ffn_hidden_size,
        "query": spec.query_size,
        "kv": spec.kv_size,
        "head": spec.head_dim,
        "one": 1,
    }
    return sizes[dim]


def flags(spec: ModelSpec, *, value_head: bool, pipelined: bool) -> frozenset[Flag]:
    """What holds for a model with this head, cut into one stage or more."""
    found: set[Flag] = {"value" if value_head else "lm", "tied" if spec.tied_embeddings else "untied"}
    if pipelined:
        found.add("pipelined")
    if spec.qkv_bias:
        found.add("qkv_bias")
    if spec.qk_norm:
        found.add("qk_norm")
    return frozenset(found)


def active_rules(rules: Iterable[Rule], present: frozenset[Flag]) -> tuple[Rule, ...]:
    """The rules whose conditions hold."""
    return tuple(rule for rule in rules if present.issuperset(rule.when))


def template_pattern(template: str) -> re.Pattern[str]:
    """A pattern that matches exactly the names of a template; group ``layer`` is the index."""
    return re.compile(re.escape(template).replace(re.escape("{layer}"), r"(?P<layer>\d+)"))
