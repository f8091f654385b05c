"""Proof that regions hold every canonical element once, and that a plan writes every destination element once.

Loads no torch.

Invariants:
1. Replicas hold equal boxes; the distinct boxes of a tensor tile it without gap or overlap.
2. The regions of a rank never overlap inside a parameter; what they leave is padding, and it is listed.
3. Names are matched by exactly one rule and one parameter; all that are not are listed at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from megarl.errors import LayoutError, PlanError
from megarl.models.registry import family_named
from megarl.models.rules import NamingScheme, Rule, flags, template_pattern
from megarl.models.spec import ModelSpec
from megarl.weights.layout import parameter_shapes
from megarl.weights.plan import REPLICA, TIED, Copy, Plan, collector_paused
from megarl.weights.region import (
    Box,
    Region,
    Shape,
    contains,
    contiguous_strides,
    local_box,
    overlapping_pairs,
    union_volume,
    volume,
    whole,
)

_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Coverage:
    """What a complete set of regions holds.

    Args:
        num_elements: elements of the canonical tensors.
        num_copies: elements held beyond the first copy (replicas).
        padding: elements of parameters that no region fills, by (rank, parameter); only those with some.
    """

    num_elements: int
    num_copies: int
    padding: Mapping[tuple[int, str], int]


def check_complete(ranks: Mapping[int, Sequence[Region]], shapes: Mapping[str, Shape]) -> Coverage:
    """Proves the regions of all ranks complete against the canonical shapes.

    Args:
        ranks: the regions of each rank.
        shapes: the model's canonical tensors (``layout.canonical_shapes``).

    Raises:
        LayoutError: listing every gap, overlap, unknown tensor, wrong shape and second owner.
    """
    problems: list[str] = []
    held: dict[str, dict[Box, list[int]]] = {name: {} for name in shapes}
    for rank, regions in ranks.items():
        for region in regions:
            if region.tensor not in shapes:
                problems.append(f"rank {rank}: {region.local_name} holds {region.tensor}, which the model has not")
            elif region.tensor_shape != shapes[region.tensor]:
                problems.append(
                    f"rank {rank}: {region.tensor} has shape {region.tensor_shape}, not {shapes[region.tensor]}"
                )
            elif region.numel:
                held[region.tensor].setdefault(region.box, []).append(region.replica)
    for name, boxes in held.items():
        problems += _tensor_problems(name, shapes[name], boxes)
    padding: dict[tuple[int, str], int] = {}
    for rank, regions in ranks.items():
        problems += _rank_problems(f"rank {rank}", rank, regions, padding)
    if problems:
        raise LayoutError("the regions are not complete: " + _listing(problems))
    copies = sum(volume(box) * (len(replicas) - 1) for boxes in held.values() for box, replicas in boxes.items())
    return Coverage(sum(prod(shape) for shape in shapes.values()), copies, padding)


@dataclass(frozen=True, slots=True)
class Proof:
    """What a checked plan does.

    Args:
        num_elements: elements written, over all destinations.
        num_dropped: source elements that are not sent, over all sources.
        padding: elements of destination parameters that no region fills, by (rank, parameter); they are zero.
    """

    num_elements: int
    num_dropped: int
    padding: Mapping[tuple[int, str], int]


def check_plan(plan: Plan) -> Proof:
    """Proves a plan complete, from its regions and copies alone.

    1. Every copy lies inside its source and its destination region, which are of its tensor.
    2. The copies into a destination region are disjoint and fill it; regions of a parameter are disjoint. Hence every
       destination element is written exactly once, but for padding, which is listed.
    3. What a source region holds is sent or in ``dropped``, and so is what its parameter holds beside its regions. A
       dropped replica is sent by another rank.

    Raises:
        PlanError: listing every violation with tensor and ranks.
    """
    with collector_paused():
        return _check_plan(plan)


def _check_plan(plan: Plan) -> Proof:
    problems: list[str] = []
    into: dict[tuple[int, int], list[Box]] = {}
    out: dict[tuple[int, int], set[Box]] = {}
    for copy in plan.copies:
        _, box, source, source_region, destination, destination_region = copy
        found = _copy_problems(plan, copy)
        if found:
            problems += found
            continue
        into.setdefault((destination, destination_region), []).append(box)
        out.setdefault((source, source_region), set()).add(box)
    for rank, regions in plan.sources.items():
        problems += _rank_problems(f"source rank {rank}", rank, regions, {})
    padding: dict[tuple[int, str], int] = {}
    for rank, regions in plan.destinations.items():
        for index, region in enumerate(regions):
            problems += _filling_problems(rank, region, into.get((rank, index), []))
        problems += _rank_problems(f"destination rank {rank}", rank, regions, padding)
    problems += _dropped_problems(plan, out)
    if problems:
        raise PlanError("the plan is not complete: " + _listing(problems))
    written = sum(volume(box) for boxes in into.values() for box in boxes)
    return Proof(written, sum(entry.num_elements for entry in plan.dropped), padding)


def check_names(regions: Iterable[Region], actual: Mapping[str, Shape]) -> None:
    """Compares a rank's regions with the names and shapes of the parameters a real model has.

    ``_extra_state`` entries are no weights and are passed over.

    Raises:
        LayoutError: listing all parameters no rule matches, rules without parameter, and differing shapes.
    """
    expected = parameter_shapes(regions)
    names = [name for name in actual if not name.endswith("_extra_state")]
    problems = [f"no rule matches {name}" for name in names if name not in expected]
    problems += [f"no parameter for {name}" for name in expected if name not in actual]
    problems += [
        f"{name} has shape {tuple(actual[name])}, expected {expected[name]}"
        for name in names
        if name in expected and tuple(actual[name]) != expected[name]
    ]
    if problems:
        raise LayoutError("the model's parameters are not those of the layout: " + _listing(problems))


def detect_naming(names: Iterable[str]) -> NamingScheme:
    """Whether a model's parameters carry Megatron's own or Transformer Engine's names, by their norms.

    Raises:
        LayoutError: neither or both.
    """
    known = set(names)
    found: set[NamingScheme] = set()
    for name in known:
        # Latent attention has input_layernorm in both schemes.
        if name.endswith(("linear_qkv.layer_norm_weight", "linear_kv_up_proj.layer_norm_weight")):
            found.add("te")
        elif name.endswith((".self_attention.linear_qkv.weight", ".self_attention.kv_layernorm.weight")):
            heads = name.endswith("linear_qkv.weight")
            norm = name.replace(".self_attention.linear_qkv.weight", ".input_layernorm.weight")
            if not heads or norm in known:
                found.add("local")
    if len(found) != 1:
        raise LayoutError(
            "cannot tell Megatron's naming scheme: expected input_layernorm.weight or linear_qkv.layer_norm_weight, "
            + ("found both" if found else "found neither")
        )
    return found.pop()


def match_rules(
    names: Iterable[str],
    spec: ModelSpec,
    *,
    naming: NamingScheme | None = None,
    value_head: bool = False,
    rules: Sequence[Rule] | None = None,
) -> dict[str, Rule]:
    """The rule of each name: Megatron's names in the given scheme, Hugging Face's where it is None.

    A rule matches where it holds: an expert's name in a layer of experts only, for layers and experts that the model
    has. Indices of Megatron's names are taken as the model's, that is for one stage and one expert-parallel rank.
    ``rules`` are the family's where they are None.

    Raises:
        LayoutError: listing all names that no rule matches and all that two match.
    """
    patterns = [
        (template_pattern(template), rule)
        for rule in (family_named(spec.family).rules if rules is None else rules)
        for template in ([tensor.name for tensor in rule.hf] if naming is None else {*_templates(rule, naming)})
        if not rule.is_copy
    ]
    matched: dict[str, Rule] = {}
    problems: list[str] = []
    for name in names:
        found = [
            rule
            for pattern, rule in patterns
            if (match := pattern.fullmatch(name)) and _holds(rule, match.groupdict(), spec, value_head)
        ]
        if len(found) == 1:
            matched[name] = found[0]
        else:
            problems.append(f"{name} is matched by {'two rules' if found else 'no rule'}")
    if problems:
        raise LayoutError(_listing(problems))
    return matched


def _templates(rule: Rule, naming: NamingScheme) -> Iterator[str]:
    yield rule.template(naming)
    yield rule.template(naming, grouped=True)


def _holds(rule: Rule, indices: Mapping[str, str], spec: ModelSpec, value_head: bool) -> bool:
    layer = int(indices["layer"]) if "layer" in indices else None
    if layer is not None and layer >= spec.num_layers:
        return False
    if "expert" in indices and (spec.moe is None or int(indices["expert"]) >= spec.moe.num_experts):
        return False
    return flags(spec, value_head=value_head, pipelined=False, layer=layer).issuperset(rule.when)


def _copy_problems(plan: Plan, copy: Copy) -> Sequence[str]:
    name, box, source, source_region, destination, destination_region = copy
    problems: list[str] = []
    for side, rank, index in (
        (plan.sources, source, source_region),
        (plan.destinations, destination, destination_region),
    ):
        regions = side.get(rank, ())
        if not 0 <= index < len(regions) or (region := regions[index]).tensor != name:
            problems.append(f"{_said(copy)} names a region that is not of its tensor")
        elif not contains(region.box, box):
            problems.append(f"{_said(copy)} is empty or not inside {region.box}")
    return problems


def _filling_problems(rank: int, region: Region, boxes: Sequence[Box]) -> list[str]:
    if len(boxes) == 1 and boxes[0] == region.box:
        return []
    who = f"destination rank {rank}: {region.tensor} {region.box}"
    problems = [f"{who} gets {boxes[one]} and {boxes[other]}" for one, other in overlapping_pairs(boxes)]
    missing = region.numel - union_volume(boxes)
    return [*problems, f"{who} gets {missing} elements from nobody"] if missing else problems


def _dropped_problems(plan: Plan, out: Mapping[tuple[int, int], set[Box]]) -> list[str]:
    """Source elements neither sent nor listed, listed and sent, or listed as replicas of what nobody sends."""
    listed: dict[tuple[int, str, str], int] = {}
    for entry in plan.dropped:
        key = (entry.rank, entry.local_name, entry.tensor)
        listed[key] = listed.get(key, 0) + entry.num_elements
    found: dict[tuple[int, str, str], int] = {}
    sent: dict[tuple[str, Box], set[Box]] = {}
    for rank, regions in plan.sources.items():
        for index, region in enumerate(regions):
            boxes = out.get((rank, index), set())
            key = (rank, region.local_name, region.tensor)
            found[key] = found.get(key, 0) + region.numel - union_volume(boxes)
            padding = (rank, region.local_name, "")
            found[padding] = found.get(padding, prod(region.local_shape)) - region.numel
            sent.setdefault((region.tensor, region.box), set()).update(boxes)
    problems = [
        f"source rank {rank}: {left} elements of {tensor or 'padding'} in {name} are not sent, "
        f"{listed.get(key, 0)} listed"
        for key, left in found.items()
        for rank, name, tensor in [key]
        if left != listed.get(key, 0)
    ]
    problems += [f"dropped lists {key}, which no source holds" for key in listed if key not in found]
    replicas = {entry.tensor for entry in plan.dropped if entry.reason in (REPLICA, TIED)}
    problems += [
        f"{name} {box} is listed as a copy, and nobody sends all of it"
        for (name, box), boxes in sent.items()
        if name in replicas and union_volume(boxes) != volume(box)
    ]
    return problems


def _said(copy: Copy) -> str:
    return f"{copy.tensor} {copy.box} from rank {copy.source} to rank {copy.destination}"


def _tensor_problems(name: str, shape: Shape, boxes: Mapping[Box, list[int]]) -> list[str]:
    distinct = list(boxes)
    problems = [f"{name}: {distinct[one]} and {distinct[other]} overlap" for one, other in overlapping_pairs(distinct)]
    missing = volume(whole(shape)) - sum(map(volume, distinct))
    if not problems and missing:
        problems.append(f"{name}: {missing} of {volume(whole(shape))} elements are held by no rank")
    problems += [
        f"{name}: {box} has replicas {sorted(replicas)}, expected one of each number from 0"
        for box, replicas in boxes.items()
        if sorted(replicas) != list(range(len(replicas)))
    ]
    return problems


@lru_cache(maxsize=1 << 12)
def _filling(shape: Shape, places: tuple[tuple[Box, int, tuple[int, ...]], ...]) -> tuple[tuple[str, ...], int]:
    """What is wrong with a parameter's regions, and how many elements none fills; layers and ranks are alike.

    Args:
        shape: the parameter's.
        places: box, offset and strides of each region.
    """
    if len(places) == 1 and places[0][1] == 0 and places[0][2] == contiguous_strides(shape):
        if tuple(stop - start for start, stop in places[0][0]) == shape:
            return (), 0
    problems: list[str] = []
    known: list[Box] = []
    for box, offset, strides in places:
        inside = local_box(Region("", (), box, "", shape, offset, strides))
        if inside is None:
            problems.append(f"{box} at {offset} with strides {strides} is no box inside {shape}")
        else:
            known.append(inside)
    problems += [f"{known[one]} and {known[other]} are filled twice" for one, other in overlapping_pairs(known)]
    return tuple(problems), prod(shape) - sum(map(volume, known))


def _rank_problems(who: str, rank: int, regions: Sequence[Region], padding: dict[tuple[int, str], int]) -> list[str]:
    """Overlaps inside the parameters of one rank; what is left over is added to ``padding``."""
    problems: list[str] = []
    parameters: dict[str, list[Region]] = {}
    for region in regions:
        parameters.setdefault(region.local_name, []).append(region)
    for parameter, held in parameters.items():
        if any(region.local_shape != held[0].local_shape for region in held):
            problems.append(f"{who}: {parameter} has two shapes")
            continue
        found, left = _filling(held[0].local_shape, tuple((r.box, r.offset, r.strides) for r in held if r.numel))
        problems += [f"{who}: {parameter}: {problem}" for problem in found]
        if left:
            padding[rank, parameter] = left
    return problems


def _listing(problems: Sequence[str]) -> str:
    shown = "; ".join(problems[:_SHOWN])
    return shown if len(problems) <= _SHOWN else f"{shown}; and {len(problems) - _SHOWN} more"
