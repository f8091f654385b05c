"""However a run ends, its session leaves nothing open and hides no error behind another."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megarl.config.load import load_train
from megarl.config.origin import Loaded
from megarl.config.schema import TrainConfig
from megarl.controller import session as session_module
from megarl.controller.cluster import Cluster
from megarl.controller.processes import Processes
from megarl.controller.session import open_session
from megarl.controller.state import RunState
from megarl.errors import ConfigError, StoppedError, WorkerError
from megarl.observability.ending import read_ending
from megarl.platform import signals


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loaded[TrainConfig]:
    monkeypatch.chdir(tmp_path)
    return load_train("grpo_tiny", ["run.dir=run", "logging.console=off", "logging.tensorboard=false"])


DEAD = WorkerError(role="actor", rank=0, phase="save", cause="killed")


def test_the_run_directory_is_absolute_and_free_again(loaded: Loaded[TrainConfig], tmp_path: Path):
    for _ in range(2):
        with open_session(loaded) as session:
            assert session.directory.root == tmp_path / "run"
            with pytest.raises(ConfigError, match="another run"), open_session(loaded):
                pass


def test_the_clean_up_is_not_interrupted_and_runs_before_the_directory_is_given_up(
    loaded: Loaded[TrainConfig], monkeypatch: pytest.MonkeyPatch
):
    events = []
    monkeypatch.setattr(session_module.signals, "hold", lambda: events.append("hold"))

    @contextmanager
    def resource(name: str) -> Iterator[None]:
        try:
            yield
        finally:
            events.append(name)

    monkeypatch.setattr(session_module.Cluster, "close", lambda self: events.append("cluster"))
    monkeypatch.setattr(session_module.RunDirectory, "close", lambda self: events.append("directory"))
    with pytest.raises(WorkerError), open_session(loaded) as session:
        session.hold(resource("reward"))
        session.hold(resource("processes"))
        raise DEAD
    assert events == ["hold", "processes", "reward", "cluster", "directory"]


def test_a_full_disk_at_the_end_does_not_hide_what_ended_the_run(
    loaded: Loaded[TrainConfig], monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(session_module, "write_chrome_trace", full)
    with pytest.raises(WorkerError) as caught, open_session(loaded):
        raise DEAD
    assert caught.value is DEAD


@pytest.mark.parametrize("error", [None, DEAD, KeyboardInterrupt()])
def test_processes_are_told_to_stop_only_after_a_good_end(error: BaseException | None, monkeypatch: pytest.MonkeyPatch):
    stopped = []
    monkeypatch.setattr(Processes, "_stop", lambda self: stopped.append(True))
    processes = Processes.__new__(Processes)
    processes._cluster = Cluster()
    if error is None:
        with processes:
            pass
    else:
        with pytest.raises(type(error)), processes:
            raise error
    assert stopped == ([True] if error is None else [])


def test_signals_are_held_by_a_real_session(loaded: Loaded[TrainConfig]):
    with signals.handled():
        with open_session(loaded):
            assert signals._held_since is None
        assert signals._held_since is not None


def test_a_run_that_fails_says_so_in_its_directory_and_the_next_attempt_sets_that_and_its_logs_aside(
    loaded: Loaded[TrainConfig], tmp_path: Path
):
    run = tmp_path / "run"
    for attempt in (1, 2):
        with pytest.raises(WorkerError), open_session(loaded) as session:
            assert session.directory.attempt == attempt
            assert not (run / "ending.json").exists()
            (run / "logs" / "actor-0.log").write_text(f"attempt {attempt}")
            raise DEAD
        ending = read_ending(run / "ending.json")
        assert ending is not None and (ending.kind, ending.role, ending.exit_code) == ("WorkerError", "actor", 12)
    assert (run / "logs" / "actor-0.log").read_text() == "attempt 2"
    assert (run / "logs" / "attempt-1" / "actor-0.log").read_text() == "attempt 1"
    assert (run / "logs" / "attempt-1" / "ending.json").is_file()


class Saves:
    """Stands for a ``Saver``: the calls it got."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def save(self, state: RunState) -> None:
        self.calls.append(f"save {state.step}")

    def finish(self) -> None:
        self.calls.append("finish")


@pytest.mark.parametrize(("newest", "is_saved"), [(None, True), ("step_000002", True), ("step_000003", False)])
def test_a_run_that_stops_saves_its_last_finished_step_once(
    loaded: Loaded[TrainConfig], newest: str | None, is_saved: bool, monkeypatch: pytest.MonkeyPatch
):
    saver = Saves()
    with pytest.raises(StoppedError, match="after step 3 of 40"), open_session(loaded) as session:
        monkeypatch.setattr(session.store, "newest", lambda: None if newest is None else Path(newest))
        session.stop(RunState(3, 3), saver)  # type: ignore[arg-type]
    # One that is under way is completed before the newest is looked at, and the last one before the run ends.
    assert saver.calls == ["finish", *(["save 3", "finish"] if is_saved else [])]


def test_a_run_that_stops_before_its_first_step_has_nothing_to_save(loaded: Loaded[TrainConfig]):
    with pytest.raises(StoppedError), open_session(loaded) as session:
        saver = Saves()
        session.stop(RunState(0, 0), saver)  # type: ignore[arg-type]
    assert saver.calls == ["finish"]
