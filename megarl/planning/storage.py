"""Disk for checkpoints and the exported model, and whether the run directory can be written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from megarl.config.schema import SftConfig, TrainConfig
from megarl.config.schema.train import EngineConfig
from megarl.models import ModelSpec
from megarl.planning.finding import Finding
from megarl.planning.model_fit import trained

GIB = 2**30
# float32 master weights and two moments of Adam, as Megatron's torch_dist format stores them beside the weights.
_OPTIMIZER_BYTES = {"bfloat16": 12, "float32": 8}
_WEIGHT_BYTES = {"bfloat16": 2, "float32": 4}


def checkpoint_bytes(engine: EngineConfig, spec: ModelSpec, *, value_head: bool) -> int:
    """Bytes of one role's part of one checkpoint: weights, master weights and moments."""
    per_parameter = _WEIGHT_BYTES[engine.dtype] + _OPTIMIZER_BYTES[engine.dtype]
    return per_parameter * spec.num_parameters(value_head=value_head)


def disk_bytes(config: TrainConfig | SftConfig, spec: ModelSpec, critic_spec: ModelSpec) -> int:
    """Most bytes a run holds on disk: the kept checkpoints, one being written, and the exported model."""
    one = sum(
        checkpoint_bytes(part.engine, critic_spec if role == "critic" else spec, value_head=role == "critic")
        for role, part in trained(config)
    )
    saves = config.checkpoint.every_steps is not None or config.checkpoint.at_end
    kept = config.checkpoint.keep + 1 if config.checkpoint.every_steps is not None else 1
    export = _WEIGHT_BYTES[config.actor.engine.dtype] * spec.num_parameters() if config.checkpoint.export_hf else 0
    return (kept * one if saves else 0) + export


def check_disk(config: TrainConfig | SftConfig, spec: ModelSpec, critic_spec: ModelSpec) -> Iterator[Finding]:
    """Whether ``run.dir`` can be written and its file system has room for the run's checkpoints."""
    directory = Path(config.run.dir).absolute()
    existing = next(place for place in (directory, *directory.parents) if place.exists())
    if not existing.is_dir():
        yield Finding("disk", "run.dir", f"{existing} is a file", "choose another run.dir")
        return
    if not os.access(existing, os.W_OK):
        problem = f"{existing} cannot be written by this user"
        yield Finding("disk", "run.dir", problem, "choose a run.dir you may write")
        return
    need, free = disk_bytes(config, spec, critic_spec), shutil.disk_usage(existing).free
    if need > free:
        problem = f"checkpoints and export need {need / GIB:.1f} GiB, {existing} has {free / GIB:.1f} GiB free"
        fix = "lower checkpoint.keep, set checkpoint.export_hf=false, or move run.dir to a larger file system"
        yield Finding("disk", "run.dir", problem, fix)
