"""What a run gives up when it is told to stop, on a clock of the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megarl.controller import stopping as module
from megarl.controller.stopping import AbandonedError, Stopping
from megarl.errors import StoppedError
from megarl.observability.trace import listening, span
from tests.unit.controller.conftest import Clock


def ask(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    asked = clock.now
    monkeypatch.setattr(module.signals, "stop_asked", lambda: asked)


@contextmanager
def steps_of(clock: Clock, *, step_s: float, save_s: float, within_s: float) -> Iterator[Stopping]:
    """Three steps and a save have been measured."""
    stopping = Stopping(within_s, clock)
    with listening(stopping):
        for _ in range(3):
            with span("step"), span("update_actor"):
                clock.now += step_s
        with span("save"):
            clock.now += save_s
        stopping.note_save(save_s)
        yield stopping


def test_nothing_is_given_up_unless_asked(clock: Clock):
    with steps_of(clock, step_s=10, save_s=1, within_s=1) as stopping, span("step"), span("rollout"):
        clock.now += 1000
        assert not stopping.is_asked
        stopping.check()


def test_a_step_that_fits_is_finished_and_one_that_overruns_its_forecast_is_abandoned_as_late_as_possible(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    with steps_of(clock, step_s=10, save_s=5, within_s=20) as stopping, span("step"), span("rollout"):
        clock.now += 4
        ask(monkeypatch, clock)
        for _ in range(15):
            stopping.check()
            clock.now += 1
        stopping.check()
        clock.now += 0.5
        with pytest.raises(AbandonedError):
            stopping.check()


def test_a_step_that_cannot_be_finished_is_abandoned_at_once(clock: Clock, monkeypatch: pytest.MonkeyPatch):
    with steps_of(clock, step_s=100, save_s=5, within_s=60) as stopping, span("step"), span("rollout"):
        ask(monkeypatch, clock)
        with pytest.raises(AbandonedError):
            stopping.check()


def test_from_its_first_update_on_a_step_is_not_abandoned_until_the_deadline(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    with steps_of(clock, step_s=100, save_s=5, within_s=60) as stopping, span("step"):
        with span("update_critic"):
            ask(monkeypatch, clock)
            stopping.check()
        with span("old_log_probs"):
            stopping.check()
            clock.now += 60
            with pytest.raises(StoppedError, match=r"did not save within 60 s .*step/old_log_probs"):
                stopping.check()


def test_the_next_step_may_be_abandoned_again(clock: Clock, monkeypatch: pytest.MonkeyPatch):
    with steps_of(clock, step_s=100, save_s=5, within_s=60) as stopping, span("step"), span("rollout"):
        ask(monkeypatch, clock)
        with pytest.raises(AbandonedError):
            stopping.check()


@pytest.mark.parametrize("phase", ["save", "export"])
def test_saving_and_exporting_go_on_to_the_deadline(clock: Clock, monkeypatch: pytest.MonkeyPatch, phase: str):
    with steps_of(clock, step_s=1, save_s=50, within_s=60) as stopping, span(phase):
        ask(monkeypatch, clock)
        clock.now += 59
        stopping.check()
        clock.now += 1
        with pytest.raises(StoppedError):
            stopping.check()


def test_before_the_first_step_there_is_nothing_to_save(clock: Clock, monkeypatch: pytest.MonkeyPatch):
    stopping = Stopping(60, clock)
    with listening(stopping), span("start"):
        ask(monkeypatch, clock)
        with pytest.raises(StoppedError, match="before the first step"):
            stopping.check()


def test_without_a_measured_save_a_third_of_the_time_is_kept_for_it(clock: Clock, monkeypatch: pytest.MonkeyPatch):
    stopping = Stopping(60, clock)
    with listening(stopping), span("validation"):
        ask(monkeypatch, clock)
        clock.now += 40
        stopping.check()
        clock.now += 0.1
        with pytest.raises(AbandonedError):
            stopping.check()
