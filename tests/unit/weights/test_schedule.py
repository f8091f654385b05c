from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.errors import PlanError
from megarl.models import spec_from_config
from megarl.models.tiny import tiny_config
from megarl.parallel.grid import ParallelLayout
from megarl.weights.layout import canonical_shapes, megatron_regions
from megarl.weights.plan import plan
from megarl.weights.region import overlapping_pairs, volume, whole
from megarl.weights.schedule import ALIGNMENT, DTYPE_BYTES, HOST, WIRE, LinkKind, Program, Schedule, cut, schedule
from tests.unit.weights.sync_ends import rows

SPEC = spec_from_config(tiny_config("qwen2"))
SHAPES = canonical_shapes(SPEC)

KINDS: dict[str, Callable[[int, int], LinkKind]] = {
    "host": lambda source, destination: HOST,
    "network": lambda source, destination: WIRE,
    "mixed": lambda source, destination: HOST if source % 2 == destination % 2 else WIRE,
}


def made(layout: ParallelLayout, kind: str, bucket_bytes: int, dtype: str = "float32") -> Schedule:
    """From a Megatron layout to two engines of two ranks."""
    sources = {rank: megatron_regions(SPEC, layout, layout.coordinate(rank)) for rank in range(layout.world_size)}
    destinations = {rank: rows(SHAPES, rank % 2, 2) for rank in range(4)}
    dtypes = {rank: {region.local_name: dtype for region in regions} for rank, regions in destinations.items()}
    return schedule(plan(sources, destinations), dtypes, KINDS[kind], bucket_bytes=bucket_bytes)


LAYOUTS = [ParallelLayout(), ParallelLayout(tp=2, pp=2), ParallelLayout(tp=2, dp=2)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bucket_bytes", [5000, 1 << 30])
def test_every_element_of_every_destination_is_in_one_item(layout, kind, bucket_bytes):
    found = made(layout, kind, bucket_bytes)
    for rank, regions in found.plan.destinations.items():
        items = [item for bucket in found.receivers[rank].buckets for item in bucket.items]
        for tensor in {region.tensor for region in regions}:
            boxes = [item.region.box for item in items if item.region.tensor == tensor]
            assert not list(overlapping_pairs(boxes))
            assert sum(map(volume, boxes)) == sum(r.numel for r in regions if r.tensor == tensor)
        assert all(item.readers == (rank,) for item in items)
    assert found.num_bytes == 4 * sum(r.numel for regions in found.plan.destinations.values() for r in regions)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bucket_bytes", [5000, 200_000])
def test_buckets_are_bounded_ordered_and_the_same_at_both_ends(kind, bucket_bytes):
    found = made(ParallelLayout(tp=2, pp=2), kind, bucket_bytes)
    sent = {bucket.number: bucket for program in found.senders.values() for bucket in program.buckets}
    assert sorted(sent) == list(range(len(sent)))
    for program in found.senders.values():
        assert [bucket.slot for bucket in program.buckets] == [index % 2 for index in range(len(program.buckets))]
    for program in [*found.senders.values(), *found.receivers.values()]:
        numbers = [bucket.number for bucket in program.buckets]
        assert numbers == sorted(numbers)
        for bucket in program.buckets:
            assert bucket.num_bytes <= bucket_bytes
            for item in bucket.items:
                assert item.start % ALIGNMENT == 0
                assert item.start + item.region.numel * DTYPE_BYTES[item.dtype] <= bucket.num_bytes
    for rank, program in found.receivers.items():
        for bucket in program.buckets:
            places = {(item.region.tensor, item.region.box): item.start for item in sent[bucket.number].items}
            assert all(places[item.region.tensor, item.region.box] == item.start for item in bucket.items)
            assert rank in sent[bucket.number].destinations
        for source in found.senders:
            assert program.link_digest(source, rank) == found.senders[source].link_digest(source, rank)


def test_readers_of_one_machine_share_what_is_packed():
    def packed(kind: str) -> int:
        program = made(ParallelLayout(), kind, 1 << 30).senders[0]
        return sum(item.region.numel for bucket in program.buckets for item in bucket.items)

    vectors = sum(volume(whole(shape)) for shape in SHAPES.values() if len(shape) == 1)
    matrices = sum(volume(whole(shape)) for shape in SHAPES.values() if len(shape) > 1)
    assert packed("host") == matrices + vectors
    assert packed("network") == 2 * matrices + 4 * vectors


def test_a_program_survives_json():
    program = made(ParallelLayout(tp=2), "mixed", 5000).senders[1]
    assert Program.from_json(program.to_json()) == program


def test_another_plan_has_other_link_digests():
    one, other = (made(layout, "network", 5000).senders[0] for layout in (LAYOUTS[0], LAYOUTS[1]))
    assert one.link_digest(0, 0) != other.link_digest(0, 0)


def test_a_dtype_that_does_not_travel_is_refused():
    with pytest.raises(PlanError, match="float8_e4m3fn"):
        made(ParallelLayout(), "network", 1000, "float8_e4m3fn")


@given(shape=st.lists(st.integers(1, 7), min_size=1, max_size=3), most=st.integers(1, 60))
def test_a_cut_box_is_covered_by_small_parts(shape, most):
    box = whole(tuple(shape))
    parts = list(cut(box, most))
    assert all(volume(part) <= most for part in parts)
    assert sum(map(volume, parts)) == volume(box) and not list(overlapping_pairs(parts))
