"""The process groups of one rank in one grid, passed as an argument to whoever communicates.

Nobody looks groups up in a global: ``train/megatron/bootstrap.py`` builds this object once from Megatron-Core's state
(or ``plain_groups`` from torch alone), and everything else receives it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megarl.errors import LayoutError
from megarl.parallel.grid import Coordinate, ParallelLayout


@dataclass(frozen=True, slots=True)
class ParallelGroups:
    """Where this process stands in a layout, and the groups along each axis it belongs to.

    Attributes:
        layout: the degrees.
        rank: rank in the layout.
        coordinate: its place.
        world: all ranks of the layout.
        tp: ranks that share its shards' layers (tensor parallel).
        pp: its pipeline, first stage first.
        dp: its data-parallel replicas, without context parallelism.
        cp: context parallel.
        dp_cp: data and context parallel together: the ranks gradients are reduced over.
        model: one replica of the model (tp times pp).
        embedding: first and last stage, which share tied embeddings; None in the middle.
        megatron: Megatron-Core's ``ProcessGroupCollection``; None without Megatron-Core.
    """

    layout: ParallelLayout
    rank: int
    coordinate: Coordinate
    world: ProcessGroup
    tp: ProcessGroup
    pp: ProcessGroup
    dp: ProcessGroup
    cp: ProcessGroup
    dp_cp: ProcessGroup
    model: ProcessGroup
    embedding: ProcessGroup | None = None
    megatron: Any = None

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank embeds tokens."""
        return self.coordinate.pp == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has the output layer."""
        return self.coordinate.pp == self.layout.pp - 1

    @property
    def reports(self) -> bool:
        """Whether results of a forward pass are taken from this rank: last stage, tensor and context rank 0."""
        return self.is_last_stage and self.coordinate.tp == 0 and self.coordinate.cp == 0


def plain_groups(layout: ParallelLayout, timeout_s: float) -> ParallelGroups:
    """Groups of this process from torch.distributed alone, in the same order on every rank.

    Collective: every rank of the default group calls it. ``timeout_s`` is the time-out of their collectives in seconds:
    torch does not take it over from the default group. Raises LayoutError if that is not of the layout's size.
    """
    if dist.get_world_size() != layout.world_size:
        raise LayoutError(f"{dist.get_world_size()} processes were started for a layout of {layout.world_size} ranks")
    rank = dist.get_rank()
    mine: dict[str, ProcessGroup] = {}
    for axis, members in _partitions(layout):
        # new_group is collective: all ranks make all groups, in one order.
        group = dist.new_group(members, timeout=timedelta(seconds=timeout_s))
        if rank in members:
            mine[axis] = group
    return ParallelGroups(
        layout=layout,
        rank=rank,
        coordinate=layout.coordinate(rank),
        world=dist.group.WORLD,
        **mine,
    )


def _partitions(layout: ParallelLayout) -> Iterator[tuple[str, list[int]]]:
    """Every group of every axis with its ranks in order."""
    axes = {"tp": ("tp",), "pp": ("pp",), "dp": ("dp",), "cp": ("cp",), "dp_cp": ("dp", "cp"), "model": ("pp", "tp")}
    for name, spanned in axes.items():
        groups: dict[Coordinate, list[int]] = {}
        for rank, coordinate in enumerate(layout.coordinates()):
            groups.setdefault(coordinate._replace(**dict.fromkeys(spanned, 0)), []).append(rank)
        yield from ((name, members) for members in groups.values())
