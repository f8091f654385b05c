"""Megatron-LM's first format: one torch archive a model shard, with whatever the run pickled beside the weights.

    latest_checkpointed_iteration.txt        an iteration, or "release"
    iter_0000100/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt

PPP is there with more than one pipeline stage, EEE with more than one expert-parallel rank. ``model`` holds the weights
by Megatron's local names, ``model0``, ``model1`` ... with virtual stages.

Invariants:
1. Nothing that the pickle names is executed (``pickles``).
2. A set of shards is complete, or the missing one is named.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from megarl.errors import CheckpointError
from megarl.weights.files.arrays import ITEM_BYTES, Array
from megarl.weights.files.pickles import Call, Global
from megarl.weights.files.torch_archive import Archive, Stored, lay_out, read_archive, tensor_value, tensors_of
from megarl.weights.region import Shape

TRACKER = "latest_checkpointed_iteration.txt"
SHARD_FILE = "model_optim_rng.pt"
CHECKPOINT_VERSION = 3.0

_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_CHUNK = re.compile(r"model(\d*)")

Coordinates = tuple[int, int, int]
"""tp, pp, ep."""


@dataclass
class LegacyShard:
    """One file.

    Args:
        path: the file.
        arrays: parameters by local name, with ``model0.`` in front where there are virtual stages.
        arguments: the run's, empty where the file has none.
        rest: names of what else the file holds.
        iteration: of the run.
        num_chunks: virtual stages, some of which may hold nothing.
    """

    path: Path
    arrays: dict[str, Array] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    rest: list[str] = field(default_factory=list)
    iteration: int = 0
    num_chunks: int = 0


def resolve_tracker(directory: Path) -> Path:
    """The directory of the iteration that the tracker names; the directory itself where there is none.

    Raises:
        CheckpointError: a tracker that names no directory.
    """
    tracker = directory / TRACKER
    if not tracker.exists():
        return directory
    name = tracker.read_text(encoding="utf-8", errors="replace").strip()
    if name != "release" and not re.fullmatch("[0-9]+", name):
        raise CheckpointError(
            f"{TRACKER} says {name[:40]!r}, expected an iteration or 'release'",
            where=str(tracker),
            fix="give the directory of an iteration",
        )
    found = directory / (name if name == "release" else f"iter_{int(name):07d}")
    if not found.is_dir():
        raise CheckpointError(
            f"{TRACKER} names {name!r}, but {found.name} is not there",
            where=str(directory),
            fix="give the directory of an iteration",
        )
    return found


def is_legacy(directory: Path) -> bool:
    """Whether a directory holds such shards."""
    return any(_RANK.fullmatch(entry.name) for entry in directory.glob("mp_rank_*"))


def read_legacy(directory: Path) -> dict[Coordinates, LegacyShard]:
    """All shards of a checkpoint: directories of archives, no tensor.

    Raises:
        CheckpointError: a missing or broken shard, a tensor that is a strided view, or a version before 3.0.
    """
    parts = {match.groups(): entry for entry in directory.glob("mp_rank_*") if (match := _RANK.fullmatch(entry.name))}
    shards = {
        key: read_shard(entry / SHARD_FILE) for key, entry in sorted(parts.items(), key=lambda item: item[1].name)
    }
    two_parts = any(key[1] is not None and key[2] is None for key in shards)
    is_expert = two_parts and _second_part_is_expert(list(shards.values()))
    found: dict[Coordinates, LegacyShard] = {}
    for (tp, second, third), shard in shards.items():
        pp, ep = (0, second) if is_expert else (second, third)
        found[int(tp), int(pp or 0), int(ep or 0)] = shard
    # Which pairs of tp and ep there are depends on the layout; every stage has the same ones.
    pairs = {(tp, ep) for tp, _, ep in found}
    arguments = next(iter(found.values())).arguments
    num_tp = _degree(arguments, "tensor_model_parallel_size", max(tp for tp, _ in pairs) + 1)
    pairs |= {(tp, 0) for tp in range(num_tp)} if len({ep for _, ep in pairs}) == 1 else set()
    stages = range(_degree(arguments, "pipeline_model_parallel_size", max(pp for _, pp, _ in found) + 1))
    missing = [(tp, pp, ep) for pp, (tp, ep) in product(stages, sorted(pairs)) if (tp, pp, ep) not in found]
    if missing:
        names = ", ".join(f"tp{tp} pp{pp} ep{ep}" for tp, pp, ep in missing[:8])
        raise CheckpointError(f"the checkpoint lacks shards: {names}", where=str(directory), fix="copy them too")
    return found


def read_shard(path: Path) -> LegacyShard:
    """One file; raises like ``read_legacy``."""
    content = read_archive(path)
    if not isinstance(content, dict):
        raise CheckpointError("the file holds no state dict", where=str(path))
    version = content.get("checkpoint_version", 0)
    if not isinstance(version, int | float) or version < CHECKPOINT_VERSION:
        raise CheckpointError(
            f"checkpoint version {version!r}: before {CHECKPOINT_VERSION} the rows of q, k and v lay otherwise",
            where=str(path),
            fix="load and save it with Megatron-LM once",
        )
    iteration = content.get("iteration")
    shard = LegacyShard(path, iteration=iteration if isinstance(iteration, int) else 0)
    shard.arguments = dict(vars(content["args"])) if hasattr(content.get("args"), "__dict__") else {}
    for key, value in content.items():
        match = _CHUNK.fullmatch(str(key))
        if match is None or not isinstance(value, dict):
            shard.rest.append(str(key))
            continue
        shard.num_chunks += 1
        prefix = f"model{match[1]}." if match[1] else ""
        for name, stored in tensors_of(value).items():
            shard.arrays[prefix + name] = _plain(stored, prefix + name)
    return shard


def shard_directory(tp: int, pp: int, ep: int, *, pipelined: bool, experts: bool) -> str:
    """Name of a shard's directory."""
    return f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if pipelined else "") + (f"_{ep:03d}" if experts else "")


def lay_out_shard(
    parameters: dict[str, tuple[str, Shape]], *, num_chunks: int, iteration: int, arguments: dict[str, Any]
) -> tuple[Archive, list[str]]:
    """A shard's file, and its parameters in the order of the archive's data.

    Args:
        parameters: dtype and shape by local name, ``model0.`` in front with virtual stages.
        num_chunks: virtual stages.
        iteration: of the run.
        arguments: the run's, plain values.
    """
    models: dict[str, Any] = {f"model{chunk}": {} for chunk in range(num_chunks)} if num_chunks > 1 else {"model": {}}
    sizes: list[int] = []
    for number, (full, (dtype, shape)) in enumerate(parameters.items()):
        head, _, tail = full.partition(".")
        chunk, name = (head, tail) if re.fullmatch(r"model\d+", head) else ("model", full)
        size = ITEM_BYTES[dtype]
        for dim in shape:
            size *= dim
        sizes.append(size)
        models[chunk][name] = tensor_value(number, dtype, shape)
    content = {
        "args": Call(Global("argparse", "Namespace"), state=dict(arguments) or {"tensor_model_parallel_size": 1}),
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": iteration,
        **models,
    }
    return lay_out(content, sizes), list(parameters)


def _degree(arguments: dict[str, Any], name: str, seen: int) -> int:
    """Of the run, as far as its arguments say; the last ranks may be those whose shards are missing."""
    value = arguments.get(name)
    return max(seen, value) if isinstance(value, int) else seen


def _plain(stored: Stored, name: str) -> Array:
    if not stored.is_contiguous:
        raise CheckpointError(f"{name} is a strided view", where=str(stored.array.path))
    return stored.array


def _second_part_is_expert(shards: list[LegacyShard]) -> bool:
    """Whether two-part names are TT_EEE: the run's arguments say, or every shard has an embedding."""
    arguments = shards[0].arguments
    if "pipeline_model_parallel_size" in arguments:
        return int(arguments["pipeline_model_parallel_size"] or 1) == 1
    return all(any(name.endswith("word_embeddings.weight") for name in shard.arrays) for shard in shards)
