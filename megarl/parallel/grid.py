"""Degrees of parallelism as integers: rank <-> coordinate, layers of a stage, rows of a vocabulary shard.

Loads no torch, so that planning and login nodes can use it.

Invariants:
1. ``rank`` and ``coordinate`` are inverse bijections between ``range(world_size)`` and the grid. The order is
   Megatron-Core's default ``tp-cp-ep-dp-pp``: tp varies fastest, pp slowest.
2. The stages' layer ranges tile ``range(num_layers)`` in order.
3. A layout that does not divide raises LayoutError naming both numbers; nothing is rounded silently.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

from megarl.errors import LayoutError

VOCAB_ROWS_MULTIPLE = 64
"""Rows of a vocabulary shard are a multiple of this, as vLLM's are, unless the layout says otherwise."""


class Coordinate(NamedTuple):
    """Place of a rank on the axes of the grid."""

    tp: int = 0
    cp: int = 0
    dp: int = 0
    pp: int = 0


class ExpertCoordinate(NamedTuple):
    """Place of a rank among those that share its pipeline stage's expert layers."""

    etp: int
    ep: int
    dp: int


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Parallel degrees of one role.

    ``ep`` and ``etp`` re-cut the ranks of one pipeline stage for the expert layers, hence they are no factors of
    ``world_size``; the order there is etp, ep, then the replicas. ``first_stage_layers`` and ``last_stage_layers``
    make the outer stages uneven; the middle ones divide the rest evenly. ``pipeline`` instead spells every stage in
    Megatron-Core's language: ``Ettt|(tt|)*29L`` has the embedding and three layers, 29 stages of two, and the head;
    with virtual stages it lists the first chunk of all stages, then the second.
    ``vocab_rows_multiple`` is what a vocabulary shard's rows are a multiple of (Megatron-LM's
    ``make_vocab_size_divisible_by``).
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    sequence_parallel: bool = False
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    pipeline: str | None = None
    vocab_rows_multiple: int = VOCAB_ROWS_MULTIPLE

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("sequence_parallel", "pipeline") and value is not None and value < 1:
                raise LayoutError(f"layout degree {field.name}={value} is less than 1", fix=f"set {field.name} >= 1")
        if self.sequence_parallel and self.tp == 1:
            raise LayoutError("sequence parallelism splits over tensor-parallel ranks, but tp=1", fix="set tp > 1")
        if self.vpp > 1 and self.pp == 1:
            raise LayoutError(f"vpp={self.vpp} virtual stages need pp > 1", fix="set vpp=1")
        if self.pp == 1 and (self.first_stage_layers is not None or self.last_stage_layers is not None):
            raise LayoutError("first_stage_layers and last_stage_layers need pp > 1", fix="leave them out")
        if self.pipeline is not None:
            if self.first_stage_layers is not None or self.last_stage_layers is not None:
                raise LayoutError("a spelled pipeline leaves no place for first_stage_layers and last_stage_layers")
            pipeline_stages(self.pipeline, self.pp * self.vpp)
        if (self.tp * self.cp * self.dp) % (self.ep * self.etp):
            raise LayoutError(
                f"ep*etp={self.ep * self.etp} does not divide the {self.tp * self.cp * self.dp} ranks of a stage"
            )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.cp * self.dp

    def coordinate(self, rank: int) -> Coordinate:
        """Coordinate of a rank. Raises LayoutError outside ``range(world_size)``."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank} is outside a layout of {self.world_size} ranks")
        rank, tp = divmod(rank, self.tp)
        rank, cp = divmod(rank, self.cp)
        pp, dp = divmod(rank, self.dp)
        return Coordinate(tp=tp, cp=cp, dp=dp, pp=pp)

    def rank(self, coordinate: Coordinate) -> int:
        """Rank at a coordinate. Raises LayoutError off the grid."""
        for axis in Coordinate._fields:
            if not 0 <= getattr(coordinate, axis) < getattr(self, axis):
                raise LayoutError(f"coordinate {coordinate} is off the {axis} axis of size {getattr(self, axis)}")
        return coordinate.tp + self.tp * (coordinate.cp + self.cp * (coordinate.dp + self.dp * coordinate.pp))

    def coordinates(self) -> Iterator[Coordinate]:
        """All coordinates in rank order."""
        return (self.coordinate(rank) for rank in range(self.world_size))

    def expert_coordinate(self, coordinate: Coordinate) -> ExpertCoordinate:
        """Where a rank stands for its stage's expert layers (Megatron-Core's expert rank generator)."""
        place = coordinate.tp + self.tp * (coordinate.cp + self.cp * coordinate.dp)
        rest, etp = divmod(place, self.etp)
        dp, ep = divmod(rest, self.ep)
        return ExpertCoordinate(etp=etp, ep=ep, dp=dp)

    @property
    def expert_dp(self) -> int:
        """Ranks of a stage that hold the same experts."""
        return self.tp * self.cp * self.dp // (self.ep * self.etp)

    def ranks_along(self, axis: str, coordinate: Coordinate) -> list[int]:
        """Ranks that differ from ``coordinate`` on ``axis`` (tp, cp, dp or pp) only, in the order of that axis."""
        return [self.rank(coordinate._replace(**{axis: place})) for place in range(getattr(self, axis))]

    def layers_of_stage(self, num_layers: int, pp: int, chunk: int = 0) -> range:
        """Global layer indices of model chunk ``chunk`` (0 without virtual stages) on pipeline stage ``pp``.

        Megatron-Core's arithmetic (``get_transformer_layer_offset``): fixed first and last stages, the other stages
        share the rest evenly; chunk c of stage p holds the p-th part of the c-th pass over the stages.

        Raises:
            LayoutError: the layers do not divide.
        """
        if not (0 <= pp < self.pp and 0 <= chunk < self.vpp):
            raise LayoutError(f"stage {pp} chunk {chunk} is outside pp={self.pp} vpp={self.vpp}")
        if self.pipeline is not None:
            per_stage = pipeline_stages(self.pipeline, self.pp * self.vpp)
            if sum(per_stage) != num_layers:
                raise LayoutError(f"pipeline {self.pipeline!r} has {sum(per_stage)} layers, the model {num_layers}")
            place = chunk * self.pp + pp
            return range(sum(per_stage[:place]), sum(per_stage[: place + 1]))
        counts = self._stage_layer_counts(num_layers)
        if any(count % self.vpp for count in counts):
            raise LayoutError(f"stages of {counts} layers do not divide into vpp={self.vpp} chunks")
        per_chunk = [count // self.vpp for count in counts]
        start = chunk * sum(per_chunk) + sum(per_chunk[:pp])
        return range(start, start + per_chunk[pp])

    def _stage_layer_counts(self, num_layers: int) -> list[int]:
        fixed = {0: self.first_stage_layers, self.pp - 1: self.last_stage_layers}
        counts = [fixed.get(stage) for stage in range(self.pp)]
        rest = num_layers - sum(count for count in counts if count is not None)
        free = counts.count(None)
        if rest < 0 or (free == 0 and rest) or (free and (rest % free or rest == 0)):
            outer = {"first": self.first_stage_layers, "last": self.last_stage_layers}
            given = ", ".join(f"{count} in the {place}" for place, count in outer.items() if count is not None)
            raise LayoutError(
                f"{num_layers} layers do not divide into pp={self.pp} stages{given and f' with {given}'}",
                fix="choose pp that divides the layers, or give the first and last stage their own number",
            )
        return [rest // free if count is None else count for count in counts]

    def padded_vocab_size(self, vocab_size: int) -> int:
        """Rows of the embedding over all tensor-parallel ranks: the next multiple of ``vocab_rows_multiple * tp``.

        The one place that decides it. The shard of rank t is rows ``t * padded / tp`` onwards; rows from
        ``vocab_size`` on are padding: zero, and left out of every softmax and export.
        """
        multiple = self.vocab_rows_multiple * self.tp
        return -(-vocab_size // multiple) * multiple

    def check_split(self, sizes: Mapping[str, int]) -> None:
        """Raises LayoutError when something that tensor parallelism divides, by name, does not divide by tp."""
        for what, size in sizes.items():
            if size % self.tp:
                raise LayoutError(f"{size} {what} do not divide by tp={self.tp}", fix=f"choose tp that divides {size}")


def pipeline_stages(text: str, num_stages: int) -> list[int]:
    """Decoder layers of each stage of a spelled pipeline (Megatron-Core's ``pipeline_parallel_layer_layout.py``).

    ``E`` is the embedding, ``t`` a decoder layer, ``L`` the head, ``|`` ends a stage, ``(...)*n`` and ``x*n`` repeat;
    commas mean nothing.

    Raises:
        LayoutError: other letters, another number of stages, or embedding and head elsewhere than first and last.
    """
    spelled = text.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        spelled = re.sub(pattern, lambda match: match.group(1) * int(match.group(2)), spelled)
    stages = spelled.split("|")
    problem = None
    if strange := sorted(set(spelled) - set("EtL|")):
        meaning = " (multi-token prediction is not supported)" if strange == ["m"] else ""
        problem = f"has the letters {', '.join(strange)}{meaning}, expected E, t, L and |"
    elif not spelled.startswith("E") or not spelled.endswith("L") or spelled.count("E") + spelled.count("L") != 2:
        problem = "must start with its only E and end with its only L"
    elif len(stages) != num_stages:
        problem = f"has {len(stages)} stages, expected pp*vpp={num_stages}"
    if problem is not None:
        raise LayoutError(f"pipeline {text!r} {problem}")
    return [stage.count("t") for stage in stages]
