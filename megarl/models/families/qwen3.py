"""Qwen3 dense: RMS norms on each head's query and key, no biases, a head dimension of its own."""

from __future__ import annotations

from megarl.models.families.dense import DENSE_DECODER, DENSE_DROPPED
from megarl.models.family import Family

QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    rules=DENSE_DECODER,
    dropped=DENSE_DROPPED,
    qk_norm=True,
    # sliding_window and max_window_layers are unused while use_sliding_window is false.
    only={"use_sliding_window": (False,), "attention_bias": (False,)},
    unused=("sliding_window", "max_window_layers"),
    defaults={"head_dim": 128},
)
