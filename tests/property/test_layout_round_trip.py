"""Any model cut into any layout and put together again is the same model, bit for bit, and the proof agrees."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megarl.errors import LayoutError
from megarl.weights.check import check_complete
from megarl.weights.checksum import add, checksum, checksums
from megarl.weights.layout import canonical_shapes, megatron_regions, parameter_shapes
from megarl.weights.pieces import assemble, fill, pieces
from megarl.weights.region import whole
from tests.property.layouts import models_and_layouts, random_model


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=models_and_layouts(), naming=st.sampled_from(["local", "te"]), grouped=st.booleans())
def test_a_model_survives_any_layout_bit_for_bit(case, naming, grouped):
    spec, layout, value_head = case
    model = random_model(spec, value_head)
    regions = {
        rank: megatron_regions(
            spec, layout, layout.coordinate(rank), value_head=value_head, naming=naming, grouped_experts=grouped
        )
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
            assert (parameter == 99).sum() == 0, name
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
    # A spelled pipeline may have stages without layers.
    rank = data.draw(st.sampled_from([rank for rank, held in sorted(regions.items()) if any(r.numel for r in held)]))
    index = data.draw(st.sampled_from([i for i, region in enumerate(regions[rank]) if region.numel]))
    region = regions[rank].pop(index)
    if region.is_owner:
        with pytest.raises(LayoutError):
            check_complete(regions, shapes)
    regions[rank] += [region, region]
    with pytest.raises(LayoutError):
        check_complete(regions, shapes)
