"""Latent attention (arXiv:2405.04434, section 2.1): its options, and its layer for devices without Transformer Engine.

Megatron-Core's layer takes packs in Transformer Engine's format only, and otherwise rotates by the place in the pack.
With its own linear layers, which cut the down-projections, it also leaves each tensor-parallel rank with the gradient
that its own heads give the keys' shared part: ``gather_from_tensor_model_parallel_region`` adds nothing up
(transformer/multi_latent_attention.py).

Invariants:
1. A token is rotated by its position in its own sequence, whatever it is packed with.
2. Gradients do not depend on the tensor-parallel size, with sequence parallelism or without.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor, nn

from megarl.models.spec import LatentAttention, ModelSpec, YarnScaling
from megarl.train.megatron.attention import PlannedSequences
from megarl.train.megatron.norm import RMSNorm


def latent_options(spec: ModelSpec, mla: LatentAttention) -> dict[str, Any]:
    """Options of Megatron-Core's MLATransformerConfig beside those of TransformerConfig."""
    options: dict[str, Any] = {
        "multi_latent_attention": True,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.nope_head_dim,
        "qk_pos_emb_head_dim": mla.rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "rotary_base": spec.rope_theta,
        "rope_type": "rope",
        # What applies without YaRN: Megatron-Core scales the softmax by the factor either way.
        "rotary_scaling_factor": 1.0,
    }
    scaling = spec.rope_scaling
    if isinstance(scaling, YarnScaling):
        options |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_max_position,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "mscale": scaling.mscale,
            "mscale_all_dim": scaling.mscale_all_dim,
        }
    return options


class LatentSelfAttention(MLASelfAttention):
    """Megatron-Core's latent attention over planned packs, with norms of ours.

    The specification leaves the norms out and the configuration's ``qk_layernorm`` off: told of them, megatron-core
    0.19 refuses its own linear layers behind a query without a latent, and both releases add up the gradients of
    ``q_layernorm`` over tensor-parallel ranks, each of which has all of it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config, eps = self.config, self.config.layernorm_epsilon
        if config.q_lora_rank is not None:
            self.q_layernorm = RMSNorm(config, config.q_lora_rank, eps)
        self.kv_layernorm = RMSNorm(config, config.kv_lora_rank, eps)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: Any = None,
        inference_context: Any = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Queries and keys [S, B, heads / tp, nope + rope], values [S, B, heads / tp, v], and both latents.

        Args:
            hidden_states: [S, B, H], [S / tp, B, H] under sequence parallelism.
            key_value_states: unused.
            position_ids: unused, the pack has them.
            packed_seq_params: a planned pack, or None for B whole sequences of S tokens.
            inference_context: unused.
        """
        del key_value_states, position_ids, inference_context
        config = self.config
        if config.q_lora_rank is None:
            asked, up = hidden_states, self.linear_q_proj
        else:
            asked = self.q_layernorm(self._own_tokens(self._down(self.linear_q_down_proj, hidden_states)))
            up = self.linear_q_up_proj
        latent, shared = self._down(self.linear_kv_down_proj, hidden_states).split(
            [config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1
        )
        # Every rank's heads add to the gradient of what all of them are given.
        shared = copy_to_tensor_model_parallel_region(shared, group=self.pg_collection.tp)
        latent = self.kv_layernorm(self._own_tokens(latent))
        plain, turned = self._heads(up(asked)[0]).split([config.qk_head_dim, config.qk_pos_emb_head_dim], dim=-1)
        key, value = self._heads(self.linear_kv_up_proj(latent)[0]).split(
            [config.qk_head_dim, config.v_head_dim], dim=-1
        )
        cos, sin = self._angles(plain.shape[0], packed_seq_params)
        query = torch.cat([plain, _rotate(turned, cos, sin)], dim=-1)
        shared = _rotate(shared[:, :, None], cos, sin).expand(-1, -1, key.shape[2], -1)
        return query, torch.cat([key, shared], dim=-1), value, asked, latent

    def _down(self, linear: nn.Module, hidden: Tensor) -> Tensor:
        """All features of all tokens of a projection whose rows the tensor-parallel ranks share out."""
        rows: Tensor = linear(hidden)[0]
        whole: Tensor = gather_from_tensor_model_parallel_region(rows, group=self.pg_collection.tp)
        return whole

    def _own_tokens(self, latent: Tensor) -> Tensor:
        """This rank's tokens under sequence parallelism, as its column-parallel layers take them."""
        if not self.config.sequence_parallel:
            return latent
        own: Tensor = scatter_to_sequence_parallel_region(latent, group=self.pg_collection.tp)
        return own

    def _heads(self, features: Tensor) -> Tensor:
        return features.unflatten(-1, (self.num_attention_heads_per_partition, -1))

    def _angles(self, num_tokens: int, pack: Any) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each token, [S, 1, 1, rope] float32, scaled as YaRN says."""
        positions = pack.positions if isinstance(pack, PlannedSequences) else None
        longest = num_tokens if positions is None else max(pack.max_seqlen_q, pack.max_seqlen_kv)
        # Told of packs, Megatron-Core leaves the table whole under context parallelism.
        table, scale = self.rotary_pos_emb(longest, packed_seq=True), 1.0
        if isinstance(table, tuple):
            table, scale = table
        rows = table if positions is None else table.index_select(0, positions)
        return rows.cos() * scale, rows.sin() * scale


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neighbours turned together, [S, B, heads, d]; in the result the first of all pairs come before the second."""
    first, second = x[..., 0::2], x[..., 1::2]
    turned = torch.cat([first, second], dim=-1) * cos.to(x.dtype)
    return turned + torch.cat([-second, first], dim=-1) * sin.to(x.dtype)
