"""Every group of a rank waits as long as the configuration says, not as long as torch or Megatron-Core would."""

from __future__ import annotations

import time
from dataclasses import fields
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.parallel.grid import ParallelLayout
from megarl.parallel.groups import plain_groups
from tests.distributed.ranks import Rank, RankPool


def process_groups(holder: Any) -> dict[str, dist.ProcessGroup]:
    """Groups among the fields of an object."""
    named = {field.name: getattr(holder, field.name, None) for field in fields(holder)}
    return {name: group for name, group in named.items() if isinstance(group, dist.ProcessGroup)}


def timeouts(rank: Rank, layout: ParallelLayout) -> dict[str, timedelta]:
    rank.timeout_s = 7.5
    groups = rank.start(layout)
    plain = plain_groups(layout, rank.timeout_s)
    found = {
        **{f"groups.{name}": group for name, group in process_groups(groups).items()},
        **{f"megatron.{name}": group for name, group in process_groups(groups.megatron).items()},
        **{f"plain.{name}": group for name, group in process_groups(plain).items()},
    }
    return {name: group._get_backend(torch.device("cpu")).options._timeout for name, group in found.items()}


def test_every_group_has_the_configured_time_out(ranks: RankPool) -> None:
    for found in ranks(2).run(timeouts, ParallelLayout(tp=2)):
        assert len(found) > 20
        assert {name: timeout for name, timeout in found.items() if timeout != timedelta(seconds=7.5)} == {}


def alone(rank: Rank) -> float:
    rank.timeout_s = 1.0
    groups = rank.start(ParallelLayout(tp=2))
    began = time.monotonic()
    if rank.rank == 1:
        time.sleep(1.5)
    else:
        with pytest.raises(RuntimeError, match="Timed out"):
            dist.all_reduce(torch.ones(2), group=groups.tp)
    return time.monotonic() - began


def test_a_collective_to_which_a_rank_does_not_come_ends_in_time(ranks: RankPool) -> None:
    waited_s, _ = ranks(2).run(alone)
    assert 0.9 < waited_s < 30
