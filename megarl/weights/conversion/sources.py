"""Checkpoints to be converted: any format, opened by its headers alone, as regions of canonical tensors.

Invariants:
1. Opening reads no tensor, and nothing a file names is executed.
2. Everything a checkpoint holds is a region, or listed with the reason why it is not used; the rest is an error.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megarl.errors import CheckpointError, LayoutError, ModelError
from megarl.models.registry import read_config, spec_from_config
from megarl.models.rules import VALUE_HEAD, NamingScheme
from megarl.models.spec import ModelSpec
from megarl.parallel.grid import ParallelLayout
from megarl.weights.conversion.dist_view import SLOTS, dist_store, find_view, slot_prefix
from megarl.weights.conversion.store import Store, whole_region
from megarl.weights.files.arrays import Array
from megarl.weights.files.bits import CONVERTIBLE, FP8_BLOCK
from megarl.weights.files.legacy import LegacyShard, is_legacy, read_legacy, resolve_tracker
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
from megarl.weights.layout import canonical_shapes, megatron_regions, parameter_shapes
from megarl.weights.region import Region

OPTIMIZER_PREFIX = "optimizer.state."
_EXACT = (VALUE_HEAD, "e_score_correction_bias")
STATE_FILE = "state.json"
HF_FOLDER = "hf"
"""Where a Megatron checkpoint of ours keeps the model's configuration and tokenizer."""


@dataclass
class KeptState:
    """What a torch_dist checkpoint holds beside tensors and goes along unchanged.

    Args:
        common: archive for ``common.pt``; None where it cannot be written without the classes it names.
        entry: archive of the entry ``common_state``, where ``common`` is None.
        trainer: contents of a megarl trainer's ``state.json``.
    """

    common: bytes | None
    entry: bytes | None
    trainer: dict[str, Any] | None


@dataclass
class Source:
    """An opened checkpoint.

    Args:
        format: hf, torch_dist or legacy.
        directory: with the files.
        spec: the model.
        value_head: whether it is a critic.
        config: the Hugging Face configuration that goes with it.
        companions: configuration and tokenizer files by name.
        store: its regions and arrays.
        dtypes: of every canonical tensor; for block-quantised ones, of what they are read as.
        unused: what is not converted, with the reason.
        scales: of block-quantised tensors.
        slots: optimizer slots it holds.
        naming: whose layers wrote it; None for Hugging Face's.
        layout: whose shards it has; None where it is not cut by ranks.
        files: all that belong to it.
        kept: state that is no tensor and goes along.
        iteration: of the run that wrote it.
        arguments: of that run, where the checkpoint names them.
    """

    format: str
    directory: Path
    spec: ModelSpec
    value_head: bool
    config: dict[str, Any]
    companions: dict[str, bytes]
    store: Store
    dtypes: dict[str, str]
    unused: dict[str, str] = field(default_factory=dict)
    scales: dict[str, Array] = field(default_factory=dict)
    slots: tuple[str, ...] = ()
    naming: NamingScheme | None = None
    layout: ParallelLayout | None = None
    files: list[Path] = field(default_factory=list)
    kept: KeptState | None = None
    iteration: int = 0
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def has_slots(self) -> bool:
        """Whether it holds optimizer state that another layout can take, read or not."""
        return any(name.startswith(slot_prefix(slot)) for slot in SLOTS for name in (*self.unused, *self.dtypes))

    def keeps_dtype(self, tensor: str) -> bool:
        """Whether a tensor stays as it is when weights are converted: what is float32 for its precision's sake."""
        return tensor.startswith(OPTIMIZER_PREFIX) or tensor.endswith(_EXACT)


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
    model = _model_at(found if spec is not None else _config_home(given, found, Path(directory)), spec)
    if kind == "torch_dist":
        return _open_dist(found, model, value_head, optimizer)
    if optimizer:
        raise CheckpointError(
            "the optimizer state of this format is cut for its own ranks and cannot be converted",
            where=str(found),
            fix="convert the weights only",
        )
    return _open_legacy(found, model, value_head)


def _config_home(given: Path | None, *places: Path) -> Path:
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


@dataclass(frozen=True)
class _Model:
    """A model and the files that describe it."""

    spec: ModelSpec
    config: dict[str, Any]
    companions: dict[str, bytes]


def _model_at(home: Path, spec: ModelSpec | None) -> _Model:
    """The model of a directory with configuration and tokenizer, or the one that is given."""
    if spec is not None:
        return _Model(spec, {}, {})
    config = read_config(home)
    companions = {name: (home / name).read_bytes() for name in COMPANION_FILES if (home / name).exists()}
    if (quantization := config.get("quantization_config")) is not None:
        _check_quantization(quantization, home)
        config = {key: value for key, value in config.items() if key != "quantization_config"}
        companions["config.json"] = (json.dumps(config, indent=2) + "\n").encode()
    return _Model(spec_from_config(config, where=str(home / "config.json")), config, companions)


def _open_hf(directory: Path, model: _Model, value_head: bool | None) -> Source:
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


def _open_dist(directory: Path, model: _Model, value_head: bool | None, optimizer: bool) -> Source:
    checkpoint, spec = read_torch_dist(directory), model.spec
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
        else:
            unknown.append(key)
    if unknown:
        raise CheckpointError(
            f"the checkpoint holds tensors of no weight of the model: {listing(unknown)}", where=str(directory)
        )
    rest = [key for key in checkpoint.objects if "_extra_state/" not in key and key != COMMON_KEY]
    unused.update({key: "state of one rank of the layout that wrote it" for key in rest})
    kept, iteration = _kept(checkpoint)
    arguments = checkpoint.common().get("args")
    return Source(
        "torch_dist",
        directory,
        spec,
        value_head,
        model.config,
        model.companions,
        store,
        _dtypes(store),
        unused,
        slots=held if optimizer else (),
        naming=view.naming,
        files=checkpoint.files(),
        kept=kept,
        iteration=iteration,
        arguments=dict(vars(arguments)) if isinstance(arguments, argparse.Namespace) else {},
    )


def _kept(checkpoint: DistCheckpoint) -> tuple[KeptState, int]:
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


def _dtypes(store: Store) -> dict[str, str]:
    return {
        region.tensor: store.array(rank, region).dtype for rank, regions in store.regions.items() for region in regions
    }


def _open_legacy(directory: Path, model: _Model, value_head: bool | None) -> Source:
    shards, spec = read_legacy(directory), model.spec
    if value_head is None:
        heads = [shard.arrays[name] for shard in shards.values() for name in shard.arrays if "output_layer.w" in name]
        value_head = (bool(heads) and heads[0].shape[0] == 1 and not spec.tied_embeddings) or (
            bool(heads) and heads[0].shape == (1, spec.hidden_size)
        )
    layout = _legacy_layout(spec, shards)
    names = {name for shard in shards.values() for name in shard.arrays}
    naming: NamingScheme = "te" if any("linear_qkv.layer_norm_weight" in name for name in names) else "local"
    if spec.mla is not None:
        naming = "te" if any("up_proj.layer_norm_weight" in name for name in names) else "local"
    grouped = any(".experts.linear_fc1.weight" in name for name in names)
    store = Store()
    problems: list[str] = []
    for rank, coordinate in enumerate(layout.coordinates()):
        key = (coordinate.tp, coordinate.pp, layout.expert_coordinate(coordinate).ep)
        shard = shards.get(key)
        if shard is None:
            problems.append(f"no shard for {key}")
            continue
        regions = megatron_regions(
            spec, layout, coordinate, value_head=value_head, naming=naming, grouped_experts=grouped
        )
        expected = parameter_shapes(regions)
        where = shard.path.parent.name
        known = {name: array for name, array in shard.arrays.items() if not name.endswith("_extra_state")}
        problems += [f"{where} holds {name}, which no rule matches" for name in known if name not in expected]
        by_name: dict[str, list[Region]] = {}
        for region in regions:
            by_name.setdefault(region.local_name, []).append(region)
        for name, shape in expected.items():
            if name not in known:
                problems.append(f"{where} lacks {name}")
            elif known[name].shape != shape:
                problems.append(f"{where}: {name} has shape {list(known[name].shape)}, expected {list(shape)}")
            else:
                store.add(rank, known[name], by_name[name])
    if problems:
        raise CheckpointError(f"checkpoint and model disagree: {listing(problems)}", where=str(directory))
    rest = sorted({name for shard in shards.values() for name in shard.rest})
    unused = {name: "state of the run that is no weight" for name in rest}
    first = next(iter(shards.values()))
    return Source(
        "legacy",
        directory,
        spec,
        value_head,
        model.config,
        model.companions,
        store,
        _dtypes(store),
        unused,
        naming=naming,
        layout=layout,
        files=[shard.path for shard in shards.values()],
        iteration=first.iteration,
        arguments=first.arguments,
    )


def _legacy_layout(spec: ModelSpec, shards: Mapping[tuple[int, int, int], LegacyShard]) -> ParallelLayout:
    """The layout that shards have, from their names, their layers and the run's arguments."""
    first = next(iter(shards.values()))
    arguments = first.arguments
    tp, pp, ep = (max(key[axis] for key in shards) + 1 for axis in range(3))
    etp = int(arguments.get("expert_tensor_parallel_size") or tp) if spec.moe is not None else 1
    rows = next(
        (array.shape[0] for name, array in first.arrays.items() if name.endswith("word_embeddings.weight")), None
    )
    layout = ParallelLayout(tp=tp, pp=pp, vpp=max(1, first.num_chunks), ep=ep, etp=etp, dp=max(1, ep * etp // tp))
    if rows is not None:
        layout = replace(layout, vocab_rows_multiple=rows)
    pipeline = arguments.get("pipeline_model_parallel_layout")
    if isinstance(pipeline, str):
        return replace(layout, pipeline=pipeline)
    if pp == 1:
        return layout
    counts = [_layers_in(shards[0, stage, 0]) for stage in range(pp)]
    if sum(counts) != spec.num_layers:
        raise LayoutError(f"the shards hold {sum(counts)} layers, the model has {spec.num_layers}")
    if len(set(counts)) == 1:
        return layout
    return replace(layout, first_stage_layers=counts[0], last_stage_layers=counts[-1])


def _layers_in(shard: LegacyShard) -> int:
    return len(
        {
            tuple(name.split(".layers.")[:1] + name.split(".layers.")[1].split(".")[:1])
            for name in shard.arrays
            if ".layers." in name
        }
    )
