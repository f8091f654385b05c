"""Spans, timelines and heartbeats."""

from __future__ import annotations

import json
import logging
import pickle
import threading
import time

import pytest

from megarl.observability.heartbeat import heartbeat, read_beats, write_beat
from megarl.observability.logs import context, set_context, set_up_logging
from megarl.observability.trace import (
    Timeline,
    chrome_trace,
    current_phase,
    forget_phase,
    listening,
    phase_of,
    span,
    write_chrome_trace,
)


def test_spans_nest_and_end_also_when_the_body_raises():
    timeline = Timeline()
    with listening(timeline):
        with span("step"):
            with span("rollout"):
                assert current_phase() == "rollout"
                time.sleep(0.01)
            with pytest.raises(ValueError), span("reward"):
                raise ValueError
            assert current_phase() == "step"
    assert current_phase() == "idle"
    assert [entry.path for entry in timeline.spans] == [("step", "rollout"), ("step", "reward"), ("step",)]
    assert timeline.seconds(1)["rollout"] >= 0.01
    assert timeline.seconds()["step"] >= sum(timeline.seconds(1).values())
    with span("unheard"):
        pass
    assert len(timeline.spans) == 3


def test_an_error_knows_the_innermost_phase_it_was_seen_in():
    with pytest.raises(ValueError) as caught, span("step"), span("rollout"):
        raise ValueError
    assert phase_of(caught.value) == "step/rollout"
    assert phase_of(ValueError()) is None
    forget_phase(caught.value)
    assert phase_of(caught.value) is None


def test_a_phase_that_comes_twice_is_summed_and_take_empties():
    timeline = Timeline("actor", 3)
    with listening(timeline):
        for _ in range(2):
            with span("sync"):
                time.sleep(0.005)
    assert timeline.seconds()["sync"] >= 0.01
    taken = pickle.loads(pickle.dumps(timeline.take()))
    assert len(taken.spans) == 2 and taken.role == "actor" and not timeline.spans


def test_another_thread_sees_the_phase_but_nests_nothing_into_it():
    seen = []
    timeline = Timeline()

    def other():
        seen.append(current_phase())
        with span("own"):
            seen.append(current_phase())

    with listening(timeline), span("main"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert current_phase() == "main"
    assert seen == ["main", "own"]
    assert [entry.path for entry in timeline.spans] == [("own",), ("main",)]


def test_a_chrome_trace_has_a_process_per_role_and_a_thread_per_rank(tmp_path):
    timelines = [Timeline("controller", 0), Timeline("actor", 0), Timeline("actor", 1)]
    for timeline in timelines:
        with listening(timeline), span("update"), span("forward"):
            pass
    write_chrome_trace(tmp_path / "trace.json", timelines)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert events == chrome_trace(timelines)["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {(event["pid"], event["tid"]) for event in spans} == {(0, 0), (1, 0), (1, 1)}
    assert [event["cat"] for event in spans[:2]] == ["update", "phase"]
    inner, outer = spans[:2]
    assert outer["ts"] <= inner["ts"] and inner["dur"] <= outer["dur"]


def test_a_span_is_cheap():
    started = time.perf_counter()
    for _ in range(1000):
        with span("x"):
            pass
    assert (time.perf_counter() - started) / 1000 < 1e-4


@pytest.fixture
def clean_logging():
    before = context()
    yield
    set_context(role=before.role, rank=before.rank, step=before.step, version=before.version)
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if getattr(handler, "megarl_handler", False)]:
        root.removeHandler(handler)
        handler.close()
    logging.getLogger("megarl").setLevel(logging.NOTSET)


def test_a_heartbeat_says_which_phase_runs_since_when(tmp_path, caplog, clean_logging):
    set_context(role="actor", rank=2, step=7, version=6)
    with heartbeat(tmp_path / "beats" / "actor-2.json", every_s=0.02, slow_after_s=0.05), span("step"), span("sync"):
        time.sleep(0.2)
        beat = read_beats(tmp_path / "beats")[0]
    assert (beat["role"], beat["rank"], beat["step"], beat["phase"]) == ("actor", 2, 7, "step/sync")
    assert 0.05 < beat["phase_s"] < 5 and beat["silent_s"] < 5 and not beat["ended"]
    assert read_beats(tmp_path / "beats")[0]["ended"]
    assert [record.message for record in caplog.records] == ["phase step/sync has been running for 0 s"]
    assert not [thread for thread in threading.enumerate() if thread.name == "megarl-heartbeat"]


def test_a_heartbeat_that_cannot_be_written_does_not_end_the_run(tmp_path, caplog):
    assert write_beat(tmp_path / "absent" / "x.json")["phase"] == "idle"
    assert "cannot write the heartbeat" in caplog.text


def test_every_line_carries_role_rank_step_and_version(tmp_path, capsys, clean_logging):
    for _ in range(2):  # setting up again must not double the lines
        set_up_logging("actor", 1, directory=tmp_path)
    set_context(step=4, version=3)
    logger = logging.getLogger("megarl.test")
    logger.info("quiet %s", "info")
    logger.warning("loud")
    terminal = capsys.readouterr().err
    assert "quiet" not in terminal and terminal.count("loud") == 1
    assert "[actor 1 step 4 v3] megarl.test: loud" in terminal
    file = (tmp_path / "actor-1.log").read_text()
    assert "quiet info" in file and "loud" in file


def test_rank_zero_speaks_at_info(capsys, clean_logging):
    set_up_logging("actor", 0)
    logging.getLogger("megarl.test").info("hello")
    logging.getLogger("somebody.else").info("hidden")
    assert "hello" in (err := capsys.readouterr().err) and "hidden" not in err
