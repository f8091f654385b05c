"""What a training rank holds all the time: weights, gradient buffers and optimizer state, to the byte.

Shapes come from the layout's regions, padding from Megatron-Core's buffers. ``memory.py`` adds what a pass needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from megarl.config.schema.train import STATE_BYTES, LoraConfig, OptimizerConfig
from megarl.models import ModelSpec
from megarl.parallel.grid import Coordinate, ParallelLayout
from megarl.planning.adapters import adapter_sizes
from megarl.weights.layout import megatron_regions, parameter_shapes

WEIGHT_BYTES: Mapping[str, int] = {"bfloat16": 2, "float32": 4}
# Megatron-Core core/distributed/param_and_grad_buffer.py (0.16.1, 0.19.2): with the distributed optimizer a parameter
# starts at a multiple of 64 elements and a bucket ends at a multiple of lcm(dp, 128).
_PARAM_START, _BUCKET_END = 64, 128
_F32 = 4


@dataclass(frozen=True, slots=True)
class StateBytes:
    """What a rank holds all the time, bytes: on its device, and of the optimizer in host memory.

    ``step`` is no part of it: what the optimizer takes on the device while it updates, when no pass runs.
    """

    weights: int
    gradients: int = 0
    optimizer: int = 0
    host: int = 0
    step: int = field(default=0, compare=False)

    @property
    def total(self) -> int:
        """All three on the device."""
        return self.weights + self.gradients + self.optimizer


def state_bytes(
    spec: ModelSpec,
    layout: ParallelLayout,
    dtype: str,
    *,
    stage: int = 0,
    value_head: bool = False,
    trained: bool = True,
    optimizer: OptimizerConfig | None = None,
    lora: LoraConfig | None = None,
) -> StateBytes:
    """Weights, gradient buffers and optimizer state of a rank of a stage after the first update.

    Adam keeps two moments, SGD at most one; with bfloat16 what the weights lack of the main parameters too. With the
    distributed optimizer each data-parallel rank keeps its equal part of the padded buffer, the gaps in it counted as
    if they had state; gradient buffers are whole on every rank. With adapters only they and a value head have both.
    """
    settings = OptimizerConfig() if optimizer is None else optimizer
    distributed = settings.distributed
    width, ranks = WEIGHT_BYTES[dtype], layout.dp * layout.cp
    buffers: list[tuple[tuple[int, ...], int, int]] = []
    frozen = 0
    # Each virtual stage has buffers of its own.
    for chunk, (sizes, experts, head) in enumerate(_parameter_sizes(spec, layout, stage, value_head)):
        if lora is not None and trained:
            frozen += width * (sum(sizes) + sum(experts))
            sizes, experts = adapter_sizes(spec, layout, lora, stage, chunk), ()
        # A value head is float32: beside weights of that dtype it stands in their buffer.
        alike, apart = (sizes + head, ()) if dtype == "float32" else (sizes, head)
        buffers += [(alike, width, ranks), (experts, width, layout.expert_dp), (apart, _F32, ranks)]
    buffers = [buffer for buffer in buffers if buffer[0]]
    routing = _routing_bytes(spec, layout, stage)
    if not trained:
        return StateBytes(routing + sum(width * sum(members) for members, width, _ in buffers))
    weights, gradients, on_device, on_host, step = routing + frozen, 0, 0, 0, 0
    for members, width, dp in buffers:
        numel = _padded(members, dp) if distributed else sum(members)
        weights += width * numel
        gradient_width = _F32 if width == _F32 else STATE_BYTES[settings.main_grads_dtype]
        gradients += gradient_width * numel
        own = numel // dp if distributed else numel
        # Padding has no state; with one rank there is no more than the parameters themselves.
        own = min(own, sum(members))
        moved = math.ceil(settings.cpu_offload_fraction * own)
        on_device += (own - moved) * _kept_bytes(settings, width)
        if moved and gradient_width < _F32:
            # Megatron's optimizer that is partly on the host copies gradients of those that are not to float32.
            step += (own - moved) * _F32
        on_host += moved * (settings.moment_bytes + 2 * _F32)  # the weights that are updated, and their gradients
    return StateBytes(weights, gradients, on_device, on_host, step)


def _kept_bytes(settings: OptimizerConfig, width: int) -> int:
    """Optimizer state of a parameter on the device, for weights of this width."""
    if settings.precision_aware:
        # Of float32 in bfloat16's bits, the other half is kept; a float32 parameter gets another one all the same.
        remainder = width < _F32 and settings.main_params_dtype == "float32"
        return settings.moment_bytes + (2 if remainder else STATE_BYTES[settings.main_params_dtype])
    return settings.moment_bytes + (_F32 if width < _F32 else 0)


def _routing_bytes(spec: ModelSpec, layout: ParallelLayout, stage: int) -> int:
    """Buffers of routers with a bias that chooses experts: the bias and a counter, float32, on every rank."""
    if spec.moe is None or not spec.moe.expert_bias:
        return 0
    chunks = [layout.layers_of_stage(spec.num_layers, stage, chunk) for chunk in range(layout.vpp)]
    return sum(spec.has_experts(layer) for chunk in chunks for layer in chunk) * 2 * spec.moe.num_experts * _F32


_Sizes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Elements of each parameter: of those outside of experts, of experts, of a value head."""


def _parameter_sizes(spec: ModelSpec, layout: ParallelLayout, stage: int, value_head: bool) -> tuple[_Sizes, ...]:
    """Of each virtual stage of a rank."""
    if spec.moe is None:
        layout = replace(layout, dp=1)  # one entry of the cache for all of them
    return _cached_sizes(spec, layout, stage, value_head)


@lru_cache(maxsize=1024)
def _cached_sizes(spec: ModelSpec, layout: ParallelLayout, stage: int, value_head: bool) -> tuple[_Sizes, ...]:
    shapes = parameter_shapes(megatron_regions(spec, layout, Coordinate(pp=stage), value_head=value_head))
    chunks: list[tuple[list[int], list[int], list[int]]] = [([], [], []) for _ in range(layout.vpp)]
    for name, shape in shapes.items():
        if name.endswith("router.expert_bias"):
            continue  # no parameter: ``_routing_bytes``
        chunk = int(name.removeprefix("model").partition(".")[0]) if layout.vpp > 1 else 0
        # Experts are reduced over other ranks than the rest (train/megatron/experts.py).
        is_apart = ".mlp.experts." in name
        is_head = value_head and name.endswith("output_layer.weight")
        chunks[chunk][2 if is_head else 1 if is_apart else 0].append(math.prod(shape))
    return tuple((tuple(sizes), tuple(experts), tuple(head)) for sizes, experts, head in chunks)


def _padded(sizes: Sequence[int], dp: int) -> int:
    """Elements of a flat buffer of these parameters, laid out from the end of the model to its start."""
    end = 0
    for size in reversed(sizes):
        end = _up(end, _PARAM_START) + size
    return _up(end, math.lcm(dp, _BUCKET_END))


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
