"""Any model cut into any layout and put together again is the same model, bit for bit, and the proof agrees."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megarl.errors import LayoutError
from megarl.models import ModelSpec
from megarl.parallel.grid import ParallelLayout
from megarl.weights.check import check_complete
from megarl.weights.checksum import add, checksum, checksums
from megarl.weights.layout import canonical_shapes, megatron_regions, parameter_shapes
from megarl.weights.pieces import assemble, fill, pieces
from megarl.weights.region import whole

FAMILIES = {
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
}


@st.composite
def models_and_layouts(draw: st.DrawFn) -> tuple[ModelSpec, ParallelLayout, bool]:
    """An awkward model and a layout it divides into."""
    tp = draw(st.sampled_from([1, 2, 3, 4]))
    pp = draw(st.integers(1, 3))
    kv_heads = tp * draw(st.integers(1, 2))
    options: dict[str, Any] = {}
    num_layers = pp * draw(st.integers(1, 2))
    if pp > 1 and draw(st.booleans()):
        options["first_stage_layers"] = draw(st.integers(1, 2))
        if draw(st.booleans()):
            options["last_stage_layers"] = draw(st.integers(1, 2))
        middle = pp - len(options)
        num_layers = sum(options.values()) + middle * draw(st.integers(1, 2))
    family = draw(st.sampled_from(sorted(FAMILIES)))
    spec = ModelSpec(
        family=family,
        vocab_size=draw(st.integers(1, 200)),
        hidden_size=draw(st.integers(1, 20)),
        ffn_hidden_size=tp * draw(st.integers(1, 9)),
        num_layers=num_layers,
        num_heads=kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 3)),
        max_position=64,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        tied_embeddings=draw(st.booleans()),
        **FAMILIES[family],
    )
    layout = ParallelLayout(tp=tp, pp=pp, dp=draw(st.integers(1, 2)), cp=draw(st.integers(1, 2)), **options)
    return spec, layout, draw(st.booleans())


@st.composite
def layouts_for(draw: st.DrawFn, spec: ModelSpec) -> ParallelLayout:
    """Another layout that the model divides into."""
    divisors = [tp for tp in range(1, 9) if spec.num_kv_heads % tp == 0 and spec.ffn_hidden_size % tp == 0]
    pp = draw(st.sampled_from([pp for pp in range(1, spec.num_layers + 1) if spec.num_layers % pp == 0]))
    return ParallelLayout(tp=draw(st.sampled_from(divisors)), pp=pp, dp=draw(st.integers(1, 2)))


def random_model(spec: ModelSpec, value_head: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16)
        for name, shape in canonical_shapes(spec, value_head=value_head).items()
    }


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=models_and_layouts(), naming=st.sampled_from(["local", "te"]))
def test_a_model_survives_any_layout_bit_for_bit(case, naming):
    spec, layout, value_head = case
    model = random_model(spec, value_head)
    regions = {
        rank: megatron_regions(spec, layout, layout.coordinate(rank), value_head=value_head, naming=naming)
        for rank in range(layout.world_size)
    }
    coverage = check_complete(regions, canonical_shapes(spec, value_head=value_head))
    assert coverage.num_elements == spec.num_parameters(value_head=value_head)

    held, shares = [], []
    for rank, mine in regions.items():
        params = {name: torch.full(shape, 99.0).bfloat16() for name, shape in parameter_shapes(mine).items()}
        fill(mine, params, lambda region: model[region.tensor][region.slices])
        for name, parameter in params.items():
            # Padding is zero, and all that is not padding was written.
            assert (parameter == 99).sum() == 0
            assert parameter.count_nonzero() <= parameter.numel() - coverage.padding.get((rank, name), 0)
        held += list(pieces(mine, params))
        shares.append(checksums(pieces(mine, params)))

    again = assemble(held)
    assert again.keys() == model.keys()
    assert all(torch.equal(again[name], model[name]) for name in model)
    assert add(shares) == {name: checksum(tensor, whole(tuple(tensor.shape))) for name, tensor in model.items()}


@settings(max_examples=30, deadline=None)
@given(case=models_and_layouts(), data=st.data())
def test_leaving_out_or_doubling_any_region_is_noticed(case, data):
    spec, layout, value_head = case
    regions = {
        rank: megatron_regions(spec, layout, layout.coordinate(rank), value_head=value_head)
        for rank in range(layout.world_size)
    }
    shapes = canonical_shapes(spec, value_head=value_head)
    rank = data.draw(st.sampled_from(sorted(regions)))
    index = data.draw(st.sampled_from([i for i, region in enumerate(regions[rank]) if region.numel]))
    region = regions[rank].pop(index)
    if region.is_owner:
        with pytest.raises(LayoutError):
            check_complete(regions, shapes)
    regions[rank] += [region, region]
    with pytest.raises(LayoutError):
        check_complete(regions, shapes)
