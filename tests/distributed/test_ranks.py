"""The pool itself: results in order, exceptions with their rank, time-outs that name who is missing and where."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
import torch.distributed as dist

from megarl.parallel.grid import Coordinate, ParallelLayout
from tests.distributed.ranks import MOST_THREADS, Rank, RankError, RankPool


def sum_of_ranks(rank: Rank, value: float) -> float:
    rank.join()
    total = torch.tensor([value * rank.rank])
    dist.all_reduce(total)
    return float(total)


def coordinates(rank: Rank, *layouts: ParallelLayout) -> list[tuple[Coordinate, int]]:
    seen = []
    for layout in layouts:
        groups = rank.start(layout)
        count = torch.ones(1)
        dist.all_reduce(count, group=groups.dp)
        seen.append((groups.coordinate, int(count)))
    return seen


def fail_on(rank: Rank, failing: int) -> None:
    rank.join()
    if rank.rank == failing:
        raise ValueError("deliberate")
    dist.barrier()


def leave_threads(rank: Rank, count: int) -> int:
    for _ in range(count):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    return os.getpid()


def hang_on(rank: Rank, hanging: int) -> None:
    while rank.rank == hanging:
        time.sleep(0.05)


def test_results_come_in_rank_order(ranks: RankPool) -> None:
    assert ranks(2).run(sum_of_ranks, 2.0) == [2.0, 2.0]
    assert ranks(4).run(sum_of_ranks, 1.0) == [6.0] * 4


def test_a_process_with_many_threads_makes_way_for_another(ranks: RankPool) -> None:
    first, other = ranks(2).run(leave_threads, 0)
    assert ranks(1).run(leave_threads, MOST_THREADS) == [first]
    replaced, kept = ranks(2).run(leave_threads, 0)
    assert replaced != first
    assert kept == other


def test_one_call_may_use_several_layouts(ranks: RankPool) -> None:
    layouts = [ParallelLayout(tp=2, dp=2), ParallelLayout(pp=2, tp=2), ParallelLayout(dp=4)]
    results = ranks(4).run(coordinates, *layouts)
    for rank, seen in enumerate(results):
        assert seen == [(layout.coordinate(rank), layout.dp) for layout in layouts]


def test_an_exception_names_its_rank_and_the_next_call_works(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2 raised in fail_on(.|\n)*ValueError: deliberate"):
        ranks(2).run(fail_on, 1)
    assert ranks(2).run(sum_of_ranks, 1.0) == [1.0, 1.0]


def test_a_time_out_names_the_rank_and_shows_its_stack(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"rank 1 did not return from hang_on in 1.0 s(.|\n)*in hang_on"):
        ranks(2).run(hang_on, 1, timeout_s=1.0)
