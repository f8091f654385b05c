from __future__ import annotations

import pickle
from math import prod

import pytest

from megarl.errors import PlanError
from megarl.models import spec_from_config
from megarl.models.tiny import tiny_config
from megarl.parallel.grid import ParallelLayout
from megarl.weights.layout import canonical_shapes, megatron_regions
from megarl.weights.manifest import ALIGNMENT, Manifest, build_manifest
from megarl.weights.plan import loading_order
from megarl.weights.region import Region

SPEC = spec_from_config(tiny_config("qwen2"))


def offers(layout: ParallelLayout) -> dict[int, list[Region]]:
    return {
        rank: [r for r in megatron_regions(SPEC, layout, layout.coordinate(rank)) if r.is_owner and r.numel]
        for rank in range(layout.world_size)
    }


def region(tensor: str, shape: tuple[int, ...], box: tuple[tuple[int, int], ...]) -> Region:
    return Region(tensor, shape, box, "p", shape, 0, (1,) * len(shape))


@pytest.mark.parametrize("layout", [ParallelLayout(), ParallelLayout(tp=2, pp=2), ParallelLayout(tp=2, dp=2)], ids=str)
@pytest.mark.parametrize("bucket_bytes", [1, 200_000, 1 << 30])
def test_every_element_of_every_tensor_travels_once(layout, bucket_bytes):
    manifest = build_manifest(offers(layout), dtype="float32", bucket_bytes=bucket_bytes)
    assert dict(manifest.shapes) == canonical_shapes(SPEC)
    moved: dict[str, int] = {}
    for item in manifest.rounds:
        for bucket in item.buckets:
            end = 0
            for piece in bucket.pieces:
                assert piece.tensor in item.tensors
                assert piece.start == end and piece.start % ALIGNMENT == 0
                size = prod(piece.shape)
                end += -(-size * 4 // ALIGNMENT) * ALIGNMENT
                moved[piece.tensor] = moved.get(piece.tensor, 0) + size
            assert end == bucket.num_bytes
            assert bucket.num_bytes <= bucket_bytes or len(item.tensors) == 1
    assert moved == {name: prod(shape) for name, shape in canonical_shapes(SPEC).items()}
    assert [name for item in manifest.rounds for name in item.tensors] == list(manifest.shapes)


def test_replicas_do_not_send():
    layout = ParallelLayout(dp=2)
    assert build_manifest(offers(layout), dtype="bfloat16", bucket_bytes=1 << 20).senders == (0,)


def test_both_ends_read_the_same_manifest():
    manifest = build_manifest(offers(ParallelLayout(tp=2)), dtype="bfloat16", bucket_bytes=100_000)
    assert Manifest.from_json(manifest.to_json()) == manifest
    for copy in (Manifest.from_json(manifest.to_json()), pickle.loads(pickle.dumps(manifest))):
        assert copy.digest == manifest.digest
    other = build_manifest(offers(ParallelLayout(tp=2)), dtype="bfloat16", bucket_bytes=100_001)
    assert other.digest != build_manifest(offers(ParallelLayout()), dtype="bfloat16", bucket_bytes=100_000).digest


def test_layers_come_in_numeric_order_and_stay_together():
    names = ["model.layers.10.a", "model.layers.9.b", "lm_head.weight", "model.layers.9.a", "model.norm.weight"]
    assert sorted(names, key=loading_order) == [
        "lm_head.weight",
        "model.layers.9.a",
        "model.layers.9.b",
        "model.layers.10.a",
        "model.norm.weight",
    ]


@pytest.mark.parametrize(
    ("pieces", "problem"),
    [
        ({0: [region("w", (4, 2), ((0, 2), (0, 2)))]}, "w: 4 of 8 elements are sent by nobody"),
        ({0: [region("w", (4,), ((0, 3),))], 1: [region("w", (4,), ((2, 4),))]}, "overlap"),
        ({0: [region("w", (4,), ((0, 2),))], 1: [region("w", (5,), ((2, 5),))]}, "two shapes"),
    ],
)
def test_pieces_that_do_not_make_up_a_tensor_are_refused(pieces, problem):
    with pytest.raises(PlanError, match=problem):
        build_manifest(pieces, dtype="float32", bucket_bytes=1024)


def test_an_unknown_dtype_is_refused():
    with pytest.raises(PlanError, match="float64"):
        build_manifest({}, dtype="float64", bucket_bytes=1)
