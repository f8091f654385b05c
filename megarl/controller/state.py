"""The run directory: one run at a time in it, checkpoints complete or absent, and what a resumed run continues.

    run directory/
      resolved.yaml, resolved.json    configuration with the origin of each value
      metrics.jsonl, tensorboard/     numbers
      logs/ROLE-RANK.log              output of each worker process; of earlier attempts in logs/attempt-1/ ...
      checkpoints/step_000010/        actor/, critic/, state.json, manifest.json (written last)
      checkpoints/latest              name of the newest complete checkpoint
      hf/                             the trained model as a Hugging Face directory
      summary.json                    written when the run ends well
      ending.json                     written when it does not: what ended it

Invariants:
1. A directory without a manifest that matches its files is not a checkpoint: it is neither resumed from nor counted.
2. An older checkpoint is removed only after the newer one is complete and ``latest`` names it.
3. A failed save leaves every earlier checkpoint as it was, and nothing of its own.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from megarl import __version__
from megarl.errors import CheckpointError, ConfigError

MANIFEST = "manifest.json"
STATE = "state.json"


@dataclass(frozen=True, slots=True)
class RunState:
    """What the controller needs to continue, beside the roles' own state.

    Args:
        step: controller steps completed.
        version: weight version published after them.
        prompts: cursor of the prompt source.
        kl: state of the KL controller.
        results: held-out numbers so far that the run's summary repeats.
    """

    step: int
    version: int
    prompts: dict[str, Any] = field(default_factory=dict)
    kl: dict[str, Any] = field(default_factory=dict)
    results: dict[str, float] = field(default_factory=dict)


class RunDirectory:
    """Paths of a run, held under an exclusive lock while the run lives."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock: IO[str] | None = None
        self.attempt = 1
        """How many times the run has been started, this time included."""

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def hf(self) -> Path:
        return self.root / "hf"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def ending(self) -> Path:
        return self.root / "ending.json"

    def open(self) -> None:
        """Create the directory, take its lock, and set the logs of an earlier attempt aside.

        Raises:
            ConfigError: another run holds it.
        """
        self.logs.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.root / ".lock", "a+")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            self._lock = None
            raise ConfigError(
                "another run is using this run directory",
                where=str(self.root),
                fix="choose another run.dir or run.name",
            ) from None
        self._set_logs_aside()

    def _set_logs_aside(self) -> None:
        earlier = [path for path in (*self.logs.iterdir(), self.ending) if path.is_file()]
        self.attempt = 1 + len(list(self.logs.glob("attempt-*")))
        if earlier:
            aside = self.logs / f"attempt-{self.attempt}"
            aside.mkdir()
            for path in earlier:
                path.rename(aside / path.name)
            self.attempt += 1

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def step_name(step: int) -> str:
    """Name of the checkpoint after a step."""
    return f"step_{step:06d}"


class CheckpointStore:
    """Complete checkpoints under one directory, the newest ``keep`` of them."""

    def __init__(self, directory: Path, keep: int) -> None:
        self.directory = directory
        self.keep = keep

    def save(self, state: RunState, write_parts: Callable[[Path], None]) -> Path:
        """Write a checkpoint, then make it the latest, then remove those beyond ``keep``.

        Args:
            state: the controller's state.
            write_parts: writes the roles' parts below the directory it is given.

        Raises:
            CheckpointError: the disk is full or a part failed; earlier checkpoints are untouched.
        """
        final = self.directory / step_name(state.step)
        partial = self.directory / f".{final.name}.partial"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            write_parts(partial)
            write_json(partial / STATE, asdict(state))
            files = {str(path.relative_to(partial)): path.stat().st_size for path in _files(partial)}
            write_json(partial / MANIFEST, {"megarl": __version__, "step": state.step, "files": files})
            _sync_directory(partial)
            # The step may have been saved before the run was resumed from an older one.
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            write_json(self.directory / "latest", final.name)
            _sync_directory(self.directory)
        except OSError as error:
            raise CheckpointError(
                f"could not save step {state.step}: {error.strerror or error}; earlier checkpoints are untouched",
                where=str(final),
                fix="free space on this file system, or set checkpoint.keep lower",
            ) from error
        finally:
            # After a success it has become the checkpoint; whatever else ended the save leaves nothing of it.
            shutil.rmtree(partial, ignore_errors=True)
        for old in self.complete()[: -self.keep]:
            shutil.rmtree(old)
        return final

    def complete(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(path for path in self.directory.glob("step_*") if not problems(path))

    def newest(self) -> Path | None:
        complete = self.complete()
        return complete[-1] if complete else None


def problems(checkpoint: Path) -> list[str]:
    """What keeps a directory from being a complete checkpoint; empty if it is one."""
    manifest = checkpoint / MANIFEST
    if not manifest.is_file():
        return [f"{MANIFEST} is missing: the save did not finish"]
    try:
        files = json.loads(manifest.read_text())["files"]
    except (ValueError, KeyError) as error:
        return [f"{MANIFEST} is unreadable: {error}"]
    found = []
    for name, size in files.items():
        path = checkpoint / name
        if not path.is_file():
            found.append(f"{name} is missing")
        elif path.stat().st_size != size:
            found.append(f"{name} has {path.stat().st_size} bytes instead of {size}")
    return found


def read_state(checkpoint: Path) -> RunState:
    """The controller's state in a complete checkpoint.

    Raises:
        CheckpointError: the checkpoint is incomplete, with the list of what is wrong.
    """
    wrong = problems(checkpoint)
    if wrong:
        raise CheckpointError(
            "not a complete checkpoint: " + "; ".join(wrong),
            where=str(checkpoint),
            fix="resume from an older one with resume=PATH, or start anew with another run.dir",
        )
    return RunState(**json.loads((checkpoint / STATE).read_text()))


def find_resume(resume: str, store: CheckpointStore) -> Path | None:
    """The checkpoint to continue from, or None to start at step 0.

    Raises:
        ConfigError: ``never`` was asked for and the run directory holds a checkpoint, or the path is no directory.
    """
    newest = store.newest()
    if resume == "auto":
        return newest
    if resume == "never":
        if newest is not None:
            raise ConfigError(
                f"run.resume=never, and the run directory already holds {newest.name}",
                where=str(newest),
                fix="choose another run.dir, or run.resume=auto to continue",
            )
        return None
    path = Path(resume).absolute()
    if not path.is_dir():
        raise ConfigError(
            f"no checkpoint directory at {resume}", where="run.resume", fix="auto, never, or a checkpoint"
        )
    return path


def write_json(path: Path, value: Any) -> None:
    """Write durably and atomically: the file holds the old or the new value, never a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w") as stream:
        json.dump(value, stream, indent=1)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
