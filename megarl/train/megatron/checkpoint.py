"""A role's training state on disk: Megatron's torch_dist format, written and read by all ranks of the role.

A directory holds Megatron's files (weights, optimizer moments, random state) and ``state.json``: format, layout, parts,
the controller's counters, and size and checksum of every file. The controller owns directories and the manifest over
roles.

Invariants:
1. ``state.json`` is written last and atomically; without it a directory is no checkpoint.
2. ``begin`` takes an empty directory only: a failure, a full disk included, damages no older checkpoint.
3. A file that is missing, shorter than recorded or changed is found by every rank before anything is loaded.
4. A failure on one rank becomes a CheckpointError on all of them, so that none waits in a collective.
5. Ranks that hold the same tensors share the writing of them.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from torch.distributed.checkpoint.api import CheckpointException

from megarl.errors import CheckpointError
from megarl.parallel.grid import ParallelLayout
from megarl.platform.durable import write_text
from megarl.train.megatron.checkpoint_reader import mapped_reading, merge_in_place
from megarl.train.megatron.checkpoint_writer import HostCopy, RankFile, Written
from megarl.train.megatron.lora import check_described
from megarl.train.megatron.optimizer import Optimizer
from megarl.train.megatron.optimizer_state import SHARDING_TYPE
from megarl.weights.files.file_checksum import checksum_of

FORMAT = 2
STATE_FILE = "state.json"
_PROBE_FILE = ".megarl-probe"

# What torch's and Megatron's readers and writers raise for files that cannot be read or written.
_FAILURES = (
    CheckpointException,  # a BaseException
    CheckpointingException,
    OSError,
    RuntimeError,
    EOFError,
    KeyError,
    ValueError,
    pickle.UnpicklingError,
)


@dataclass(frozen=True, slots=True)
class Save:
    """A save under way on this rank: planned by all of them, its tensors copied if it runs in the background."""

    directory: Path
    file: RankFile
    described: dict[str, Any]

    @property
    def is_written(self) -> bool:
        """Whether this rank has nothing left to write."""
        return self.file.is_written

    def finish(self) -> dict[str, float]:
        """Wait for this rank's file, then complete the checkpoint with all ranks; collective.

        Returns:
            this rank's seconds of planning, copying, writing and reading back.

        Raises:
            CheckpointError: a rank could not write; on every rank.
        """
        written = self.file.gather()

        def complete() -> None:
            self.file.write_index(written)
            _write_state_file(self.directory, self.described, written)

        _on_first_rank(complete, self.directory)
        return dict(self.file.seconds)


def begin(
    directory: Path,
    modules: Sequence[Any],
    optimizer: Optimizer | None,
    rng_state: Mapping[str, Any],
    layout: ParallelLayout,
    *,
    dp_group: dist.ProcessGroup,
    counters: Mapping[str, Any],
    adapters: Mapping[str, Any] | None = None,
    host: HostCopy | None = None,
    synchronize: Callable[[], None] = lambda: None,
) -> Save:
    """Start to write the training state of this role; called by all its ranks with the same directory and counters.

    Args:
        directory: new or empty directory on a file system all ranks see.
        modules: the bare chunks of this rank's model.
        optimizer: its optimizer; None for a model that is not trained.
        rng_state: this rank's random generators.
        layout: the role's layout.
        dp_group: data-parallel (and context-parallel) group, whose ranks share the writing.
        counters: what the controller wants back from ``load``; JSON values.
        adapters: ``lora.Adapters.describe()`` of a model with adapters, whose frozen weights are left out; else None.
        host: memory to copy into: this rank then writes in a thread, and training may go on. None writes before this
            returns.
        synchronize: waits for copies from the device.

    Raises:
        CheckpointError: the directory is not empty, the disk is full, or a file cannot be written; on every rank.
    """
    try:
        json.dumps(dict(counters))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the counters are no JSON values: {error}", where=f"keys {sorted(counters)}") from error
    if optimizer is not None:
        optimizer.materialise_state()
    metadata = _metadata(dp_group)
    state = _state_dict(modules, optimizer, metadata, is_loading=False, only_trained=adapters is not None)
    state["rng"] = _rng_object(rng_state, layout)
    _on_first_rank(lambda: _prepare(directory), directory)
    _require_space(directory, state)
    file = RankFile(host, synchronize)
    strategy: Any = file if dp_group.size() == 1 else FullyParallelSaveStrategyWrapper(file, dp_group)
    try:
        with _quiet():
            dist_checkpointing.save(
                state, str(directory), sharded_strategy=strategy, content_metadata=_storable(metadata)
            )
    except _FAILURES as error:
        _fail("cannot write the checkpoint", directory, error)
    described = {
        "format": FORMAT,
        "layout": asdict(layout),
        "optimizer": None if optimizer is None else {"kind": optimizer.config.kind, **optimizer.counters()},
        "adapters": None if adapters is None else dict(adapters),
        "counters": dict(counters),
    }
    if host is None:
        file.write()
    else:
        file.start()
    return Save(directory, file, described)


def load(
    directory: Path,
    modules: Sequence[Any],
    optimizer: Optimizer | None,
    layout: ParallelLayout,
    *,
    dp_group: dist.ProcessGroup,
    adapters: Mapping[str, Any] | None = None,
    fresh: Collection[str] = (),
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Read a checkpoint into this rank's model and optimizer; called by all ranks, at any layout.

    Args:
        directory: the checkpoint.
        modules: the bare chunks of this rank's model.
        optimizer: its optimizer.
        layout: the role's layout.
        dp_group: data-parallel (and context-parallel) group.
        adapters: as ``begin`` takes it; the checkpoint must have been written with the same.
        fresh: parts to leave as they are: ``optimizer`` (state), ``scheduler`` (its position), ``rng``.

    Returns:
        the counters given to ``begin``, and this rank's random state (None if the layout was another one, at which a
        rank's generators have no counterpart, or if it is left fresh).

    Raises:
        CheckpointError: no complete checkpoint, a missing, truncated or changed file, or contents that do not fit the
            model or the kind of optimizer.
    """
    described = read_state_file(directory)
    _verify_together(directory, described)
    check_described(directory, described.get("adapters"), adapters)
    saved = described["optimizer"]
    loads_optimizer = optimizer is not None and "optimizer" not in fresh
    if optimizer is not None and loads_optimizer:
        kind = None if saved is None else saved["kind"]
        if kind != optimizer.config.kind:
            raise CheckpointError(
                f"the checkpoint holds {'no optimizer state' if kind is None else f'the state of {kind}'}, "
                f"the run has {optimizer.config.kind}",
                where=str(directory),
                fix="resume.allow_fresh=[optimizer]",
            )
        optimizer.materialise_state()
    loads_rng = described["layout"] == asdict(layout) and "rng" not in fresh
    is_partial = adapters is not None
    state = _state_dict(
        modules,
        optimizer if loads_optimizer else None,
        _metadata(dp_group),
        is_loading=True,
        only_trained=is_partial,
    )
    if loads_rng:
        state["rng"] = _rng_object({}, layout)
    try:
        with _quiet(), mapped_reading():
            merge_in_place(state)
            loaded = dist_checkpointing.load(state, str(directory), strict="raise_unexpected")
        for name, module in _named(modules).items():
            # What was asked for has been found; of a model with adapters the rest is the base, which stays.
            module.load_state_dict(loaded[name], strict=not is_partial)
        if optimizer is not None:
            if loads_optimizer:
                optimizer.load_state(loaded["optimizer"])
            else:
                optimizer.reload_weights()
            if saved is not None and "scheduler" not in fresh:
                optimizer.load_counters(saved)
    except _FAILURES as error:
        _fail("cannot load the checkpoint", directory, error)
    return described["counters"], loaded["rng"] if loads_rng else None


def _verify_together(directory: Path, described: Mapping[str, Any]) -> None:
    """Compare every file's checksum with the recorded one, each rank a share of the files; collective."""
    # Files that a conversion wrote have none.
    names = sorted(name for name, recorded in described["files"].items() if "checksum" in recorded)
    mine = names[dist.get_rank() :: dist.get_world_size()]
    changed = []
    for name in mine:
        try:
            found = checksum_of(directory / name)
        except OSError as error:
            changed.append(f"{name} cannot be read: {error}")
            continue
        if found != described["files"][name]["checksum"]:
            changed.append(f"{name} has checksum {found} instead of {described['files'][name]['checksum']}")
    everywhere: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everywhere, changed)
    if problems := [problem for one in everywhere for problem in one]:
        raise CheckpointError(
            f"damaged checkpoint: {'; '.join(problems)}", where=str(directory), fix="load another one"
        )


def read_state_file(directory: Path) -> dict[str, Any]:
    """Contents of ``state.json``, after every file it lists was found with its recorded size.

    Raises:
        CheckpointError: names what is missing or truncated.
    """
    path = directory / STATE_FILE
    try:
        described: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(
            f"no complete checkpoint: {STATE_FILE} is missing", where=str(directory), fix="load another one"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{STATE_FILE} cannot be read: {error}", where=str(path)) from error
    if described.get("format") != FORMAT:
        raise CheckpointError(f"checkpoint format {described.get('format')!r}, expected {FORMAT}", where=str(path))
    damaged = []
    for name, recorded in described["files"].items():
        file = directory / name
        if not file.is_file():
            damaged.append(f"{name} is missing")
        elif file.stat().st_size != recorded["bytes"]:
            damaged.append(f"{name} has {file.stat().st_size} of {recorded['bytes']} bytes")
    if damaged:
        raise CheckpointError(f"damaged checkpoint: {'; '.join(damaged)}", where=str(directory), fix="load another one")
    return described


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's notices that the format Megatron builds on, and its entry points, are to be replaced."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed|megatron")
        yield


def _metadata(dp_group: dist.ProcessGroup) -> dict[str, Any]:
    """How Megatron shards the state: loadable at another layout, names without a prefix per optimizer."""
    return {
        "distrib_optim_sharding_type": SHARDING_TYPE,
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": dp_group,
    }


def _storable(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metadata.items() if name != "dp_cp_group"}


def _state_dict(
    modules: Sequence[Any],
    optimizer: Optimizer | None,
    metadata: dict[str, Any],
    *,
    is_loading: bool,
    only_trained: bool,
) -> dict[str, Any]:
    state = {name: module.sharded_state_dict(metadata=metadata) for name, module in _named(modules).items()}
    if optimizer is not None:
        weights = state["model"] if len(modules) == 1 else dict(state)
        state["optimizer"] = optimizer.sharded_state(weights, metadata, is_loading=is_loading)
    if only_trained:
        for name, module in _named(modules).items():
            frozen = {key for key, parameter in module.named_parameters() if not parameter.requires_grad}
            state[name] = {key: entry for key, entry in state[name].items() if key not in frozen}
    return state


def _named(modules: Sequence[Any]) -> dict[str, Any]:
    """Chunks by their place in a checkpoint's state; the files do not tell chunks apart."""
    return {"model" if len(modules) == 1 else f"model{index}": module for index, module in enumerate(modules)}


def _rng_object(rng_state: Mapping[str, Any], layout: ParallelLayout) -> ShardedObject:
    """This rank's generators, stored under its coordinate."""
    at = layout.coordinate(dist.get_rank())
    shape = (layout.pp, layout.tp, layout.cp * layout.dp)
    return ShardedObject("rng_state", dict(rng_state), shape, (at.pp, at.tp, at.cp + layout.cp * at.dp))


def _prepare(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise CheckpointError("the directory is not empty", where=str(directory), fix="save into a new directory")
    # A file that can be written and synced rules out a read-only, missing or over-quota file system while it is
    # still one rank's error; inside Megatron's save it would leave the other ranks waiting.
    probe = directory / _PROBE_FILE
    with probe.open("wb") as file:
        file.write(bytes(1 << 20))
        file.flush()
        os.fsync(file.fileno())
    probe.unlink()


def _require_space(directory: Path, state: Mapping[str, Any]) -> None:
    """Raise on every rank if the file system lacks room for the tensors of all of them."""
    needed = torch.tensor([_owned_bytes(state)], dtype=torch.int64)
    sizes: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(sizes, int(needed))
    total = sum(sizes)

    def check() -> None:
        free = shutil.disk_usage(directory).free
        if free < total:
            raise CheckpointError(
                f"the checkpoint needs {total / 2**20:.0f} MiB, the file system has {free / 2**20:.0f} MiB free",
                where=str(directory),
                fix="free space, lower checkpoint.keep, or put run.dir elsewhere",
            )

    _on_first_rank(check, directory)


def _owned_bytes(state: Any) -> int:
    """Bytes this rank writes: tensors of which it holds the main replica."""
    if isinstance(state, Mapping):
        return sum(_owned_bytes(value) for value in state.values())
    if isinstance(state, list | tuple):
        return sum(_owned_bytes(value) for value in state)
    data, replica = getattr(state, "data", None), getattr(state, "replica_id", None)
    if replica is None or not isinstance(data, torch.Tensor):
        return 0
    is_main = not any(replica) if isinstance(replica, Sequence) else replica == 0
    return data.numel() * data.element_size() if is_main else 0


def _write_state_file(directory: Path, described: dict[str, Any], written: Sequence[Written]) -> None:
    checksums = {one.name: one.checksum for one in written if one.name is not None}
    files = {}
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        name = str(path.relative_to(directory))
        checksum = checksums[name] if name in checksums else checksum_of(path)
        files[name] = {"bytes": path.stat().st_size, "checksum": checksum}
    if missing := sorted(set(checksums) - set(files)):
        raise CheckpointError(f"files are not there that were written: {', '.join(missing)}", where=str(directory))
    write_text(directory / STATE_FILE, json.dumps(described | {"files": files}, indent=1))


def _on_first_rank(action: Any, directory: Path) -> None:
    """Run ``action`` on rank 0 and raise what it raised on every rank."""
    outcome: list[CheckpointError | None] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except CheckpointError as error:
            outcome[0] = error
        except OSError as error:
            outcome[0] = CheckpointError(f"cannot write the checkpoint: {error}", where=str(directory))
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise outcome[0]


def _fail(problem: str, directory: Path, error: BaseException) -> NoReturn:
    causes = [error]
    if isinstance(error, CheckpointException):
        causes = [failure[0] for failure in error.failures.values()]
    cause = causes[0]
    # The last line of torch's and Megatron's messages says what; the lines before are their tracebacks.
    text = str(cause).strip().splitlines()
    raise CheckpointError(
        f"{problem}: {type(cause).__name__}: {text[0] if text else ''}",
        where=f"{directory}, rank {dist.get_rank()}",
    ) from error
