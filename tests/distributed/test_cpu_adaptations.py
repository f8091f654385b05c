"""Every adaptation of Megatron-Core to the CPU is still needed, and is enough.

Each test runs one operation of Megatron-Core on two fresh ranks with all adaptations but one, and expects the failure
that one is there for; then with all of them. A release that no longer needs an adaptation fails its test here.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.parallel.grid import ParallelLayout
from megarl.parallel.groups import ParallelGroups
from megarl.platform.cpu import ADAPTATIONS, adapt_megatron
from megarl.train.megatron.bootstrap import initialize_megatron
from tests.distributed.models import MIXTRAL, QWEN2, build
from tests.distributed.parity import LATENT
from tests.distributed.ranks import Rank, RankPool

NO_CUDA = r"CUDA|NVIDIA driver"


def gather_along_sequence(groups: ParallelGroups) -> None:
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    gather_from_sequence_parallel_region(torch.ones(2, 1, 3), group=groups.tp)


def take_memory_buffer(groups: ParallelGroups) -> None:
    from megatron.core.utils import GlobalMemoryBuffer

    assert GlobalMemoryBuffer().get_tensor((2,), torch.float32, "test").shape == (2,)


def fork_generator(groups: ParallelGroups) -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1, tp_rank=groups.tp.rank(), ep_rank=0, etp_rank=0, force_reset_rng=True)
    with get_cuda_rng_tracker().fork():
        torch.rand(1)


def make_rotary_table(groups: ParallelGroups) -> None:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    assert RotaryEmbedding(8, 1.0, use_cpu_initialization=True, cp_group=groups.cp)(4).shape == (4, 1, 1, 8)


def build_latent_attention(groups: ParallelGroups) -> None:
    build(LATENT, groups)


def tie_embeddings_over_stages(groups: ParallelGroups) -> None:
    build(QWEN2, groups)


def wrapped(groups: ParallelGroups, dtype: torch.dtype, *, distributed: bool) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    chunk = build(QWEN2, groups, dtype=dtype)
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
    return DistributedDataParallel(chunk.config, settings, chunk)


def reduce_gradients(groups: ParallelGroups) -> None:
    model = wrapped(groups, torch.float32, distributed=False)
    model.start_grad_sync()
    model.finish_grad_sync()


def measure_gradients(groups: ParallelGroups) -> None:
    from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
    from megatron.core.optimizer.grad_scaler import ConstantGradScaler

    ConstantGradScaler(1.0)
    get_grad_norm_fp32([torch.ones(2)], grad_stats_parallel_group=groups.world)


def build_optimizers(groups: ParallelGroups) -> None:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    for distributed in (True, False):
        model = wrapped(groups, torch.bfloat16, distributed=distributed)
        settings = OptimizerConfig(
            lr=1.0, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=distributed
        )
        get_megatron_optimizer(settings, [model], use_gloo_process_groups=False)


def gather_optimizer_state(groups: ParallelGroups) -> None:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    model = wrapped(groups, torch.float32, distributed=True)
    settings = OptimizerConfig(lr=1.0, use_distributed_optimizer=True)
    (optimizer,) = get_megatron_optimizer(settings, [model], use_gloo_process_groups=False).chained_optimizers
    for group in optimizer.optimizer.param_groups:
        for part in group["params"]:
            optimizer.optimizer.state[part] = {name: torch.zeros_like(part) for name in ("exp_avg", "exp_avg_sq")}
    optimizer.get_parameter_state_dp_zero(use_gloo_comm=False)


def clip_gradients(groups: ParallelGroups) -> None:
    from megatron.core.optimizer import optimizer

    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), 3.0)
    optimizer.clip_grad_by_total_norm_fp32([parameter], max_norm=1.0, total_norm=2.0)
    torch.testing.assert_close(parameter.grad, torch.full((2,), 1.5))


def update_on_host(groups: ParallelGroups) -> None:
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    parameters = [torch.nn.Parameter(torch.full((2,), 3.0)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    adam = {"lr": 0.5, "weight_decay": 0.0, "betas": (0.9, 0.95), "eps": 1e-8}
    classes = {"cpu_optimizer_cls": torch.optim.AdamW, "gpu_optimizer_cls": torch.optim.AdamW}
    pinning = {"pin_cpu_grads": False, "pin_cpu_params": False}
    optimizer = HybridDeviceOptimizer(parameters, 0.5, param_update_in_fp32=True, **classes, **pinning, **adam)
    assert len(optimizer.gpu_params_map_cpu_copy) == 1 and optimizer.gpu_optimizer is not None
    optimizer.step()
    torch.testing.assert_close(torch.stack(list(parameters)), torch.full((2, 2), 2.5))
    shared = {"use_distributed_optimizer": True, "use_precision_aware_optimizer": True}
    OptimizerConfig(lr=1.0, optimizer_cpu_offload=True, **shared)


def send_between_stages(groups: ParallelGroups) -> None:
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    peer = P2PCommunicator(groups.pp, build(QWEN2, groups).config)
    if groups.is_first_stage:
        peer.send_forward(torch.ones(3, 1, 2), is_last_stage=False)
    else:
        assert peer.recv_forward((3, 1, 2), is_first_stage=False).shape == (3, 1, 2)


def run_schedule(groups: ParallelGroups) -> None:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def step(data: Any, model: Any) -> Any:
        ids, positions = next(data), torch.arange(4)[None]
        return model(ids, positions), lambda output: (output.sum(), {})

    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter([torch.tensor([[1, 2, 3, 4]])]),
        model=[build(QWEN2, groups)],
        num_microbatches=1,
        seq_length=4,
        micro_batch_size=1,
        forward_only=True,
    )


def route_tokens(groups: ParallelGroups) -> None:
    router = build(MIXTRAL, groups).decoder.layers[0].mlp.router
    scores, chosen = router(torch.ones(3, 1, MIXTRAL.hidden_size))
    assert scores.shape == chosen.shape == (3, 4)


def exchange_tokens(groups: ParallelGroups) -> None:
    layer = build(MIXTRAL, groups).decoder.layers[0].mlp
    # Ranks hold unequal numbers of tokens, as they would of rows.
    hidden = torch.randn(3 + groups.rank, 1, MIXTRAL.hidden_size)
    assert layer(hidden)[0].shape == hidden.shape


def gather_unequal_parts(groups: ParallelGroups) -> None:
    from megatron.core.tensor_parallel.mappings import (
        gather_from_sequence_parallel_region,
        reduce_scatter_to_sequence_parallel_region,
    )

    part = torch.full((1 + groups.rank, 2), float(groups.rank))
    whole = gather_from_sequence_parallel_region(part, group=groups.tp, output_split_sizes=[1, 2])
    torch.testing.assert_close(whole[:, 0], torch.tensor([0.0, 1.0, 1.0]))
    again = reduce_scatter_to_sequence_parallel_region(whole, group=groups.tp, input_split_sizes=[1, 2])
    torch.testing.assert_close(again, 2 * part)


def write_checkpoint(groups: ParallelGroups) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    folder = [tempfile.mkdtemp()] if groups.rank == 0 else [""]
    dist.broadcast_object_list(folder, src=0)
    part = ShardedTensor.from_rank_offsets("x", torch.full((2,), float(groups.rank)), (0, groups.rank, 2))
    dist_checkpointing.save({"x": part}, folder[0])


TP2, PP2, DP2, EP2 = ParallelLayout(tp=2), ParallelLayout(pp=2), ParallelLayout(dp=2), ParallelLayout(dp=2, ep=2)
OPERATIONS: dict[str, tuple[Callable[[ParallelGroups], None], ParallelLayout, str]] = {
    "tensor-parallel-buffers": (gather_along_sequence, TP2, NO_CUDA),
    "memory-buffer": (take_memory_buffer, TP2, NO_CUDA),
    "rng-states": (fork_generator, TP2, NO_CUDA),
    "rotary-frequencies": (make_rotary_table, TP2, NO_CUDA),
    "latent-attention": (build_latent_attention, DP2, NO_CUDA + "|isinstance"),
    "tied-embeddings": (tie_embeddings_over_stages, PP2, NO_CUDA),
    "gradient-buffers": (reduce_gradients, DP2, NO_CUDA),
    "optimizer-scalars": (measure_gradients, DP2, NO_CUDA),
    "optimizer-parameter-types": (build_optimizers, DP2, r"Wrapped parameters must be one of torch\.cuda\.FloatTensor"),
    "optimizer-gradient-types": (clip_gradients, DP2, "AssertionError"),
    "optimizer-state-gathering": (gather_optimizer_state, DP2, NO_CUDA),
    "optimizer-on-host": (update_on_host, DP2, NO_CUDA),
    "pipeline-buffers": (send_between_stages, PP2, NO_CUDA),
    "schedule-counters": (run_schedule, DP2, NO_CUDA),
    "expert-router": (route_tokens, DP2, NO_CUDA),
    "expert-dispatch": (exchange_tokens, EP2, NO_CUDA + "|dummy base class Stream"),
    "expert-tensor-parallel": (gather_unequal_parts, TP2, "invalid tensor size"),
    "checkpoint-writing": (write_checkpoint, DP2, NO_CUDA),
}


def without_then_with(
    rank: Rank, name: str, operation: Callable[[ParallelGroups], None], layout: ParallelLayout
) -> str:
    """What the operation raised while the adaptation was missing; then it must succeed."""
    rank.join()
    adapt_megatron(without=[name])
    groups = initialize_megatron(layout, rank.timeout_s)
    try:
        operation(groups)
    except BaseException as error:
        failure = f"{type(error).__name__}: {error}"
    else:
        return f"{operation.__name__} runs without {name}: remove the adaptation"
    adapt_megatron()
    operation(groups)
    return failure


def test_every_adaptation_has_an_operation_that_needs_it() -> None:
    assert list(OPERATIONS) == [adaptation.name for adaptation in ADAPTATIONS]
    assert all(adaptation.reason for adaptation in ADAPTATIONS)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "latent-attention" else ()) for name in OPERATIONS]
)
def test_megatron_fails_without_the_adaptation_and_works_with_it(name: str) -> None:
    operation, layout, expected = OPERATIONS[name]
    # A pool of its own: adaptations cannot be undone.
    pool = RankPool()
    try:
        failures = pool(2).run(without_then_with, name, operation, layout)
    finally:
        pool.shut_down()
    for failure in failures:
        assert re.search(expected, failure), failure


def torch_itself(rank: Rank) -> tuple[bool, bool]:
    adapt_megatron()
    before = torch.zeros
    import megatron.core.tensor_parallel.mappings as mappings

    return torch.zeros is before and torch.cuda.current_device.__module__ == "torch.cuda", mappings.torch is not torch


def test_torch_itself_is_left_alone(ranks: RankPool) -> None:
    assert ranks(1).run(torch_itself) == [(True, True)]
