"""A conversion from start to end: plan, proof, files, tensors, receipt, name.

    reserve .NAME.partial/ ── copy, note each tensor in .NAME.journal ── small files, receipt ── rename to NAME

Invariants:
1. Killed at any moment, the target is absent or complete (or, when overwriting, the old one); ``resume`` continues.
2. What a journal notes is read back before it is relied on.
3. The plan is proved before a file is made.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.errors import CheckpointError
from megarl.weights.check import check_plan
from megarl.weights.conversion.copying import (
    BUFFERS_PER_WORKER,
    DEFAULT_BLOCK_BYTES,
    SMALLEST_BLOCK_BYTES,
    Job,
    jobs_of,
    run,
)
from megarl.weights.conversion.journal import Journal
from megarl.weights.conversion.receipt import MANIFEST, changed_files, is_receipt_of, read_receipt, receipt
from megarl.weights.conversion.source import HF_FOLDER, Source
from megarl.weights.conversion.target import Target
from megarl.weights.files.arrays import Array
from megarl.weights.plan import Plan
from megarl.weights.plan import plan as plan_copies
from megarl.weights.region import Box, Region

DEFAULT_MAX_MEMORY = 1 << 30

# By one of these a directory is known as a checkpoint, whole or damaged, of any format.
_SIGNS = ("*.safetensors", "*.safetensors.index.json", "*.distcp", ".metadata", "latest_checkpointed_iteration.txt")


class Progress:
    """What a conversion reports; this one keeps silent."""

    def start(self, total_bytes: int, done_bytes: int) -> None:
        """The tensors' bytes, and how many of them an earlier attempt had moved."""

    def moved(self, count: int) -> None:
        """Bytes moved; called by several threads."""

    def phase(self, name: str) -> None:
        """A new phase: reserve, check, copy, complete; kept, where an earlier attempt had completed it."""


@dataclass(frozen=True)
class Settings:
    """How a conversion runs.

    Args:
        workers: threads.
        max_memory: bytes for blocks of all workers together.
        resume: continue an interrupted conversion; one that is complete is left as it is.
        overwrite: replace an existing target when the new one is complete.
        durable: wait for the disk before the target gets its name.
    """

    workers: int = 2
    max_memory: int = DEFAULT_MAX_MEMORY
    resume: bool = False
    overwrite: bool = False
    durable: bool = True

    def block_bytes(self) -> int:
        """Size of a block. Raises CheckpointError where the memory is too small for the workers."""
        if self.workers < 1:
            raise CheckpointError(f"{self.workers} workers can do nothing", fix="give --workers of at least 1")
        size = min(DEFAULT_BLOCK_BYTES, self.max_memory // (self.workers * BUFFERS_PER_WORKER))
        if size < SMALLEST_BLOCK_BYTES:
            least = self.workers * BUFFERS_PER_WORKER * SMALLEST_BLOCK_BYTES
            raise CheckpointError(
                f"{self.max_memory} bytes are too few for {self.workers} workers",
                fix=f"give --max-memory of at least {least}, or fewer --workers",
            )
        return size


def convert(
    source: Source,
    final: str | Path,
    make_target: Callable[[Path], Target],
    options: Mapping[str, Any],
    settings: Settings,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Converts a checkpoint; returns the receipt.

    Args:
        source: what is converted.
        final: the new directory.
        make_target: lays the target out in a given directory.
        options: what distinguishes this target from others of the source; JSON values.
        settings: how.
        progress: told what happens.

    Raises:
        CheckpointError: the target exists (under ``overwrite``: and is no checkpoint, or the source), no room, a
            failing read or write, replicas that differ, or an unfinished conversion of something else under ``resume``.
        PlanError: source and target do not cover each other.
    """
    progress = progress or Progress()
    final = Path(os.path.abspath(final))
    if not final.name:
        raise CheckpointError("the target exists", where=str(final), fix="choose another name")
    temporary, journal_path = final.with_name(f".{final.name}.partial"), final.with_name(f".{final.name}.journal")
    if not (settings.resume and (journal_path.exists() or (final / MANIFEST).exists())):
        _check_place(final, source, settings)
    block_bytes = settings.block_bytes()
    target = make_target(temporary)
    plan = plan_copies(source.store.regions, target.store.regions)
    check_plan(plan)
    if settings.resume and not journal_path.exists() and (final / MANIFEST).exists():
        if kept := _completed(final, source, plan, options):
            progress.phase("kept")
            return kept
        _check_place(final, source, settings)
    jobs = jobs_of(plan, source.store, target.store, scales=source.scales)
    identity = _identity(source, plan.digest, options)
    journal = Journal(journal_path, identity, resume=settings.resume)
    try:
        if journal.is_complete(jobs) and final.exists() and not temporary.exists():
            # Killed between the rename and the removal of the journal: everything is in place.
            journal.remove()
            return receipt(source, target, plan, jobs, journal.done, options)
        try:
            _check_place(final, source, settings)  # Another process may have completed it meanwhile.
        except CheckpointError:
            if not journal.is_resumed:
                journal.remove()
            raise
        _prepare(target, journal, jobs, settings, block_bytes, progress)
        left = [job for job in jobs if job.tensor not in journal.done]
        total, left_bytes = sum(job.num_bytes for job in jobs), sum(job.num_bytes for job in left)
        progress.phase("copy")
        progress.start(total, total - left_bytes)
        run(left, workers=settings.workers, block_bytes=block_bytes, on_done=journal.record, on_bytes=progress.moved)
        progress.phase("complete")
        content = receipt(source, target, plan, jobs, journal.done, options)
        target.complete(_companions(source, target, content), durable=settings.durable)
        target.put_in_place(final)
        journal.remove()
    finally:
        journal.close()
    return content


def _completed(final: Path, source: Source, plan: Plan, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """The receipt of a target that an earlier call completed from the same; None where it is of something else."""
    content = read_receipt(final)
    if final.is_symlink() or not is_receipt_of(content, source, plan, options):
        return None
    if damaged := changed_files(final, content):
        raise CheckpointError(
            f"the target was complete, but {', '.join(damaged[:4])}",
            where=str(final),
            fix="make it again with --overwrite and without --resume",
        )
    return content


def _check_place(final: Path, source: Source, settings: Settings) -> None:
    """Raises CheckpointError where a conversion must not write: what makes way in the end is removed."""
    if not final.parent.is_dir():
        raise CheckpointError("no such directory", where=str(final.parent), fix="make it first")
    if final.is_symlink():
        raise CheckpointError("the target is a link", where=str(final), fix="name what it leads to, or another place")
    if not final.exists():
        return
    if not settings.overwrite:
        raise CheckpointError("the target exists", where=str(final), fix="choose another name, or give --overwrite")
    if source.directory.resolve().is_relative_to(final.resolve()):
        raise CheckpointError("the target is or holds the source", where=str(final), fix="choose another name")
    if not final.is_dir() or (any(final.iterdir()) and not any(next(final.glob(sign), None) for sign in _SIGNS)):
        raise CheckpointError("the target exists and is no checkpoint", where=str(final), fix="choose another name")


def _prepare(
    target: Target, journal: Journal, jobs: Sequence[Job], settings: Settings, block_bytes: int, progress: Progress
) -> None:
    """Files of full size; what an earlier attempt wrote is read back."""
    if journal.is_resumed and target.is_allocated():
        progress.phase("check")
        try:
            target.write_segments()
        except OSError as error:
            raise CheckpointError(f"cannot write: {error.strerror}", where=str(target.directory)) from error
        noted = [job for job in jobs if job.tensor in journal.done]
        with ThreadPoolExecutor(settings.workers) as pool:
            answers = pool.map(lambda job: _is_written(job, journal, block_bytes), noted)
            for job, is_good in zip(noted, answers, strict=True):
                if not is_good:
                    journal.forget(job.tensor)
        return
    progress.phase("reserve")
    for tensor in list(journal.done):
        journal.forget(tensor)
    try:
        target.allocate()
    except CheckpointError:
        journal.remove()
        raise


def _is_written(job: Job, journal: Journal, block_bytes: int) -> bool:
    """Whether a tensor's bytes in the target are those the journal notes, in all places."""
    check = Job(job.tensor, job.shape, job.dtype, job.dtype)
    seen: dict[Box, tuple[Array, Region]] = {}
    for place in job.writes:
        if place[1].box in seen:
            check.replicas.append(place)
        else:
            seen[place[1].box] = place
    check.reads = list(seen.values())
    sums: list[int] = []
    try:
        run([check], workers=1, block_bytes=block_bytes, on_done=lambda done: sums.append(done.checksum))
    except CheckpointError:
        return False
    return sums == [journal.done[job.tensor].checksum]


def _identity(source: Source, plan_digest: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """What an unfinished conversion must have in common with the one that continues it."""
    files = {
        str(path.relative_to(source.directory)): [path.stat().st_size, path.stat().st_mtime_ns] for path in source.files
    }
    return {"source": str(source.directory.resolve()), "files": files, "plan": plan_digest, "options": dict(options)}


def _companions(source: Source, target: Target, content: Mapping[str, Any]) -> dict[str, bytes]:
    folder = "" if target.format in ("hf", "sharded_state") else f"{HF_FOLDER}/"
    files = {folder + name: data for name, data in source.companions.items()}
    files[MANIFEST] = (json.dumps(content, indent=1) + "\n").encode()
    return files
