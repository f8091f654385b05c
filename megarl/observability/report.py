"""``megarl report``: what a run directory says afterwards, the forecast beside what was measured.

Reads ``forecast.json`` and ``metrics.jsonl`` only; a run still going on has them too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megarl.errors import ConfigError

MIB = 2**20
_STATE = ("weights", "gradients", "optimizer")
# Which part of the forecast a measured peak holds beside the state.
_PASSES = {
    "update_peak": ("actor", "training"),
    "log_probs_peak": ("actor", "inference"),
    "ref_log_probs_peak": ("reference", "inference"),
    "values_peak": ("critic", "inference"),
}


def report(directory: Path) -> str:
    """The report of a run.

    Raises:
        ConfigError: the directory holds no run.
    """
    metrics = directory / "metrics.jsonl"
    if not metrics.is_file():
        raise ConfigError("no run: metrics.jsonl is missing", where=str(directory), fix="give a run's directory")
    steps = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines() if line.strip()]
    lines = [f"run {directory}: {max((line['step'] for line in steps), default=0)} steps"]
    lines += _seconds(steps)
    forecast = directory / "forecast.json"
    if not forecast.is_file():
        return "\n".join([*lines, "memory: the run has no forecast.json"])
    lines += _memory(json.loads(forecast.read_text(encoding="utf-8")), steps)
    return "\n".join(lines)


def _seconds(steps: list[dict[str, Any]]) -> Iterator[str]:
    """Mean seconds of each phase, the first step left out where there are others: it warms up."""
    timed = [line["metrics"] for line in steps if "timing_s/step" in line["metrics"]]
    timed = timed[1:] if len(timed) > 1 else timed
    names = dict.fromkeys(name for metrics in timed for name in metrics if name.startswith("timing_s/"))
    if not names:
        return
    yield "seconds a step:"
    for name in names:
        found = [metrics[name] for metrics in timed if metrics.get(name) is not None]
        yield f"  {name.removeprefix('timing_s/'):<16} {sum(found) / len(found):10.3f}"


def _memory(forecast: Mapping[str, Any], steps: list[dict[str, Any]]) -> Iterator[str]:
    measured: dict[str, float] = {}
    for line in steps:
        measured |= {name: value for name, value in line["metrics"].items() if name.startswith("memory/")}
    if not measured:
        yield "memory: not measured yet (at the second step)"
        return
    on_cpu = forecast["capacity"] is None
    yield "memory of the fullest rank, MiB:"
    yield f"  {'':<28} {'forecast':>10} {'measured':>10} {'error':>7}"
    for name, value in measured.items():
        _, role, part = name.split("/")
        expected = _expected(forecast["ranks"], role, part)
        if part in _STATE and expected is not None:
            yield _row(f"{role} {part}", expected, value)
        elif on_cpu or expected is None:
            yield f"  {f'{role} {part}':<28} {'':>10} {value / MIB:>10.1f}"
        else:
            yield _row(f"{role} {part}", expected, value)
    if on_cpu:
        yield "  on CPU a peak is that of the whole process, libraries included, and has no forecast"


def _row(name: str, expected: float, measured: float) -> str:
    error = f"{expected / measured - 1:+7.1%}" if measured else ""
    return f"  {name:<28} {expected / MIB:>10.1f} {measured / MIB:>10.1f} {error}"


def _expected(ranks: Mapping[str, Mapping[str, int]], role: str, part: str) -> float | None:
    if part in _STATE:
        return ranks[role][part] if role in ranks else None
    passed, kind = _PASSES[part]
    holder = role if part == "update_peak" else passed
    if holder not in ranks:
        return None
    # The reference policy lives in the actor's processes; both hold their state whichever of them runs.
    members = [role, "reference"] if role == "actor" and "reference" in ranks else [role]
    return sum(ranks[member][part] for member in members for part in _STATE) + ranks[holder][kind]
