"""Qwen2 and Qwen2.5: biases on q, k and v (not on o), the small ones tied."""

from __future__ import annotations

from megarl.models.families.dense import DENSE_DECODER, DENSE_DROPPED
from megarl.models.family import Family

QWEN2 = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    rules=DENSE_DECODER,
    dropped=DENSE_DROPPED,
    qkv_bias=True,
    # sliding_window and max_window_layers are unused while use_sliding_window is false.
    only={"use_sliding_window": (False,)},
    unused=("sliding_window", "max_window_layers"),
    defaults={"head_dim": None},
)
