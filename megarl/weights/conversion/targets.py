"""Targets of the formats that store parameters as they are: Hugging Face, Megatron's legacy shards, vLLM's state."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.errors import CheckpointError, LayoutError
from megarl.models.rules import NamingScheme
from megarl.models.spec import ModelSpec
from megarl.parallel.grid import ParallelLayout
from megarl.weights.conversion.store import Store, whole_region
from megarl.weights.conversion.target import Target
from megarl.weights.engine_layout import engine_regions
from megarl.weights.files.arrays import Array
from megarl.weights.files.legacy import SHARD_FILE, TRACKER, lay_out_shard, shard_directory
from megarl.weights.files.safetensors_header import header_of
from megarl.weights.files.safetensors_target import DEFAULT_SHARD_BYTES, index_of, lay_out_safetensors
from megarl.weights.layout import canonical_shapes, megatron_regions
from megarl.weights.region import Region, Shape


def hf_target(
    directory: Path,
    spec: ModelSpec,
    dtypes: Mapping[str, str],
    *,
    value_head: bool,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> Target:
    """A Hugging Face directory in ``directory``, in the order of the model's layers."""
    shapes = canonical_shapes(spec, value_head=value_head)
    layout = lay_out_safetensors({name: (dtypes[name], shape) for name, shape in shapes.items()}, max_shard_bytes)
    store = Store()
    for name, array in layout.arrays.items():
        store.add(0, replace(array, path=directory / array.path), [whole_region(name, array.shape)])
    segments = {file: [(0, header)] for file, header in layout.headers.items()}

    def closing() -> list[tuple[str, bytes]]:
        index = index_of(directory, layout.sizes)
        return [] if index is None else [index]

    return Target("hf", directory, store, layout.sizes, segments, closing)


def legacy_target(
    directory: Path,
    spec: ModelSpec,
    layout: ParallelLayout,
    dtypes: Mapping[str, str],
    *,
    value_head: bool,
    naming: NamingScheme,
    grouped_experts: bool = False,
    iteration: int = 0,
) -> Target:
    """Megatron-LM's shards for a layout, with the tracker that its loader looks for.

    Raises:
        CheckpointError: tensors of one parameter with different dtypes.
        LayoutError: expert tensor parallelism that the names of the shards cannot express.
    """
    folder = f"iter_{iteration:07d}" if iteration else "release"
    store = Store()
    sizes: dict[str, int] = {}
    segments: dict[str, list[tuple[int, bytes]]] = {}
    done: dict[str, list[Any]] = {}
    for rank, coordinate in enumerate(layout.coordinates()):
        ep = layout.expert_coordinate(coordinate).ep
        name = shard_directory(coordinate.tp, coordinate.pp, ep, pipelined=layout.pp > 1, experts=layout.ep > 1)
        file = f"{folder}/{name}/{SHARD_FILE}"
        regions = megatron_regions(
            spec, layout, coordinate, value_head=value_head, naming=naming, grouped_experts=grouped_experts
        )
        held = [(region.local_name, region.tensor, region.box) for region in regions]
        if done.setdefault(file, held) != held:
            raise LayoutError(
                f"two ranks with different experts would share {name}: the legacy format names ranks by tp, pp and ep",
                fix="choose etp equal to tp",
            )
        if file in sizes:
            continue
        parameters: dict[str, list[Region]] = {}
        for region in regions:
            parameters.setdefault(region.local_name, []).append(region)
        table = {name: _entry(name, found, dtypes) for name, found in parameters.items()}
        archive, order = lay_out_shard(
            table, num_chunks=layout.vpp, iteration=iteration, arguments=_arguments(spec, layout)
        )
        sizes[file], segments[file] = archive.num_bytes, list(archive.segments)
        for parameter, begin in zip(order, archive.data_begin, strict=True):
            dtype, shape = table[parameter]
            store.add(rank, Array(directory / file, begin, dtype, shape), parameters[parameter])
    tracker = (TRACKER, (str(iteration) if iteration else "release").encode())
    return Target("legacy", directory, store, sizes, segments, lambda: [tracker])


SCALES = ("_k_scale", "_v_scale", "_q_scale", "_prob_scale")
"""Buffers of vLLM's attention layers that its loader of sharded states asks for; 1 where nothing is quantised."""


def sharded_state_target(directory: Path, spec: ModelSpec, tp: int, dtypes: Mapping[str, str]) -> Target:
    """What vLLM loads with ``load_format=sharded_state``: each tensor-parallel rank's parameters in a file of its own.

    Raises:
        CheckpointError: latent attention, of which an engine keeps other weights than the model's, or tensors of one
            parameter with different dtypes.
        LayoutError: the model does not divide by ``tp``.
    """
    if spec.mla is not None:
        raise CheckpointError(f"vLLM derives weights of {spec.family} after loading; its sharded state is not written")
    store = Store()
    sizes: dict[str, int] = {}
    segments: dict[str, list[tuple[int, bytes]]] = {}
    for rank in range(tp):
        parameters: dict[str, list[Region]] = {}
        for region in engine_regions(spec, tp, rank):
            parameters.setdefault(_state_name(region.local_name, spec), []).append(region)
        table = {name: _entry(name, found, dtypes) for name, found in parameters.items()}
        ones = [f"model.layers.{layer}.self_attn.attn.{scale}" for layer in range(spec.num_layers) for scale in SCALES]
        file = f"model-rank-{rank}-part-0.safetensors"
        # Scalars behind the weights, so that those stay aligned.
        header, offsets, sizes[file] = header_of({**table, **{name: ("F32", ()) for name in ones}})
        segments[file] = [(0, header), *((offsets[name], struct.pack("<f", 1.0)) for name in ones)]
        for name, (dtype, shape) in table.items():
            array = Array(directory / file, offsets[name], dtype, shape)
            store.add(rank, array, [replace(region, local_name=name) for region in parameters[name]])
    return Target("sharded_state", directory, store, sizes, segments, list)


def _state_name(parameter: str, spec: ModelSpec) -> str:
    """Name in an engine's state: of a tied embedding and head, which are one tensor, it keeps the smaller."""
    return "lm_head.weight" if spec.tied_embeddings and parameter == "model.embed_tokens.weight" else parameter


def _entry(name: str, regions: list[Region], dtypes: Mapping[str, str]) -> tuple[str, Shape]:
    kinds = {dtypes[region.tensor] for region in regions}
    if len(kinds) > 1:
        raise CheckpointError(
            f"{name} would hold tensors of {', '.join(sorted(kinds))}", fix="convert to one dtype (--dtype)"
        )
    return kinds.pop(), regions[0].local_shape


def _arguments(spec: ModelSpec, layout: ParallelLayout) -> dict[str, Any]:
    """What Megatron-LM compares with its own arguments, and what a reader needs to place the shards."""
    return {
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "ffn_hidden_size": spec.ffn_hidden_size,
        "num_attention_heads": spec.num_heads,
        "num_query_groups": spec.num_kv_heads,
        "kv_channels": spec.head_dim,
        "max_position_embeddings": spec.max_position,
        "padded_vocab_size": layout.padded_vocab_size(spec.vocab_size),
        "untie_embeddings_and_output_weights": not spec.tied_embeddings,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "decoder_first_pipeline_num_layers": layout.first_stage_layers,
        "decoder_last_pipeline_num_layers": layout.last_stage_layers,
        "pipeline_model_parallel_layout": layout.pipeline,
        "iteration": 0,
    }
