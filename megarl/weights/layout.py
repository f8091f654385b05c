"""Megatron's side by arithmetic: the regions of any rank of any layout, from the family's rules.

Needs no torch, Megatron or process group. Reading order: ``megatron_regions``, ``_placed_rules``, ``_blocks``.

Invariants:
1. The rules of ``megarl/models/families`` are the only source; both directions and both naming schemes come from them.
2. Parameters come in the order of the rules, layer by layer, so that every process lists them alike.
3. What is not yet represented (virtual stages, expert parallelism) is refused, never approximated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megarl.errors import LayoutError
from megarl.models.registry import family_named
from megarl.models.rules import (
    Flag,
    GroupedQKV,
    NamingScheme,
    Replicate,
    Rule,
    Split,
    Stack,
    active_rules,
    dim_size,
    flags,
)
from megarl.models.spec import ModelSpec
from megarl.parallel.grid import Coordinate, ParallelLayout
from megarl.weights.region import Region, Shape, contiguous_strides


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive rows (or columns) of one canonical tensor inside a rank's parameter."""

    source: int
    start: int
    stop: int
    local_start: int


def megatron_regions(
    spec: ModelSpec,
    layout: ParallelLayout,
    coordinate: Coordinate,
    *,
    value_head: bool = False,
    naming: NamingScheme = "local",
) -> list[Region]:
    """The regions of one rank's parameters, in the order of the rules.

    Padding of the vocabulary lies in no region; a shard that is all padding has one region with an empty box, so that
    every parameter is named. Data-parallel and context-parallel ranks list the same boxes with
    other replica numbers; so do tensor-parallel ranks for what they replicate, and the tied head's copy.

    Raises:
        LayoutError: the model does not divide into the layout, or the layout has virtual stages or experts.
    """
    regions: list[Region] = []
    for rule, local_layer, layer in _placed_rules(spec, layout, coordinate.pp, value_head):
        shapes = canonical_shapes_of(rule, spec)
        blocks, local_shape, dim = _blocks(rule, spec, layout, coordinate.tp, shapes)
        local_strides = contiguous_strides(local_shape)
        replica = _replica(rule, layout, coordinate)
        for block in blocks:
            box = [(0, size) for size in shapes[block.source]]
            box[dim] = (block.start, block.stop)
            name = rule.hf[block.source].name
            regions.append(
                Region(
                    tensor=name.format(layer=layer),
                    tensor_shape=shapes[block.source],
                    box=tuple(box),
                    local_name=rule.local_name(naming, local_layer),
                    local_shape=local_shape,
                    offset=block.local_start * local_strides[dim],
                    strides=local_strides,
                    replica=replica,
                )
            )
    return regions


def parameter_shapes(regions: Iterable[Region]) -> dict[str, Shape]:
    """Names and shapes of the parameters that regions lie in, padding included, in their order."""
    return {region.local_name: region.local_shape for region in regions}


def canonical_shapes(spec: ModelSpec, *, value_head: bool = False) -> dict[str, Shape]:
    """Names and shapes of the model's Hugging Face tensors, in the order an export writes them."""
    shapes: dict[str, Shape] = {}
    rules = _rules(spec, flags(spec, value_head=value_head, pipelined=False))
    for stage, layers in (("first", (None,)), ("layer", range(spec.num_layers)), ("last", (None,))):
        for layer in layers:
            for rule in rules:
                if rule.stage == stage:
                    for tensor, shape in zip(rule.hf, canonical_shapes_of(rule, spec), strict=True):
                        shapes[tensor.name.format(layer=layer)] = shape
    return shapes


def canonical_shapes_of(rule: Rule, spec: ModelSpec) -> list[Shape]:
    """Shapes of a rule's Hugging Face tensors."""
    return [tuple(dim_size(spec, dim) for dim in tensor.shape) for tensor in rule.hf]


def _rules(spec: ModelSpec, present: frozenset[Flag]) -> tuple[Rule, ...]:
    return active_rules(family_named(spec.family).rules, present)


def _placed_rules(
    spec: ModelSpec, layout: ParallelLayout, stage: int, value_head: bool
) -> Iterator[tuple[Rule, int | None, int | None]]:
    """The rules of one pipeline stage with stage-local and global layer index."""
    _check_supported(layout)
    rules = _rules(spec, flags(spec, value_head=value_head, pipelined=layout.pp > 1))
    if stage == 0:
        yield from ((rule, None, None) for rule in rules if rule.stage == "first")
    for local_layer, layer in enumerate(layout.layers_of_stage(spec.num_layers, stage)):
        yield from ((rule, local_layer, layer) for rule in rules if rule.stage == "layer")
    if stage == layout.pp - 1:
        yield from ((rule, None, None) for rule in rules if rule.stage == "last")


def _check_supported(layout: ParallelLayout) -> None:
    for degree in ("vpp", "ep", "etp"):
        if getattr(layout, degree) != 1:
            raise LayoutError(
                f"weight layouts with {degree}={getattr(layout, degree)} are not supported yet", fix=f"set {degree}=1"
            )


def _replica(rule: Rule, layout: ParallelLayout, coordinate: Coordinate) -> int:
    """Number of this rank among those that hold the same boxes; 0 on the owner."""
    replica, count = (coordinate.tp, layout.tp) if isinstance(rule.cut, Replicate) else (0, 1)
    replica, count = replica + count * coordinate.cp, count * layout.cp
    replica, count = replica + count * coordinate.dp, count * layout.dp
    return replica + count * int(rule.is_copy)


def _blocks(
    rule: Rule, spec: ModelSpec, layout: ParallelLayout, tp_rank: int, shapes: list[Shape]
) -> tuple[list[Block], Shape, int]:
    """Blocks of a tensor-parallel rank's parameter, its shape, and the dim along which it is cut."""
    match rule.cut:
        case Replicate():
            (shape,) = shapes
            return [Block(0, 0, shape[0], 0)], shape, 0
        case Split(dim, padded):
            (shape,) = shapes
            rows = layout.padded_vocab_size(shape[dim]) if padded else shape[dim]
            part = _part(rule, rows, layout.tp)
            start, stop = min(tp_rank * part, shape[dim]), min((tp_rank + 1) * part, shape[dim])
            return [Block(0, start, stop, 0)], (*shape[:dim], part, *shape[dim + 1 :]), dim
        case Stack():
            parts = [_part(rule, shape[0], layout.tp) for shape in shapes]
            blocks = [
                Block(source, tp_rank * part, (tp_rank + 1) * part, sum(parts[:source]))
                for source, part in enumerate(parts)
            ]
            return blocks, (sum(parts), *shapes[0][1:]), 0
        case GroupedQKV():
            part = _part(rule, sum(shape[0] for shape in shapes), layout.tp)
            if spec.num_kv_heads % layout.tp:
                raise LayoutError(
                    f"{spec.num_kv_heads} key-value heads do not divide by tp={layout.tp}",
                    where=rule.megatron,
                    fix="choose tp that divides the key-value heads",
                )
            per_group = [shape[0] // spec.num_kv_heads for shape in shapes]
            groups = spec.num_kv_heads // layout.tp
            blocks = []
            for local_group in range(groups):
                group = tp_rank * groups + local_group
                local_start = local_group * sum(per_group)
                for source, rows in enumerate(per_group):
                    blocks.append(Block(source, group * rows, (group + 1) * rows, local_start))
                    local_start += rows
            return blocks, (part, *shapes[0][1:]), 0
    raise LayoutError(f"cut {rule.cut!r} has no arithmetic", where=rule.megatron)


def _part(rule: Rule, rows: int, tp: int) -> int:
    """Rows of one tensor-parallel rank. Raises LayoutError where they do not divide."""
    if rows % tp:
        raise LayoutError(
            f"{rows} rows or columns do not divide by tp={tp}", where=rule.megatron, fix="choose tp that divides"
        )
    return rows // tp
