"""Checkpoints are complete or absent."""

from __future__ import annotations

import errno
import json

import pytest

from megarl.controller.state import CheckpointStore, RunDirectory, RunState, find_resume, problems, read_state
from megarl.errors import CheckpointError, ConfigError, WorkerError


def write_part(directory):
    (directory / "actor").mkdir()
    (directory / "actor" / "weights.bin").write_bytes(b"12345")


def full_disk(directory):
    write_part(directory)
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_saved_checkpoint_gives_back_the_state(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    state = RunState(step=3, version=4, prompts={"epoch": 1}, kl={"coef": 0.1})
    path = store.save(state, write_part)
    assert read_state(path) == state
    assert json.loads((tmp_path / "latest").read_text()) == "step_000003"


def test_only_the_newest_are_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in range(1, 5):
        store.save(RunState(step, step), write_part)
    assert [path.name for path in store.complete()] == ["step_000003", "step_000004"]


def test_a_full_disk_leaves_the_previous_checkpoint_and_nothing_of_the_failed_one(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    store.save(RunState(1, 1), write_part)
    with pytest.raises(CheckpointError, match=r"No space left on device.*earlier checkpoints are untouched"):
        store.save(RunState(2, 2), full_disk)
    assert [path.name for path in store.complete()] == ["step_000001"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000001"]


@pytest.mark.parametrize(
    "error",
    [
        CheckpointError("a rank could not write"),
        WorkerError(role="actor", rank=1, phase="save", cause="killed"),
        KeyboardInterrupt(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_whatever_ends_a_save_leaves_nothing_of_it(tmp_path, error):
    def fail(directory):
        write_part(directory)
        raise error

    store = CheckpointStore(tmp_path, keep=1)
    store.save(RunState(1, 1), write_part)
    with pytest.raises(type(error)) as caught:
        store.save(RunState(2, 2), fail)
    assert caught.value is error
    assert problems(store.newest()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000001"]


@pytest.mark.parametrize("harm", ["truncate", "remove", "manifest"])
def test_a_damaged_checkpoint_is_not_one(tmp_path, harm):
    store = CheckpointStore(tmp_path, keep=3)
    store.save(RunState(1, 1), write_part)
    newest = store.save(RunState(2, 2), write_part)
    weights = newest / "actor" / "weights.bin"
    if harm == "truncate":
        weights.write_bytes(b"123")
    elif harm == "remove":
        weights.unlink()
    else:
        (newest / "manifest.json").unlink()
    assert problems(newest)
    assert store.newest().name == "step_000001"
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        read_state(newest)


def test_resume_auto_never_and_path(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path / "a", keep=1)
    assert find_resume("auto", store) is None
    assert find_resume("never", store) is None
    path = store.save(RunState(1, 1), write_part)
    assert find_resume("auto", store) == path
    assert find_resume(str(path), store) == path
    monkeypatch.chdir(tmp_path)
    assert find_resume("a/step_000001", store) == path  # workers may run in another directory
    with pytest.raises(ConfigError, match="already holds step_000001"):
        find_resume("never", store)
    with pytest.raises(ConfigError, match="no checkpoint directory"):
        find_resume(str(tmp_path / "absent"), store)


def test_two_runs_do_not_share_a_directory(tmp_path):
    first, second = RunDirectory(tmp_path), RunDirectory(tmp_path)
    first.open()
    with pytest.raises(ConfigError, match="another run is using"):
        second.open()
    first.close()
    second.open()
    second.close()
