"""The console in its modes."""

from __future__ import annotations

import io
import math
import time

import pytest

from megarl.observability.console import Console
from megarl.observability.trace import listening, span

VALUES = {
    "critic/score/mean": 0.51234,
    "response_length/mean": 5.25,
    "actor/pg_clipfrac": 0.013,
    "actor/entropy": math.nan,
    "timing_s/rollout": 1.5,
    "timing_s/update_actor": 0.5,
    "timing_s/step": 2.0,
    "unknown/metric": 3.0,
}


def test_plain_prints_one_line_a_step():
    stream = io.StringIO()
    console = Console("auto", 100, stream=stream)
    assert console.mode == "plain"
    console.step(1, VALUES)
    assert stream.getvalue() == (
        "step 1/100 | reward 0.512 | length 5.2 | clip 1.30% | entropy nan | s 2.00 | left 3:18 "
        "| rollout 1.50s update_actor 0.50s\n"
    )


def test_the_time_left_is_of_the_steps_that_remain():
    console = Console("plain", 10, first_step=4, stream=io.StringIO())
    assert console.left_s() is None
    for step, seconds in ((5, 30.0), (6, 2.0), (7, 2.0)):  # a slow first step does not count for long
        console.step(step, {"timing_s/step": seconds})
    assert console.left_s() == pytest.approx(6.0)


def test_off_prints_nothing_and_close_silences():
    for mode in ("off", "plain"):
        stream = io.StringIO()
        console = Console(mode, 3, stream=stream)
        if mode == "plain":
            console.close()
        console.step(1, VALUES)
        console.note("hello")
        console.samples([{"prompt": "a", "response": "b", "score": 1.0}])
        console.close()
        assert stream.getvalue() == ""


def test_samples_are_one_line_each_when_plain():
    stream = io.StringIO()
    console = Console("plain", stream=stream)
    console.samples([{"prompt": "1+1=\n", "response": "[bold]2", "score": 1.0}], title="validation")
    assert stream.getvalue() == "validation: prompt='1+1=\\n' | response='[bold]2' | score=1.000\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "TTY_COMPATIBLE", "FORCE_COLOR", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()


def test_live_shows_the_running_phase_and_keeps_rows(terminal):
    console = Console("auto", 5, stream=terminal)
    assert console.mode == "live"
    with listening(console), span("rollout"), span("generate"):
        assert console._status().plain.startswith("step 1/5  rollout 0.0 s > generate 0.0 s")
        time.sleep(0.3)
    with console.phase("saving"):
        assert "saving" in console._status().plain
    assert "idle" in console._status().plain
    console.step(1, VALUES)
    console.step(2, VALUES)
    console.note("[not markup]")
    console.samples([{"prompt": "[bold]a", "response": "b", "score": 0.5}])
    console.close()
    written = terminal.getvalue()
    assert written.count("reward") == 1  # the heading is not repeated
    assert "rollout 0." in written and "0.512" in written and "[not markup]" in written and "[bold]a" in written


def test_a_row_is_complete_without_any_known_metric():
    stream = io.StringIO()
    Console("plain", stream=stream).step(3, {})
    assert stream.getvalue().startswith("step 3 | s ")
