"""Activations of a layer with latent attention (``train/megatron/latent.py``): they follow the code, unmeasured."""

from __future__ import annotations

from typing import Literal

from megarl.models import ModelSpec
from megarl.models.spec import LatentAttention
from megarl.parallel.grid import ParallelLayout

_F32 = 4


def latent_layer_bytes(
    spec: ModelSpec,
    mla: LatentAttention,
    layout: ParallelLayout,
    dtype: str,
    recompute: str,
    feed_forward: float,
    gathered: float,
    *,
    layers: Literal["local", "transformer_engine"],
) -> float:
    """Bytes of one token on one rank; norms of the latents keep what the layer's do, values are padded to keys.

    Args:
        spec: the model.
        mla: its attention.
        layout: the role's layout.
        dtype: of the activations.
        recompute: none or selective.
        feed_forward: elements in the layer's feed-forward part.
        gathered: elements of keys and values gathered under context parallelism.
        layers: which implementation runs.
    """
    share = 1 / layout.tp if layout.sequence_parallel else 1.0
    heads, hidden = spec.num_heads / layout.tp, share * spec.hidden_size
    queries, values = heads * (mla.nope_head_dim + mla.rope_head_dim), heads * mla.v_head_dim
    latents = share * (mla.kv_lora_rank + (mla.q_lora_rank or 0))
    width = 2 if dtype == "bfloat16" else _F32
    # Of softmax and norms, and the rotary table's rows.
    others = _F32 * (heads + 4) + 2 * _F32 * mla.rope_head_dim + _F32 * gathered
    if layers == "transformer_engine":
        return width * (4 * hidden + 2 * latents + 2 * queries + 2 * values + feed_forward) + others
    if dtype == "float32":
        return _F32 * (6 * hidden + 3 * latents + 4 * queries + values + feed_forward) + others
    halves = width * (2 * hidden + latents + values + feed_forward) + _F32 * (4 * hidden + 2 * latents)
    attention = width * (2 * queries + values) if recompute == "selective" else _F32 * 4 * queries
    return halves + attention + others
