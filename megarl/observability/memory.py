"""Measured memory beside its forecast: what each number is compared with, and a line per phase.

Names are ``ROLE/PART``. Parts of the state are weights, gradients and optimizer, and what of the last is in host
memory; of a pass ``KIND_activations``, the most that is alive above the state, and ``KIND_peak``, both together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

MIB = 2**20
STATE = ("weights", "gradients", "optimizer")
ON_HOST = "optimizer_on_host"
PREFIX, FORECAST = "memory/", "_forecast"
# Which part of a forecast a pass of a kind takes.
_PASSES = {"update": "training", "log_probs": "inference", "values": "inference"}
_ACTIVATIONS, _PEAK = "_activations", "_peak"


def expected_bytes(ranks: Mapping[str, Mapping[str, int]], name: str) -> int | None:
    """The forecast of ``ROLE/PART``; None where there is none.

    Args:
        ranks: for each role the forecast parts of its fullest rank, state and passes.
        name: of the number.
    """
    role, _, part = name.partition("/")
    if role not in ranks:
        return None
    if part in (*STATE, ON_HOST):
        return ranks[role][part]
    kind, _, what = part.rpartition("_")
    if kind not in _PASSES:
        return None
    taken = ranks[role][_PASSES[kind]]
    if what == _ACTIVATIONS[1:]:
        return taken
    # The reference policy lives in the actor's processes; both hold their state whichever of them runs.
    members = {"actor", "reference"} & set(ranks) if role in ("actor", "reference") else {role}
    return taken + sum(ranks[member][one] for member in members for one in STATE)


def memory_lines(numbers: Mapping[str, float]) -> Iterator[str]:
    """A line for each phase whose memory is among the metrics, in MiB with the forecast in brackets."""
    for name in numbers:
        if not (name.startswith(PREFIX) and name.endswith(_ACTIVATIONS)):
            continue
        phase = name.removesuffix(_ACTIVATIONS)
        role, _, kind = phase.removeprefix(PREFIX).partition("/")
        state = [(one.replace("_", " "), f"{PREFIX}{role}/{one}") for one in (*STATE, ON_HOST)]
        parts = [*state, ("activations", name), ("peak", phase + _PEAK)]
        cells = [f"{label} {_cell(numbers, key)}" for label, key in parts if key in numbers]
        yield f"memory of {role} in {kind}, MiB (forecast): {', '.join(cells)}"


def _cell(numbers: Mapping[str, float], key: str) -> str:
    expected = numbers.get(key + FORECAST)
    return f"{numbers[key] / MIB:.1f}" + (f" ({expected / MIB:.1f})" if expected is not None else "")
