"""Checkpoints to be converted: any format, opened by its headers alone, as regions of canonical tensors.

Invariants:
1. Opening reads no tensor, and nothing a file names is executed.
2. Everything a checkpoint holds is a region, or listed with the reason why it is not used; the rest is an error.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.errors import CheckpointError, ModelError
from megarl.models.registry import read_config, spec_from_config
from megarl.models.rules import VALUE_HEAD
from megarl.models.spec import ModelSpec
from megarl.weights.conversion.dist_view import SLOTS, dist_store, find_view, slot_prefix
from megarl.weights.conversion.legacy_source import open_legacy
from megarl.weights.conversion.source import HF_FOLDER, MTP, STATE_FILE, KeptState, Model, Source, dtypes_of
from megarl.weights.conversion.store import Store, whole_region
from megarl.weights.files.arrays import Array
from megarl.weights.files.bits import CONVERTIBLE, FP8_BLOCK
from megarl.weights.files.legacy import is_legacy, resolve_tracker
from megarl.weights.files.pickles import is_plain
from megarl.weights.files.safetensors_header import COMPANION_FILES, directory_arrays, listing, unused_tensors
from megarl.weights.files.torch_archive import plain_archive
from megarl.weights.files.torch_dist import (
    COMMON_FILE,
    COMMON_KEY,
    METADATA_FILE,
    DistCheckpoint,
    is_torch_dist,
    read_torch_dist,
)
from megarl.weights.layout import canonical_shapes


def format_of(directory: Path) -> str:
    """The format of a directory that ``resolve_tracker`` gave.

    Raises:
        CheckpointError: none that megarl reads; what was found is named.
    """
    if not directory.is_dir():
        raise CheckpointError("no such directory", where=str(directory))
    if is_torch_dist(directory):
        return "torch_dist"
    if is_legacy(directory):
        return "legacy"
    if (directory / METADATA_FILE).exists():
        raise CheckpointError(
            "the checkpoint has .metadata but no metadata.json: unfinished, or written by FSDP (fsdp_dtensor)",
            where=str(directory),
            fix="save it as torch_dist",
        )
    if any(directory.glob("model-rank-*-part-*.safetensors")):
        raise CheckpointError("vLLM's sharded_state is a target only", where=str(directory))
    return "hf"


def open_source(
    directory: str | Path,
    *,
    config: str | Path | None = None,
    spec: ModelSpec | None = None,
    value_head: bool | None = None,
    optimizer: bool = False,
) -> Source:
    """Opens a checkpoint of any format.

    Args:
        directory: of the checkpoint, or of its iterations with their tracker.
        config: Hugging Face directory with the model's configuration, where the checkpoint has none.
        spec: the model, instead of a configuration.
        value_head: whether the model is a critic; None finds out.
        optimizer: read the optimizer's state too.

    Raises:
        CheckpointError, ModelError: a broken, incomplete or unknown checkpoint, or one that is not this model's.
    """
    found = resolve_tracker(Path(directory))
    kind = format_of(found)
    if kind == "hf":
        if optimizer:
            raise CheckpointError("a Hugging Face directory holds no optimizer state", where=str(found))
        return _open_hf(found, _model_at(found if config is None else Path(config), spec), value_head)
    given = None if config is None else Path(config)
    model = _model_at(found if spec is not None else config_home(given, found, Path(directory)), spec)
    if kind == "torch_dist":
        return _open_dist(found, model, value_head, optimizer)
    if optimizer:
        raise CheckpointError(
            "the optimizer state of this format is cut for its own ranks and cannot be converted",
            where=str(found),
            fix="convert the weights only",
        )
    return open_legacy(found, model, value_head)


def config_home(given: Path | None, *places: Path) -> Path:
    """The directory given, or the one of these places that has a model's configuration. Raises CheckpointError."""
    if given is not None:
        return given
    for place in places:
        for home in (place, place / HF_FOLDER):
            if (home / "config.json").exists():
                return home
    raise CheckpointError(
        "the checkpoint has no Hugging Face configuration",
        where=str(places[0]),
        fix="give the model's directory with --config",
    )


def _model_at(home: Path, spec: ModelSpec | None) -> Model:
    """The model of a directory with configuration and tokenizer, or the one that is given."""
    if spec is not None:
        return Model(spec, {}, {})
    config = read_config(home)
    companions = {name: (home / name).read_bytes() for name in COMPANION_FILES if (home / name).exists()}
    if (quantization := config.get("quantization_config")) is not None:
        _check_quantization(quantization, home)
        config = {key: value for key, value in config.items() if key != "quantization_config"}
        companions["config.json"] = (json.dumps(config, indent=2) + "\n").encode()
    return Model(spec_from_config(config, where=str(home / "config.json")), config, companions)


def _open_hf(directory: Path, model: Model, value_head: bool | None) -> Source:
    spec, arrays = model.spec, directory_arrays(directory)
    is_value = VALUE_HEAD in arrays and _names_a_head(model.config) if value_head is None else value_head
    shapes = canonical_shapes(spec, value_head=is_value)
    scales = {name.removesuffix("_scale_inv"): array for name, array in arrays.items() if name.endswith("_scale_inv")}
    problems = []
    dtypes: dict[str, str] = {}
    for name, shape in shapes.items():
        array = arrays.get(name)
        if array is None:
            problems.append(f"{name} is absent")
        elif array.shape != shape:
            problems.append(f"{name} has shape {list(array.shape)}, expected {list(shape)} ({array.path.name})")
        elif name in scales:
            dtypes[name] = "BF16"
            problems += _scale_problems(name, array, scales[name])
        elif array.dtype not in CONVERTIBLE:
            problems.append(
                f"{name} is packed or quantised ({array.dtype}, {array.path.name}); only block-scaled fp8 is read"
            )
        else:
            dtypes[name] = array.dtype
    rest = [name for name in arrays if name not in shapes and name.removesuffix("_scale_inv") not in shapes]
    unused, unknown = unused_tensors(rest, spec, value_head=is_value)
    problems += [f"{name} belongs to no weight of the model ({arrays[name].path.name})" for name in unknown]
    if problems:
        raise ModelError(f"checkpoint and configuration disagree: {listing(problems)}", where=str(directory))
    store = Store()
    for name, shape in shapes.items():
        store.add(0, arrays[name], [whole_region(name, shape)])
    files = sorted({array.path for array in arrays.values()})
    scales = {name: array for name, array in scales.items() if name in shapes}
    return Source(
        "hf", directory, spec, is_value, model.config, model.companions, store, dtypes, unused, scales, files=files
    )


def _names_a_head(config: Mapping[str, Any]) -> bool:
    return any("CausalLM" not in str(name) for name in config.get("architectures") or ())


def _check_quantization(options: Any, home: Path) -> None:
    method = options.get("quant_method") if isinstance(options, dict) else options
    block = options.get("weight_block_size") if isinstance(options, dict) else None
    if method != "fp8" or block != [FP8_BLOCK, FP8_BLOCK]:
        raise ModelError(
            f"the weights are quantised by {method!r} with blocks {block}; only fp8 with blocks "
            f"[{FP8_BLOCK}, {FP8_BLOCK}] is read",
            where=str(home / "config.json"),
            fix="take the model's bfloat16 release",
        )


def _scale_problems(name: str, array: Array, scales: Array) -> list[str]:
    expected = tuple(-(-size // FP8_BLOCK) for size in array.shape)
    if array.dtype != "F8_E4M3" or scales.dtype != "F32":
        return [f"{name} is {array.dtype} with scales of {scales.dtype}, expected F8_E4M3 and F32"]
    if len(expected) != 2 or scales.shape != expected:
        return [f"{name}_scale_inv has shape {list(scales.shape)}, expected {list(expected)}"]
    return []


def _open_dist(directory: Path, model: Model, value_head: bool | None, optimizer: bool) -> Source:
    checkpoint, spec = read_torch_dist(directory), model.spec
    kept, iteration = kept_state(checkpoint)
    if kept.trainer is not None and kept.trainer.get("adapters") is not None:
        raise CheckpointError(
            "the checkpoint holds adapters without the weights they are for",
            where=str(directory),
            fix="take the run's merged model (checkpoint.export_hf, checkpoint.export_hf_every)",
        )
    if value_head is None:
        head = checkpoint.tensors.get("output_layer.weight")
        value_head = head is not None and head.shape[0] == 1
    view = find_view(checkpoint, spec, value_head=value_head)
    held = tuple(slot for slot in SLOTS if any(key.startswith(slot_prefix(slot)) for key in checkpoint.tensors))
    if optimizer and not held:
        raise CheckpointError(
            "the checkpoint holds no optimizer state that can be cut anew",
            where=str(directory),
            fix="save it with distrib_optim_sharding_type: fully_reshardable, or convert the weights only",
        )
    store, used = dist_store(checkpoint, view, held if optimizer else ())
    unused: dict[str, str] = {}
    unknown: list[str] = []
    for key in checkpoint.tensors:
        if key in used:
            continue
        if key.startswith(("optimizer.", "chained_")):
            unused[key] = "optimizer state, not asked for"
        elif key.startswith("mtp."):
            unused[key] = MTP
        else:
            unknown.append(key)
    if unknown:
        raise CheckpointError(
            f"the checkpoint holds tensors of no weight of the model: {listing(unknown)}", where=str(directory)
        )
    rest = [key for key in checkpoint.objects if "_extra_state/" not in key and key != COMMON_KEY]
    unused.update({key: "state of one rank of the layout that wrote it" for key in rest})
    arguments = checkpoint.common().get("args")
    return Source(
        "torch_dist",
        directory,
        spec,
        value_head,
        model.config,
        model.companions,
        store,
        dtypes_of(store),
        unused,
        slots=held if optimizer else (),
        naming=view.naming,
        files=checkpoint.files(),
        kept=kept,
        iteration=iteration,
        arguments=dict(vars(arguments)) if isinstance(arguments, argparse.Namespace) else {},
    )


def kept_state(checkpoint: DistCheckpoint) -> tuple[KeptState, int]:
    """State beside tensors, and the iteration it names."""
    value = checkpoint.common()
    iteration = value.get("iteration", 0)
    path = checkpoint.directory / COMMON_FILE
    common = entry = None
    if path.exists():
        common = path.read_bytes()
    elif COMMON_KEY in checkpoint.objects:
        if is_plain(value):
            common = plain_archive(value)
        else:
            place, offset, length = checkpoint.objects[COMMON_KEY]
            with place.open("rb") as file:
                file.seek(offset)
                entry = file.read(length)
    state = checkpoint.directory / STATE_FILE
    trainer = json.loads(state.read_text(encoding="utf-8")) if state.exists() else None
    return KeptState(common, entry, trainer), iteration if isinstance(iteration, int) else 0
