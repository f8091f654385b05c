"""``megarl status`` and ``megarl attach``: what a run's directory says while it goes on, and after.

Reads files only, so it works from a login node and disturbs nothing: heartbeats, metrics, the ending, and the logs of
all processes, whose warnings and errors it merges by time.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megarl.errors import ConfigError
from megarl.observability.console import Console
from megarl.observability.ending import Ending, read_ending
from megarl.observability.heartbeat import read_beats

State = Literal["starting", "running", "silent", "finished", "ended"]

SILENT_S = 60.0
"""Age of the controller's heartbeat from which on it is not believed to live; it beats every ten seconds."""

POLL_S = 1.0
"""Between two looks at a run one is attached to."""

# Of each log, where warnings are looked for.
_TAIL_BYTES = 256 * 1024
_LINE = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) (WARNING|ERROR|CRITICAL) +(\[[^\]]*\]) [\w.]+: (.*)$")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run at one moment.

    Args:
        directory: of the run.
        state: starting: no heartbeat yet; silent: its controller has stopped without a word, and nothing says why.
        attempt: how many times it was started.
        total_steps: of the configuration.
        lines: of metrics.jsonl.
        beats: heartbeats of all processes.
        ending: what ended it, if it did not end well.
    """

    directory: Path
    state: State
    attempt: int
    total_steps: int
    lines: tuple[dict[str, Any], ...]
    beats: tuple[dict[str, Any], ...]
    ending: Ending | None

    @property
    def line(self) -> str:
        """The run and its state."""
        return f"run {self.directory}: {self.state}"

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Lines of training steps, those of held-out evaluations left out."""
        return [line for line in self.lines if "timing_s/step" in line["metrics"]]

    @property
    def controller(self) -> dict[str, Any] | None:
        """The controller's heartbeat."""
        return next((beat for beat in self.beats if beat["role"] == "controller"), None)


def look(directory: Path) -> Snapshot:
    """Read a run's directory.

    Raises:
        ConfigError: the directory holds no run.
    """
    return _look(directory, _Metrics(directory / "metrics.jsonl"))


def _look(directory: Path, metrics: _Metrics) -> Snapshot:
    resolved = directory / "resolved.json"
    if not resolved.is_file():
        raise ConfigError("no run: resolved.json is missing", where=str(directory), fix="give a run's directory")
    beats = tuple(read_beats(directory / "logs"))
    ending = read_ending(directory / "ending.json")
    controller = next((beat for beat in beats if beat["role"] == "controller"), None)
    is_live = controller is not None and not controller["ended"] and controller["silent_s"] <= SILENT_S
    state: State
    if ending is not None:
        state = "ended"
    elif is_live:
        state = "running"
    elif (directory / "summary.json").is_file():
        state = "finished"
    else:
        state = "starting" if controller is None else "silent"
    attempt = 1 + len(list((directory / "logs").glob("attempt-*")))
    steps = int(json.loads(resolved.read_text(encoding="utf-8"))["config"]["run"]["steps"])
    return Snapshot(directory, state, attempt, steps, metrics.read(), beats, ending)


class _Metrics:
    """Lines of a JSONL file; what was read once is not read again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._lines: list[dict[str, Any]] = []

    def read(self) -> tuple[dict[str, Any], ...]:
        """All lines that are there now."""
        if not self._path.is_file():
            return ()
        if self._path.stat().st_size < self._position:  # the run was resumed from an earlier step
            self._position = 0
            self._lines.clear()
        with self._path.open("rb") as file:
            file.seek(self._position)
            for line in file:
                if line.endswith(b"\n"):  # the last line may be half written
                    self._lines.append(json.loads(line))
                    self._position += len(line)
        return tuple(self._lines)


def status(directory: Path, num_errors: int = 10) -> str:
    """The run in words: state, progress, what each process does, and the latest warnings and errors of all.

    Raises:
        ConfigError: the directory holds no run.
    """
    run = look(directory)
    done = run.steps[-1]["step"] if run.steps else 0
    lines = [f"{run.line}, attempt {run.attempt}, step {done} of {run.total_steps}"]
    if run.ending is not None:
        lines.append(f"ended: {run.ending.line()}")
    if run.state == "silent" and run.controller is not None:
        beat = run.controller
        heard = f"was last heard {beat['silent_s']:.0f} s ago in {beat['phase']}: it was killed, or its node was lost"
        lines.append(f"its controller, process {beat['pid']} on {beat['node']}, {heard}")
    if run.steps:
        seconds = [line["metrics"]["timing_s/step"] for line in run.steps[-10:]]
        lines.append(f"seconds a step, latest {len(seconds)}: {sum(seconds) / len(seconds):.1f}")
    if run.state in ("running", "silent"):
        lines += _processes(run.beats)
    found = errors(directory / "logs")
    latest = found[max(0, len(found) - max(0, num_errors)) :]
    if found:
        lines.append(f"warnings and errors, the latest {len(latest)} of {len(found)}:")
        lines += [f"  {text}" for text in latest]
    return "\n".join(lines)


def _processes(beats: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield f"  {'process':<16} {'node':<16} {'phase':<28} {'for':>8} {'heard':>8}"
    for beat in sorted(beats, key=lambda beat: (beat["role"] != "controller", beat["role"], beat["rank"])):
        name = f"{beat['role']} {beat['rank']}"
        running_s = beat["phase_s"] + beat["silent_s"]
        times = f"{running_s:>6.0f} s {beat['silent_s']:>6.0f} s"
        yield f"  {name:<16} {beat['node']:<16} {beat['phase']:<28} {times}"


def errors(logs: Path) -> list[str]:
    """Warnings and errors of all processes, by time: ``TIME LEVEL [role rank step] text``, with the exception if any.

    Args:
        logs: directory of the run's logs; earlier attempts are not looked at.
    """
    return _Errors(logs).read()


class _Errors:
    """Warnings and errors in a directory of logs; only files that have changed are read again."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._found: dict[Path, tuple[tuple[int, int], list[tuple[str, str]]]] = {}

    def read(self) -> list[str]:
        """Those of all files now, by time."""
        for path in sorted(self._logs.glob("*.log")):
            with path.open("rb") as file:
                now = os.fstat(file.fileno())
                version = (now.st_size, now.st_mtime_ns)
                if path in self._found and self._found[path][0] == version:
                    continue
                file.seek(max(0, now.st_size - _TAIL_BYTES))
                text = file.read().decode("utf-8", errors="replace")
            self._found[path] = (version, _errors_of(text.splitlines()))
        merged = sorted((entry for _, found in self._found.values() for entry in found), key=lambda entry: entry[0])
        return [text for _, text in merged]


def _errors_of(lines: Sequence[str]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    is_open = False
    for line in lines:
        match = _LINE.match(line)
        if match is not None:
            found.append((match[1], f"{match[1]} {match[2]} {match[3]} {match[4]}"))
            is_open = True
        elif re.match(r"^\d{4}-\d\d-\d\d ", line):
            is_open = False
        elif is_open and re.match(r"^[\w.]+(Error|Exception|Interrupt)\b", line):  # the last line of a traceback
            moment, text = found[-1]
            found[-1] = (moment, f"{text.partition(' | ')[0]} | {line}")
    return found


def attach(directory: Path, console: Console | None = None, *, sleep: Callable[[float], None] = time.sleep) -> Snapshot:
    """Show a run as its own console does, from its first step on, until it ends; returns how it was found then.

    Args:
        directory: of the run.
        console: where to show it; None is the standard output.
        sleep: waits so many seconds.

    Raises:
        ConfigError: the directory holds no run.
    """
    metrics = _Metrics(directory / "metrics.jsonl")
    run = _look(directory, metrics)
    shown = _Shown(Console("auto", run.total_steps) if console is None else console, directory / "logs")
    try:
        while True:
            run = _look(directory, metrics)
            shown.update(run)
            if run.state in ("finished", "ended", "silent"):
                if run.ending is not None:
                    shown.console.note(f"ended: {run.ending.line()}")
                return run
            sleep(POLL_S)
    finally:
        shown.console.close()


class _Shown:
    """What of a run a console has shown already."""

    def __init__(self, console: Console, logs: Path) -> None:
        self.console = console
        self._lines = 0
        self._errors = _Errors(logs)
        self._said: set[str] = set()

    def update(self, run: Snapshot) -> None:
        """Show what is new."""
        if len(run.lines) < self._lines:  # the run was resumed from an earlier step
            self._lines = 0
        for line in run.lines[self._lines :]:
            numbers = {name: number for name, number in line["metrics"].items() if number is not None}
            if "timing_s/step" in numbers:
                self.console.step(line["step"], numbers)
            else:
                said = " | ".join(f"{name.removeprefix('val/')} {number:.4g}" for name, number in numbers.items())
                self.console.note(f"step {line['step']} held out: {said}")
        self._lines = len(run.lines)
        # A process may be late with a line whose time is earlier than that of one shown already.
        for text in self._errors.read():
            if text not in self._said:
                self._said.add(text)
                self.console.note(text)
        if run.controller is not None:
            self.console.show_phase(run.controller["phase"], run.controller["phase_s"] + run.controller["silent_s"])
