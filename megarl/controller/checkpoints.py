"""Checkpoints of a run: complete or absent, listed part by part, the newest kept and the older ones let go.

Invariants:
1. A directory without a manifest that matches its files is not a checkpoint: it is neither resumed from nor counted.
2. An older checkpoint is removed only after the newer one is complete, read back and synced, and ``latest`` names it.
3. A failed save leaves every earlier checkpoint as it was, and nothing of its own; one that was killed leaves a
   directory that the next save removes.
4. A damaged checkpoint is never passed over in silence: it is named, and where no other is left nothing starts.
5. What a checkpoint lacks or has beyond the run's parts is refused by name, unless it may start afresh.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from megarl import __version__
from megarl.config.schema import SftConfig, TrainConfig
from megarl.controller.state import RunState, write_json
from megarl.errors import CheckpointError, ConfigError
from megarl.platform.durable import sync
from megarl.weights.files.file_checksum import checksum_of

MANIFEST = "manifest.json"
STATE = "state.json"
LATEST = "latest"
ROLE_PARTS = ("model", "optimizer", "scheduler", "rng")


@dataclass(frozen=True, slots=True)
class Partial:
    """A checkpoint that is being written: its directory, to be renamed when it is complete."""

    state: RunState
    directory: Path


class CheckpointStore:
    """Complete checkpoints under one directory: the newest ``keep``, and those of every ``keep_every_steps`` steps.

    Args:
        directory: holds them.
        keep: newest checkpoints kept.
        keep_every_steps: a checkpoint of a step that it divides stays for good; None keeps the newest only.
        contents: parts of this run's checkpoints (``contents_of``).
    """

    def __init__(
        self,
        directory: Path,
        keep: int,
        *,
        keep_every_steps: int | None = None,
        contents: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = directory
        self.keep = keep
        self.keep_every_steps = keep_every_steps
        self.contents = {} if contents is None else dict(contents)

    def begin(self, state: RunState) -> Partial:
        """A new directory into which roles write their parts; ``commit`` makes it a checkpoint.

        Raises:
            CheckpointError: the directory cannot be made.
        """
        partial = Partial(state, self.directory / f".{step_name(state.step)}.partial")
        with self.writing(partial):
            # Of runs that were killed while they saved: nobody else writes here while this run holds its directory.
            for stale in self.directory.glob(".step_*.partial"):
                shutil.rmtree(stale)
            partial.directory.mkdir(parents=True)
        return partial

    def commit(self, partial: Partial) -> Path:
        """Make a directory whose parts are complete the latest checkpoint, then remove those beyond what is kept.

        Raises:
            CheckpointError: the disk is full; earlier checkpoints are untouched.
        """
        directory, step = partial.directory, partial.state.step
        final = self.directory / step_name(step)
        with self.writing(partial):
            write_json(directory / STATE, asdict(partial.state))
            manifest = {"megarl": __version__, "step": step, "contents": self.contents, "files": _listed(directory)}
            write_json(directory / MANIFEST, manifest)
            for place in [directory, *(path for path in directory.rglob("*") if path.is_dir())]:
                sync(place)
            # The step may have been saved before the run was resumed from an older one.
            shutil.rmtree(final, ignore_errors=True)
            directory.rename(final)
            write_json(self.directory / LATEST, final.name)
            sync(self.directory)
        self._let_go(newest=final)
        return final

    @contextmanager
    def writing(self, partial: Partial) -> Iterator[None]:
        """What ends the block by an exception leaves nothing of the checkpoint; a full disk is a CheckpointError."""
        try:
            yield
        except BaseException as error:
            shutil.rmtree(partial.directory, ignore_errors=True)
            if isinstance(error, OSError):
                raise CheckpointError(
                    f"could not save step {partial.state.step}: {error.strerror or error}; "
                    "earlier checkpoints are untouched",
                    where=str(partial.directory),
                    fix="free space on this file system, or set checkpoint.keep lower",
                ) from error
            raise

    def _let_go(self, newest: Path) -> None:
        """Remove checkpoints that are neither among the newest nor kept for good; nothing if the newest is damaged."""
        complete = self.complete()
        if newest not in complete:
            raise CheckpointError(
                "the checkpoint just written is not complete: " + "; ".join(problems(newest)),
                where=str(newest),
                fix="check the file system; earlier checkpoints are untouched",
            )
        every = self.keep_every_steps
        # A run resumed from an older step writes lower steps than those that are there.
        others = [path for path in complete if path != newest]
        for path in [*others, newest][: -self.keep]:
            if every is None or int(path.name.removeprefix("step_")) % every:
                shutil.rmtree(path)

    def complete(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(path for path in self.directory.glob("step_*") if not problems(path))

    def damaged(self) -> dict[str, list[str]]:
        """What is wrong with the directories of checkpoints that are none, by name, oldest first."""
        found = {path.name: problems(path) for path in sorted(self.directory.glob("step_*"))}
        return {name: wrong for name, wrong in found.items() if wrong}

    def newest(self) -> Path | None:
        """The one that ``latest`` names; if that is damaged, the complete one of the highest step."""
        complete = self.complete()
        try:
            named = self.directory / str(json.loads((self.directory / LATEST).read_text()))
        except (OSError, ValueError):
            named = None
        if named in complete:
            return named
        return complete[-1] if complete else None


def step_name(step: int) -> str:
    """Name of the checkpoint after a step."""
    return f"step_{step:06d}"


def contents_of(config: TrainConfig | SftConfig) -> dict[str, str]:
    """Parts of a run's checkpoints by name, with the kind of those that have one."""
    roles = {"actor": config.actor.optimizer.kind}
    if isinstance(config, TrainConfig) and config.critic is not None:
        roles["critic"] = config.critic.optimizer.kind
    parts = {
        f"{role}/{part}": kind if part == "optimizer" else "" for role, kind in roles.items() for part in ROLE_PARTS
    }
    others = ("data", "kl", "version", "metrics") if isinstance(config, TrainConfig) else ("data", "metrics")
    return parts | dict.fromkeys(others, "")


def fresh_parts(checkpoint: Path, expected: Mapping[str, str], allowed: Collection[str]) -> frozenset[str]:
    """Parts of the run that start afresh because the checkpoint has none of them, or another kind.

    Args:
        checkpoint: a complete one.
        expected: parts of this run.
        allowed: names of parts that may be missing, of another kind, or superfluous: ``optimizer`` stands for each
            role's, ``critic`` for all parts of that role.

    Raises:
        CheckpointError: names every part that is missing, of another kind or superfluous and not allowed.
    """
    found: dict[str, str] = json.loads((checkpoint / MANIFEST).read_text())["contents"]
    wrong = {name: "missing" for name in expected if name not in found}
    wrong |= {
        name: f"{found[name]} there, {kind} here" for name, kind in expected.items() if found.get(name, kind) != kind
    }
    superfluous = {name: "not a part of this run" for name in found if name not in expected}
    refused = {name: why for name, why in (wrong | superfluous).items() if not {name, *name.split("/")} & set(allowed)}
    if refused:
        short = sorted({name.split("/")[0 if name.startswith("critic/") else -1] for name in refused})
        raise CheckpointError(
            "the checkpoint has other parts than this run: "
            + "; ".join(f"{name}: {why}" for name, why in refused.items()),
            where=str(checkpoint),
            fix=f"resume.allow_fresh=[{','.join(short)}] starts them afresh, or drops them",
        )
    return frozenset(wrong)


def problems(checkpoint: Path) -> list[str]:
    """What keeps a directory from being a complete checkpoint; empty if it is one.

    Sizes of all files are compared, and checksums of the small ones; roles check theirs when they load.
    """
    try:
        recorded = json.loads((checkpoint / MANIFEST).read_text())
        files = {name: (int(entry["bytes"]), entry.get("checksum")) for name, entry in recorded["files"].items()}
        dict(recorded["contents"])
    except FileNotFoundError:
        return [f"{MANIFEST} is missing: the save did not finish"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{MANIFEST} is unreadable: {type(error).__name__} {error}"]
    found = []
    for name, (num_bytes, checksum) in files.items():
        path = checkpoint / name
        try:
            if not path.is_file():
                found.append(f"{name} is missing")
            elif path.stat().st_size != num_bytes:
                found.append(f"{name} has {path.stat().st_size} bytes instead of {num_bytes}")
            elif checksum is not None and checksum_of(path) != checksum:
                found.append(f"{name} has changed")
        except OSError as error:
            found.append(f"{name} cannot be read: {error.strerror}")
    return found


def read_state(checkpoint: Path) -> RunState:
    """The controller's state in a complete checkpoint.

    Raises:
        CheckpointError: the checkpoint is incomplete, with the list of what is wrong, or of another version's form.
    """
    wrong = problems(checkpoint)
    if wrong:
        raise CheckpointError(
            "not a complete checkpoint: " + "; ".join(wrong),
            where=str(checkpoint),
            fix="resume from an older one with resume=PATH, or start anew with another run.dir",
        )
    try:
        return RunState(**json.loads((checkpoint / STATE).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{STATE} is not what megarl {__version__} writes: {error}",
            where=str(checkpoint),
            fix="continue with the version that manifest.json names, or from another checkpoint",
        ) from error


def find_resume(resume: str, store: CheckpointStore) -> Path | None:
    """The checkpoint to continue from, or None to start at step 0.

    Raises:
        ConfigError: ``never`` was asked for and the run directory holds a checkpoint, or the path is none.
        CheckpointError: ``auto`` was asked for, and what the run directory holds is damaged, all of it.
    """
    newest = store.newest()
    if resume == "auto":
        if newest is None and (damaged := store.damaged()):
            raise CheckpointError(
                "no checkpoint of this run is complete: "
                + "; ".join(f"{name}: {', '.join(wrong)}" for name, wrong in damaged.items()),
                where=str(store.directory),
                fix="restore a file, give run.resume=PATH of another checkpoint, or start anew with run.resume=never",
            )
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
    inside = [found for place in (path / "checkpoints", path) for found in sorted(place.glob("step_*"))]
    if inside and not (path / MANIFEST).exists():
        raise ConfigError(
            f"{resume} is no checkpoint, it holds {len(inside)}", where="run.resume", fix=f"run.resume={inside[-1]}"
        )
    return path


def _listed(directory: Path) -> dict[str, dict[str, int | str]]:
    """Size of every file, and the checksum of those that no role has listed with theirs."""
    files: dict[str, dict[str, int | str]] = {}
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        files[str(path.relative_to(directory))] = {"bytes": path.stat().st_size}
    for name, entry in files.items():
        path = directory / name
        if path.name == STATE or not (path.parent / STATE).is_file() or path.parent == directory:
            entry["checksum"] = checksum_of(path)
    return files
