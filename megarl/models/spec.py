"""A decoder-only language model as numbers: all that a layout, a planner or a model builder needs to know.

Invariants:
1. A spec is read once, from a Hugging Face configuration; nothing later consults that configuration.
2. ``vocab_size`` is the configuration's; padding belongs to a layout (``ParallelLayout.padded_vocab_size``).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Frequency scaling of Llama 3.1 and later (``rope_type: llama3``)."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes and options of one model.

    ``vocab_size`` is the configuration's, which may exceed the tokenizer's; ``head_dim`` need not be
    ``hidden_size / num_heads``. Token ids are None where the configuration names none.
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
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    init_std: float = 0.02

    @property
    def query_size(self) -> int:
        """Rows of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim

    def num_parameters(self, *, value_head: bool = False) -> int:
        """Distinct trainable numbers, without vocabulary padding; a tied head counts once."""
        heads = self.hidden_size if value_head else 0 if self.tied_embeddings else self.vocab_size * self.hidden_size
        return (
            self.vocab_size * self.hidden_size
            + self.num_layers * (self._layer_matrix_parameters() + self._layer_vector_parameters())
            + self.hidden_size
            + heads
        )

    def flops_per_token(self, sequence_length: int, *, value_head: bool = False) -> float:
        """Floating-point operations of one token's forward pass in a sequence of this length.

        Two per weight of every matrix product (the embedding look-up is none; the head is one, tied or not), and for
        attention ``4 * L * num_heads * head_dim`` per attended position, half the sequence on average under the
        causal mask. A training step costs three times as much, four times with full recomputation.
        """
        head = self.hidden_size * (1 if value_head else self.vocab_size)
        matrices = self.num_layers * self._layer_matrix_parameters() + head
        attention = 4 * self.num_layers * self.query_size * sequence_length / 2
        return 2.0 * matrices + attention

    def _layer_matrix_parameters(self) -> int:
        attention = self.hidden_size * (2 * self.query_size + 2 * self.kv_size)
        return attention + 3 * self.hidden_size * self.ffn_hidden_size

    def _layer_vector_parameters(self) -> int:
        biases = self.query_size + 2 * self.kv_size if self.qkv_bias else 0
        return 2 * self.hidden_size + biases + (2 * self.head_dim if self.qk_norm else 0)
