"""Conversions that are killed, that run out of room, and that meet each other."""

from __future__ import annotations

import fcntl
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.errors import CheckpointError, PlanError
from megarl.models.registry import load_spec
from megarl.models.tiny import tiny_config, write_tiny
from megarl.parallel.grid import ParallelLayout
from megarl.weights.conversion import session
from megarl.weights.conversion.copying import Done
from megarl.weights.conversion.dist_target import dist_target
from megarl.weights.conversion.journal import Journal
from megarl.weights.conversion.session import Settings, convert
from megarl.weights.conversion.source import Source
from megarl.weights.conversion.sources import open_source
from megarl.weights.conversion.target import Target
from megarl.weights.conversion.targets import hf_target
from megarl.weights.files.safetensors_header import directory_arrays
from megarl.weights.files.safetensors_writer import write_hf
from megarl.weights.layout import canonical_shapes

ROOT = Path(__file__).resolve().parents[3]
TOOLS = ROOT / "tools/convert"


def make_model(directory: Path, *, shard_bytes: int = 60_000, **options: Any) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16}
    write_tiny(directory / "description", tiny_config("qwen2", **(sizes | options)))
    shapes = canonical_shapes(load_spec(directory / "description"))
    generator = torch.Generator().manual_seed(3)
    tensors = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    table = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    write_hf(directory / "hf", tensors.items(), table, copy_from=directory / "description", max_shard_bytes=shard_bytes)
    return directory / "hf"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def to_dist(source: Source, target: Path, settings: Settings, progress: Any = None) -> dict[str, Any]:
    layout = ParallelLayout(tp=2)
    return convert(
        source,
        target,
        lambda place: dist_target(place, source.spec, layout, source.dtypes, value_head=False, naming="te"),
        {},
        settings,
        progress,
    )


def to_hf(source: Source, target: Path) -> dict[str, Any]:
    return convert(
        source,
        target,
        lambda place: hf_target(place, source.spec, source.dtypes, value_head=False, max_shard_bytes=50_000),
        {},
        Settings(durable=False),
    )


def same_weights(one: Path, other: Path) -> bool:
    def bits(directory: Path) -> dict[str, bytes]:
        return {
            name: np.fromfile(array.path, np.uint8, array.num_bytes, offset=array.begin).tobytes()
            for name, array in directory_arrays(directory).items()
        }

    return bits(one) == bits(other)


class KilledError(BaseException):
    """Stands for the end of the process."""


class KillAfter(session.Progress):
    """Ends the conversion after some bytes or at a phase, as if the process had died there."""

    def __init__(self, *, moves: int | None = None, phase: str | None = None) -> None:
        self._moves, self._phase = moves, phase

    def moved(self, count: int) -> None:
        if self._moves is not None:
            self._moves -= 1
            if self._moves < 0:
                raise KilledError

    def phase(self, name: str) -> None:
        if name == self._phase:
            raise KilledError


@pytest.mark.parametrize("kill", [{"moves": 0}, {"moves": 5}, {"moves": 20}, {"phase": "copy"}, {"phase": "complete"}])
def test_an_interrupted_conversion_continues_where_it_stopped(tmp_path, model, kill):
    source, target = open_source(model), tmp_path / "dist"
    settings = Settings(workers=1, durable=False)
    with pytest.raises(KilledError):
        to_dist(source, target, settings, KillAfter(**kill))
    assert not target.exists()
    with pytest.raises(CheckpointError, match="no such directory"):
        open_source(target)
    again = CountBytes()
    to_dist(source, target, Settings(workers=2, resume=True, durable=False), again)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dist"]
    to_hf(open_source(target), tmp_path / "hf")
    assert same_weights(tmp_path / "hf", model)
    if kill == {"phase": "complete"}:
        assert again.count == 0


class CountBytes(session.Progress):
    """Counts what is moved."""

    def __init__(self) -> None:
        self.count = 0

    def moved(self, count: int) -> None:
        self.count += count


def test_bytes_that_the_journal_promises_are_read_back(tmp_path, model):
    source, target = open_source(model), tmp_path / "dist"
    with pytest.raises(KilledError):
        to_dist(source, target, Settings(durable=False), KillAfter(phase="complete"))
    damaged = sorted((tmp_path / ".dist.partial").glob("*.distcp"))[0]
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    again = CountBytes()
    to_dist(source, target, Settings(resume=True, durable=False), again)
    # The tensor under the flipped bit is written again, and no other.
    assert 0 < again.count < sum(array.num_bytes for array in directory_arrays(model).values()) / 2
    to_hf(open_source(target), tmp_path / "hf")
    assert same_weights(tmp_path / "hf", model)


def test_killed_after_the_rename_there_is_nothing_left_to_do(tmp_path, model, monkeypatch):
    source, target = open_source(model), tmp_path / "dist"

    def killed(self: Journal) -> None:
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "remove", killed)
        with pytest.raises(KilledError):
            to_dist(source, target, Settings(durable=False))
    assert target.exists() and (tmp_path / ".dist.journal").exists()
    receipt = to_dist(source, target, Settings(resume=True, durable=False))
    assert receipt["tensors"] and not (tmp_path / ".dist.journal").exists()


def test_a_complete_conversion_of_the_same_is_left_as_it_is(tmp_path, model):
    source, target, settings = open_source(model), tmp_path / "dist", Settings(resume=True, durable=False)
    first = to_dist(source, target, settings)
    again = CountBytes()
    assert to_dist(source, target, settings, again) == first and again.count == 0
    assert [path.name for path in tmp_path.iterdir()] == ["dist"]
    with pytest.raises(CheckpointError, match="the target exists"):
        to_hf_resumed(source, target)
    with pytest.raises(CheckpointError, match="the target exists"):
        to_dist(source, target, Settings(durable=False))
    shutil.copytree(model, tmp_path / "model")
    to_dist(open_source(tmp_path / "model"), tmp_path / "moved", settings)
    os.utime(sorted((tmp_path / "model").glob("*.safetensors"))[0])
    with pytest.raises(CheckpointError, match="the target exists"):  # of the same size, but written since
        to_dist(open_source(tmp_path / "model"), tmp_path / "moved", settings)
    assert open_source(target).format == "torch_dist"


def test_a_complete_conversion_that_lost_bytes_is_not_called_complete(tmp_path, model):
    source, target, settings = open_source(model), tmp_path / "dist", Settings(resume=True, durable=False)
    to_dist(source, target, settings)
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(CheckpointError, match="the target is a link"):
        to_dist(source, tmp_path / "link", settings)
    shard = next(target.glob("*.distcp"))
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=f"{shard.name} has [0-9]+ bytes instead of"):
        to_dist(source, target, settings)


def to_hf_resumed(source: Source, target: Path) -> dict[str, Any]:
    make = lambda place: hf_target(place, source.spec, source.dtypes, value_head=False)  # noqa: E731
    return convert(source, target, make, {}, Settings(resume=True, durable=False))


def test_a_conversion_of_something_else_is_not_continued(tmp_path, model):
    source, target = open_source(model), tmp_path / "dist"
    with pytest.raises(KilledError):
        to_dist(source, target, Settings(durable=False), KillAfter(phase="complete"))
    with pytest.raises(CheckpointError, match="the unfinished conversion was another one: plan"):
        convert(
            source,
            target,
            lambda place: dist_target(
                place, source.spec, ParallelLayout(), source.dtypes, value_head=False, naming="te"
            ),
            {},
            Settings(resume=True, durable=False),
        )


def test_a_line_cut_short_is_not_counted(tmp_path):
    path = tmp_path / "journal"
    journal = Journal(path, {"plan": "1"}, resume=False)
    journal.record(Done("a", 1, 2))
    journal.record(Done("b", 3, 4))
    journal.close()
    path.write_bytes(path.read_bytes()[:-3])
    again = Journal(path, {"plan": "1"}, resume=True)
    assert again.done == {"a": Done("a", 1, 2)}
    again.record(Done("c", 5, 6))
    again.close()
    assert [json.loads(line).get("tensor") for line in path.read_text().splitlines()] == [None, "a", "c"]


def test_two_conversions_do_not_write_one_target(tmp_path, model):
    source = open_source(model)
    journal = Journal(tmp_path / ".dist.journal", {"plan": "1"}, resume=False)
    with pytest.raises(CheckpointError, match="another process is converting"):
        to_dist(source, tmp_path / "dist", Settings(resume=True, durable=False))
    journal.close()


def test_an_existing_target_stays_until_its_successor_is_complete(tmp_path, model):
    source, target = open_source(model), tmp_path / "dist"
    to_dist(source, target, Settings(durable=False))
    before = (target / "conversion_manifest.json").read_bytes()
    with pytest.raises(CheckpointError, match="the target exists"):
        to_dist(source, target, Settings(durable=False))
    with pytest.raises(KilledError):
        to_dist(source, target, Settings(workers=1, overwrite=True, durable=False), KillAfter(moves=3))
    assert (target / "conversion_manifest.json").read_bytes() == before
    to_dist(source, target, Settings(overwrite=True, resume=True, durable=False))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dist"]


@pytest.mark.parametrize("is_overwriting", [True, False])
def test_killed_before_the_first_file_the_old_target_is_not_taken_for_the_new_one(
    tmp_path, model, monkeypatch, is_overwriting
):
    source, target = open_source(model), tmp_path / "dist"
    to_hf(source, target)
    with monkeypatch.context() as patch:
        patch.setattr(session, "_prepare", lambda *_: (_ for _ in ()).throw(KilledError()))
        with pytest.raises(KilledError):
            to_dist(source, target, Settings(overwrite=True, durable=False))
    again = Settings(overwrite=is_overwriting, resume=True, durable=False)
    if is_overwriting:
        to_dist(source, target, again)
        assert open_source(target).format == "torch_dist"
    else:
        with pytest.raises(CheckpointError, match="the target exists"):
            to_dist(source, target, again)
        assert open_source(target).format == "hf"


def test_a_target_that_another_process_completed_meanwhile_stays(tmp_path, model):
    source, target = open_source(model), tmp_path / "hf"

    def completed_meanwhile(place: Path) -> Target:
        shutil.copytree(model, target)
        return hf_target(place, source.spec, source.dtypes, value_head=False)

    with pytest.raises(CheckpointError, match="the target exists"):
        convert(source, target, completed_meanwhile, {}, Settings(durable=False))
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_journal_removed_while_its_lock_was_taken_is_made_anew(tmp_path, monkeypatch):
    path, lock = tmp_path / "journal", fcntl.flock
    removals = [path.unlink, lambda: None]
    monkeypatch.setattr(fcntl, "flock", lambda *given: (removals.pop(0)(), lock(*given)))
    journal = Journal(path, {"plan": "1"}, resume=False)
    assert json.loads(path.read_text()) == {"plan": "1"} and removals == []
    journal.close()


@pytest.mark.parametrize("place", ["source", "above", "photos", "file"])
def test_nothing_but_a_checkpoint_is_overwritten_and_never_the_source(tmp_path, model, place):
    source = tmp_path / "models/hf"
    shutil.copytree(model, source)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/cat.jpg").write_bytes(b"cat")
    (tmp_path / "file").write_text("text")
    target = {"source": source, "above": source.parent}.get(place, tmp_path / place)
    words = "the target is or holds the source" if place in ("source", "above") else "is no checkpoint"
    with pytest.raises(CheckpointError, match=words):
        to_dist(open_source(source), target, Settings(overwrite=True, durable=False))
    assert same_weights(source, model) and (tmp_path / "photos/cat.jpg").exists() and (tmp_path / "file").exists()


def test_a_full_disk_fails_before_the_first_tensor(tmp_path, model):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
    moved = CountBytes()
    try:
        with pytest.raises(CheckpointError, match="cannot reserve") as caught:
            to_dist(open_source(model), tmp_path / "dist", Settings(durable=False), moved)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert caught.value.exit_code == 8 and moved.count == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("workers", [1, 3])
def test_a_failing_write_ends_all_workers(tmp_path, model, monkeypatch, workers):
    from megarl.weights.files import arrays

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    source = open_source(model)
    with monkeypatch.context() as patch:
        patch.setattr(arrays.os, "pwrite", full)
        patch.setattr(session.Target, "allocate", lambda self: _make_files(self))
        with pytest.raises(CheckpointError, match="cannot write: No space left"):
            to_dist(source, tmp_path / "dist", Settings(workers=workers, durable=False))
    assert not (tmp_path / "dist").exists()


def _make_files(target: Any) -> None:
    target.directory.mkdir()
    for name, size in target.sizes.items():
        with (target.directory / name).open("wb") as file:
            file.truncate(size)


def test_too_little_memory_for_the_workers_is_said_before_anything_is_made(tmp_path, model):
    with pytest.raises(CheckpointError, match="too few for 4 workers"):
        to_dist(open_source(model), tmp_path / "dist", Settings(workers=4, max_memory=1000))
    assert list(tmp_path.iterdir()) == []


def test_stores_that_do_not_cover_each_other_are_no_plan(tmp_path, model):
    source = open_source(model)
    source.store.regions[0].pop()
    with pytest.raises(PlanError):
        to_dist(source, tmp_path / "dist", Settings(durable=False))
    assert list(tmp_path.iterdir()) == []


def command(name: str, *arguments: Any) -> list[str]:
    return [sys.executable, str(TOOLS / name), *map(str, arguments)]


@pytest.mark.slow
def test_killed_with_signal_nine_at_any_moment_it_continues(tmp_path):
    """The real command, killed at random moments until it gets through."""
    model = make_model(
        tmp_path, hidden_size=512, intermediate_size=1536, num_hidden_layers=24, head_dim=128, shard_bytes=20_000_000
    )
    draw = random.Random(5)
    start = time.monotonic()
    subprocess.run(command("hf_to_megatron.py", model, tmp_path / "timed", "--tp", 2), check=True, cwd=ROOT)
    whole_s = time.monotonic() - start
    for round_number in range(6):
        target, killed = tmp_path / f"dist{round_number}", 0
        while not target.exists() and killed < 40:
            with subprocess.Popen(
                command("hf_to_megatron.py", model, target, "--tp", 2, "--resume", "--quiet"),
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
            ) as process:
                try:
                    process.wait(timeout=draw.uniform(0.2, 1.1) * whole_s)
                except subprocess.TimeoutExpired:
                    process.kill()
                    killed += 1
        subprocess.run(command("hf_to_megatron.py", model, target, "--tp", 2, "--resume", "--overwrite"), cwd=ROOT)
        subprocess.run(command("megatron_to_hf.py", target, tmp_path / f"hf{round_number}"), check=True, cwd=ROOT)
        assert same_weights(tmp_path / f"hf{round_number}", model)
        shutil.rmtree(target)


@pytest.mark.slow
def test_a_model_larger_than_the_memory_is_converted(tmp_path):
    """Over 0.9 GB of weights under a limit of 600 MB of address space."""
    model = make_model(
        tmp_path, hidden_size=2048, intermediate_size=8192, num_hidden_layers=10, head_dim=512, shard_bytes=300_000_000
    )
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    limit = 600_000_000
    assert size > 1.5 * limit

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    options = ("--workers", 2, "--max-memory", "64M", "--no-fsync", "--quiet")
    forth = command("hf_to_megatron.py", model, tmp_path / "dist", "--tp", 2, *options)
    back = command("megatron_to_hf.py", tmp_path / "dist", tmp_path / "back", *options)
    for words in (forth, back):
        result = subprocess.run(words, preexec_fn=limited, cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
    receipts = [json.loads((tmp_path / name / "conversion_manifest.json").read_text()) for name in ("dist", "back")]
    assert receipts[0]["source"]["digest"] == receipts[1]["target"]["digest"]
