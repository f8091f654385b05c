"""Who hangs, on a clock of the test's own and with stacks it makes up."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from megarl.config.schema.run import HangConfig
from megarl.controller.dispatch import Member
from megarl.controller.hang import HangWatch
from megarl.errors import HangError
from megarl.observability.stacks import Frame, Stack
from megarl.observability.trace import listening, span
from tests.unit.controller.conftest import Clock

ALL_REDUCE = Stack(
    "main",
    (Frame("/x/megarl/train/step.py", 7, "run"), Frame("/x/torch/distributed/distributed_c10d.py", 1, "all_reduce")),
)
FORWARD = Stack("main", (Frame("/x/megarl/train/step.py", 5, "forward"),))
RANKS = [Member("actor", rank, None, None, f"n{rank}") for rank in range(3)]
PENDING = {f"call {member.rank}": member for member in RANKS}


def watch_of(
    logs: Path, clock: Clock, answers: Mapping[int, list[Stack]], config: HangConfig | None = None
) -> HangWatch:
    def ask(members: Sequence[Member]) -> dict[tuple[str, int], list[Stack]]:
        return {("actor", member.rank): answers[member.rank] for member in members if member.rank in answers}

    return HangWatch(HangConfig(after_s=20, factor=5) if config is None else config, logs, ask, clock)


def hang(watch: HangWatch, clock: Clock, known_s: float, seconds: float) -> None:
    """An update that took ``known_s`` three times does not end within ``seconds``."""
    with listening(watch):
        for _ in range(3):
            with span("update"):
                clock.now += known_s
        with span("update"):
            for _ in range(int(seconds)):
                clock.now += 1
                watch.check(PENDING)


def test_a_phase_within_its_forecast_is_left_alone(tmp_path: Path, clock: Clock):
    hang(watch_of(tmp_path, clock, {}), clock, known_s=10, seconds=50)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("known_s", "at_s"), [(10, 51), (1, 21), (1000, 301)])
def test_a_phase_is_overdue_at_a_multiple_of_its_median_between_two_bounds(
    tmp_path: Path, clock: Clock, known_s: float, at_s: int
):
    config = HangConfig(after_s=20, factor=5, timeout_s=300)
    with pytest.raises(HangError, match=f"did not end within {at_s} s"):
        hang(watch_of(tmp_path, clock, {}, config), clock, known_s, seconds=400)


def test_a_phase_that_never_ran_before_has_the_time_out(tmp_path: Path, clock: Clock):
    watch = watch_of(tmp_path, clock, {}, HangConfig(timeout_s=100))
    assert watch.limit_s("rollout") == 100


def test_who_is_outside_of_the_collective_of_the_others_is_the_suspect(tmp_path: Path, clock: Clock):
    answers = {0: [ALL_REDUCE], 1: [FORWARD], 2: [ALL_REDUCE]}
    with pytest.raises(HangError) as caught:
        hang(watch_of(tmp_path, clock, answers), clock, 1, 30)
    error = caught.value
    assert (error.role, error.rank, error.node, error.phase) == ("actor", 1, "n1", "update")
    assert "2 wait in all_reduce, and actor rank 1 on n1 is in megarl/train/step.py:5 forward" in error.cause
    report = (tmp_path / "hang-1.txt").read_text()
    assert "actor rank 0 on n0 waits in all_reduce\n" in report
    assert "megarl/train/step.py:7 run" in report


def test_who_does_not_answer_is_the_suspect_and_its_heartbeat_speaks(tmp_path: Path, clock: Clock):
    beat = {"role": "actor", "rank": 2, "phase": "update_sft", "time": 0.0}
    (tmp_path / "actor-2.heartbeat.json").write_text(json.dumps(beat))
    with pytest.raises(HangError, match="actor rank 2 on n2 does not answer") as caught:
        hang(watch_of(tmp_path, clock, {0: [ALL_REDUCE], 1: [ALL_REDUCE]}), clock, 1, 30)
    assert caught.value.rank == 2
    assert "in update_sft" in (tmp_path / "hang-1.txt").read_text()


def test_where_all_wait_in_one_collective_that_is_said(tmp_path: Path, clock: Clock):
    with pytest.raises(HangError, match="all 3 wait in all_reduce"):
        hang(watch_of(tmp_path, clock, dict.fromkeys(range(3), (ALL_REDUCE,))), clock, 1, 30)  # type: ignore[arg-type]


def test_a_run_that_only_reports_goes_on_and_reports_each_phase_once(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
):
    watch = watch_of(tmp_path, clock, {}, HangConfig(after_s=20, factor=5, action="report"))
    for _ in range(2):
        hang(watch, clock, 1, 60)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hang-1.txt", "hang-2.txt"]
    assert caplog.text.count("has been running for 21 s") == 2
