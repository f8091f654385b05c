"""Megatron's side by arithmetic: the regions of any rank of any layout, from the family's rules.

Needs no torch, Megatron or process group. Reading order: ``megatron_regions``, ``_Placed``, ``_blocks``.

Invariants:
1. The rules of ``megarl/models/families`` are the only source; both directions and both naming schemes come from them.
2. Parameters come in the order of the rules, layer by layer, so that every process lists them alike.
3. With virtual stages a parameter's name starts with its chunk, ``model0.``, as checkpoints spell it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from megarl.errors import LayoutError
from megarl.models.registry import family_named
from megarl.models.rules import (
    Cut,
    GroupedQKV,
    NamingScheme,
    Replicate,
    Rule,
    Split,
    Stack,
    Stage,
    active_rules,
    dim_size,
    flags,
)
from megarl.models.spec import ModelSpec
from megarl.parallel.grid import Coordinate, ParallelLayout
from megarl.weights.region import Box, Region, Shape, contiguous_strides


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive rows (or columns) of one canonical tensor inside a rank's parameter."""

    source: int
    start: int
    stop: int
    local_start: int


@dataclass(frozen=True, slots=True)
class _Placed:
    """A rule on one rank: its parameter, for one layer where there are layers.

    Args:
        rule: the rule.
        prefix: of the parameter's name.
        local_layer: index inside the chunk.
        layer: index in the model.
    """

    rule: Rule
    prefix: str = ""
    local_layer: int | None = None
    layer: int | None = None


def megatron_regions(
    spec: ModelSpec,
    layout: ParallelLayout,
    coordinate: Coordinate,
    *,
    value_head: bool = False,
    naming: NamingScheme = "local",
    grouped_experts: bool = False,
) -> list[Region]:
    """The regions of one rank's parameters, in the order of the rules.

    Padding of the vocabulary lies in no region; a shard that is all padding has one region with an empty box, so that
    every parameter is named. Data-parallel and context-parallel ranks list the same boxes with
    other replica numbers; so do tensor-parallel ranks for what they replicate, and the tied head's copy.

    Args:
        spec: the model.
        layout: its degrees of parallelism.
        coordinate: the rank's place.
        value_head: a critic's head in place of the language model's.
        naming: Megatron's own layers, or Transformer Engine's.
        grouped_experts: a rank's experts are one module (``moe_grouped_gemm`` of Transformer Engine), each with a
            parameter of its own.

    Raises:
        LayoutError: the model does not divide into the layout.
    """
    check_divides(spec, layout)
    regions: list[Region] = []
    for placed in _placed_rules(spec, layout, coordinate.pp, value_head):
        rule = placed.rule
        template = placed.prefix + rule.template(naming, grouped=grouped_experts)
        boxes, local_shape, strides = _boxes(rule, naming, spec, layout, coordinate)
        replica = _replica(rule, naming, layout, coordinate)
        for local_expert, expert in _experts(rule, spec, layout, coordinate):
            local_name = template.format(layer=placed.local_layer, expert=local_expert)
            for source, shape, box, offset in boxes:
                tensor = tensor_name(rule.hf[source].name, placed.layer, expert)
                regions.append(Region(tensor, shape, box, local_name, local_shape, offset, strides, replica))
    return regions


def check_divides(spec: ModelSpec, layout: ParallelLayout) -> None:
    """Raises LayoutError where the model's experts do not divide into the layout, or it has none and the layout has."""
    if spec.moe is None:
        for degree in ("ep", "etp"):
            if getattr(layout, degree) != 1:
                raise LayoutError(
                    f"{degree}={getattr(layout, degree)}, but {spec.family} has no experts", fix=f"set {degree}=1"
                )
        return
    for degree, what, size in (("ep", "experts", spec.moe.num_experts), ("etp", "rows of an expert", _ffn(spec))):
        if size % getattr(layout, degree):
            raise LayoutError(
                f"{size} {what} do not divide by {degree}={getattr(layout, degree)}",
                fix=f"choose {degree} that divides the {what}",
            )


def _ffn(spec: ModelSpec) -> int:
    return 0 if spec.moe is None else spec.moe.ffn_hidden_size


def parameter_shapes(regions: Iterable[Region]) -> dict[str, Shape]:
    """Names and shapes of the parameters that regions lie in, padding included, in their order."""
    return {region.local_name: region.local_shape for region in regions}


def canonical_shapes(spec: ModelSpec, *, value_head: bool = False) -> dict[str, Shape]:
    """Names and shapes of the model's Hugging Face tensors, in the order an export writes them."""
    shapes: dict[str, Shape] = {}
    experts = spec.moe.num_experts if spec.moe is not None else 0
    for rule, layer in _canonical_rules(spec, value_head):
        sizes = canonical_shapes_of(rule, spec)
        for expert in range(experts) if rule.is_per_expert else (None,):
            for tensor, shape in zip(rule.hf, sizes, strict=True):
                shapes[tensor_name(tensor.name, layer, expert)] = shape
    return shapes


def canonical_shapes_of(rule: Rule, spec: ModelSpec) -> list[Shape]:
    """Shapes of a rule's Hugging Face tensors."""
    return [tuple(dim_size(spec, dim) for dim in tensor.shape) for tensor in rule.hf]


@lru_cache(maxsize=1 << 18)
def tensor_name(template: str, layer: int | None, expert: int | None) -> str:
    """A canonical name; one string for all ranks that hold the tensor."""
    return template.format(layer=layer, expert=expert)


def _stage_rules(
    spec: ModelSpec, stage: Stage, *, value_head: bool, pipelined: bool, layer: int | None = None
) -> list[Rule]:
    present = flags(spec, value_head=value_head, pipelined=pipelined, layer=layer)
    return [rule for rule in active_rules(family_named(spec.family).rules, present) if rule.stage == stage]


def _canonical_rules(spec: ModelSpec, value_head: bool) -> Iterator[tuple[Rule, int | None]]:
    for stage in ("first", "layer", "last"):
        for layer in range(spec.num_layers) if stage == "layer" else (None,):
            for rule in _stage_rules(spec, stage, value_head=value_head, pipelined=False, layer=layer):
                yield rule, layer


def _placed_rules(spec: ModelSpec, layout: ParallelLayout, stage: int, value_head: bool) -> Iterator[_Placed]:
    """The rules of one pipeline stage, chunk by chunk."""
    options = {"value_head": value_head, "pipelined": layout.pp > 1}
    for chunk in range(layout.vpp):
        prefix = f"model{chunk}." if layout.vpp > 1 else ""
        if (stage, chunk) == (0, 0):
            yield from (_Placed(rule, prefix) for rule in _stage_rules(spec, "first", **options))
        for local_layer, layer in enumerate(layout.layers_of_stage(spec.num_layers, stage, chunk)):
            for rule in _stage_rules(spec, "layer", **options, layer=layer):
                yield _Placed(rule, prefix, local_layer, layer)
        if (stage, chunk) == (layout.pp - 1, layout.vpp - 1):
            yield from (_Placed(rule, prefix) for rule in _stage_rules(spec, "last", **options))


def _experts(
    rule: Rule, spec: ModelSpec, layout: ParallelLayout, coordinate: Coordinate
) -> Iterable[tuple[int | None, int | None]]:
    """Local and global index of the rank's experts; one pair of None for what is not per expert."""
    if not rule.is_per_expert or spec.moe is None:
        return ((None, None),)
    count = spec.moe.num_experts // layout.ep
    first = layout.expert_coordinate(coordinate).ep * count
    return ((local, first + local) for local in range(count))


def _replica(rule: Rule, naming: NamingScheme, layout: ParallelLayout, coordinate: Coordinate) -> int:
    """Number of this rank among those that hold the same boxes; 0 on the owner."""
    if rule.is_per_expert:
        return layout.expert_coordinate(coordinate).dp
    replicated = isinstance(rule.cut_for(naming), Replicate)
    replica, count = (coordinate.tp, layout.tp) if replicated else (0, 1)
    replica, count = replica + count * coordinate.cp, count * layout.cp
    replica, count = replica + count * coordinate.dp, count * layout.dp
    return replica + count * int(rule.is_copy)


def _boxes(
    rule: Rule, naming: NamingScheme, spec: ModelSpec, layout: ParallelLayout, coordinate: Coordinate
) -> tuple[list[tuple[int, Shape, Box, int]], Shape, tuple[int, ...]]:
    """Which box of which source lies at which offset of a rank's parameter, the parameter's shape and strides."""
    expert = layout.expert_coordinate(coordinate)
    rank, size = (expert.etp, layout.etp) if rule.is_per_expert else (coordinate.tp, layout.tp)
    shapes = canonical_shapes_of(rule, spec)
    blocks, local_shape, dim = _blocks(rule, rule.cut_for(naming), spec, layout, rank, size, shapes)
    strides = contiguous_strides(local_shape)
    boxes = []
    for block in blocks:
        shape = shapes[block.source]
        box = tuple((block.start, block.stop) if at == dim else (0, rows) for at, rows in enumerate(shape))
        boxes.append((block.source, shape, box, block.local_start * strides[dim]))
    return boxes, local_shape, strides


def _blocks(
    rule: Rule, cut: Cut, spec: ModelSpec, layout: ParallelLayout, rank: int, size: int, shapes: list[Shape]
) -> tuple[list[Block], Shape, int]:
    """Blocks of one of ``size`` ranks' parameter, its shape, and the dim along which it is cut."""
    match cut:
        case Replicate():
            (shape,) = shapes
            return [Block(0, 0, shape[0], 0)], shape, 0
        case Split(dim, padded):
            (shape,) = shapes
            rows = layout.padded_vocab_size(shape[dim]) if padded else shape[dim]
            part = _part(rule, rows, size)
            start, stop = min(rank * part, shape[dim]), min((rank + 1) * part, shape[dim])
            return [Block(0, start, stop, 0)], (*shape[:dim], part, *shape[dim + 1 :]), dim
        case Stack():
            parts = [_part(rule, shape[0], size) for shape in shapes]
            blocks = [
                Block(source, rank * part, (rank + 1) * part, sum(parts[:source])) for source, part in enumerate(parts)
            ]
            return blocks, (sum(parts), *shapes[0][1:]), 0
        case GroupedQKV():
            _check_heads(rule, spec, size)
            part = _part(rule, sum(shape[0] for shape in shapes), size)
            per_source = [shape[0] // spec.num_kv_heads for shape in shapes]
            return list(_grouped_blocks(per_source, spec.num_kv_heads, rank * part, part)), (part, *shapes[0][1:]), 0
    raise LayoutError(f"cut {cut!r} has no arithmetic", where=rule.megatron)


def _grouped_blocks(rows: list[int], num_groups: int, first: int, part: int) -> Iterator[Block]:
    """Blocks of rows ``first`` to ``first + part`` where every group has ``rows[s]`` rows of each source s in turn."""
    per_group = sum(rows)
    for group in range(first // per_group, min(num_groups, -(-(first + part) // per_group))):
        at = group * per_group
        for source, count in enumerate(rows):
            start, stop = max(at, first), min(at + count, first + part)
            if start < stop:
                begin = group * count + start - at
                yield Block(source, begin, begin + stop - start, start - first)
            at += count


def _check_heads(rule: Rule, spec: ModelSpec, tp: int) -> None:
    """Megatron-Core's condition (``transformer_config.py``); with fewer key-value heads than ranks, groups are cut."""
    if spec.num_kv_heads % tp and tp % spec.num_kv_heads:
        raise LayoutError(
            f"{spec.num_kv_heads} key-value heads do not divide by tp={tp}, nor the other way round",
            where=rule.megatron,
            fix="choose tp that divides the key-value heads, or is a multiple of them",
        )


def _part(rule: Rule, rows: int, size: int) -> int:
    """Rows of one rank. Raises LayoutError where they do not divide."""
    if rows % size:
        raise LayoutError(
            f"{rows} rows or columns do not divide by {'etp' if rule.is_per_expert else 'tp'}={size}",
            where=rule.megatron,
            fix=f"choose {'etp' if rule.is_per_expert else 'tp'} that divides",
        )
    return rows // size
