"""Weight rules as data: which Megatron parameter holds which Hugging Face tensors, and how it is cut.

One declaration serves both directions and every layout; ``megarl/weights/layout.py`` turns it into rectangles.

Invariants:
1. A rule names its tensors with templates whose only variables are ``{layer}`` and ``{expert}``: the index inside the
   pipeline stage and inside the expert-parallel rank on Megatron's side, the global indices on Hugging Face's.
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

Dim = Literal[
    "vocab",
    "hidden",
    "ffn",
    "query",
    "kv",
    "head",
    "one",
    "experts",
    "expert_ffn",
    "shared_ffn",
    "q_latent",
    "q_latent_heads",
    "kv_latent",
    "kv_latent_rope",
    "kv_latent_heads",
    "value_heads",
]
Stage = Literal["first", "layer", "last"]
Flag = Literal[
    "tied",
    "untied",
    "lm",
    "value",
    "pipelined",
    "qkv_bias",
    "qk_norm",
    "dense_layer",
    "expert_layer",
    "shared_experts",
    "shared_gate",
    "expert_bias",
    "heads",
    "latent",
    "query_latent",
    "query_direct",
]

VALUE_HEAD = "score.weight"
"""Hugging Face name of a critic's head, as in its sequence-classification models; shape [1, hidden]."""


ROUTING_BIAS = ".gate.e_score_correction_bias"
"""End of the Hugging Face name of a bias that chooses experts, which is float32 whatever the weights are."""


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
        te_cut: how Transformer Engine's layers cut it, where that differs.
        grouped: name where all experts of a rank are one module.

    A rule with ``{expert}`` in its names holds once per expert; its cut goes over the expert-tensor-parallel ranks.
    """

    megatron: str
    hf: tuple[Tensor, ...]
    cut: Cut
    stage: Stage
    te: str | None = None
    when: tuple[Flag, ...] = ()
    is_copy: bool = False
    te_cut: Cut | None = None
    grouped: str | None = None

    @property
    def is_per_expert(self) -> bool:
        """Whether every expert has this parameter."""
        return "{expert}" in self.megatron

    def template(self, naming: NamingScheme, *, grouped: bool = False) -> str:
        """Megatron's name with its variables."""
        if grouped and self.grouped is not None:
            return self.grouped
        return self.te if naming == "te" and self.te is not None else self.megatron

    def cut_for(self, naming: NamingScheme) -> Cut:
        """How the parameter is cut."""
        return self.te_cut if naming == "te" and self.te_cut is not None else self.cut


@dataclass(frozen=True, slots=True)
class Dropped:
    """A tensor that checkpoints may carry and the model does not hold.

    ``name`` is a regular expression; ``{num_layers}`` in it stands for the first index beyond the decoder's layers.
    """

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
    if spec.moe is not None:
        sizes["experts"] = spec.moe.num_experts
        sizes["expert_ffn"] = spec.moe.ffn_hidden_size
        sizes["shared_ffn"] = spec.moe.shared_ffn_hidden_size
    if spec.mla is not None:
        mla = spec.mla
        sizes["q_latent"] = mla.q_lora_rank or 0
        sizes["q_latent_heads"] = spec.num_heads * (mla.nope_head_dim + mla.rope_head_dim)
        sizes["kv_latent"] = mla.kv_lora_rank
        sizes["kv_latent_rope"] = mla.kv_lora_rank + mla.rope_head_dim
        sizes["kv_latent_heads"] = spec.num_heads * (mla.nope_head_dim + mla.v_head_dim)
        sizes["value_heads"] = spec.num_heads * mla.v_head_dim
    return sizes[dim]


def flags(spec: ModelSpec, *, value_head: bool, pipelined: bool, layer: int | None = None) -> frozenset[Flag]:
    """What holds for a model with this head, cut into one stage or more; with a layer, also what holds for it."""
    found: dict[Flag, bool] = {
        "value": value_head,
        "lm": not value_head,
        "tied": spec.tied_embeddings,
        "untied": not spec.tied_embeddings,
        "pipelined": pipelined,
        "qkv_bias": spec.qkv_bias,
        "qk_norm": spec.qk_norm,
        "heads": spec.mla is None,
        "latent": spec.mla is not None,
        "query_latent": spec.mla is not None and spec.mla.q_lora_rank is not None,
        "query_direct": spec.mla is not None and spec.mla.q_lora_rank is None,
    }
    if layer is not None:
        experts = spec.moe if spec.has_experts(layer) else None
        found["dense_layer"] = experts is None
        found["expert_layer"] = experts is not None
        found["shared_experts"] = experts is not None and experts.shared_ffn_hidden_size > 0
        found["shared_gate"] = experts is not None and experts.shared_gate
        found["expert_bias"] = experts is not None and experts.expert_bias
    return frozenset(flag for flag, holds in found.items() if holds)


def active_rules(rules: Iterable[Rule], present: frozenset[Flag]) -> tuple[Rule, ...]:
    """The rules whose conditions hold."""
    return tuple(rule for rule in rules if present.issuperset(rule.when))


def template_pattern(template: str) -> re.Pattern[str]:
    """A pattern that matches exactly the names of a template; groups ``layer`` and ``expert`` are the indices."""
    pattern = re.escape(template)
    for variable in ("layer", "expert"):
        pattern = pattern.replace(re.escape(f"{{{variable}}}"), rf"(?P<{variable}>0|[1-9]\d*)")
    return re.compile(pattern)
