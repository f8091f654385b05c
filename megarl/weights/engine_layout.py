"""A rollout engine's side by arithmetic: how vLLM cuts a model over tensor-parallel ranks, from the same rules.

For plans made without an engine, and for loaders that cannot be traced; a live engine's parameters are compared with it
by ``check.check_names`` before anything is written. vLLM 0.32 and 0.33: q, k, v are stacked rather than interleaved, a
key-value head is on several ranks where there are fewer heads than ranks, the vocabulary is padded to 64 rows and then
cut, and a layer's experts are two parameters. Loads no torch.

Invariants:
1. Families come from ``megarl/models/families``; what is said here is how vLLM packs modules, and holds for all.
2. A tied head is the embedding itself and is no parameter of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megarl.errors import LayoutError
from megarl.models.registry import family_named
from megarl.models.rules import GroupedQKV, Replicate, Rule, Split, Stack, active_rules, flags
from megarl.models.spec import ModelSpec
from megarl.weights.layout import canonical_shapes_of, tensor_name
from megarl.weights.region import Box, Region, Shape, contiguous_strides

VOCAB_MULTIPLE = 64

PACKED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "q_a_proj": "fused_qkv_a_proj",
    "kv_a_proj_with_mqa": "fused_qkv_a_proj",
}
"""Modules whose rows vLLM stacks into one parameter, in the order of the rules."""

ROUTED = "experts.routed_experts."
"""Module of a layer's experts: ``w13_weight`` [experts, 2 ffn, hidden] and ``w2_weight`` [experts, hidden, ffn]."""


@dataclass(frozen=True, slots=True)
class _Part:
    """One canonical tensor's box inside a parameter, of so many rows there; for experts, of each expert in turn."""

    tensor: str
    shape: Shape
    box: Box
    rows: int
    per_expert: bool
    replica: int


def engine_regions(spec: ModelSpec, tp: int, rank: int, *, expert_parallel: bool = False) -> list[Region]:
    """The regions of one tensor-parallel rank of an engine.

    Args:
        spec: the model; engines sample, hence a language-model head.
        tp: tensor-parallel size.
        rank: place in it.
        expert_parallel: experts are dealt out whole, in contiguous blocks, instead of cut.

    Raises:
        LayoutError: the model does not divide.
    """
    if not 0 <= rank < tp:
        raise LayoutError(f"rank {rank} is outside tp={tp}")
    experts = range(0)
    if spec.moe is not None:
        experts = _experts(spec.moe.num_experts, tp, rank) if expert_parallel else range(spec.moe.num_experts)
    regions: list[Region] = []
    layouts: dict[bool, dict[str, list[_Part]]] = {}
    for stage, layers in (("first", (None,)), ("layer", range(spec.num_layers)), ("last", (None,))):
        for layer in layers:
            kind = layer is not None and spec.has_experts(layer)
            if layer is None or kind not in layouts:
                parameters = _parameters(spec, stage, layer, tp, rank, expert_parallel)
                if layer is not None:
                    layouts[kind] = parameters
            else:
                parameters = layouts[kind]
            for name, parts in parameters.items():
                regions += _regions(name.format(layer=layer), parts, layer, experts)
    return regions


def engine_replicas(
    spec: ModelSpec, *, replicas: int, tp: int, expert_parallel: bool = False
) -> dict[int, list[Region]]:
    """The regions of all ranks of several engines, numbered engine by engine."""
    one = [engine_regions(spec, tp, rank, expert_parallel=expert_parallel) for rank in range(tp)]
    return {replica * tp + rank: one[rank] for replica in range(replicas) for rank in range(tp)}


def _experts(count: int, tp: int, rank: int) -> range:
    if count % tp:
        raise LayoutError(f"{count} experts do not divide by tp={tp}", fix="choose a tp that divides the experts")
    return range(rank * count // tp, (rank + 1) * count // tp)


def _parameters(
    spec: ModelSpec, stage: str, layer: int | None, tp: int, rank: int, expert_parallel: bool
) -> dict[str, list[_Part]]:
    """The parts of every parameter of a layer, or of what is outside layers, in the order of the rules."""
    found: dict[str, list[_Part]] = {}
    present = flags(spec, value_head=False, pipelined=False, layer=layer)
    for rule in active_rules(family_named(spec.family).rules, present):
        if rule.stage == stage:
            size, place = (1, 0) if rule.is_per_expert and expert_parallel else (tp, rank)
            for name, part in _parts(rule, spec, size, place):
                found.setdefault(name, []).append(part)
    return found


def _parts(rule: Rule, spec: ModelSpec, tp: int, rank: int) -> Iterator[tuple[str, _Part]]:
    """The parameter and box of each of a rule's tensors on one rank."""
    cut = rule.cut_for("te")
    for index, (tensor, shape) in enumerate(zip(rule.hf, canonical_shapes_of(rule, spec), strict=True)):
        dim = cut.dim if isinstance(cut, Split) else 0
        replica, rows = 0, None
        match cut:
            case Replicate():
                start, stop, replica = 0, shape[0], rank
            case Split(_, padded=True):
                padded = -(-shape[dim] // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
                start, stop = _part(rule, padded, tp, rank)
                # A shard has all its rows, whatever part of them is padding.
                rows, start, stop = stop - start, min(start, shape[dim]), min(stop, shape[dim])
            case GroupedQKV():
                start, stop, replica = _head_rows(rule, spec, shape[0], tp, rank, is_query=index == 0)
            case _:
                start, stop = _part(rule, shape[dim], tp, rank)
        box = tuple((start, stop) if at == dim else (0, size) for at, size in enumerate(shape))
        rows = rows if rows is not None else box[0][1] - box[0][0]
        yield _parameter_name(tensor.name, rule), _Part(tensor.name, shape, box, rows, rule.is_per_expert, replica)


def _parameter_name(tensor: str, rule: Rule) -> str:
    if rule.is_per_expert:
        module = tensor.partition("experts.{expert}.")[0]
        return module + ROUTED + ("w13_weight" if isinstance(rule.cut, Stack) else "w2_weight")
    parts = tensor.split(".")
    if len(parts) > 1:
        parts[-2] = PACKED.get(parts[-2], parts[-2])
    return ".".join(parts)


def _regions(name: str, parts: list[_Part], layer: int | None, experts: range) -> Iterator[Region]:
    """The regions of one parameter: its parts' rows stacked, for every expert in turn."""
    inner = tuple(stop - start for start, stop in parts[0].box[1:])
    shape: Shape = (sum(part.rows for part in parts), *inner)
    strides = contiguous_strides(shape)
    per_expert = parts[0].per_expert
    local_shape = (len(experts), *shape) if per_expert else shape
    for place, expert in enumerate(experts) if per_expert else ((0, None),):
        offset = place * shape[0] * strides[0]
        for part in parts:
            tensor = tensor_name(part.tensor, layer, expert)
            yield Region(tensor, part.shape, part.box, name, local_shape, offset, strides, part.replica)
            offset += part.rows * strides[0]


def _head_rows(rule: Rule, spec: ModelSpec, rows: int, tp: int, rank: int, *, is_query: bool) -> tuple[int, int, int]:
    """Rows of q, k or v on a rank and their replica number; key-value heads are repeated where ranks outnumber them."""
    heads = spec.num_heads if is_query else spec.num_kv_heads
    if is_query or heads % tp == 0:
        start, stop = _part(rule, heads, tp, rank)
        return start * (rows // heads), stop * (rows // heads), 0
    if tp % heads:
        raise LayoutError(
            f"{heads} key-value heads do not divide by tp={tp}, nor the other way round", where=rule.hf[1].name
        )
    head, replica = divmod(rank, tp // heads)
    return head * (rows // heads), (head + 1) * (rows // heads), replica


def _part(rule: Rule, size: int, tp: int, rank: int) -> tuple[int, int]:
    if size % tp:
        raise LayoutError(f"{size} rows, columns or heads do not divide by an engine's tp={tp}", where=rule.hf[0].name)
    return rank * size // tp, (rank + 1) * size // tp
