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
from megarl.errors import ConfigError, WorkerError
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
