"""Sizes of low-rank adapters on one rank, from the model's numbers and the layout (``train/megatron/lora.py``)."""

from __future__ import annotations

from megarl.config.schema.train import COLUMN_PARALLEL_TARGETS, LoraConfig
from megarl.models import ModelSpec
from megarl.parallel.grid import ParallelLayout


def adapter_sizes(
    spec: ModelSpec, layout: ParallelLayout, lora: LoraConfig, stage: int = 0, chunk: int = 0
) -> tuple[int, ...]:
    """Elements of each factor on a rank of a pipeline stage, or of one of its virtual stages, in the engine's order.

    A column-parallel layer shards B by rows and has all of A on every rank, a row-parallel one shards A by columns.
    """
    of_layer: list[int] = []
    for target in lora.targets:
        rows, columns = _shape(spec, target)
        if target in COLUMN_PARALLEL_TARGETS:
            rows //= layout.tp
        else:
            columns //= layout.tp
        of_layer += [lora.rank * columns, lora.rank * rows]
    return tuple(of_layer) * len(layout.layers_of_stage(spec.num_layers, stage, chunk))


def _shape(spec: ModelSpec, target: str) -> tuple[int, int]:
    """Rows and columns of a linear layer, over all tensor-parallel ranks."""
    return {
        "linear_qkv": (spec.query_size + 2 * spec.kv_size, spec.hidden_size),
        "linear_proj": (spec.hidden_size, spec.query_size),
        "linear_fc1": (2 * spec.ffn_hidden_size, spec.hidden_size),
        "linear_fc2": (spec.hidden_size, spec.ffn_hidden_size),
    }[target]
