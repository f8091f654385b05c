"""Device memory of one training rank, part by part, from the model's numbers and the layout.

Weights, gradients and optimizer state are exact: shapes come from the layout's regions, padding from Megatron-Core's
buffers. Activations are counted tensor by tensor as autograd keeps them, once for Megatron-Core's local layers with
megarl's attention (CPU), once for Transformer Engine's with flash attention (CUDA). The former is compared with what
a real engine allocates (``tests/distributed/test_memory_forecast.py``); the latter follows Transformer Engine's source
and has not been measured by this project.

Invariants:
1. Bytes of one rank, never of a role; the stage that needs most stands for the role.
2. No number is rounded, and nothing is left out because it is small: what is not modelled is listed in
   ``docs/planning.md``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from megarl.config.schema.train import EngineConfig, LoraConfig, OptimizerConfig
from megarl.models import ModelSpec
from megarl.parallel.grid import Coordinate, ParallelLayout
from megarl.planning.latent_memory import latent_layer_bytes
from megarl.planning.state import WEIGHT_BYTES, StateBytes, state_bytes
from megarl.weights.layout import megatron_regions, parameter_shapes

Layers = Literal["local", "transformer_engine"]

_F32 = 4
ROUTER_TENSORS = 4
"""Of a token's scores of all experts, that the router keeps."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One training rank, bytes: its state, and what a pass needs at its peak beside it."""

    state: StateBytes
    training: int
    inference: int


def rank_memory(
    spec: ModelSpec,
    layout: ParallelLayout,
    engine: EngineConfig,
    *,
    stage: int,
    num_microbatches: int,
    layers: Layers,
    value_head: bool = False,
    trained: bool = True,
    optimizer: OptimizerConfig | None = None,
    lora: LoraConfig | None = None,
    training_tokens: int | None = None,
    inference_tokens: int | None = None,
) -> RankMemory:
    """Memory of a rank of a pipeline stage.

    Args:
        spec: the model.
        layout: the role's layout.
        engine: dtype, microbatch caps, recompute.
        stage: pipeline stage.
        num_microbatches: microbatches of an update; a stage holds no more at once than 1F1B has in flight.
        layers: which implementation runs.
        value_head: a critic.
        trained: with gradients and optimizer; a reference policy has neither.
        optimizer: its settings; None takes the defaults.
        lora: adapters, the only ones with gradients and optimizer state.
        training_tokens: tokens of a microbatch; None takes the cap.
        inference_tokens: the same without gradients.
    """
    state = state_bytes(
        spec,
        layout,
        engine.dtype,
        stage=stage,
        value_head=value_head,
        trained=trained,
        optimizer=optimizer,
        lora=lora,
    )
    cap = engine.microbatch_tokens
    inference_cap = cap if engine.inference_microbatch_tokens is None else engine.inference_microbatch_tokens
    is_fp8 = engine.fp8 is not None
    kept = Activations(spec, layout, engine.dtype, layers, value_head=value_head, is_fp8=is_fp8, lora=lora)
    # Copies of weights that a pass multiplies by: one for the way forward and a transposed one for the way back.
    copies = quantized_elements(spec, layout, stage) if is_fp8 else 0
    training = kept.training(
        cap if training_tokens is None else training_tokens,
        stage=stage,
        recompute=engine.recompute,
        num_microbatches=num_microbatches,
        chunk_tokens=engine.logits_chunk_tokens,
    )
    inference = kept.inference(
        inference_cap if inference_tokens is None else inference_tokens,
        stage=stage,
        chunk_tokens=engine.logits_chunk_tokens,
    )
    return RankMemory(state, max(training + 2 * copies, state.step) if trained else 0, inference + copies)


def worst_stage(
    spec: ModelSpec,
    layout: ParallelLayout,
    engine: EngineConfig,
    *,
    num_microbatches: int,
    layers: Layers,
    **options: Any,
) -> RankMemory:
    """``rank_memory`` of the stage that needs most in training (or, untrained, in a pass)."""
    stages = (
        rank_memory(spec, layout, engine, stage=stage, num_microbatches=num_microbatches, layers=layers, **options)
        for stage in _outer_stages(layout)
    )
    return max(stages, key=lambda one: one.state.total + max(one.training, one.inference))


def _outer_stages(layout: ParallelLayout) -> list[int]:
    """The first stage holds the embedding and most microbatches, the last the head; the second is like the others."""
    return sorted({0, min(1, layout.pp - 1), layout.pp - 1})


@lru_cache(maxsize=64)
def quantized_elements(spec: ModelSpec, layout: ParallelLayout, stage: int) -> int:
    """Elements of a rank's matrices that are multiplied in FP8: those of attention and feed-forward parts."""
    shapes = parameter_shapes(megatron_regions(spec, layout, Coordinate(pp=stage)))
    return sum(math.prod(shape) for name, shape in shapes.items() if ".linear_" in name and name.endswith(".weight"))


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of activations of one rank.

    ``layer_bytes`` counts what autograd keeps of a layer, the others what is alive beside it. With ``is_fp8`` what goes
    into a matrix product is kept in one byte.
    """

    spec: ModelSpec
    layout: ParallelLayout
    dtype: str
    layers: Layers
    value_head: bool = False
    is_fp8: bool = False
    lora: LoraConfig | None = None

    def training(self, tokens: int, *, stage: int, recompute: str, num_microbatches: int, chunk_tokens: int) -> int:
        """Peak of a forward-backward pass over microbatches of this many tokens, in bytes, above the state.

        The peak is where the forward pass ends, with the head's tensors, or in the backward pass of a layer that has
        been computed again, without them.
        """
        tokens = -(-tokens // self.layout.cp)
        kinds = [
            self.spec.has_experts(layer)
            for chunk in range(self.layout.vpp)
            for layer in self.layout.layers_of_stage(self.spec.num_layers, stage, chunk)
        ]
        in_flight = self._in_flight(stage, num_microbatches)
        boundary = self._hidden() * self._width
        kept = sum(boundary if recompute == "full" else self.layer_bytes(recompute, experts=kind) for kind in kinds)
        held = tokens * (in_flight * kept + (2 * boundary if self.layout.pp > 1 else 0.0))
        is_last = stage == self.layout.pp - 1
        end = tokens * self._end_bytes() + self._head(chunk_tokens, trained=True) if is_last else 0.0
        again = 0.0
        if recompute == "full":
            again = tokens * (max(self.layer_bytes("none", experts=kind) for kind in kinds) + self._gradient_bytes())
        return round(held + max(end, again + self._weight_gradient()))

    def _in_flight(self, stage: int, num_microbatches: int) -> float:
        """Microbatches whose activations a stage holds at most, in whole passes through its layers.

        Interleaved, a stage warms up over all of its virtual stages but the last, and twice the stages that follow it.
        """
        pp, vpp = self.layout.pp, self.layout.vpp
        if vpp == 1:
            return max(1, min(pp - stage, num_microbatches))
        return min(2 * (pp - stage - 1) + (vpp - 1) * pp + 1, vpp * num_microbatches) / vpp

    def inference(self, tokens: int, *, stage: int, chunk_tokens: int) -> int:
        """Peak of a pass without gradients, in bytes, above the weights."""
        tokens = -(-tokens // self.layout.cp)
        query, key, _ = self._sizes()
        hidden = self._hidden()
        ffn = max(self._visiting() if kind else self._feed_forward(experts=False) for kind in self._kinds)
        if self.layers == "local":
            working = max(ffn + 4 * hidden, 3 * (query + 2 * key) + 2 * self._gathered() + 4 * hidden)
        else:
            working = max(ffn, 2 * (query + 2 * key)) + 2 * hidden + self.spec.hidden_size
        is_last = stage == self.layout.pp - 1
        end = tokens * hidden * self._width + self._head(chunk_tokens, trained=False) if is_last else 0.0
        return round(max(tokens * working * self._width, end))

    def layer_bytes(self, recompute: str, *, experts: bool = False) -> float:
        """What one layer keeps of one token for its backward pass; ``recompute`` is none or selective."""
        query, key, _ = self._sizes()
        ffn = self._feed_forward(experts=experts)
        hidden, width, heads = self._hidden(), self._width, self.spec.num_heads / self.layout.tp
        norms = query + key if self.spec.qk_norm else 0
        if self.spec.mla is not None:
            return latent_layer_bytes(
                self.spec, self.spec.mla, self.layout, self.dtype, recompute, ffn, self._gathered(), layers=self.layers
            )
        if self.layers == "transformer_engine":
            # Input and output of both norms; queries, keys, values and their result; gate and up, and their product.
            elements = 4 * hidden + 2 * query + 2 * key + norms + ffn
            statistics = _F32 * (heads + 2 * hidden / self.spec.hidden_size)
            if self.is_fp8:
                # Outputs of norms and the product of gate and up; the result of attention twice, once as it is.
                multiplied = 2 * hidden + ffn / 3
                return width * (elements - multiplied) + multiplied + query + statistics
            return width * elements + statistics
        rotary = 4 * self.spec.head_dim * width
        statistics = _F32 * (heads + 2)
        if self.dtype == "float32":
            # Each norm keeps its input, the normalised and the result. Values are a view of the whole of query, key
            # and value, so that is kept beside rotated queries, rotated keys and the result of attention. The gate's
            # halves, its activation, the shifted up projection and their product: five times the rows.
            elements = 6 * hidden + 3 * query + 3 * key + 3 * norms + ffn + self._gathered()
            return _F32 * elements + rotary + statistics
        # The norm's input and the normalised are float32, as are queries, keys, values and the result in attention.
        halves = width * (2 * hidden + query + norms + ffn) + _F32 * (4 * hidden + 2 * norms)
        # Recomputed, attention keeps what went into it in bfloat16: rotated queries and keys, and values as above.
        statistics += _F32 * self._gathered()
        attention = width * (2 * query + 3 * key) if recompute == "selective" else _F32 * (2 * query + 2 * key)
        return halves + attention + rotary + statistics

    def _feed_forward(self, *, experts: bool) -> float:
        """Elements that one token leaves in the feed-forward part of a layer, beside the norm and its own result.

        Of a gated projection five times its rows in Megatron-Core's layers and three in Transformer Engine's. A token
        visits ``top_k`` experts, each with a copy of it; there its product with the router's weight is one more.
        Experts are taken to be visited alike.
        """
        rows = 5 if self.layers == "local" else 3
        moe = self.spec.moe
        if not experts or moe is None:
            return rows * self._sizes()[2]
        # Under sequence parallelism a rank routes its own tokens only.
        share = 1 / self.layout.tp if self.layout.sequence_parallel else 1.0
        routed = moe.top_k * (self.layout.etp * self.spec.hidden_size + (rows + 1) * moe.ffn_hidden_size)
        shared = rows * moe.shared_ffn_hidden_size / self.layout.tp + (self._hidden() if moe.shared_gate else 0.0)
        return share * (routed + ROUTER_TENSORS * moe.num_experts) + shared

    def _gathered(self) -> float:
        """Keys and values of the whole sequence that megarl's attention gathers for one token of a rank."""
        return 2 * self.layout.cp * self._sizes()[1] if self.layout.cp > 1 else 0.0

    def _visiting(self) -> float:
        """Elements of one token alive in a layer with experts in a pass without gradients.

        Tokens are sorted by expert, sent and brought back, hence copied three times, five where an expert's parts
        gather them; experts run one after another, or together with Transformer Engine.
        """
        moe = self.spec.moe
        if moe is None:
            return 0.0
        share = 1 / self.layout.tp if self.layout.sequence_parallel else 1.0
        rows = 6 * self.layout.ep / moe.num_experts if self.layers == "local" else 3
        copies = 3 if self.layout.etp == 1 else 5
        return share * moe.top_k * (copies * self.layout.etp * self.spec.hidden_size + rows * moe.ffn_hidden_size)

    @property
    def _kinds(self) -> set[bool]:
        """Whether layers of the model have experts; both, where some have."""
        return {self.spec.has_experts(layer) for layer in range(self.spec.num_layers)}

    @property
    def _width(self) -> int:
        return WEIGHT_BYTES[self.dtype]

    def _sizes(self) -> tuple[float, float, float]:
        """Rows of queries, keys and the feed-forward part on this rank."""
        tp = self.layout.tp
        return self.spec.query_size / tp, self.spec.kv_size / tp, self.spec.ffn_hidden_size / tp

    def _hidden(self) -> float:
        """Hidden size, a rank's share of it under sequence parallelism (of tokens, which is the same number)."""
        return self.spec.hidden_size / (self.layout.tp if self.layout.sequence_parallel else 1)

    def _gradient_bytes(self) -> float:
        """Gradients alive in the backward pass of a layer, per token: of gate and up, and of the hidden states."""
        rows = max(self._feed_forward(experts=kind) for kind in self._kinds) / (5 if self.layers == "local" else 3)
        return self._width * (2 * rows + 1.5 * self._hidden())

    def _end_bytes(self) -> float:
        """The final norm's tensors and the hidden states that the head reads, per token."""
        hidden = self._hidden()
        if self.layers == "transformer_engine":
            return self._width * 2 * hidden
        return _F32 * 3 * hidden if self.dtype == "float32" else _F32 * 2 * hidden + self._width * hidden

    def _head(self, chunk_tokens: int, *, trained: bool) -> int:
        """Logits of a chunk with two copies in float32; in training the gradient of the output matrix too."""
        if self.value_head:
            return 2 * _F32 * self.spec.hidden_size
        rows = self.layout.padded_vocab_size(self.spec.vocab_size) // self.layout.tp
        gradient = rows * self.spec.hidden_size * (_F32 + (self._width if self._width < _F32 else 0))
        return 3 * _F32 * chunk_tokens * rows + (gradient if trained and self.lora is None else 0)

    def _weight_gradient(self) -> int:
        """The largest weight's gradient before it is added to the buffer, in its dtype; those of adapters are small."""
        if self.lora is not None:
            return 0
        moe, rows = self.spec.moe, self._sizes()[2] if False in self._kinds else 0.0
        if moe is not None:
            rows = max(rows, moe.ffn_hidden_size / self.layout.etp, moe.shared_ffn_hidden_size / self.layout.tp)
        return 2 * self.spec.hidden_size * round(rows) * self._width


@lru_cache(maxsize=64)
def engine_bytes(spec: ModelSpec, tp: int, dtype: str) -> tuple[int, int]:
    """Weights of one rank of a vLLM engine, and the key-value cache of one token on it, in bytes.

    vLLM cuts the vocabulary like Megatron-Core and keeps a copy of a key-value head where ranks are more than heads.
    Its tensor-parallel ranks cut every expert too.
    """
    ranks = min(tp, spec.num_kv_heads)
    layout = ParallelLayout(tp=ranks, etp=1 if spec.moe is None else ranks)
    shapes = parameter_shapes(megatron_regions(spec, layout, Coordinate()))
    weights = sum(math.prod(shape) for shape in shapes.values()) * layout.tp / tp
    heads = max(1, spec.num_kv_heads // tp)
    width = WEIGHT_BYTES[dtype]
    return round(weights * width), 2 * spec.num_layers * heads * spec.head_dim * width


def parts(memory: RankMemory) -> Iterator[tuple[str, int]]:
    """Names and bytes of a rank's parts, for a table."""
    yield "weights", memory.state.weights
    yield "gradients", memory.state.gradients
    yield "optimizer", memory.state.optimizer
    yield "training pass", memory.training
    yield "inference pass", memory.inference
