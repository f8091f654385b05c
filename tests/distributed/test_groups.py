"""Groups from torch alone are those Megatron-Core makes: the same ranks along every axis."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megarl.errors import LayoutError
from megarl.parallel.grid import ParallelLayout
from megarl.parallel.groups import ParallelGroups, plain_groups
from tests.distributed.ranks import Rank, RankPool

AXES = ("world", "tp", "pp", "dp", "cp", "dp_cp", "model")


def members(groups: ParallelGroups) -> dict[str, list[int]]:
    return {axis: dist.get_process_group_ranks(getattr(groups, axis)) for axis in AXES}


def both(rank: Rank, layout: ParallelLayout) -> tuple[dict[str, list[int]], dict[str, list[int]], list[list[int]]]:
    groups = rank.start(layout)
    plain = plain_groups(layout, rank.timeout_s)
    assert (plain.rank, plain.coordinate, plain.reports) == (groups.rank, groups.coordinate, groups.reports)
    grid = [layout.ranks_along(axis, groups.coordinate) for axis in ("tp", "pp", "dp")]
    return members(groups), members(plain), grid


@pytest.mark.parametrize(
    "layout", [ParallelLayout(tp=2, pp=2), ParallelLayout(tp=2, dp=2), ParallelLayout(pp=2, dp=2)], ids=str
)
def test_groups_agree_with_megatron_and_with_the_grid(ranks: RankPool, layout: ParallelLayout) -> None:
    for megatron, plain, (tp, pp, dp) in ranks(4).run(both, layout):
        assert plain == megatron
        assert (plain["tp"], plain["pp"], plain["dp"]) == (tp, pp, dp)


def wrong_size(rank: Rank) -> str:
    rank.join()
    with pytest.raises(LayoutError) as error:
        plain_groups(ParallelLayout(tp=4), rank.timeout_s)
    return str(error.value)


def test_a_layout_of_another_size_is_refused(ranks: RankPool) -> None:
    assert ranks(2).run(wrong_size) == ["2 processes were started for a layout of 4 ranks"] * 2
