"""Saving and continuing: exact, also at another layout; and every way a checkpoint can be unusable."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.errors import CheckpointError
from megarl.models.spec import ModelSpec
from megarl.observability.metrics import values
from megarl.parallel.grid import ParallelLayout
from megarl.train.megatron import checkpoint
from megarl.weights.pieces import assemble
from tests.distributed.engines import make_engine, owned_weights, policy_update, recorded_batch, replica
from tests.distributed.models import QWEN2
from tests.distributed.ranks import Rank, RankPool

COUNTERS = {"step": 3, "kl_coef": 0.1, "cursor": {"epoch": 0, "position": 17}}


def _steps(engine: Any, groups: Any, number: int) -> list[Any]:
    batch, minibatches = replica(recorded_batch(QWEN2.vocab_size), groups)
    metrics = [engine.update_policy(batch, policy_update(), minibatches) for _ in range(number)]
    return [values(m) for m in metrics if m is not None]


def save_and_go_on(rank: Rank, layout: ParallelLayout, directory: Path, options: dict[str, Any]) -> Any:
    groups = rank.start(layout)
    engine = make_engine(QWEN2, groups, **options)
    _steps(engine, groups, 2)
    engine.save(directory, COUNTERS)
    return _steps(engine, groups, 2), owned_weights(engine)


def load_and_go_on(rank: Rank, layout: ParallelLayout, directory: Path, options: dict[str, Any]) -> Any:
    groups = rank.start(layout)
    # Other weights than those saved, so that what is not loaded shows.
    engine = make_engine(QWEN2, groups, seed=99, **options)
    counters = engine.load(directory)
    return counters, engine.optimizer.num_updates, (_steps(engine, groups, 2), owned_weights(engine))


def _metrics_and_weights(results: list[Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    return next(m for m, _ in results if m), assemble(piece for _, pieces in results for piece in pieces)


@pytest.mark.parametrize(
    "options", [{}, {"distributed": False}, {"dtype": "bfloat16"}], ids=["sharded", "plain", "bf16"]
)
@pytest.mark.parametrize(
    "layout",
    [ParallelLayout(), ParallelLayout(tp=2, dp=2, sequence_parallel=True), ParallelLayout(tp=2, pp=2)],
    ids=["one", "tp2-sp-dp2", "tp2-pp2"],
)
def test_a_loaded_engine_continues_bit_for_bit(
    ranks: RankPool, tmp_path: Path, layout: ParallelLayout, options: dict[str, Any]
) -> None:
    directory = tmp_path / "saved"
    expected = _metrics_and_weights(ranks(layout.world_size).run(save_and_go_on, layout, directory, options))
    loaded = ranks(layout.world_size).run(load_and_go_on, layout, directory, options)
    assert all(counters == COUNTERS and updates == 4 for counters, updates, _ in loaded)
    metrics, weights = _metrics_and_weights([rest for _, _, rest in loaded])
    assert metrics == expected[0]
    for name, tensor in expected[1].items():
        assert torch.equal(weights[name], tensor), name


def test_a_checkpoint_continues_at_another_layout(ranks: RankPool, tmp_path: Path) -> None:
    directory = tmp_path / "saved"
    expected = _metrics_and_weights(ranks(2).run(save_and_go_on, ParallelLayout(tp=2), directory, {}))
    layout = ParallelLayout(pp=2, dp=2)
    loaded = ranks(4).run(load_and_go_on, layout, directory, {})
    metrics, weights = _metrics_and_weights([rest for _, _, rest in loaded])
    for mine, theirs in zip(metrics, expected[0], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    for name, tensor in expected[1].items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def save_at_once(rank: Rank, layout: ParallelLayout, directory: Path, head: str) -> Any:
    """Before any update, when torch's Adam has no state yet."""
    groups = rank.start(layout)
    engine = make_engine(QWEN2, groups, head=head)
    engine.save(directory)
    other = make_engine(QWEN2, groups, head=head, seed=99)
    assert other.load(directory) == {}
    return [torch.equal(a, b) for (_, a), (_, b) in zip(engine.pieces(), other.pieces(), strict=True)]


@pytest.mark.parametrize("head", ["lm", "value"])
def test_an_engine_can_be_saved_before_its_first_update(ranks: RankPool, tmp_path: Path, head: str) -> None:
    results = ranks(2).run(save_at_once, ParallelLayout(tp=2), tmp_path / "saved", head)
    assert all(all(same) for same in results)


def save_into(rank: Rank, layout: ParallelLayout, directory: Path, failure: str | None = None) -> str | None:
    groups = rank.start(layout)
    engine = make_engine(QWEN2, groups)
    if failure == "full" and rank.rank == 1:
        # The second rank's disk is full in the middle of its file.
        def write(*_: Any, **__: Any) -> Any:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        import torch.distributed.checkpoint.filesystem as filesystem

        filesystem._write_item = write
    if failure == "no room" and rank.rank == 0:
        checkpoint.shutil = type("Disk", (), {"disk_usage": staticmethod(lambda _: type("U", (), {"free": 1000}))})
    try:
        engine.save(directory)
    except CheckpointError as error:
        return str(error)
    finally:
        if failure == "full" and rank.rank == 1:
            import importlib

            importlib.reload(filesystem)
    return None


def load_from(rank: Rank, layout: ParallelLayout, directory: Path, spec: ModelSpec = QWEN2) -> str | None:
    engine = make_engine(spec, rank.start(layout))
    try:
        engine.load(directory)
    except CheckpointError as error:
        return str(error)
    return None


@pytest.fixture
def saved(ranks: RankPool, tmp_path: Path) -> Path:
    assert ranks(2).run(save_into, ParallelLayout(tp=2), tmp_path / "saved") == [None, None]
    return tmp_path / "saved"


def test_a_missing_or_truncated_file_is_named_on_every_rank(ranks: RankPool, saved: Path) -> None:
    part = max(saved.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = part.read_bytes()
    part.write_bytes(content[:-100])
    errors = ranks(2).run(load_from, ParallelLayout(tp=2), saved)
    assert all(f"{part.name} has {len(content) - 100} of {len(content)} bytes" in str(error) for error in errors)
    part.unlink()
    errors = ranks(2).run(load_from, ParallelLayout(tp=2), saved)
    assert all(f"{part.name} is missing" in str(error) for error in errors)


def test_a_directory_without_its_last_file_is_no_checkpoint(ranks: RankPool, saved: Path, tmp_path: Path) -> None:
    (saved / checkpoint.STATE_FILE).unlink()
    for directory in (saved, tmp_path / "nothing"):
        errors = ranks(2).run(load_from, ParallelLayout(tp=2), directory)
        assert all("no complete checkpoint" in str(error) for error in errors)


def test_contents_of_another_model_are_refused(ranks: RankPool, saved: Path) -> None:
    from dataclasses import replace

    errors = ranks(2).run(load_from, ParallelLayout(tp=2), saved, replace(QWEN2, hidden_size=64))
    assert all("cannot load the checkpoint" in str(error) for error in errors)
    errors = ranks(2).run(load_from, ParallelLayout(tp=2), saved, replace(QWEN2, tied_embeddings=False))
    assert all("cannot load the checkpoint" in str(error) for error in errors)


def test_a_directory_in_use_is_not_overwritten(ranks: RankPool, saved: Path) -> None:
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    errors = ranks(2).run(save_into, ParallelLayout(tp=2), saved)
    assert all("not empty" in str(error) for error in errors)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before


@pytest.mark.parametrize("failure", ["full", "no room"])
def test_a_full_disk_is_an_error_on_every_rank_and_leaves_older_checkpoints_alone(
    ranks: RankPool, saved: Path, tmp_path: Path, failure: str
) -> None:
    errors = ranks(2).run(save_into, ParallelLayout(tp=2), tmp_path / "next", failure)
    expected = "No space left on device" if failure == "full" else "MiB free"
    assert all(expected in str(error) for error in errors)
    assert not (tmp_path / "next" / checkpoint.STATE_FILE).exists()
    ranks(2).pool.close()  # fresh processes: these have a broken writer
    assert ranks(2).run(load_from, ParallelLayout(tp=2), saved) == [None, None]


def test_the_state_file_records_layout_and_sizes(saved: Path) -> None:
    described = json.loads((saved / checkpoint.STATE_FILE).read_text())
    assert described["layout"]["tp"] == 2
    assert described["files"] == {
        path.name: path.stat().st_size for path in saved.iterdir() if path.name != checkpoint.STATE_FILE
    }
