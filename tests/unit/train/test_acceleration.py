"""Options for GPUs reach Megatron-Core's configuration, or are refused with the reason."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.config.schema.train import EngineConfig
from megarl.data.balance import SequenceCost
from megarl.errors import ModelError, SetupError
from megarl.parallel.grid import ParallelLayout
from megarl.platform.cpu import CpuDevice
from megarl.platform.device import get_device
from megarl.train.megatron import acceleration
from megarl.train.megatron.forward import ModelParts
from megarl.train.megatron.model import transformer_config
from tests.distributed.models import QWEN2

EVEN = replace(QWEN2, hidden_size=128, ffn_hidden_size=288, head_dim=32)


class Gpu(CpuDevice):
    """A device that has what it is asked for."""

    def check_fp8(self, recipe: str) -> None:
        self.asked = recipe


def test_fp8_arrives_in_the_configuration():
    device, layout = Gpu(), ParallelLayout(tp=2)
    engine = EngineConfig(fp8="hybrid", fp8_recipe="tensorwise")
    found = acceleration.options(engine, EVEN, layout, device)
    config = transformer_config(EVEN, layout, device=device, dtype=torch.bfloat16, options=found)
    assert (config.fp8, config.fp8_recipe, config.fp8_param) == ("hybrid", "tensorwise", False)
    assert device.asked == "tensorwise"
    assert acceleration.options(EngineConfig(), EVEN, layout, device) == {}


def test_fp8_is_refused_on_cpu():
    with pytest.raises(SetupError, match="needs a GPU with Transformer Engine"):
        acceleration.options(EngineConfig(fp8="e4m3"), EVEN, ParallelLayout(), get_device("cpu"))


def test_sides_that_fp8_does_not_take_are_named():
    engine = EngineConfig(fp8="e4m3", fp8_recipe="mxfp8")
    acceleration.options(engine, EVEN, ParallelLayout(), Gpu())
    with pytest.raises(ModelError, match="144 feed-forward rows"):
        acceleration.options(engine, EVEN, ParallelLayout(tp=2), Gpu())


@pytest.mark.parametrize(
    ("engine", "cp", "sequence_parallel", "expected"),
    [
        (EngineConfig(), 1, False, 1),
        (EngineConfig(fp8="e4m3"), 1, False, 16),
        (EngineConfig(fp8="e4m3"), 1, True, 32),
        (EngineConfig(fp8="e4m3", fp8_recipe="mxfp8"), 2, True, 128),
        (EngineConfig(fp8="e4m3"), 3, False, 48),
    ],
)
def test_every_share_of_a_pack_is_what_fp8_takes(engine: EngineConfig, cp: int, sequence_parallel: bool, expected: int):
    group: Any = lambda size: SimpleNamespace(size=lambda: size, rank=lambda: 0)  # noqa: E731
    parts = ModelParts(
        chunks=[], module=None, vocab_size=8, chunk_tokens=1, is_value=False, sequence_parallel=sequence_parallel,
        tp_group=group(2), cp_group=group(cp), pp_size=1, device=torch.device("cpu"), cost=SequenceCost(),
        token_unit=engine.fp8_multiple,
    )  # fmt: skip
    assert parts.token_multiple == expected
    assert expected % parts.context.unit == 0


def test_copies_of_weights_are_dropped_where_modules_keep_them():
    quantizing, plain = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    quantizing._fp8_workspaces = {"weight": torch.zeros(2)}
    found = acceleration.quantizing_modules([torch.nn.Sequential(quantizing, plain)])
    assert found == [quantizing]
    acceleration.drop_quantized(found)
    assert quantizing._fp8_workspaces == {}
