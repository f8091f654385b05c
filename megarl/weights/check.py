"""Proof that the regions of all ranks hold every canonical element, and fill every parameter, exactly once.

Loads no torch.

Invariants:
1. Replicas hold equal boxes; the distinct boxes of a tensor tile it without gap or overlap.
2. The regions of a rank never overlap inside a parameter; what they leave is padding, and it is listed.
3. Names are matched by exactly one rule and one parameter; all that are not are listed at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from megarl.errors import LayoutError
from megarl.models.rules import NamingScheme, Rule, template_pattern
from megarl.weights.layout import parameter_shapes
from megarl.weights.region import Box, Region, Shape, local_box, overlapping_pairs, volume, whole

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
        problems += _rank_problems(rank, regions, padding)
    if problems:
        raise LayoutError("the regions are not complete: " + _listing(problems))
    copies = sum(volume(box) * (len(replicas) - 1) for boxes in held.values() for box, replicas in boxes.items())
    return Coverage(sum(prod(shape) for shape in shapes.values()), copies, padding)


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
    found: set[NamingScheme] = set()
    for name in names:
        if name.endswith("linear_qkv.layer_norm_weight"):
            found.add("te")
        elif name.endswith(".input_layernorm.weight"):
            found.add("local")
    if len(found) != 1:
        raise LayoutError(
            "cannot tell Megatron's naming scheme: expected input_layernorm.weight or linear_qkv.layer_norm_weight, "
            + ("found both" if found else "found neither")
        )
    return found.pop()


def match_rules(names: Iterable[str], rules: Sequence[Rule], naming: NamingScheme | None = None) -> dict[str, Rule]:
    """The rule of each name: Megatron's names in the given scheme, Hugging Face's where it is None.

    Raises:
        LayoutError: listing all names that no rule matches and all that two match.
    """
    patterns = [
        (template_pattern(template), rule)
        for rule in rules
        for template in ([tensor.name for tensor in rule.hf] if naming is None else [rule.local_name(naming)])
        if not (naming is None and rule.is_copy)
    ]
    matched: dict[str, Rule] = {}
    problems: list[str] = []
    for name in names:
        found = [rule for pattern, rule in patterns if pattern.fullmatch(name)]
        if len(found) == 1:
            matched[name] = found[0]
        else:
            problems.append(f"{name} is matched by {'two rules' if found else 'no rule'}")
    if problems:
        raise LayoutError(_listing(problems))
    return matched


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


def _rank_problems(rank: int, regions: Sequence[Region], padding: dict[tuple[int, str], int]) -> list[str]:
    """Overlaps inside the parameters of one rank; what is left over is added to ``padding``."""
    problems: list[str] = []
    for parameter, shape in parameter_shapes(regions).items():
        inside = [region for region in regions if region.local_name == parameter and region.numel]
        boxes = [local_box(region) for region in inside]
        problems += [
            f"rank {rank}: {region.tensor} {region.box} is no box inside {parameter} {shape}"
            for region, box in zip(inside, boxes, strict=True)
            if box is None
        ]
        known = [box for box in boxes if box is not None]
        problems += [
            f"rank {rank}: {known[one]} and {known[other]} of {parameter} are filled twice"
            for one, other in overlapping_pairs(known)
        ]
        if left := prod(shape) - sum(map(volume, known)):
            padding[rank, parameter] = left
    return problems


def _listing(problems: Sequence[str]) -> str:
    shown = "; ".join(problems[:_SHOWN])
    return shown if len(problems) <= _SHOWN else f"{shown}; and {len(problems) - _SHOWN} more"
