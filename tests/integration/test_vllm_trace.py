"""What the trace of a loader shows, and what it refuses, on a module of a few lines instead of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

from megarl.weights.pieces import region_view
from megarl.weights.region import whole

# vLLM takes seconds to import, and warns when it does.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
    pytest.mark.slow,
]

Load = Callable[["Model", str, Tensor], None]


class Model(nn.Module):
    """``fused`` stacks two tensors, ``vocab`` has padding; ``loader`` may do something else with ``b``."""

    def __init__(self, loader: Load) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.fused = nn.Parameter(torch.arange(32.0).view(8, 4))
        self.vocab = nn.Parameter(torch.ones(8, 4))
        self.loader = loader

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name == "vocab":
                self.vocab.data[:6].copy_(tensor[2:8])
                self.vocab.data[6:].fill_(0)
            elif name == "a":
                self.inner.fused.data.narrow(0, 0, 4).copy_(tensor.chunk(2, 0)[1])
            else:
                self.loader(self, name, tensor)


def columns(model: Model, name: str, tensor: Tensor) -> None:
    """The transposed half of ``b``, converted and from another place."""
    model.inner.fused.data[4:].copy_(tensor.t().to(torch.float64)[4:])


SHAPES = {"a": (8, 4), "b": (4, 8), "vocab": (8, 4)}


def traced(loader: Load) -> tuple[Model, object]:
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

    from megarl.rollout.vllm.trace import trace

    model = Model(loader)
    record_metadata_for_reloading(model)
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    try:
        return model, trace(model, SHAPES, torch.bfloat16)
    finally:
        for name, parameter in model.named_parameters():
            assert id(parameter) == before[name][0] and torch.equal(parameter, before[name][1])


def test_what_is_written_at_the_traced_regions_is_what_the_loader_writes():
    model, found = traced(columns)
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    with torch.no_grad():
        model.load_weights(tensors.items())
    expected = {name: parameter.clone() for name, parameter in model.named_parameters()}
    written = {name: torch.zeros_like(parameter) for name, parameter in expected.items()}
    for region in found.regions:
        region_view(region, written[region.local_name]).copy_(tensors[region.tensor][region.slices])
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    assert found.dtypes == {"inner.fused": "float32", "vocab": "float32"}
    assert {region.tensor: region.box for region in found.regions} == {
        "a": ((4, 8), (0, 4)), "b": ((0, 4), (4, 8)), "vocab": ((2, 8), (0, 4)),
    }  # fmt: skip
    assert all(
        region.tensor_shape == tuple(stop for _, stop in whole(SHAPES[region.tensor])) for region in found.regions
    )


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (lambda m, n, t: m.inner.fused.data[4:].copy_(t.t()[4:] + 1), "computes inner.fused"),
        (lambda m, n, t: m.inner.fused.data[4:].copy_(t.t()[4:].contiguous()), "computes inner.fused"),
        (lambda m, n, t: m.inner.fused.data[4:].copy_(t[0, :4]), "is broadcast"),
        (lambda m, n, t: m.inner.fused.data[4:].copy_(t.view(8, 4)[4:]), "no box"),
        (lambda m, n, t: m.inner.fused.data.mul_(2), r"changes inner.fused by aten.mul_"),
        (lambda m, n, t: m.inner.fused.data.fill_(t[0, 0].item()), "fails on placeholders"),
        (lambda m, n, t: m.vocab.requires_grad_(False) and None if t.sum() > 0 else None, "fails on placeholders"),
    ],
)
def test_a_loader_that_computes_is_not_traced(loader, words):
    from megarl.rollout.vllm.trace import UntraceableError

    with pytest.raises(UntraceableError, match=words):
        traced(loader)


def test_a_parameter_that_the_loader_leaves_out_is_named():
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

    from megarl.rollout.vllm.trace import UntraceableError, trace

    model = Model(columns)
    record_metadata_for_reloading(model)
    with pytest.raises(UntraceableError, match=r"leaves out vocab"):
        trace(model, {name: shape for name, shape in SHAPES.items() if name != "vocab"}, torch.float32)


def test_a_tensor_of_two_layers_that_vllm_keeps_has_the_first_ones_name():
    """A routing bias is the router's and the experts'; vLLM leaves it where it is while others are replaced."""
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

    from megarl.rollout.vllm.trace import trace

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Module(), nn.Module()
            self.gate.e_score_correction_bias = nn.Parameter(torch.zeros(4))
            self.experts.e_score_correction_bias = self.gate.e_score_correction_bias

        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            for _, tensor in weights:
                self.gate.e_score_correction_bias.data.copy_(tensor)

    model = Routed()
    record_metadata_for_reloading(model)
    found = trace(model, {"bias": (4,)}, torch.float32)
    assert [(region.tensor, region.local_name) for region in found.regions] == [
        ("bias", "gate.e_score_correction_bias")
    ]
