"""A torch_dist checkpoint to be written: chunks as the ranks of a layout would save them.

Megatron loads any chunks at any layout, but it reads stored chunks whole: cut as the training layout cuts, every rank
reads its own bytes only.

Invariants:
1. The chunks of a key tile its tensor, padding of the vocabulary included (zeros).
2. Every entry a loading model asks for is there: weights, and the empty ``_extra_state`` of the layers that have one.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from megarl.errors import CheckpointError, PlanError
from megarl.models.rules import NamingScheme
from megarl.models.spec import ModelSpec
from megarl.parallel.grid import ParallelLayout
from megarl.weights.conversion.dist_view import DistView, Entry, dist_view, is_indexed, slot_prefix
from megarl.weights.conversion.source import STATE_FILE, KeptState
from megarl.weights.conversion.store import Store, prefixed
from megarl.weights.conversion.target import Target
from megarl.weights.files.torch_archive import plain_archive
from megarl.weights.files.torch_dist import (
    COMMON_FILE,
    COMMON_KEY,
    CONFIG_FILE,
    METADATA_FILE,
    PlannedChunk,
    config_bytes,
    lay_out_torch_dist,
    object_bytes,
)
from megarl.weights.layout import megatron_regions
from megarl.weights.region import Box, Region, Shape, contains, local_box, part_of

FILES_PER_RANK = 2
"""As Megatron-Core writes by default; writers of one file wait for each other."""


def dist_target(
    directory: Path,
    spec: ModelSpec,
    layout: ParallelLayout,
    dtypes: Mapping[str, str],
    *,
    value_head: bool,
    naming: NamingScheme,
    slots: Sequence[str] = (),
    kept: KeptState | None = None,
) -> Target:
    """Lays a checkpoint out.

    Args:
        directory: where its files will be written.
        spec: the model.
        layout: whose ranks' shards become chunks.
        dtypes: dtype of each canonical tensor, slots included.
        value_head: the model is a critic.
        naming: whose layers are to load it.
        slots: optimizer slots to hold.
        kept: state that is no tensor, of the checkpoint that is converted.

    Raises:
        CheckpointError: tensors of one key with different dtypes.
    """
    view = dist_view(spec, value_head=value_head, naming=naming, indexed=is_indexed(spec))
    planned = list(_chunks(view, spec, layout, value_head))
    tensors: dict[str, tuple[str, Shape]] = {}
    chunks: list[PlannedChunk] = []
    regions: dict[PlannedChunk, list[Region]] = {}
    counts: dict[int, int] = defaultdict(int)
    for slot in ("", *slots):
        prefix = slot_prefix(slot)
        for rank, key, box, found in planned:
            file = rank * FILES_PER_RANK + counts[rank] % FILES_PER_RANK
            counts[rank] += 1
            chunk = PlannedChunk(prefix + key, box, file)
            chunks.append(chunk)
            named = (replace(region, local_name=prefix + region.local_name) for region in found)
            regions[chunk] = [prefixed(region, prefix) for region in named]
            stops = tuple(stop for _, stop in box)
            kinds = {dtypes[region.tensor] for region in regions[chunk]}
            dtype, shape = tensors.get(chunk.key, (next(iter(kinds), ""), stops))
            if kinds - {dtype}:
                raise CheckpointError(
                    f"{chunk.key} would hold tensors of {dtype} and {', '.join(sorted(kinds - {dtype}))}",
                    fix="convert to one dtype (--dtype)",
                )
            tensors[chunk.key] = (dtype, tuple(map(max, shape, stops)))
    kept = kept or KeptState(plain_archive({"checkpoint_version": 3.0, "iteration": 0}), None, None)
    objects = _extra_states(view)
    if kept.entry is not None:
        objects[COMMON_KEY] = kept.entry
    laid_out = lay_out_torch_dist(tensors, chunks, objects)
    store = Store()
    for chunk, found in regions.items():
        array = laid_out.arrays[chunk]
        store.add(chunk.file, replace(array, path=directory / array.path), found)
    closing = [] if kept.common is None else [(COMMON_FILE, kept.common)]
    closing += [(METADATA_FILE, laid_out.metadata), (CONFIG_FILE, config_bytes())]
    if kept.trainer is not None:
        closing.append((STATE_FILE, _trainer_state(kept.trainer, laid_out.sizes, closing, has_optimizer=bool(slots))))
    return Target("torch_dist", directory, store, laid_out.sizes, laid_out.segments, lambda: closing)


def _chunks(
    view: DistView, spec: ModelSpec, layout: ParallelLayout, value_head: bool
) -> Iterator[tuple[int, str, Box, list[Region]]]:
    """Rank, key, box and regions of every chunk."""
    homes: dict[str, list[tuple[Entry, Region]]] = defaultdict(list)
    for entry in view.entries:
        for region in entry.regions:
            homes[region.tensor].append((entry, region))
    for rank, coordinate in enumerate(layout.coordinates()):
        params: dict[str, list[Region]] = defaultdict(list)
        for region in megatron_regions(spec, layout, coordinate, value_head=value_head, naming=view.naming):
            if region.is_owner:
                params[region.local_name].append(region)
        for name, found in params.items():
            for key, box, regions in _chunks_of(name, found, homes, coordinate.tp):
                yield rank, key, box, regions


def _chunks_of(
    name: str, regions: Sequence[Region], homes: Mapping[str, Sequence[tuple[Entry, Region]]], tp_rank: int
) -> Iterator[tuple[str, Box, list[Region]]]:
    """A parameter as boxes of its key's tensor: one, or one for each part of it that is stacked (gate, up)."""
    shape = regions[0].local_shape
    groups: dict[tuple[int, ...], list[Region]] = {}
    entry: Entry | None = None
    for region in regions:
        entry, shift = _shift(region, homes, tp_rank)
        groups.setdefault(shift, []).append(region)
    assert entry is not None
    row = prod(shape[1:])
    lead = tuple((index, index + 1) for index in entry.lead)
    filled = 0
    for shift, found in groups.items():
        inside = tuple((0, size) for size in shape) if len(groups) == 1 else _hull(found)
        if inside[1:] != tuple((0, size) for size in shape[1:]):
            raise PlanError(f"{name} is stacked along another dim than its first", where=entry.key)
        filled += (inside[0][1] - inside[0][0]) * row
        box = (*lead, *((start + by, stop + by) for (start, stop), by in zip(inside, shift, strict=True)))
        chunk_shape = tuple(stop - start for start, stop in box)
        chunk_name = f"{entry.key}@{','.join(str(start) for start, _ in box)}"
        first = inside[0][0] * row
        yield (
            entry.key,
            box,
            [
                replace(region, local_name=chunk_name, local_shape=chunk_shape, offset=region.offset - first)
                for region in found
            ],
        )
    if filled != prod(shape):
        raise PlanError(f"the parts of {name} do not fill it", where=entry.key)


def _shift(
    region: Region, homes: Mapping[str, Sequence[tuple[Entry, Region]]], tp_rank: int
) -> tuple[Entry, tuple[int, ...]]:
    """The entry a region belongs to, and what takes coordinates of the rank's parameter to those of the entry."""
    for entry, home in homes[region.tensor]:
        if region.numel == 0:
            # A shard of the vocabulary that is all padding: its place follows from its rank.
            return entry, (tp_rank * region.local_shape[0], *(0 for _ in region.local_shape[1:]))
        if contains(home.box, region.box):
            there, here = local_box(part_of(home, region.box)), local_box(region)
            assert there is not None and here is not None
            return entry, tuple(a - b for (a, _), (b, _) in zip(there, here, strict=True))
    raise PlanError(f"{region.tensor} {region.box} is in no entry of the checkpoint")


def _hull(regions: Iterable[Region]) -> Box:
    boxes = [box for region in regions if (box := local_box(region)) is not None]
    return tuple((min(start for start, _ in dim), max(stop for _, stop in dim)) for dim in zip(*boxes, strict=True))


def _trainer_state(
    trainer: Mapping[str, Any], sizes: Mapping[str, int], closing: Sequence[tuple[str, bytes]], *, has_optimizer: bool
) -> bytes:
    """What megarl's trainer wants beside Megatron's files. No layout is named: no rank's random state came along.

    Files have no checksum, which the trainer computes with torch; the receipt of the conversion has its own.
    """
    all_sizes = {**sizes, **{name: len(data) for name, data in closing}}
    files = {name: {"bytes": size} for name, size in all_sizes.items()}
    optimizer = trainer.get("optimizer") if has_optimizer else None
    return json.dumps({**trainer, "layout": None, "optimizer": optimizer, "files": files}, indent=1).encode()


def _extra_states(view: DistView) -> dict[str, bytes]:
    """The empty ``_extra_state`` of every linear layer, norm and core attention.

    A model that is loaded names one for each module of its own implementation (Megatron's linear layers; Transformer
    Engine's norms and attention too), and fails where one is absent; what it does not name is passed over.
    """
    empty = object_bytes(None)
    shapes = view.shapes()
    found: dict[str, bytes] = {}
    for entry in view.entries:
        module = entry.key.rpartition(".")[0]
        if not (module.rpartition(".")[2].startswith("linear_") or module.endswith("layernorm")):
            continue
        counts = shapes[entry.key][: len(entry.lead)]
        place = ".".join(map(str, entry.lead or (0,))) + "_" + ".".join(map(str, counts or (1,)))
        found[f"{module}._extra_state/shard_{place}"] = empty
        if module.endswith("self_attention.linear_proj"):
            found[f"{module.removesuffix('linear_proj')}core_attention._extra_state/shard_{place}"] = empty
    return found
