"""CUDA paths of the platform and of the model, on one GPU."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megarl.errors import SetupError
from megarl.parallel.grid import ParallelLayout
from megarl.platform.packages import has_transformer_engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def bound():
    from megarl.platform.device import get_device

    device = get_device("cuda")
    device.bind(0)
    return device


def test_nothing_is_allocated_before_a_device_is_bound() -> None:
    from megarl.platform.cuda import CudaDevice

    with pytest.raises(SetupError, match="no CUDA device is bound"):
        _ = CudaDevice().torch_device
    with pytest.raises(SetupError, match="local rank 1000 has no device"):
        CudaDevice().bind(1000)


def test_memory_and_its_peak_are_counted() -> None:
    device = bound()
    before = device.memory()
    with device.watch_pass(0) as measured:
        block = torch.ones(1 << 20, device=device.torch_device)
        del block
    after = device.memory()
    assert after.allocated_bytes == before.allocated_bytes == measured.held_bytes
    assert (4 << 20) <= measured.working_bytes < (5 << 20)
    assert after.total_bytes >= after.reserved_bytes


def test_generators_are_saved_and_restored() -> None:
    device = bound()
    device.seed(1)
    state = device.rng_state()
    first = torch.rand(3, device=device.torch_device), torch.rand(3)
    device.set_rng_state(state)
    again = torch.rand(3, device=device.torch_device), torch.rand(3)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_the_process_group_is_bound_to_the_device() -> None:
    device = bound()
    dist.init_process_group(
        store=dist.HashStore(), rank=0, world_size=1, **device.process_group_options(timedelta(seconds=60))
    )
    try:
        total = torch.ones(2, device=device.torch_device)
        dist.all_reduce(total)
        assert total.tolist() == [1.0, 1.0]
        assert dist.get_backend() == "nccl"
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not has_transformer_engine(), reason="needs Transformer Engine")
def test_a_pack_equals_its_sequences_one_by_one() -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    from megarl.train.megatron import bootstrap
    from megarl.train.megatron.model import build_model
    from tests.distributed.models import QWEN2

    device = bound()
    groups = bootstrap.start(ParallelLayout(), device=device, rank=0, seed=1, store=dist.HashStore())
    try:
        (chunk,) = build_model(QWEN2, groups, device=device, dtype=torch.bfloat16)
        for parameter in chunk.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        lengths = [8, 3, 13]
        ids = torch.randint(0, QWEN2.vocab_size, (1, sum(lengths)), device=device.torch_device)
        bounds = torch.tensor([0, *lengths], device=device.torch_device).cumsum(0).to(torch.int32)
        packed = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=13, max_seqlen_kv=13
        )
        positions = torch.cat([torch.arange(length) for length in lengths])[None].to(device.torch_device)
        together = chunk(ids, positions, packed_seq_params=packed)
        alone = [chunk(part[None], torch.arange(len(part), device=part.device)[None]) for part in ids[0].split(lengths)]
        torch.testing.assert_close(together, torch.cat(alone), rtol=0.02, atol=0.02)
    finally:
        bootstrap.stop()
