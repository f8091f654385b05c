"""A plan as text: made on a login node, read by every rank. Loads no torch.

Names, boxes and shapes that occur many times are written once and referred to by number.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from megarl.errors import PlanError
from megarl.weights.plan import Copy, Dropped, Plan
from megarl.weights.region import Region

_FORMAT = 1


class _Table:
    """Values in the order they were first met."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Hashable, int] = {}

    def number(self, value: Hashable) -> int:
        found = self._numbers.get(value)
        if found is None:
            found = self._numbers[value] = len(self.values)
            self.values.append(value)
        return found


def to_json(plan: Plan) -> str:
    """Text that ``from_json`` reads."""
    names, boxes, places = _Table(), _Table(), _Table()

    def side(ranks: Mapping[int, Sequence[Region]]) -> list[Any]:
        return [
            [
                rank,
                [
                    [
                        names.number(r.tensor),
                        boxes.number(r.box),
                        names.number(r.local_name),
                        places.number((r.tensor_shape, r.local_shape, r.offset, r.strides)),
                        r.replica,
                    ]
                    for r in regions
                ],
            ]
            for rank, regions in ranks.items()
        ]

    content = {
        "format": _FORMAT,
        "digest": plan.digest,
        "sources": side(plan.sources),
        "destinations": side(plan.destinations),
        "copies": [[names.number(copy.tensor), boxes.number(copy.box), *copy[2:]] for copy in plan.copies],
        "dropped": [list(entry) for entry in plan.dropped],
        "names": names.values,
        "boxes": boxes.values,
        "places": places.values,
    }
    return json.dumps(content, separators=(",", ":"))


def from_json(text: str) -> Plan:
    """What ``to_json`` wrote.

    Raises:
        PlanError: another format, damaged text, or a plan that is not the one whose digest it carries.
    """
    try:
        content = json.loads(text)
        if content["format"] != _FORMAT:
            raise PlanError(f"expected a plan in format {_FORMAT}, found {content['format']}", fix="make the plan anew")
        plan = _parsed(content)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise PlanError(f"the text is no plan: {type(error).__name__}: {error}", fix="make the plan anew") from error
    if plan.digest != content["digest"]:
        raise PlanError(
            f"the plan's digest is {plan.digest}, its text says {content['digest']}", fix="make the plan anew"
        )
    return plan


def _parsed(content: Mapping[str, Any]) -> Plan:
    names = content["names"]
    boxes = [tuple((start, stop) for start, stop in box) for box in content["boxes"]]
    places = [(tuple(whole), tuple(local), offset, tuple(steps)) for whole, local, offset, steps in content["places"]]

    def region(tensor: int, box: int, local_name: int, place: int, replica: int) -> Region:
        whole, local, offset, strides = places[place]
        return Region(names[tensor], whole, boxes[box], names[local_name], local, offset, strides, replica)

    sources, destinations = (
        {rank: tuple(region(*entry) for entry in regions) for rank, regions in content[side]}
        for side in ("sources", "destinations")
    )
    copies = tuple(Copy(names[tensor], boxes[box], *ends) for tensor, box, *ends in content["copies"])
    return Plan(sources, destinations, copies, tuple(Dropped(*entry) for entry in content["dropped"]))
