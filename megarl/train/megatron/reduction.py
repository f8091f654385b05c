"""Gradients summed over data-parallel ranks, and weights gathered from them, in Megatron's buffers.

Both may overlap with computing: gradients are reduced while the last microbatch's backward pass runs, and weights, of
which an update leaves each rank its own part, are gathered while the next pass runs. Megatron waits for a module's
weights before its forward pass; the head's are read without one (``heads.py``), so that ``wait_for`` does it.

Invariants:
1. No pass reads a weight that has not been gathered.
2. Whoever reads weights outside of a pass calls ``Optimizer.gather_weights`` first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import Tensor, nn

from megarl.config.schema.train import OptimizerConfig

BUCKET_ELEMENTS: int | None = None
"""Most elements of a bucket; None is Megatron's own choice."""


def reducing(modules: Sequence[Any], optimizer: OptimizerConfig) -> list[nn.Module]:
    """Each module with gradient buffers that are reduced over data parallelism."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=optimizer.main_grads_dtype == "float32",
        use_distributed_optimizer=optimizer.distributed,
        overlap_grad_reduce=optimizer.overlap_grad_reduce,
        overlap_param_gather=optimizer.overlap_param_gather,
        bucket_size=BUCKET_ELEMENTS,
    )
    chunks = [DistributedDataParallel(module.config, config, module) for module in modules]
    if optimizer.overlap_grad_reduce:
        # The schedules then reduce in the last microbatch's backward pass, and not before.
        waits = [chunk.no_sync for chunk in chunks]
        for chunk in chunks:
            chunk.module.config.no_sync_func = waits if len(waits) > 1 else waits[0]
    return list(chunks)


def wait_for(chunk: Any, weight: Tensor) -> None:
    """Wait until a weight of a chunk is whole; collective over its data-parallel ranks, in the order of the pass.

    Args:
        chunk: made by ``reducing`` with ``overlap_param_gather``.
        weight: a parameter of it; nothing is waited for if it is frozen.
    """
    group = chunk.param_to_bucket_group.get(weight)
    if group is not None:
        group.finish_param_sync()
