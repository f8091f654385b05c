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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from megarl.config.schema.train import EngineConfig
from megarl.models import ModelSpec
from megarl.parallel.grid import Coordinate, ParallelLayout
from megarl.weights.layout import megatron_regions, parameter_shapes

Layers = Literal["local", "transformer_engine"]

WEIGHT_BYTES: Mapping[str, int] = {"bfloat16": 2, "float32": 4}
# Megatron-Core core/distributed/param_and_grad_buffer.py (0.16.1, 0.19.2): with the distributed optimizer a parameter
# starts at a multiple of 64 elements and a bucket ends at a multiple of lcm(dp, 128).
_PARAM_START, _BUCKET_END = 64, 128
_F32 = 4


@dataclass(frozen=True, slots=True)
class StateBytes:
    """What a rank holds all the time: bytes."""

    weights: int
    gradients: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        """All three."""
        return self.weights + self.gradients + self.optimizer


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
    distributed: bool = True,
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
        distributed: Megatron's distributed optimizer.
        training_tokens: tokens of a microbatch; None takes the cap.
        inference_tokens: the same without gradients.
    """
    state = state_bytes(
        spec, layout, engine.dtype, stage=stage, value_head=value_head, trained=trained, distributed=distributed
    )
    cap = engine.microbatch_tokens
    inference_cap = cap if engine.inference_microbatch_tokens is None else engine.inference_microbatch_tokens
    kept = Activations(spec, layout, engine.dtype, layers, value_head=value_head)
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
    return RankMemory(state, training if trained else 0, inference)


def worst_stage(
    spec: ModelSpec,
    layout: ParallelLayout,
    engine: EngineConfig,
    *,
    num_microbatches: int,
    layers: Layers,
    **options: bool,
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


def state_bytes(
    spec: ModelSpec,
    layout: ParallelLayout,
    dtype: str,
    *,
    stage: int = 0,
    value_head: bool = False,
    trained: bool = True,
    distributed: bool = True,
) -> StateBytes:
    """Weights, gradient buffers and optimizer state of a rank of a stage after the first update.

    Adam keeps two float32 moments; with bfloat16 a float32 copy of the weights too. With the distributed optimizer each
    data-parallel rank keeps its equal part of the padded buffer, the gaps in it counted as if they had state; gradient
    buffers are whole on every rank.
    """
    sizes, head = _parameter_sizes(spec, replace(layout, dp=1), stage, value_head)
    buffers = [(sizes, WEIGHT_BYTES[dtype])]
    if head:
        buffers = [(sizes + head, _F32)] if dtype == "float32" else [*buffers, (head, _F32)]
    buffers = [(members, width) for members, width in buffers if members]
    if not trained:
        return StateBytes(sum(width * sum(members) for members, width in buffers))
    weights = gradients = optimizer = 0
    dp = layout.dp * layout.cp
    for members, width in buffers:
        numel = _padded(members, dp) if distributed else sum(members)
        weights += width * numel
        gradients += _F32 * numel
        own = numel // dp if distributed else numel
        # Padding has no state; with one rank there is no more than the parameters themselves.
        own = min(own, sum(members))
        optimizer += own * (2 * _F32 + (_F32 if width < _F32 else 0))
    return StateBytes(weights, gradients, optimizer)


@lru_cache(maxsize=1024)
def _parameter_sizes(
    spec: ModelSpec, layout: ParallelLayout, stage: int, value_head: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Elements of each parameter of a rank, those of a value head apart: it is float32 whatever the model's dtype."""
    shapes = parameter_shapes(megatron_regions(spec, layout, Coordinate(pp=stage), value_head=value_head))
    heads = {"output_layer.weight"} if value_head else set()
    sizes = tuple(math.prod(shape) for name, shape in shapes.items() if name not in heads)
    return sizes, tuple(math.prod(shape) for name, shape in shapes.items() if name in heads)


def _padded(sizes: Sequence[int], dp: int) -> int:
    """Elements of a flat buffer of these parameters, laid out from the end of the model to its start."""
    end = 0
    for size in reversed(sizes):
        end = _up(end, _PARAM_START) + size
    return _up(end, math.lcm(dp, _BUCKET_END))


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of activations of one rank.

    ``layer_bytes`` counts what autograd keeps of a layer, the others what is alive beside it.
    """

    spec: ModelSpec
    layout: ParallelLayout
    dtype: str
    layers: Layers
    value_head: bool = False

    def training(self, tokens: int, *, stage: int, recompute: str, num_microbatches: int, chunk_tokens: int) -> int:
        """Peak of a forward-backward pass over microbatches of this many tokens, in bytes, above the state.

        The peak is where the forward pass ends, with the head's tensors, or in the backward pass of a layer that has
        been computed again, without them.
        """
        num_layers = len(self.layout.layers_of_stage(self.spec.num_layers, stage))
        in_flight = max(1, min(self.layout.pp - stage, num_microbatches))
        boundary = self._hidden() * self._width
        kept = num_layers * (boundary if recompute == "full" else self.layer_bytes(recompute))
        held = tokens * (in_flight * kept + (2 * boundary if self.layout.pp > 1 else 0.0))
        is_last = stage == self.layout.pp - 1
        end = tokens * self._end_bytes() + self._head(chunk_tokens, trained=True) if is_last else 0.0
        again = tokens * (self.layer_bytes("none") + self._gradient_bytes()) if recompute == "full" else 0.0
        return round(held + max(end, again + self._weight_gradient()))

    def inference(self, tokens: int, *, stage: int, chunk_tokens: int) -> int:
        """Peak of a pass without gradients, in bytes, above the weights."""
        query, key, ffn = self._sizes()
        hidden = self._hidden()
        if self.layers == "local":
            working = max(5 * ffn + 4 * hidden, 3 * (query + 2 * key) + 4 * hidden)
        else:
            working = max(3 * ffn, 2 * (query + 2 * key)) + 2 * hidden + self.spec.hidden_size
        is_last = stage == self.layout.pp - 1
        end = tokens * hidden * self._width + self._head(chunk_tokens, trained=False) if is_last else 0.0
        return round(max(tokens * working * self._width, end))

    def layer_bytes(self, recompute: str) -> float:
        """What one layer keeps of one token for its backward pass; ``recompute`` is none or selective."""
        query, key, ffn = self._sizes()
        hidden, width, heads = self._hidden(), self._width, self.spec.num_heads / self.layout.tp
        norms = query + key if self.spec.qk_norm else 0
        if self.layers == "transformer_engine":
            # Input and output of both norms; queries, keys, values and their result; gate and up, and their product.
            return width * (4 * hidden + 2 * query + 2 * key + norms + 3 * ffn) + _F32 * (
                heads + 2 * hidden / self.spec.hidden_size
            )
        rotary = 4 * self.spec.head_dim * width
        statistics = _F32 * (heads + 2)
        if self.dtype == "float32":
            # Each norm keeps its input, the normalised and the result. Values are a view of the whole of query, key
            # and value, so that is kept beside rotated queries, rotated keys and the result of attention. The gate's
            # halves, its activation, the shifted up projection and their product: five times the rows.
            elements = 6 * hidden + 3 * query + 3 * key + 3 * norms + 5 * ffn
            return _F32 * elements + rotary + statistics
        # The norm's input and the normalised are float32, as are queries, keys, values and the result in attention.
        halves = width * (2 * hidden + query + norms + 5 * ffn) + _F32 * (4 * hidden + 2 * norms)
        # Recomputed, attention keeps what went into it in bfloat16: rotated queries and keys, and values as above.
        attention = width * (2 * query + 3 * key) if recompute == "selective" else _F32 * (2 * query + 2 * key)
        return halves + attention + rotary + statistics

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
        return self._width * (2 * self._sizes()[2] + 1.5 * self._hidden())

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
        return 3 * _F32 * chunk_tokens * rows + (gradient if trained else 0)

    def _weight_gradient(self) -> int:
        """The largest weight's gradient before it is added to the buffer, in the weights' dtype."""
        return 2 * self.spec.hidden_size * round(self._sizes()[2]) * self._width


@lru_cache(maxsize=64)
def engine_bytes(spec: ModelSpec, tp: int, dtype: str) -> tuple[int, int]:
    """Weights of one rank of a vLLM engine, and the key-value cache of one token on it, in bytes.

    vLLM cuts the vocabulary like Megatron-Core and keeps a copy of a key-value head where ranks are more than heads.
    """
    layout = ParallelLayout(tp=min(tp, spec.num_kv_heads))
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
