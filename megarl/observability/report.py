"""``megarl report``: what a run directory says afterwards, the forecast beside what was measured.

Reads ``forecast.json`` and ``metrics.jsonl`` only; a run still going on has them too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megarl.errors import ConfigError
from megarl.observability.memory import FORECAST, MIB, PREFIX, expected_bytes


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
    path = directory / "forecast.json"
    forecast = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    lines += _seconds({} if forecast is None else forecast.get("seconds", {}), steps)
    lines += ["memory: the run has no forecast.json"] if forecast is None else _memory(forecast, steps)
    return "\n".join(lines)


def _seconds(forecast: Mapping[str, float], steps: list[dict[str, Any]]) -> Iterator[str]:
    """Mean seconds of each phase, the first step left out where there are others: it warms up."""
    timed = [line["metrics"] for line in steps if "timing_s/step" in line["metrics"]]
    timed = timed[1:] if len(timed) > 1 else timed
    names = dict.fromkeys(name for metrics in timed for name in metrics if name.startswith("timing_s/"))
    if not names:
        return
    yield "seconds a step:"
    if forecast:
        yield f"  {'':<16} {'measured':>10} {'forecast':>10} {'error':>7}"
    for name in names:
        found = [metrics[name] for metrics in timed if metrics.get(name) is not None]
        phase, mean = name.removeprefix("timing_s/"), sum(found) / len(found)
        expected = forecast.get(phase)
        beside = "" if expected is None or not mean else f" {expected:>10.3f} {expected / mean - 1:+7.1%}"
        yield f"  {phase:<16} {mean:10.3f}{beside}{_speed(timed, phase)}"
    if forecast:
        yield "  the forecast is for responses and prompts of half their limits on average, on H100"


def _speed(timed: list[dict[str, Any]], phase: str) -> str:
    """Mean speed of a phase in which a role computes, and the share of the GPU's peak where that is known."""
    text = ""
    for kind, form in (("tflops", "{:10.4g} TFLOP/s a rank"), ("mfu", ", MFU {:.1%}")):
        found = [metrics[name] for metrics in timed if metrics.get(name := f"perf/{kind}/{phase}") is not None]
        text += form.format(sum(found) / len(found)) if found else ""
    return text


def _memory(forecast: Mapping[str, Any], steps: list[dict[str, Any]]) -> Iterator[str]:
    measured: dict[str, float] = {}
    for line in steps:
        found = {name: value for name, value in line["metrics"].items() if name.startswith(PREFIX)}
        measured |= {name.removeprefix(PREFIX): value for name, value in found.items()}
    if not measured:
        yield "memory: not measured yet (at the second step)"
        return
    yield "memory of the fullest rank, MiB:"
    yield f"  {'':<28} {'forecast':>10} {'measured':>10} {'error':>7}"
    for name, value in measured.items():
        if name.endswith(FORECAST):
            continue
        label, expected = name.replace("/", " "), expected_bytes(forecast["ranks"], name)
        yield f"  {label:<28} {'':>10} {value / MIB:>10.1f}" if expected is None else _row(label, expected, value)


def _row(name: str, expected: float, measured: float) -> str:
    error = f"{expected / measured - 1:+7.1%}" if measured else ""
    return f"  {name:<28} {expected / MIB:>10.1f} {measured / MIB:>10.1f} {error}"
