"""A trained model as a Hugging Face directory: every rank writes the pieces it owns into files of known size.

Invariants:
1. Nothing is gathered: a rank holds at most one piece beside its weights.
2. The regions of all ranks are proved complete before a file is made; the directory appears complete or not at all.
3. A failure on one rank ends the export on all of them with the same error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.errors import CheckpointError, MegarlError
from megarl.models.rules import ROUTING_BIAS, VALUE_HEAD
from megarl.models.spec import ModelSpec
from megarl.parallel.groups import ParallelGroups
from megarl.weights.check import check_complete
from megarl.weights.files.safetensors_writer import SafetensorsWriter, table_of
from megarl.weights.layout import canonical_shapes, megatron_regions
from megarl.weights.region import Region


def export_hf(
    directory: Path,
    spec: ModelSpec,
    groups: ParallelGroups,
    pieces: Iterable[tuple[Region, Tensor]],
    *,
    dtype: torch.dtype,
    value_head: bool,
    copy_from: Path | None,
) -> None:
    """Write the model; called by all ranks with the same directory on a file system they all see.

    Args:
        directory: must not exist.
        spec: the model.
        groups: groups of this rank.
        pieces: what this rank owns.
        dtype: dtype of the files; a critic's head and biases that choose experts are float32.
        value_head: the model is a critic.
        copy_from: Hugging Face directory whose configuration and tokenizer files belong to it.

    Raises:
        CheckpointError: the directory exists, the disk is full, or a write failed; on every rank.
    """
    shapes = canonical_shapes(spec, value_head=value_head)
    layout = groups.layout
    check_complete(
        {
            rank: megatron_regions(spec, layout, layout.coordinate(rank), value_head=value_head)
            for rank in range(layout.world_size)
        },
        shapes,
    )
    table = table_of(shapes, dtype)
    for name, shape in shapes.items():
        if name.endswith(ROUTING_BIAS):
            table[name] = (torch.float32, shape)
    if value_head:
        # It is float32 in the model too: one row, whose precision is the values'.
        table[VALUE_HEAD] = (torch.float32, shapes[VALUE_HEAD])
    writer: SafetensorsWriter | None = None

    def allocate() -> None:
        nonlocal writer
        if groups.rank == 0:
            writer = SafetensorsWriter(directory, table)

    def write() -> None:
        nonlocal writer
        if writer is None:
            writer = SafetensorsWriter(directory, table, attach=True)
        for region, piece in pieces:
            writer.write_box(region.tensor, region.box, piece)
        writer.close()

    def commit() -> None:
        if groups.rank == 0 and writer is not None:
            config = _critic_config(copy_from) if value_head and copy_from is not None else None
            writer.commit(config=config, copy_from=copy_from)

    try:
        for phase in (allocate, write, commit):
            _together(phase, groups)
    except MegarlError:
        if groups.rank == 0 and writer is not None:
            writer.abort()
        raise


def _critic_config(source: Path) -> Mapping[str, Any]:
    """The model's configuration as that of a critic, whose head `transformers` knows as a score of one label."""
    config: dict[str, Any] = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["architectures"] = [
        name.replace("ForCausalLM", "ForSequenceClassification") for name in config.get("architectures", [])
    ]
    return {**config, "id2label": {"0": "value"}, "label2id": {"value": 0}}


def _together(phase: Callable[[], None], groups: ParallelGroups) -> None:
    """Run a phase on every rank; the first rank's failure is raised on all."""
    error: MegarlError | None = None
    try:
        phase()
    except MegarlError as raised:
        error = raised
    except OSError as raised:
        error = CheckpointError(f"the export failed: {raised}", where=f"rank {groups.rank}")
    errors: list[MegarlError | None] = [None] * groups.layout.world_size
    dist.all_gather_object(errors, error, group=groups.world)
    for found in errors:
        if found is not None:
            raise found
