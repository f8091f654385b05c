"""Checkpoints are complete or absent."""

from __future__ import annotations

import errno
import json

import pytest

from megarl.config.load import load_sft, load_train
from megarl.controller import checkpoints
from megarl.controller.checkpoints import (
    CheckpointStore,
    contents_of,
    find_resume,
    fresh_parts,
    problems,
    read_state,
)
from megarl.controller.state import RunDirectory, RunState
from megarl.errors import CheckpointError, ConfigError, WorkerError


def save(store, state, write_parts):
    partial = store.begin(state)
    with store.writing(partial):
        write_parts(partial.directory)
    return store.commit(partial)


def write_part(directory):
    (directory / "actor").mkdir()
    (directory / "actor" / "weights.bin").write_bytes(b"12345")


def full_disk(directory):
    write_part(directory)
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_saved_checkpoint_gives_back_the_state(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    state = RunState(step=3, version=4, prompts={"epoch": 1}, kl={"coef": 0.1})
    path = save(store, state, write_part)
    assert read_state(path) == state
    assert json.loads((tmp_path / "latest").read_text()) == "step_000003"


def test_only_the_newest_are_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in range(1, 5):
        save(store, RunState(step, step), write_part)
    assert [path.name for path in store.complete()] == ["step_000003", "step_000004"]


def test_every_so_many_steps_stay_for_good(tmp_path):
    store = CheckpointStore(tmp_path, keep=2, keep_every_steps=3)
    for step in range(1, 9):
        save(store, RunState(step, step), write_part)
    assert [path.name for path in store.complete()] == ["step_000003", "step_000006", "step_000007", "step_000008"]


def test_a_run_resumed_from_an_older_step_keeps_what_it_writes(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (5, 20, 10):
        save(store, RunState(step, step), write_part)
    assert [path.name for path in store.complete()] == ["step_000010", "step_000020"]
    assert store.newest().name == "step_000010"  # what latest names, not the highest step


def test_nothing_is_removed_for_a_checkpoint_that_is_not_complete(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path, keep=1)
    save(store, RunState(1, 1), write_part)
    partial = store.begin(RunState(2, 2))
    write_part(partial.directory)
    write = checkpoints.write_json

    def lose(path, value):
        write(path, value)
        if path.name == "latest":
            (tmp_path / "step_000002" / "actor" / "weights.bin").write_bytes(b"")

    monkeypatch.setattr(checkpoints, "write_json", lose)
    with pytest.raises(CheckpointError, match=r"just written is not complete: actor/weights.bin has 0 bytes"):
        store.commit(partial)
    assert store.newest().name == "step_000001"


def test_what_a_killed_save_left_is_removed_by_the_next(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    write_part(store.begin(RunState(1, 1)).directory)
    assert store.newest() is None
    save(store, RunState(2, 2), write_part)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000002"]


ACTOR = {"actor/model": "", "actor/optimizer": "adam", "data": "", "metrics": ""}


@pytest.mark.parametrize(
    ("saved", "run", "listed", "allowed"),
    [
        ({"actor/model": "", "data": "", "metrics": ""}, ACTOR, "actor/optimizer: missing", ["optimizer"]),
        (ACTOR, ACTOR | {"actor/optimizer": "sgd"}, "actor/optimizer: adam there, sgd here", ["optimizer"]),
        (ACTOR | {"critic/model": ""}, ACTOR, "critic/model: not a part of this run", ["critic"]),
        (
            ACTOR,
            ACTOR | {"critic/model": "", "critic/rng": ""},
            "critic/model: missing; critic/rng: missing",
            ["critic"],
        ),
        ({"actor/model": ""}, {"actor/model": "", "data": "", "kl": ""}, "data: missing; kl: missing", ["kl", "data"]),
    ],
)
def test_other_parts_are_refused_by_name_unless_they_may_start_afresh(tmp_path, saved, run, listed, allowed):
    path = save(CheckpointStore(tmp_path, keep=1, contents=saved), RunState(1, 1), write_part)
    assert fresh_parts(path, saved, []) == frozenset()
    with pytest.raises(CheckpointError, match=listed) as caught:
        fresh_parts(path, run, [])
    assert f"resume.allow_fresh=[{','.join(sorted(allowed))}]" in str(caught.value)
    if len(allowed) > 1:
        with pytest.raises(CheckpointError, match=r"this run: data: missing"):
            fresh_parts(path, run, allowed[:1])
    assert fresh_parts(path, run, allowed) == {name for name in run if saved.get(name) != run[name]}


def test_parts_of_a_run_follow_its_roles():
    grpo, ppo = (
        load_train("grpo_tiny", []).config,
        load_train("ppo_tiny", ["critic.optimizer.kind=sgd", "critic.optimizer.distributed=false"]).config,
    )
    assert contents_of(grpo)["actor/optimizer"] == "adam" and "critic/model" not in contents_of(grpo)
    assert contents_of(ppo)["critic/optimizer"] == "sgd"
    assert {"data", "kl", "version", "metrics", "actor/rng", "actor/scheduler"} <= set(contents_of(grpo))
    assert "kl" not in contents_of(load_sft("sft_tiny", []).config)


def test_a_full_disk_leaves_the_previous_checkpoint_and_nothing_of_the_failed_one(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    save(store, RunState(1, 1), write_part)
    with pytest.raises(CheckpointError, match=r"No space left on device.*earlier checkpoints are untouched"):
        save(store, RunState(2, 2), full_disk)
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
    save(store, RunState(1, 1), write_part)
    with pytest.raises(type(error)) as caught:
        save(store, RunState(2, 2), fail)
    assert caught.value is error
    assert problems(store.newest()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000001"]


MANIFESTS = {"no text": b"\xff\xfe", "no object": b"[]", "no files": b'{"contents": {}, "files": {"a": 3}}'}


@pytest.mark.parametrize("harm", ["truncate", "remove", "manifest", *MANIFESTS])
def test_a_damaged_checkpoint_is_not_one(tmp_path, harm):
    store = CheckpointStore(tmp_path, keep=3)
    save(store, RunState(1, 1), write_part)
    newest = save(store, RunState(2, 2), write_part)
    weights = newest / "actor" / "weights.bin"
    if harm == "truncate":
        weights.write_bytes(b"123")
    elif harm == "remove":
        weights.unlink()
    elif harm in MANIFESTS:
        (newest / "manifest.json").write_bytes(MANIFESTS[harm])
    else:
        (newest / "manifest.json").unlink()
    assert problems(newest)
    assert store.newest().name == "step_000001"
    assert store.damaged() == {"step_000002": problems(newest)}
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        read_state(newest)


def test_nothing_starts_anew_where_all_checkpoints_are_damaged(tmp_path):
    store = CheckpointStore(tmp_path, keep=3)
    for step in (1, 2):
        (save(store, RunState(step, step), write_part) / "actor" / "weights.bin").unlink()
    with pytest.raises(CheckpointError, match=r"step_000001: actor/weights\.bin is missing; step_000002"):
        find_resume("auto", store)
    assert find_resume("never", store) is None


def test_the_state_of_another_version_is_refused(tmp_path):
    path = save(CheckpointStore(tmp_path, keep=1), RunState(1, 1), write_part)
    state = path / "state.json"
    state.write_text(state.read_text().replace('"step"', '"stride"'))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["state.json"] = {"bytes": state.stat().st_size}
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="stride"):
        read_state(path)


def test_resume_auto_never_and_path(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path / "a", keep=1)
    assert find_resume("auto", store) is None
    assert find_resume("never", store) is None
    path = save(store, RunState(1, 1), write_part)
    assert find_resume("auto", store) == path
    assert find_resume(str(path), store) == path
    monkeypatch.chdir(tmp_path)
    assert find_resume("a/step_000001", store) == path  # workers may run in another directory
    with pytest.raises(ConfigError, match="already holds step_000001"):
        find_resume("never", store)
    with pytest.raises(ConfigError, match="no checkpoint directory"):
        find_resume(str(tmp_path / "absent"), store)
    (tmp_path / "run").mkdir()
    (tmp_path / "a").rename(tmp_path / "run" / "checkpoints")
    for place in ("run", "run/checkpoints"):
        with pytest.raises(ConfigError, match="holds 1") as refused:
            find_resume(place, store)
        assert refused.value.fix == f"run.resume={tmp_path}/run/checkpoints/step_000001"


def test_two_runs_do_not_share_a_directory(tmp_path):
    first, second = RunDirectory(tmp_path), RunDirectory(tmp_path)
    first.open()
    with pytest.raises(ConfigError, match="another run is using"):
        second.open()
    first.close()
    second.open()
    second.close()
