"""What a person sees: the running phase with its elapsed time, one row per step, samples at validations.

Invariants:
1. ``live`` redraws one line in a terminal and prints rows above it; ``plain`` prints each line once; ``off`` nothing.
2. A column appears when the step has its metric; names decide nothing but the heading.
3. The console never raises over a metric it does not know or lacks.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TextIO, TypeAlias

from rich.console import Console as RichConsole
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from megarl.observability.trace import Span

Mode: TypeAlias = Literal["auto", "live", "plain", "off"]


@dataclass(frozen=True, slots=True)
class Column:
    """One number of the step row: its heading, the metrics it may come from (first present), its format."""

    heading: str
    metrics: tuple[str, ...]
    form: str


COLUMNS = (
    Column("reward", ("critic/score/mean",), ".3f"),
    Column("accuracy", ("reward/accuracy", "val/accuracy"), ".3f"),
    Column("loss", ("actor/loss", "train/loss"), ".4f"),
    Column("val loss", ("val/loss",), ".4f"),
    Column("length", ("response_length/mean",), ".1f"),
    Column("cut", ("response_length/clip_ratio",), ".0%"),
    Column("kl", ("actor/ppo_kl",), ".2e"),
    Column("ref kl", ("actor/kl_loss", "actor/reward_kl_penalty"), ".2e"),
    Column("clip", ("actor/pg_clipfrac",), ".2%"),
    Column("entropy", ("actor/entropy", "actor/old_entropy"), ".3f"),
    Column("grad", ("actor/grad_norm", "train/grad_norm"), ".2f"),
    Column("mismatch", ("training/rollout_log_probs_diff/mean",), ".1e"),
    Column("tokens/s", ("perf/tokens_per_s",), ",.0f"),
)
PHASE_PREFIX = "timing_s/"
"""Metrics under it are seconds per phase; ``timing_s/step`` is the whole step."""


class Console:
    """Shows a run.

    Args:
        mode: ``live``, ``plain``, ``off``, or ``auto``: live in a terminal, else plain.
        total_steps: steps of the run, for the time left.
        first_step: step before the first one this process does (a resumed run starts later).
        stream: where to write; None is the standard output.
    """

    def __init__(
        self, mode: Mode = "auto", total_steps: int = 0, *, first_step: int = 0, stream: TextIO | None = None
    ) -> None:
        self._rich = RichConsole(file=stream or sys.stdout, highlight=False, soft_wrap=True)
        self.mode: Mode = ("live" if self._rich.is_terminal else "plain") if mode == "auto" else mode
        self._total_steps = total_steps
        self._done = first_step
        self._started: list[tuple[str, float]] = []
        self._step_s: list[float] = []
        self._last_step_end = time.monotonic()
        self._headings: list[str] = []
        self._live: Live | None = None
        if self.mode == "live":
            self._live = Live(get_renderable=self._status, console=self._rich, refresh_per_second=4, transient=True)
            self._live.start()

    # -- phases: called directly, or as a listener of spans (trace.listening(console)) -------------------------------

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show a phase as running while the body runs."""
        self._started.append((name, time.monotonic()))
        try:
            yield
        finally:
            self._started.pop()

    def span_started(self, span: Span) -> None:
        """Show a span's phase as running."""
        self._started.append((span.name, span.started))

    def span_ended(self, span: Span) -> None:
        """Take it away again."""
        if (span.name, span.started) in self._started:
            self._started.remove((span.name, span.started))

    def show_phase(self, name: str, elapsed_s: float) -> None:
        """Show one phase as running for so long, in the place of all others: that of another process."""
        self._started[:] = [(name, time.monotonic() - elapsed_s)]

    # -- lines -------------------------------------------------------------------------------------------------------

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Print the row of a finished step."""
        now = time.monotonic()
        elapsed_s = values.get(PHASE_PREFIX + "step", now - self._last_step_end)
        self._last_step_end = now
        self._done = step
        self._step_s = [*self._step_s[-9:], elapsed_s]
        cells = [("step", f"{step}/{self._total_steps}" if self._total_steps else str(step))]
        for column in COLUMNS:
            found = next((values[name] for name in column.metrics if name in values), None)
            if found is not None:
                cells.append((column.heading, format(found, column.form) if math.isfinite(found) else str(found)))
        cells.append(("s", f"{elapsed_s:.2f}"))
        cells.append(("left", _duration(self.left_s())))
        phases = _phases(values)
        if self.mode == "plain":
            self._print(" | ".join(f"{heading} {text}" for heading, text in cells) + (f" | {phases}" if phases else ""))
        elif self.mode == "live":
            headings = [heading for heading, _ in cells]
            widths = [max(len(heading), len(text), 7) for heading, text in cells]
            if headings != self._headings:
                self._headings = headings
                self._print("[bold]" + " ".join(h.rjust(w) for h, w in zip(headings, widths, strict=True)) + "[/bold]")
            row = " ".join(text.rjust(width) for (_, text), width in zip(cells, widths, strict=True))
            self._print(f"{row}  [dim]{escape(phases)}[/dim]")

    def samples(self, rows: Sequence[Mapping[str, Any]], title: str = "samples") -> None:
        """Print decoded samples: dicts with ``prompt``, ``response``, ``score`` and further keys such as ``answer``."""
        if self.mode == "off" or not rows:
            return
        names = list(dict.fromkeys(name for row in rows for name in row))
        if self.mode == "plain":
            for row in rows:
                self._print(
                    f"{title}: " + " | ".join(f"{name}={_one_line(row[name])}" for name in names if name in row)
                )
            return
        table = Table(title=title, title_justify="left", show_lines=True)
        for name in names:
            table.add_column(name, overflow="fold")
        for row in rows:
            table.add_row(*(Text(_cell(row.get(name, ""))) for name in names))
        self._rich.print(table)

    def note(self, text: str) -> None:
        """Print one line."""
        if self.mode != "off":
            self._print(escape(text) if self.mode == "live" else text)

    def left_s(self) -> float | None:
        """Expected seconds to the end, from the median of the last ten steps; None before the first."""
        if not self._step_s or not self._total_steps:
            return None
        return sorted(self._step_s)[len(self._step_s) // 2] * max(0, self._total_steps - self._done)

    def close(self) -> None:
        """Take the live line away; the console is silent afterwards."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        self.mode = "off"

    def _print(self, line: str) -> None:
        self._rich.print(line, markup=self.mode == "live")
        if self.mode == "plain":
            self._rich.file.flush()  # a log file is read while the run goes on

    def _status(self) -> Text:
        now = time.monotonic()
        running = " > ".join(f"{name} {now - started:.1f} s" for name, started in list(self._started)) or "idle"
        total = f"/{self._total_steps}" if self._total_steps else ""
        return Text(f"step {self._done + 1}{total}  {running}  left {_duration(self.left_s())}", style="cyan")


def _phases(values: Mapping[str, float]) -> str:
    phases = {name.removeprefix(PHASE_PREFIX): s for name, s in values.items() if name.startswith(PHASE_PREFIX)}
    phases.pop("step", None)
    return " ".join(f"{name} {seconds:.2f}s" for name, seconds in phases.items())


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _cell(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _one_line(value: Any) -> str:
    return repr(value) if isinstance(value, str) else _cell(value)
