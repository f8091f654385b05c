"""Megatron-LM's shards opened as regions: which layout they have, and whether they hold the model and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import lcm
from pathlib import Path

from megarl.errors import CheckpointError, LayoutError
from megarl.models.rules import NamingScheme
from megarl.models.spec import ModelSpec
from megarl.parallel.grid import ParallelLayout
from megarl.weights.conversion.source import MTP, Model, Source, dtypes_of
from megarl.weights.conversion.store import Store
from megarl.weights.files.legacy import LegacyShard, read_legacy
from megarl.weights.files.safetensors_header import listing
from megarl.weights.layout import megatron_regions, parameter_shapes
from megarl.weights.region import Region


def open_legacy(directory: Path, model: Model, value_head: bool | None) -> Source:
    """Opens the shards of an iteration's directory.

    Raises:
        CheckpointError: shards that are missing, broken, or do not hold the model; all problems at once.
        LayoutError: shards whose layers are not the model's.
    """
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
    unused: dict[str, str] = {}
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
        predicted = {name: MTP for name in shard.arrays if ".mtp." in f".{name}"}
        unused.update(predicted)
        left_out = {name for name in shard.arrays if name.endswith("_extra_state") or name in predicted}
        known = {name: array for name, array in shard.arrays.items() if name not in left_out}
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
    unused.update({name: "state of the run that is no weight" for name in rest})
    first = next(iter(shards.values()))
    return Source(
        "legacy",
        directory,
        spec,
        value_head,
        model.config,
        model.companions,
        store,
        dtypes_of(store),
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
    layout = ParallelLayout(tp=tp, pp=pp, vpp=max(1, first.num_chunks), ep=ep, etp=etp, dp=lcm(tp, ep * etp) // tp)
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
