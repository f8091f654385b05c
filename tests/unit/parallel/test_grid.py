"""The grid of ranks: Megatron's order, inverse maps, layers of stages, vocabulary padding, refusals."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis.strategies import integers

from megarl.errors import LayoutError
from megarl.parallel.grid import Coordinate, ParallelLayout

degree = integers(1, 4)


@given(tp=degree, pp=degree, cp=degree, dp=degree)
def test_rank_and_coordinate_are_inverse(tp: int, pp: int, cp: int, dp: int) -> None:
    layout = ParallelLayout(tp=tp, pp=pp, cp=cp, dp=dp)
    coordinates = list(layout.coordinates())
    assert len(set(coordinates)) == layout.world_size
    assert [layout.rank(coordinate) for coordinate in coordinates] == list(range(layout.world_size))


def test_tp_varies_fastest_and_pp_slowest() -> None:
    layout = ParallelLayout(tp=2, dp=2, pp=2)
    assert [tuple(layout.coordinate(rank)) for rank in range(8)] == [
        (0, 0, 0, 0),
        (1, 0, 0, 0),
        (0, 0, 1, 0),
        (1, 0, 1, 0),
        (0, 0, 0, 1),
        (1, 0, 0, 1),
        (0, 0, 1, 1),
        (1, 0, 1, 1),
    ]
    assert layout.ranks_along("pp", Coordinate(tp=1, dp=1)) == [3, 7]
    assert layout.ranks_along("dp", Coordinate(pp=1)) == [4, 6]


@given(per_stage=integers(1, 5), pp=integers(1, 5), vpp=integers(1, 3))
def test_layers_of_even_stages_tile_the_model(per_stage: int, pp: int, vpp: int) -> None:
    layout = ParallelLayout(pp=pp, vpp=vpp if pp > 1 else 1)
    num_layers = per_stage * pp * layout.vpp
    chunks = [
        layout.layers_of_stage(num_layers, stage, chunk) for chunk in range(layout.vpp) for stage in range(layout.pp)
    ]
    assert [layer for layers in chunks for layer in layers] == list(range(num_layers))
    assert {len(layers) for layers in chunks} == {per_stage}


@pytest.mark.parametrize(
    ("num_layers", "pp", "first", "last", "expected"),
    [
        (4, 2, 1, None, [1, 3]),
        (4, 2, None, 1, [3, 1]),
        (10, 4, 1, 3, [1, 3, 3, 3]),
        (7, 3, 2, None, None),  # five layers over two stages
        (4, 2, 1, 2, None),
        (3, 2, None, None, None),
        (2, 3, 1, 1, None),  # a stage without layers
    ],
)
def test_uneven_stages(
    num_layers: int, pp: int, first: int | None, last: int | None, expected: list[int] | None
) -> None:
    layout = ParallelLayout(pp=pp, first_stage_layers=first, last_stage_layers=last)
    if expected is None:
        with pytest.raises(LayoutError, match=f"{num_layers} layers do not divide into pp={pp}"):
            layout.layers_of_stage(num_layers, 0)
        return
    stages = [layout.layers_of_stage(num_layers, stage) for stage in range(pp)]
    assert [len(stage) for stage in stages] == expected
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))


@pytest.mark.parametrize(
    ("text", "pp", "vpp", "stages"),
    [
        ("EtttL", 1, 1, [[3]]),
        ("Ettt|(tt|)*2,t,L", 4, 1, [[3], [2], [2], [1]]),
        ("E|t|t*2|L", 2, 2, [[0, 2], [1, 0]]),
        ("Et|t|tt|t|tt|L", 3, 2, [[1, 1], [1, 2], [2, 0]]),
    ],
)
def test_a_spelled_pipeline_has_its_layers_in_order(text: str, pp: int, vpp: int, stages: list[list[int]]) -> None:
    layout = ParallelLayout(pp=pp, vpp=vpp, pipeline=text)
    total = sum(map(sum, stages))
    chunks = [[layout.layers_of_stage(total, stage, chunk) for chunk in range(vpp)] for stage in range(pp)]
    assert [[len(layers) for layers in stage] for stage in chunks] == stages
    assert [x for chunk in range(vpp) for stage in range(pp) for x in chunks[stage][chunk]] == list(range(total))
    with pytest.raises(LayoutError, match=f"has {total} layers, the model {total + 1}"):
        layout.layers_of_stage(total + 1, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Ett|tt", "end with its only L"),
        ("tE|tL", "start with its only E"),
        ("EtL|EtL", "only E"),
        ("Et|t|L", "has 3 stages"),
        ("Et|mL", "multi-token prediction"),
        ("Ex|tL", "has the letters x"),
    ],
)
def test_a_pipeline_spelled_wrongly_is_refused(text: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        ParallelLayout(pp=2, pipeline=text)
    with pytest.raises(LayoutError, match="leaves no place"):
        ParallelLayout(pp=2, pipeline="Et|tL", first_stage_layers=1)


def test_experts_are_dealt_out_over_the_ranks_of_a_stage() -> None:
    """Megatron-Core's order: expert tensor ranks vary fastest, then experts, then the replicas."""
    layout = ParallelLayout(tp=2, cp=2, dp=2, pp=2, ep=2, etp=2)
    places = [layout.expert_coordinate(layout.coordinate(rank)) for rank in range(8)]
    assert places == [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1), (1, 1, 1)]
    assert layout.expert_dp == 2
    assert layout.expert_coordinate(layout.coordinate(8)) == places[0]


def test_another_multiple_of_vocabulary_rows() -> None:
    assert ParallelLayout(tp=3, vocab_rows_multiple=128).padded_vocab_size(400) == 768
    assert ParallelLayout(tp=3, vocab_rows_multiple=1).padded_vocab_size(400) == 402


@given(vocab=integers(1, 200_000), tp=integers(1, 16))
def test_padded_vocabulary_is_the_next_multiple(vocab: int, tp: int) -> None:
    padded = ParallelLayout(tp=tp).padded_vocab_size(vocab)
    assert padded % (64 * tp) == 0
    assert 0 <= padded - vocab < 64 * tp


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 0}, "tp=0 is less than 1"),
        ({"sequence_parallel": True}, "tp=1"),
        ({"vpp": 2}, "need pp > 1"),
        ({"first_stage_layers": 1}, "need pp > 1"),
        ({"tp": 2, "ep": 3}, "does not divide"),
    ],
)
def test_impossible_layouts_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        ParallelLayout(**options)


def test_places_off_the_grid_are_refused() -> None:
    layout = ParallelLayout(tp=2)
    with pytest.raises(LayoutError, match="rank 2 is outside"):
        layout.coordinate(2)
    with pytest.raises(LayoutError, match="off the dp axis of size 1"):
        layout.rank(Coordinate(dp=1))


def test_what_tensor_parallelism_divides_must_divide() -> None:
    ParallelLayout(tp=2).check_split({"attention heads": 4, "feed-forward rows": 8})
    with pytest.raises(LayoutError, match=r"3 key-value heads do not divide by tp=2"):
        ParallelLayout(tp=2).check_split({"attention heads": 4, "key-value heads": 3})


def test_the_grid_loads_no_torch() -> None:
    imports = "megarl.parallel.grid, megarl.platform.env, megarl.platform.device, megarl.platform.packages"
    code = f"import sys, {imports}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
