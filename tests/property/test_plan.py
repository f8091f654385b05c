"""Between any two layouts of any model: the plan moves every element once, and its proof notices every change to it."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megarl.errors import PlanError
from megarl.weights.check import check_plan
from megarl.weights.layout import megatron_regions, parameter_shapes
from megarl.weights.pieces import assemble, fill, pieces, region_view
from megarl.weights.plan import plan
from megarl.weights.plan_json import from_json, to_json
from tests.property.layouts import layouts_for, models_and_layouts, random_model


@st.composite
def models_and_two_layouts(draw: st.DrawFn):
    """A model, two layouts it divides into with their naming schemes, and whether it has a value head."""
    spec, layout, value_head = draw(models_and_layouts())
    other = draw(layouts_for(spec))
    namings = [(draw(st.sampled_from(["local", "te"])), draw(st.booleans())) for _ in range(2)]
    return spec, [layout, other], namings, value_head


LEAST_PARTS = st.sampled_from([1, 1 << 16])
"""Tiny models have no box large enough to be cut among replicas, unless the bound is lowered."""


def regions_of(spec, layout, naming, value_head):
    return {
        rank: megatron_regions(
            spec, layout, layout.coordinate(rank), value_head=value_head, naming=naming[0], grouped_experts=naming[1]
        )
        for rank in range(layout.world_size)
    }


def both_sides(case):
    spec, layouts, namings, value_head = case
    return [regions_of(spec, layout, naming, value_head) for layout, naming in zip(layouts, namings, strict=True)]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=models_and_two_layouts(), least_part=LEAST_PARTS)
def test_a_plan_carries_a_model_from_layout_to_layout_bit_for_bit(case, least_part):
    spec, _, _, value_head = case
    sources, destinations = both_sides(case)
    with patch("megarl.weights.plan._LEAST_PART", least_part):
        made = plan(sources, destinations)
    proof = check_plan(made)

    model = random_model(spec, value_head)
    held = {}
    for rank, regions in sources.items():
        held[rank] = {name: torch.empty(shape).bfloat16() for name, shape in parameter_shapes(regions).items()}
        fill(regions, held[rank], lambda region: model[region.tensor][region.slices])
    written = {
        rank: {name: torch.zeros(shape).bfloat16() for name, shape in parameter_shapes(regions).items()}
        for rank, regions in destinations.items()
    }
    for copy in made.copies:
        source, destination = made.source_of(copy), made.destination_of(copy)
        region_view(destination, written[copy.destination][destination.local_name]).copy_(
            region_view(source, held[copy.source][source.local_name])
        )
    again = assemble(part for rank, regions in destinations.items() for part in pieces(regions, written[rank]))
    assert again.keys() == model.keys()
    assert all(torch.equal(again[name], model[name]) for name in model)
    elements = {rank: sum(tensor.numel() for tensor in params.values()) for rank, params in written.items()}
    assert proof.num_elements + sum(proof.padding.values()) == sum(elements.values())
    assert sum(len(made.sends(rank)) for rank in sources) == len(made.copies)
    assert sum(len(made.receives(rank)) for rank in destinations) == len(made.copies)


@pytest.mark.slow
@settings(max_examples=4000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=models_and_two_layouts(), least_part=LEAST_PARTS)
def test_thousands_of_pairs_of_layouts_are_planned_completely(case, least_part):
    with patch("megarl.weights.plan._LEAST_PART", least_part):
        made = plan(*both_sides(case))
    proof = check_plan(made)
    assert proof.num_elements == sum(r.numel for regions in made.destinations.values() for r in regions)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=models_and_two_layouts(), data=st.data())
def test_every_single_change_to_a_plan_is_found(case, data):
    made = plan(*both_sides(case))
    index = data.draw(st.integers(0, len(made.copies) - 1))
    copy = made.copies[index]
    rest = made.copies[:index] + made.copies[index + 1 :]
    dim = data.draw(st.integers(0, len(copy.box) - 1))
    start, stop = copy.box[dim]
    shifted = (*copy.box[:dim], (start + 1, stop + 1), *copy.box[dim + 1 :])
    shorter = (*copy.box[:dim], (start, stop - 1), *copy.box[dim + 1 :])
    others = [c for c in made.copies if c.tensor != copy.tensor]
    broken = {
        "one left out": rest,
        "one made twice": (*made.copies, copy),
        "one shifted": (*rest, copy._replace(box=shifted)),
        "one cut short": (*rest, copy._replace(box=shorter)),
        "one from another tensor": (
            *rest,
            copy._replace(source_region=others[0].source_region, source=others[0].source),
        )
        if others
        else rest,
        "one from nowhere": (*rest, copy._replace(source=len(made.sources))),
        "one to nowhere": (*rest, copy._replace(destination_region=10**6)),
    }
    for copies in broken.values():
        with pytest.raises(PlanError):
            check_plan(replace(made, copies=copies))
    if made.dropped:
        gone = data.draw(st.integers(0, len(made.dropped) - 1))
        with pytest.raises(PlanError, match="not sent"):
            check_plan(replace(made, dropped=made.dropped[:gone] + made.dropped[gone + 1 :]))
        with pytest.raises(PlanError):
            check_plan(replace(made, dropped=(*made.dropped, made.dropped[gone])))


@settings(max_examples=20, deadline=None)
@given(case=models_and_two_layouts(), data=st.data())
def test_a_region_without_source_or_destination_is_refused(case, data):
    sources, destinations = both_sides(case)
    spec = case[0]
    name = data.draw(st.sampled_from(sorted({r.tensor for r in sources[0]})))
    without = {rank: [r for r in regions if r.tensor != name] for rank, regions in sources.items()}
    with pytest.raises(PlanError, match="has no source"):
        plan(without, destinations)
    lacking = {rank: [r for r in regions if r.tensor != name] for rank, regions in destinations.items()}
    with pytest.raises(PlanError, match="has no destination"):
        plan(sources, lacking)
    made = plan(sources, lacking, unwanted={name: "kept by the trainer"})
    check_plan(made)
    assert {entry.tensor for entry in made.dropped if entry.reason == "kept by the trainer"} == {name}
    assert spec is not None


@settings(max_examples=20, deadline=None)
@given(case=models_and_two_layouts())
def test_the_plan_and_its_digest_depend_on_nothing_but_the_regions(case):
    sources, destinations = both_sides(case)
    made = plan(sources, destinations)
    backwards = plan(dict(reversed(sources.items())), dict(reversed(destinations.items())))
    assert (made.copies, made.dropped, made.digest) == (backwards.copies, backwards.dropped, backwards.digest)
    read = from_json(to_json(made))
    assert (read.sources, read.destinations, read.copies, read.dropped) == (
        made.sources,
        made.destinations,
        made.copies,
        made.dropped,
    )
    rank = min(rank for rank, regions in destinations.items() if regions)
    moved = [replace(region, local_name=region.local_name + "x") for region in destinations[rank]]
    assert plan(sources, {**destinations, rank: moved}).digest != made.digest
