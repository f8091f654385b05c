"""Process group, Megatron-Core's parallel state and random seeds of one rank; the only reader of ``parallel_state``.

Invariants:
1. ``start`` returns every group anyone needs; no other module asks Megatron-Core which rank it is.
2. Megatron-Core's grid and ``ParallelLayout`` agree on every coordinate, or ``start`` raises.
3. ``start`` and ``stop`` can be repeated in one process with other layouts.
"""

from __future__ import annotations

import logging
from datetime import timedelta

import torch.distributed as dist

from megarl.errors import LayoutError
from megarl.parallel.grid import Coordinate, ExpertCoordinate, ParallelLayout
from megarl.parallel.groups import ParallelGroups
from megarl.platform.device import Device

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 600.0


def start(
    layout: ParallelLayout,
    *,
    device: Device,
    rank: int,
    seed: int,
    local_rank: int = 0,
    init_method: str | None = None,
    store: dist.Store | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> ParallelGroups:
    """Join the layout's process group and set up Megatron-Core in this process. Collective over the layout's ranks.

    Args:
        layout: parallel degrees; its world size is the number of processes.
        device: where this process computes.
        rank: rank in the layout.
        seed: seed of the run; see ``seed_generators``.
        local_rank: which of the node's devices this process owns (0 where it sees its own only).
        init_method: ``tcp://host:port`` of rank 0, or another URL of torch.distributed.
        store: a store shared by the ranks, instead of ``init_method``.
        timeout_s: time-out of collectives in seconds.

    Raises:
        LayoutError: the default process group exists with another size, or Megatron-Core places ranks differently.
        SetupError: Megatron-Core or the device is missing.
    """
    device.bind(local_rank)
    device.prepare_megatron()
    timeout = timedelta(seconds=timeout_s)
    if not dist.is_initialized():
        dist.init_process_group(
            init_method=init_method,
            store=store,
            rank=rank,
            world_size=layout.world_size,
            **device.process_group_options(timeout),
        )
    elif dist.get_world_size() != layout.world_size or dist.get_rank() != rank:
        raise LayoutError(
            f"this process is rank {dist.get_rank()} of {dist.get_world_size()}, "
            f"but the layout places it at rank {rank} of {layout.world_size}"
        )
    groups = initialize_megatron(layout, timeout_s)
    seed_generators(groups, device, seed)
    logger.info("rank %d of %d at %s on %s", rank, layout.world_size, groups.coordinate, device.torch_device)
    return groups


def stop() -> None:
    """Undo ``start``: forget Megatron-Core's groups and leave the process group; nothing where none was started."""
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding

    parallel_state.destroy_model_parallel()
    # Megatron-Core caches tables of angles together with the module they are of, which holds a group.
    RotaryEmbedding.forward.cache_clear()
    YarnRotaryEmbedding.forward.cache_clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def seed_generators(groups: ParallelGroups, device: Device, seed: int) -> None:
    """Seed the generators of this rank.

    The default generator depends on the pipeline stage and the data-parallel replica, and is the same on all
    tensor-parallel ranks; Megatron-Core's ``model-parallel-rng`` differs between them. Nothing megarl computes depends
    on them by default: weights are drawn by name (``initialize.py``) and dropout is off.
    """
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    local_seed = seed + 100 * groups.coordinate.pp + 10_000 * groups.coordinate.dp
    device.seed(local_seed)
    # The tracker keeps the seeds it has seen and refuses a repetition, unless it is made anew.
    model_parallel_cuda_manual_seed(
        local_seed, tp_rank=groups.coordinate.tp, ep_rank=0, etp_rank=groups.coordinate.tp, force_reset_rng=True
    )


def initialize_megatron(layout: ParallelLayout, timeout_s: float) -> ParallelGroups:
    """Megatron-Core's groups of the layout over the default process group. Collective. Raises LayoutError."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        distributed_timeout_minutes=timeout_s / 60,  # it makes a timedelta of them, so fractions count
        # Host copies of groups are for checkpoints of device tensors; on CPU the groups are gloo's already.
        create_gloo_process_groups=False,
    )
    collection = ProcessGroupCollection.use_mpu_process_groups()
    rank = dist.get_rank()
    found = Coordinate(
        tp=collection.tp.rank(), cp=collection.cp.rank(), dp=collection.dp.rank(), pp=collection.pp.rank()
    )
    if found != layout.coordinate(rank):
        raise LayoutError(f"Megatron-Core places rank {rank} at {found}, the layout at {layout.coordinate(rank)}")
    experts = ExpertCoordinate(etp=collection.expt_tp.rank(), ep=collection.ep.rank(), dp=collection.expt_dp.rank())
    if experts != (expected := layout.expert_coordinate(found)):
        raise LayoutError(f"Megatron-Core places the experts of rank {rank} at {experts}, the layout at {expected}")
    return ParallelGroups(
        layout=layout,
        rank=rank,
        coordinate=found,
        world=dist.group.WORLD,
        tp=collection.tp,
        pp=collection.pp,
        dp=collection.dp,
        cp=collection.cp,
        dp_cp=collection.dp_cp,
        model=collection.mp,
        embedding=collection.embd,
        megatron=collection,
    )
