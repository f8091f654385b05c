"""A decoder-only language model as numbers: all that a layout, a planner or a model builder needs to know.

Invariants:
1. A spec is read once, from a Hugging Face configuration; nothing later consults that configuration.
2. ``vocab_size`` is the configuration's; padding belongs to a layout (``ParallelLayout.padded_vocab_size``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Frequency scaling of Llama 3.1 and later (``rope_type: llama3``)."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (arXiv:2309.00071) with DeepSeek's scaling of the attention's softmax by ``mscale``."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True, slots=True)
class MixtureOfExperts:
    """The expert layers of a model.

    Args:
        num_experts: routed experts of a layer.
        top_k: experts of a token.
        ffn_hidden_size: rows of one expert's gate projection.
        dense_layers: layers without experts, in ascending order.
        shared_ffn_hidden_size: rows of the shared experts' gate projection together; 0 without.
        shared_gate: the shared experts' output is scaled by a sigmoid gate (Qwen2-MoE).
        score: how the router turns logits into scores.
        normalize_top_k: the chosen experts' weights are divided by their sum.
        expert_bias: a bias chooses experts and is no part of their weight (DeepSeek-V3, arXiv:2412.19437, 2.1.2).
        routed_scale: factor of the routed experts' output.
        num_groups: groups of experts for group-limited routing; 1 without.
        top_groups: groups a token may choose from.
        aux_loss_coef: of the load-balancing loss in the configuration.
    """

    num_experts: int
    top_k: int
    ffn_hidden_size: int
    dense_layers: tuple[int, ...] = ()
    shared_ffn_hidden_size: int = 0
    shared_gate: bool = False
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize_top_k: bool = True
    expert_bias: bool = False
    routed_scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    aux_loss_coef: float = 0.0

    @property
    def not_trained(self) -> str | None:
        """What of the router Megatron-Core's is not, or megarl does not train yet."""
        if self.num_groups > 1 and self.top_k // self.top_groups != (2 if self.expert_bias else 1):
            # Megatron-Core's group_limited_topk adds up the best top_k // top_groups.
            return "groups of experts that are chosen by other sums of scores than Megatron-Core's"
        if self.score == "softmax" and self.normalize_top_k and self.top_k == 1:
            return "a router whose only chosen expert has the weight 1, whatever it scores,"
        if self.score == "sigmoid" and not self.normalize_top_k and self.top_k > 1:
            return "a router whose sigmoid scores are not divided by their sum"
        return None


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Args:
        q_lora_rank: rank of the query's latent; None projects the hidden state to queries directly.
        kv_lora_rank: rank of the keys' and values' latent.
        nope_head_dim: part of a query or key without position.
        rope_head_dim: part with rotary position; the key's is shared by all heads.
        v_head_dim: size of a head's value.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    nope_head_dim: int
    rope_head_dim: int
    v_head_dim: int

    @property
    def split_rows(self) -> dict[str, int]:
        """What tensor-parallel ranks on CPU share out beside heads, by name; Transformer Engine leaves it whole."""
        rows = {"rows of the keys' and values' latent": self.kv_lora_rank + self.rope_head_dim}
        return rows if self.q_lora_rank is None else rows | {"rows of the queries' latent": self.q_lora_rank}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes and options of one model.

    ``vocab_size`` is the configuration's, which may exceed the tokenizer's; ``head_dim`` need not be
    ``hidden_size / num_heads``. ``ffn_hidden_size`` is that of the dense layers. Token ids are None where the
    configuration names none. ``rotary_fraction`` is the part of a head that carries position.
    """

    family: str
    vocab_size: int
    hidden_size: int
    ffn_hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | YarnScaling | None = None
    tied_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    init_std: float = 0.02
    rotary_fraction: float = 1.0
    moe: MixtureOfExperts | None = None
    mla: LatentAttention | None = None

    @property
    def query_size(self) -> int:
        """Rows of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim

    def has_experts(self, layer: int) -> bool:
        """Whether a layer is a mixture of experts."""
        return self.moe is not None and layer not in self.moe.dense_layers

    @property
    def split_rows(self) -> dict[str, int]:
        """What tensor parallelism divides, by name: heads, and rows of dense layers and shared experts if any."""
        rows = {"attention heads": self.num_heads, "key-value heads": self.num_kv_heads}
        if self.num_expert_layers < self.num_layers:
            rows["feed-forward rows"] = self.ffn_hidden_size
        if self.moe is not None and self.moe.shared_ffn_hidden_size:
            rows["rows of the shared experts"] = self.moe.shared_ffn_hidden_size
        return rows

    @property
    def num_expert_layers(self) -> int:
        """Layers that are a mixture of experts."""
        return 0 if self.moe is None else self.num_layers - len(self.moe.dense_layers)

    @property
    def not_trained(self) -> str | None:
        """What of the model megarl's training engine cannot build yet; its weights can be planned and converted."""
        if self.moe is not None and self.moe.not_trained is not None:
            return self.moe.not_trained
        if isinstance(self.rope_scaling, YarnScaling):
            if self.mla is None:
                return "YaRN without latent attention"
            if self.rope_scaling.mscale != 1 and not self.rope_scaling.mscale_all_dim:
                # transformers leaves mscale out then, Megatron-Core does not.
                return "YaRN with mscale and no mscale_all_dim"
        return None

    @property
    def not_trained_on_gpu(self) -> str | None:
        """What of the model the training engine cannot build with Transformer Engine's layers, though with others."""
        if self.mla is not None and self.mla.q_lora_rank is None:
            # multi_latent_attention.py of megatron-core 0.19.2 makes their projection one with a norm before it.
            return "queries without a latent, whose projection Megatron-Core 0.19 fuses with a norm the model has not,"
        return None

    def num_parameters(self, *, value_head: bool = False) -> int:
        """Distinct numbers a checkpoint holds, without vocabulary padding; a tied head counts once."""
        heads = self.hidden_size if value_head else 0 if self.tied_embeddings else self.vocab_size * self.hidden_size
        return (
            self.vocab_size * self.hidden_size
            + self.num_layers * (self._attention_matrices() + self._vectors())
            + self._mlp_matrices(experts=self.moe.num_experts if self.moe else 0)
            + self.num_expert_layers * (self.moe.num_experts if self.moe and self.moe.expert_bias else 0)
            + self.hidden_size
            + heads
        )

    def flops_per_token(self, sequence_length: int, *, value_head: bool = False) -> float:
        """Floating-point operations of one token's forward pass in a sequence of this length.

        Two per weight of every matrix product (the embedding look-up is none; the head is one, tied or not; of the
        experts those a token visits), and two for each element of queries, keys and values per attended position,
        half the sequence on average under the causal mask. A training step costs three times as much, four times with
        full recomputation.
        """
        per_token, per_token_squared = self.sequence_cost(value_head=value_head)
        return per_token + per_token_squared * sequence_length

    def sequence_cost(self, *, value_head: bool = False) -> tuple[float, float]:
        """Operations of a sequence's forward pass, as ``flops_per_token`` counts them: per token, per token squared."""
        head = self.hidden_size * (1 if value_head else self.vocab_size)
        matrices = self.num_layers * self._attention_matrices() + head
        matrices += self._mlp_matrices(experts=self.moe.top_k if self.moe else 0)
        score, value = self.query_size, self.query_size
        if self.mla is not None:
            score = self.num_heads * (self.mla.nope_head_dim + self.mla.rope_head_dim)
            value = self.num_heads * self.mla.v_head_dim
        return 2.0 * matrices, float(self.num_layers * (score + value))

    def _attention_matrices(self) -> int:
        if self.mla is None:
            return self.hidden_size * (2 * self.query_size + 2 * self.kv_size)
        mla = self.mla
        query_rows = self.num_heads * (mla.nope_head_dim + mla.rope_head_dim)
        query = (
            self.hidden_size * query_rows
            if mla.q_lora_rank is None
            else mla.q_lora_rank * (self.hidden_size + query_rows)
        )
        latent = self.hidden_size * (mla.kv_lora_rank + mla.rope_head_dim)
        up = mla.kv_lora_rank * self.num_heads * (mla.nope_head_dim + mla.v_head_dim)
        return query + latent + up + self.hidden_size * self.num_heads * mla.v_head_dim

    def _mlp_matrices(self, *, experts: int) -> int:
        """Weights of all layers' feed-forward parts with this many routed experts, the router included."""
        dense = self.num_layers - self.num_expert_layers
        total = dense * 3 * self.hidden_size * self.ffn_hidden_size
        if self.moe is not None:
            routed = self.moe.num_experts + 3 * experts * self.moe.ffn_hidden_size
            shared = 3 * self.moe.shared_ffn_hidden_size + int(self.moe.shared_gate)
            total += self.num_expert_layers * self.hidden_size * (routed + shared)
        return total

    def _vectors(self) -> int:
        if self.mla is not None:
            return 2 * self.hidden_size + self.mla.kv_lora_rank + (self.mla.q_lora_rank or 0)
        biases = self.query_size + 2 * self.kv_size if self.qkv_bias else 0
        return 2 * self.hidden_size + biases + (2 * self.head_dim if self.qk_norm else 0)
