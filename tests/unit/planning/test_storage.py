"""Where a run may start or go on: the doctor refuses what the run itself would, and takes what it recommends."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.schema import TrainConfig
from megarl.controller.checkpoints import CheckpointStore, find_resume
from megarl.errors import CheckpointError, ConfigError
from megarl.planning.finding import Finding
from megarl.planning.storage import check_resume
from tests.unit.planning.models import write_checkpoint


def found(run: Path, resume: str) -> list[Finding]:
    data = {"train": [{"kind": "reasoning_gym", "task": "chain_sum"}]}
    section = {"dir": str(run), "resume": resume}
    return list(check_resume(TrainConfig.model_validate({"model": {"path": "m"}, "data": data, "run": section})))


DAMAGE = {
    "a save that did not finish": lambda path: (path / "manifest.json").unlink(),
    "a broken manifest": lambda path: (path / "manifest.json").write_text("{"),
    "a manifest of another kind": lambda path: (path / "manifest.json").write_text("[]"),
    "a file that is gone": lambda path: (path / "state.json").unlink(),
    "a file cut short": lambda path: (path / "state.json").write_text("{"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_where_every_checkpoint_is_damaged_never_starts_and_auto_does_not(tmp_path: Path, name: str):
    checkpoint = write_checkpoint(tmp_path, step=20)
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    assert not found(tmp_path, "auto") and find_resume("auto", store) == checkpoint
    (refused,) = found(tmp_path, "never")
    assert "holds checkpoints already" in refused.problem
    with pytest.raises(ConfigError):
        find_resume("never", store)
    DAMAGE[name](checkpoint)
    assert not found(tmp_path, "never") and find_resume("never", store) is None
    (refused,) = found(tmp_path, "auto")
    assert refused.area == "checkpoint" and "complete: step_000020: " in refused.problem
    assert refused.fix.endswith("start anew with run.resume=never")
    with pytest.raises(CheckpointError):
        find_resume("auto", store)


def test_one_whole_checkpoint_is_enough_to_go_on(tmp_path: Path):
    write_checkpoint(tmp_path, step=10)
    (write_checkpoint(tmp_path, step=20) / "state.json").unlink()
    assert not found(tmp_path, "auto")
    assert [finding.area for finding in found(tmp_path, "never")] == ["configuration"]


def test_a_run_directory_without_checkpoints_starts_either_way(tmp_path: Path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text('"step_000005"')
    assert not found(tmp_path, "auto") and not found(tmp_path, "never")
