"""Disk for checkpoints and the exported model, and whether the run directory can be written."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from megarl.config.schema import SftConfig, TrainConfig
from megarl.config.schema.train import EngineConfig, LoraConfig, OptimizerConfig
from megarl.models import ModelSpec
from megarl.parallel.grid import ParallelLayout
from megarl.planning.adapters import adapter_sizes
from megarl.planning.finding import Finding
from megarl.planning.model_fit import trained

GIB = 2**30
# float32 master weights, as Megatron's torch_dist format stores them beside the weights and the moments.
_MASTER_BYTES = {"bfloat16": 4, "float32": 0}
_WEIGHT_BYTES = {"bfloat16": 2, "float32": 4}


def checkpoint_bytes(
    engine: EngineConfig,
    optimizer: OptimizerConfig,
    spec: ModelSpec,
    *,
    value_head: bool,
    lora: LoraConfig | None = None,
) -> int:
    """Bytes of one role's part of one checkpoint: weights, or adapters and a value head, master weights and moments."""
    per_parameter = _WEIGHT_BYTES[engine.dtype] + _MASTER_BYTES[engine.dtype] + 4 * optimizer.num_moments
    if lora is None:
        return per_parameter * spec.num_parameters(value_head=value_head)
    return per_parameter * (sum(adapter_sizes(spec, ParallelLayout(), lora)) + value_head * spec.hidden_size)


def disk_bytes(config: TrainConfig | SftConfig, spec: ModelSpec, critic_spec: ModelSpec) -> int:
    """Most bytes a run holds on disk: the kept checkpoints, one being written, and the exported models."""
    one = sum(
        checkpoint_bytes(
            part.engine,
            part.optimizer,
            critic_spec if role == "critic" else spec,
            value_head=role == "critic",
            lora=part.lora,
        )
        for role, part in trained(config)
    )
    saving, steps = config.checkpoint, config.run.steps
    kept = int(saving.at_end)
    exports = int(saving.export_hf)
    if saving.every_steps is not None:
        for_good = (
            0 if saving.keep_every_steps is None else steps // math.lcm(saving.every_steps, saving.keep_every_steps)
        )
        kept = saving.keep + 1 + for_good
        exports += 0 if saving.export_hf_every is None else steps // (saving.every_steps * saving.export_hf_every)
    return kept * one + exports * _WEIGHT_BYTES[config.actor.engine.dtype] * spec.num_parameters()


def check_resume(config: TrainConfig | SftConfig) -> Iterator[Finding]:
    """Whether the run may start in ``run.dir``, or from the checkpoint that ``run.resume`` names."""
    resume, directory = config.run.resume, Path(config.run.dir) / "checkpoints"
    if resume in ("auto", "never"):
        damage = {path.name: _damage(path) for path in sorted(directory.glob("step_*"))}
        is_usable = None in damage.values()
        if resume == "never" and is_usable:
            problem = f"never, and {directory} holds checkpoints already"
            yield Finding("configuration", "run.resume", problem, "choose another run.dir, or run.resume=auto to go on")
        if resume == "auto" and damage and not is_usable:
            problem = "no checkpoint of this run is complete: " + "; ".join(f"{n}: {why}" for n, why in damage.items())
            fix = "restore a file, give run.resume=PATH of another checkpoint, or start anew with run.resume=never"
            yield Finding("checkpoint", "run.resume", problem, fix)
        return
    path = Path(resume)
    if not path.is_dir():
        fix = "set run.resume to auto, never or a checkpoint such as RUN/checkpoints/step_000020"
        yield Finding("configuration", "run.resume", f"there is no checkpoint directory {path}", fix)
    elif not (path / "manifest.json").is_file():
        fix = "give a folder such as RUN/checkpoints/step_000020 that was written to its end"
        yield Finding("checkpoint", "run.resume", f"{path} is no complete checkpoint: it has no manifest.json", fix)


def _damage(checkpoint: Path) -> str | None:
    """What keeps a directory from being a checkpoint, by manifest and sizes; checksums are left to the run."""
    try:
        files = json.loads((checkpoint / "manifest.json").read_text())["files"]
        for name, entry in files.items():
            if (found := (checkpoint / name).stat().st_size) != int(entry["bytes"]):
                return f"{name} has {found} bytes instead of {entry['bytes']}"
    except FileNotFoundError as error:
        return f"{Path(error.filename).relative_to(checkpoint)} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"it cannot be read: {type(error).__name__} {error}"
    return None


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
