"""Llama 2 and 3 (3.1 and later with llama3 rope scaling), and Mistral 7B, whose weights have the same names.

Megatron-Core has one switch for the biases of every linear layer, so ``attention_bias`` (q, k, v and o) and
``mlp_bias`` are refused unless false. Mistral is accepted without sliding-window attention.
"""

from __future__ import annotations

from megarl.models.families.dense import DENSE_DECODER, DENSE_DROPPED
from megarl.models.family import Family

LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    rules=DENSE_DECODER,
    dropped=DENSE_DROPPED,
    only={"attention_bias": (False,), "mlp_bias": (False,)},
    defaults={"num_key_value_heads": None, "head_dim": None},
)

MISTRAL = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    rules=DENSE_DECODER,
    dropped=DENSE_DROPPED,
    # transformers takes a missing sliding_window for 4096, so the key must be there and null.
    only={"sliding_window": (None,)},
    defaults={"head_dim": None},
    required=("sliding_window",),
)
