"""The CPU device answers the whole protocol; a missing device is a SetupError that says what to do."""

from __future__ import annotations

import inspect
from datetime import timedelta

import pytest
import torch

from megarl.errors import SetupError
from megarl.platform import device as device_module
from megarl.platform.cpu import CpuDevice
from megarl.platform.cuda import CudaDevice


def test_both_devices_have_every_member_of_the_protocol() -> None:
    members = {name for name, _ in inspect.getmembers(device_module.Device, inspect.isfunction)} | {"torch_device"}
    members -= {name for name in members if name.startswith("_")}
    for kind in (CpuDevice, CudaDevice):
        assert [name for name in sorted(members) if not hasattr(kind, name)] == []
        for attribute in ("name", "collective_backend", "layer_implementation"):
            assert isinstance(getattr(kind, attribute), str)


def test_cpu_generators_can_be_saved_and_restored() -> None:
    cpu = device_module.get_device("cpu")
    cpu.seed(3)
    state = cpu.rng_state()
    first = torch.rand(4)
    cpu.set_rng_state(state)
    assert torch.equal(torch.rand(4), first)


def test_cpu_memory_is_the_process_and_the_machine() -> None:
    memory = device_module.get_device("cpu").memory()
    assert 0 < memory.allocated_bytes <= memory.peak_bytes <= memory.total_bytes


def test_cpu_groups_use_gloo() -> None:
    options = device_module.get_device("cpu").process_group_options(timedelta(seconds=5))
    assert options == {"backend": "gloo", "timeout": timedelta(seconds=5)}


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(SetupError, match="'tpu' is unknown"):
        device_module.get_device("tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_without_a_gpu_says_what_to_do() -> None:
    with pytest.raises(SetupError, match=r"no CUDA device.*cluster.device=cpu"):
        device_module.get_device("cuda")
