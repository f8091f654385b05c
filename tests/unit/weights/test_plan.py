"""What a plan refuses and chooses, on cases small enough to read."""

import json

import pytest
import torch

from megarl.errors import LayoutError, PlanError
from megarl.weights.check import check_plan
from megarl.weights.pieces import check_replicas, region_view
from megarl.weights.plan import PADDING, REPLICA, TIED, Dropped, plan
from megarl.weights.plan_json import from_json, to_json
from megarl.weights.region import Region, part_of, union_volume, volume


def rows(start: int, stop: int, *, of: int = 8, name: str = "w", tensor: str = "t", local: int | None = None) -> Region:
    """Rows of a tensor of two columns, at the start of a parameter of as many or ``local`` rows."""
    shape = (local if local is not None else stop - start, 2)
    return Region(tensor, (of, 2), ((start, stop), (0, 2)), name, shape, 0, (2, 1))


def test_boxes_are_intersected():
    made = plan({0: [rows(0, 5)], 1: [rows(5, 8)]}, {0: [rows(0, 3)], 1: [rows(3, 8)]})
    assert [(c.box[0], c.source, c.destination) for c in made.copies] == [
        ((0, 3), 0, 0),
        ((3, 5), 0, 1),
        ((5, 8), 1, 1),
    ]
    source, destination = made.source_of(made.copies[1]), made.destination_of(made.copies[1])
    assert (source.offset, destination.offset) == (6, 0)
    view = region_view(source, torch.arange(10.0).reshape(5, 2))
    assert view.tolist() == [[6, 7], [8, 9]]
    assert [c.source for c in made.receives(1)] == [0, 1] and len(made.sends(1)) == 1
    assert check_plan(made).num_elements == 16


def test_replicas_share_and_neighbours_are_preferred():
    holders = {rank: [rows(0, 8, tensor=f"t{index}", name=f"w{index}") for index in range(4)] for rank in range(2)}
    wanted = {0: holders[0], 1: holders[0]}
    made = plan(holders, wanted)
    assert [len(made.sends(rank)) for rank in range(2)] == [4, 4]
    assert {entry.reason for entry in made.dropped} <= {REPLICA}
    near = plan(holders, wanted, source_hosts={0: "a", 1: "b"}, destination_hosts={0: "b", 1: "a"})
    assert all((copy.source, copy.destination) in {(0, 1), (1, 0)} for copy in near.copies)
    elsewhere = plan(holders, wanted, source_hosts={0: "a", 1: "b"}, destination_hosts={0: "c", 1: "c"})
    assert elsewhere.copies == made.copies


def test_who_has_no_choice_counts_first():
    """Rank 0 alone holds the large tensor, so that rank 1 sends the small one they share."""
    sources = {0: [rows(0, 8), rows(0, 4, of=4, tensor="s", name="v")], 1: [rows(0, 4, of=4, tensor="s")]}
    made = plan(sources, {0: [rows(0, 8), rows(0, 4, of=4, tensor="s", name="v")]})
    assert {copy.tensor: copy.source for copy in made.copies} == {"t": 0, "s": 1}


def test_a_large_tensor_is_cut_among_its_replicas():
    """One tensor is most of the model: each of three replicas sends a third of it, to either destination."""
    large = Region("t", (3000, 100), ((0, 3000), (0, 100)), "w", (3000, 100), 0, (100, 1))
    small = rows(0, 4, of=4, tensor="s", name="v")
    made = plan({rank: [large, small] for rank in range(3)}, {rank: [large, small] for rank in range(2)})
    check_plan(made)
    sent = [sum(volume(copy.box) for copy in made.sends(rank)) for rank in range(3)]
    assert max(sent) - min(sent) <= volume(small.box) * 2
    assert [copy.box[0] for copy in made.receives(1) if copy.tensor == "t"] == [(0, 1000), (1000, 2000), (2000, 3000)]
    alone = plan({0: [large]}, {0: [large]})
    assert len(alone.copies) == 1


def test_what_is_not_sent_is_listed_with_its_reason():
    tied = rows(0, 8, name="head")
    made = plan(
        {0: [rows(0, 8, local=10)], 1: [tied], 2: [rows(0, 8, tensor="mtp")]},
        {0: [rows(0, 8)]},
        unwanted={"mtp": "not sampled with"},
    )
    assert set(made.dropped) == {
        Dropped(0, "w", "", 4, PADDING),
        Dropped(1, "head", "t", 16, TIED),
        Dropped(2, "w", "mtp", 16, "not sampled with"),
    }
    check_plan(made)


@pytest.mark.parametrize(
    ("sources", "destinations", "message"),
    [
        ({0: [rows(0, 5)]}, {0: [rows(0, 8)]}, "no source holds 6 elements of .* for destination rank 0"),
        ({0: [rows(0, 8)]}, {0: [rows(0, 5)]}, "no destination wants 6 of its sources' elements"),
        (
            {0: [rows(0, 8)]},
            {0: [rows(0, 8, tensor="u")]},
            "t has no destination; .*u has no source|u has no source; t",
        ),
        ({0: [rows(0, 8)], 1: [rows(4, 8)]}, {0: [rows(0, 8)]}, "which overlap"),
        ({0: [rows(0, 8)]}, {0: [rows(0, 8, of=9)]}, r"shape \(9, 2\) at destination rank 0, \(8, 2\) at its source"),
        ({0: [rows(0, 8)], 1: [rows(0, 8, of=9)]}, {0: [rows(0, 8)]}, r"source rank 1 has t with shape \(9, 2\)"),
    ],
)
def test_layouts_that_do_not_meet_are_refused(sources, destinations, message):
    with pytest.raises(PlanError, match=message):
        plan(sources, destinations)


def test_a_damaged_plan_is_refused():
    text = to_json(plan({0: [rows(0, 8)]}, {0: [rows(0, 8)]}))
    assert check_plan(from_json(text)).num_elements == 16
    content = json.loads(text)
    for damaged, message in (
        (text[:-5], "the text is no plan"),
        (json.dumps({**content, "format": 2}), "expected a plan in format 1, found 2"),
        (json.dumps({**content, "copies": []}), "its text says"),
        (json.dumps({**content, "copies": [[0]]}), "the text is no plan"),
    ):
        with pytest.raises(PlanError, match=message):
            from_json(damaged)


def test_unequal_replicas_are_named():
    sources = {rank: [rows(0, 8), rows(0, 4, of=4, tensor="s", name="v")] for rank in range(3)}
    params = {rank: {"w": torch.ones(8, 2), "v": torch.full((4, 2), float("nan"))} for rank in range(3)}
    check_replicas(sources, params)
    params[2]["w"][7, 1] = -1
    with pytest.raises(LayoutError, match=r"unequal: t \(\(0, 8\), \(0, 2\)\) on rank 2 differs from rank 0$"):
        check_replicas(sources, params)
    params[2]["w"][7, 1] = 1
    params[1]["v"] = params[1]["v"].bfloat16()
    with pytest.raises(LayoutError, match=r"s .* on rank 1 differs"):
        check_replicas(sources, params)


def test_a_part_lies_inside_its_region():
    region = Region("t", (8, 6), ((2, 6), (1, 5)), "w", (10, 4), 8, (4, 1))
    part = part_of(region, ((3, 4), (2, 4)))
    assert (part.offset, part.strides, part.shape) == (8 + 4 + 1, (4, 1), (1, 2))
    for outside in (((1, 3), (1, 5)), ((2, 6), (1, 6)), ((2, 6),)):
        with pytest.raises(LayoutError, match="is not inside"):
            part_of(region, outside)


def test_the_volume_of_a_union():
    assert union_volume([]) == 0
    assert union_volume([((0, 2), (0, 2)), ((1, 3), (1, 3))]) == 7
    assert union_volume([((0, 2), (0, 2)), ((0, 2), (0, 2)), ((5, 6), (0, 9))]) == 13
    assert union_volume([()]) == 1
