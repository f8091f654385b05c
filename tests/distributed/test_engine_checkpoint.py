"""Saving and continuing: exact, also at another layout; and every way a checkpoint can be unusable."""

from __future__ import annotations

import errno
import json
import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.errors import CheckpointError
from megarl.models.spec import ModelSpec
from megarl.observability.metrics import values
from megarl.parallel.grid import ParallelLayout
from megarl.train.megatron import checkpoint, checkpoint_writer
from megarl.weights.files.file_checksum import checksum_of
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


OPTIONS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "plain": {"distributed": False},
    "bf16": {"dtype": "bfloat16"},
    "sgd": {"distributed": False, "optimizer": {"kind": "sgd"}},
}
LAYOUTS = {
    "one": ParallelLayout(),
    "tp2-sp-dp2": ParallelLayout(tp=2, dp=2, sequence_parallel=True),
    "tp2-pp2": ParallelLayout(tp=2, pp=2),
}
QUICK = {("tp2-sp-dp2", "sharded"), ("tp2-sp-dp2", "bf16"), ("tp2-pp2", "plain")}


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        pytest.param(
            LAYOUTS[layout],
            OPTIONS[options],
            id=f"{layout}-{options}",
            marks=() if layout == "one" or (layout, options) in QUICK else pytest.mark.slow,
        )
        for layout, options in product(LAYOUTS, OPTIONS)
    ],
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
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    for name, tensor in expected[1].items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-5, msg=name)


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


def save_into(
    rank: Rank, layout: ParallelLayout, directory: Path, failure: str | None = None, in_background: bool = False
) -> str | None:
    groups = rank.start(layout)
    engine = make_engine(QWEN2, groups)
    if failure == "full" and rank.rank == 1:
        # The second rank's disk is full in the middle of its file.
        def write(*_: Any, **__: Any) -> Any:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        checkpoint_writer._write_all = write
    if failure == "no room" and rank.rank == 0:
        checkpoint.shutil = type("Disk", (), {"disk_usage": staticmethod(lambda _: type("U", (), {"free": 1000}))})
    try:
        engine.save(directory, background=in_background)
        if in_background:
            engine.finish_save()
    except CheckpointError as error:
        return str(error)
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


def test_a_changed_byte_is_found_by_every_rank(ranks: RankPool, saved: Path) -> None:
    part = max(saved.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    errors = ranks(2).run(load_from, ParallelLayout(tp=2), saved)
    assert all(f"{part.name} has checksum" in str(error) for error in errors)


def test_a_file_that_reads_back_otherwise_is_not_saved(ranks: RankPool, tmp_path: Path) -> None:
    errors = ranks(2).run(save_on_a_bad_disk, ParallelLayout(tp=2), tmp_path / "saved")
    assert all("reads back as" in str(error) and "rank 1" in str(error) for error in errors)
    assert not (tmp_path / "saved" / checkpoint.STATE_FILE).exists()


def save_on_a_bad_disk(rank: Rank, layout: ParallelLayout, directory: Path) -> str | None:
    """The second rank's last byte does not arrive as it was written."""
    write_all = checkpoint_writer._write_all

    def write(descriptor: int, data: torch.Tensor) -> None:
        write_all(descriptor, data if rank.rank == 0 or len(data) < 100 else data ^ 1)

    checkpoint_writer._write_all = write
    try:
        return save_into(rank, layout, directory)
    finally:
        checkpoint_writer._write_all = write_all


def save_behind_the_steps(rank: Rank, layout: ParallelLayout, directory: Path) -> Any:
    """Two updates while the checkpoint is written, and another save behind the first with the same host memory."""
    groups = rank.start(layout)
    engine = make_engine(QWEN2, groups)
    _steps(engine, groups, 2)
    engine.save(directory, COUNTERS, background=True)
    went_on = _steps(engine, groups, 2), owned_weights(engine)
    seconds = engine.finish_save()
    assert engine.save_is_written and {"plan", "copy", "write", "verify"} <= set(seconds)
    engine.save(directory.parent / "second", background=True)
    engine.finish_save()
    return went_on


def test_a_save_in_the_background_holds_what_was_there_when_it_began(ranks: RankPool, tmp_path: Path) -> None:
    layout = ParallelLayout(tp=2, dp=2)
    expected = _metrics_and_weights(ranks(4).run(save_behind_the_steps, layout, tmp_path / "saved"))
    loaded = ranks(4).run(load_and_go_on, layout, tmp_path / "saved", {})
    metrics, weights = _metrics_and_weights([rest for _, _, rest in loaded])
    assert metrics == expected[0]
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected[1].items())


def test_ranks_with_the_same_tensors_share_the_writing(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(save_into, ParallelLayout(dp=2), tmp_path / "saved")
    sizes = [path.stat().st_size for path in (tmp_path / "saved").glob("*.distcp")]
    assert len(sizes) == 2 and max(sizes) <= 1.2 * min(sizes)


def load_afresh(rank: Rank, layout: ParallelLayout, directory: Path, dtype: str, kind: str) -> Any:
    groups = rank.start(layout)
    sgd = {"kind": "sgd"} if kind == "sgd" else {}
    engine = make_engine(QWEN2, groups, seed=99, dtype=dtype, distributed=kind == "adam", optimizer=sgd)
    try:
        engine.load(directory)
        refused = None
    except CheckpointError as error:
        refused = str(error)
    engine = make_engine(QWEN2, groups, seed=99, dtype=dtype, distributed=kind == "adam", optimizer=sgd)
    engine.load(directory, fresh=["optimizer", "scheduler", "rng"])
    loaded = owned_weights(engine)
    before = {name: parameter.detach().clone() for name, parameter in engine.parameters().items()}
    _steps(engine, groups, 1)
    moved = max(float((p.detach() - before[name]).abs().max()) for name, p in engine.parameters().items())
    return refused, engine.optimizer.num_updates, loaded, moved


@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_optimizer_may_start_afresh_on_loaded_weights(
    ranks: RankPool, tmp_path: Path, dtype: str, kind: str
) -> None:
    directory = tmp_path / "saved"
    layout = ParallelLayout(dp=2)
    saved = ranks(2).run(save_now, layout, directory, dtype)
    results = ranks(2).run(load_afresh, layout, directory, dtype, kind)
    for (refused, updates, _, moved), _ in zip(results, saved, strict=True):
        assert (refused is None) == (kind == "adam")
        assert kind == "adam" or "the state of adam, the run has sgd" in refused
        assert updates == 2 and 0 < moved < 0.1  # two minibatches; weights that were not the loaded ones would jump
    expected = assemble(piece for pieces in saved for piece in pieces)
    loaded = assemble(piece for _, _, pieces, _ in results for piece in pieces)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def save_now(rank: Rank, layout: ParallelLayout, directory: Path, dtype: str) -> Any:
    groups = rank.start(layout)
    engine = make_engine(QWEN2, groups, dtype=dtype)
    _steps(engine, groups, 1)
    engine.save(directory)
    return owned_weights(engine)


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


@pytest.mark.parametrize(
    ("failure", "in_background"),
    [("full", False), ("full", True), ("no room", False)],
    ids=["full", "later", "no room"],
)
def test_a_full_disk_is_an_error_on_every_rank_and_leaves_older_checkpoints_alone(
    ranks: RankPool, saved: Path, tmp_path: Path, failure: str, in_background: bool
) -> None:
    errors = ranks(2).run(save_into, ParallelLayout(tp=2), tmp_path / "next", failure, in_background)
    expected = "No space left on device" if failure == "full" else "MiB free"
    assert all(expected in str(error) for error in errors)
    assert not (tmp_path / "next" / checkpoint.STATE_FILE).exists()
    ranks(2).pool.close()  # fresh processes: these have a broken writer
    assert ranks(2).run(load_from, ParallelLayout(tp=2), saved) == [None, None]


def test_the_state_file_records_layout_and_sizes(saved: Path) -> None:
    described = json.loads((saved / checkpoint.STATE_FILE).read_text())
    assert described["layout"]["tp"] == 2
    assert described["files"] == {
        path.name: {"bytes": path.stat().st_size, "checksum": checksum_of(path)}
        for path in saved.iterdir()
        if path.name != checkpoint.STATE_FILE
    }
