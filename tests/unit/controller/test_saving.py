"""When a run saves, and that a save behind its steps becomes a checkpoint or an error."""

from __future__ import annotations

import pytest

from megarl.config.schema.run import CheckpointConfig
from megarl.controller.checkpoints import CheckpointStore
from megarl.controller.saving import Saver
from megarl.controller.state import RunState
from megarl.errors import CheckpointError


class Group:
    """A role whose two ranks write when they are told to."""

    def __init__(self) -> None:
        self.waiting = []
        self.written = [True, True]
        self.exports = []
        self.error = None

    def save(self, directory, background):
        (directory / "state.json").write_text("{}")
        if background:
            self.waiting.append(directory)
            self.written = [False, True]
        else:
            (directory / "weights").write_bytes(b"123")

    def save_is_written(self):
        return self.written

    def finish_save(self):
        if self.error is not None:
            raise self.error
        (self.waiting.pop() / "weights").write_bytes(b"123")

    def export_hf(self, directory):
        directory.mkdir(parents=True)
        self.exports.append(directory.name)


def made(tmp_path, **options):
    group, seconds = Group(), []
    store = CheckpointStore(tmp_path / "checkpoints", keep=5)
    config = CheckpointConfig(**options)
    return (
        group,
        store,
        Saver(store, {"actor": group}, config, tmp_path / "exports", note_seconds=seconds.append),
        seconds,
    )


def names(store):
    return [path.name for path in store.complete()]


def test_a_save_is_due_at_its_steps_and_at_the_end(tmp_path):
    saver = made(tmp_path, every_steps=3)[2]
    assert [step for step in range(1, 11) if saver.is_due(step, 10)] == [3, 6, 9, 10]
    saver = made(tmp_path, at_end=False)[2]
    assert not any(saver.is_due(step, 10) for step in range(1, 11))


def test_a_save_the_run_waits_for_is_a_checkpoint_when_it_returns(tmp_path):
    group, store, saver, seconds = made(tmp_path, every_steps=1, export_hf_every=2)
    for step in range(1, 6):
        saver.save(RunState(step, step))
        assert names(store)[-1] == f"step_{step:06d}"
    assert group.exports == ["step_000002", "step_000004"]
    assert len(seconds) == 5


def test_a_save_behind_the_steps_is_a_checkpoint_when_all_ranks_have_written(tmp_path):
    group, store, saver, seconds = made(tmp_path, every_steps=1, background=True)
    saver.look()
    saver.save(RunState(1, 1))
    saver.look()
    assert names(store) == [] and not seconds
    group.written = [True, True]
    saver.look()
    assert names(store) == ["step_000001"] and len(seconds) == 1
    # The next save and the end of the run wait for the one under way.
    saver.save(RunState(2, 2))
    saver.save(RunState(3, 3))
    assert names(store) == ["step_000001", "step_000002"]
    saver.finish()
    saver.finish()
    assert names(store) == ["step_000001", "step_000002", "step_000003"]


def test_a_save_behind_the_steps_that_fails_ends_the_run_and_leaves_nothing_of_it(tmp_path):
    group, store, saver, _ = made(tmp_path, every_steps=1, background=True)
    saver.save(RunState(1, 1))
    saver.finish()
    saver.save(RunState(2, 2))
    group.error = CheckpointError("rank 1 could not write")
    with pytest.raises(CheckpointError, match="rank 1"):
        saver.finish()
    assert sorted(path.name for path in store.directory.iterdir()) == ["latest", "step_000001"]
    saver.finish()  # nothing is under way any more
