"""A role's training state on disk: Megatron's torch_dist format, written and read by all ranks of the role.

A directory holds Megatron's files (weights, optimizer moments, random state) and ``state.json``: format, layout, the
controller's counters, and the size of every file. The controller owns directories and the manifest over roles.

Invariants:
1. ``state.json`` is written last and atomically; without it a directory is no checkpoint.
2. ``save`` writes into an empty directory only: a failure, a full disk included, damages no older checkpoint.
3. A file that is missing or shorter than recorded is found by every rank before anything is loaded.
4. A failure on one rank becomes a CheckpointError on all of them, so that none waits in a collective.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from torch.distributed.checkpoint.api import CheckpointException

from megarl.errors import CheckpointError
from megarl.parallel.grid import ParallelLayout
from megarl.train.megatron.optimizer import Optimizer

logger = logging.getLogger(__name__)

FORMAT = 1
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


class _DirectSave(torch_strategy.TorchDistSaveShardedStrategy):
    """Megatron's save strategy with torch's own writer.

    Megatron's writer forks from a process full of threads, starts a manager process on first use (3 to 4 s), and
    reports a failed write only after all ranks have passed a barrier; torch's writes from this process and raises the
    same exception on every rank. The files are the same format.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        # The name maps that come back with it are for loading.
        state = torch_strategy._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)[0]
        dcp.save(
            torch_strategy.mcore_to_pyt_state_dict(state, False),
            storage_writer=dcp.FileSystemWriter(checkpoint_dir, single_file_per_rank=True, sync_files=True),
            planner=torch_strategy.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def save(
    directory: Path,
    modules: Sequence[Any],
    optimizer: Optimizer | None,
    rng_state: Mapping[str, Any],
    layout: ParallelLayout,
    *,
    dp_group: dist.ProcessGroup,
    counters: Mapping[str, Any],
) -> None:
    """Write the training state of this role; called by all its ranks with the same directory and counters.

    Args:
        directory: new or empty directory on a file system all ranks see.
        modules: the bare chunks of this rank's model.
        optimizer: its optimizer; None for a model that is not trained.
        rng_state: this rank's random generators.
        layout: the role's layout.
        dp_group: data-parallel group.
        counters: what the controller wants back from ``load``; JSON values.

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
    state = _state_dict(modules, optimizer, metadata, is_loading=False)
    state["rng"] = _rng_object(rng_state, layout)
    _on_first_rank(lambda: _prepare(directory), directory)
    _require_space(directory, state)
    try:
        with _quiet():
            dist_checkpointing.save(
                state, str(directory), sharded_strategy=_DirectSave(), content_metadata=_storable(metadata)
            )
    except _FAILURES as error:
        _fail("cannot write the checkpoint", directory, error)
    described = {
        "format": FORMAT,
        "layout": asdict(layout),
        "optimizer": None if optimizer is None else optimizer.counters(),
        "counters": dict(counters),
    }
    _on_first_rank(lambda: _write_state_file(directory, described), directory)


def load(
    directory: Path,
    modules: Sequence[Any],
    optimizer: Optimizer | None,
    layout: ParallelLayout,
    *,
    dp_group: dist.ProcessGroup,
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Read what ``save`` wrote into this rank's model and optimizer; called by all ranks, at any layout.

    Returns:
        the counters given to ``save``, and this rank's random state (None if the layout was another one, at which a
        rank's generators have no counterpart).

    Raises:
        CheckpointError: no complete checkpoint, a missing or truncated file, or contents that do not fit the model.
    """
    described = read_state_file(directory)
    if optimizer is not None and described["optimizer"] is None:
        raise CheckpointError("the checkpoint holds no optimizer state", where=str(directory))
    same_layout = described["layout"] == asdict(layout)
    metadata = _metadata(dp_group)
    if optimizer is not None:
        optimizer.materialise_state()
    state = _state_dict(modules, optimizer, metadata, is_loading=True)
    if same_layout:
        state["rng"] = _rng_object({}, layout)
    try:
        with _quiet():
            loaded = dist_checkpointing.load(state, str(directory), strict="raise_unexpected")
        for name, module in _named(modules).items():
            module.load_state_dict(loaded[name])
        if optimizer is not None:
            optimizer.load_state(loaded["optimizer"])
            optimizer.load_counters(described["optimizer"])
    except _FAILURES as error:
        _fail("cannot load the checkpoint", directory, error)
    return described["counters"], loaded["rng"] if same_layout else None


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
    for name, size in described["files"].items():
        file = directory / name
        if not file.is_file():
            damaged.append(f"{name} is missing")
        elif file.stat().st_size != size:
            damaged.append(f"{name} has {file.stat().st_size} of {size} bytes")
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
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": dp_group,
    }


def _storable(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metadata.items() if name != "dp_cp_group"}


def _state_dict(
    modules: Sequence[Any], optimizer: Optimizer | None, metadata: dict[str, Any], *, is_loading: bool
) -> dict[str, Any]:
    state = {name: module.sharded_state_dict(metadata=metadata) for name, module in _named(modules).items()}
    if optimizer is not None:
        weights = state["model"] if len(modules) == 1 else dict(state)
        state["optimizer"] = optimizer.megatron.sharded_state_dict(weights, is_loading=is_loading, metadata=metadata)
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


def _write_state_file(directory: Path, described: dict[str, Any]) -> None:
    described["files"] = {
        str(path.relative_to(directory)): path.stat().st_size for path in sorted(directory.rglob("*")) if path.is_file()
    }
    temporary = directory / (STATE_FILE + ".tmp")
    with temporary.open("w") as file:
        json.dump(described, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(directory / STATE_FILE)


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
