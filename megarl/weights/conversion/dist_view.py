"""Megatron's torch_dist keys: one global tensor for all layers, experts and ranks, from the same rules as every layout.

A parameter of an uncut model is one entry of a key's tensor: ``decoder.layers.3.mlp.linear_fc2.weight`` is entry 3 of
``decoder.layers.mlp.linear_fc2.weight``, an expert's has its index behind the layer's. Models whose layers differ keep
the layer in the key (``indexed``).

Read from megatron-core 0.16.1 and 0.19.2: ``sharded_state_dict`` of ``transformer_block.py`` and ``moe/experts.py``;
the key map of ``gpt_layer_specs.py``, by which Megatron's own layers save their norms under Transformer Engine's names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from megarl.errors import CheckpointError
from megarl.models.rules import NamingScheme
from megarl.models.spec import ModelSpec
from megarl.parallel.grid import Coordinate, ParallelLayout
from megarl.weights.conversion.store import Store, cut_to_chunk, prefixed
from megarl.weights.files.safetensors_header import listing
from megarl.weights.files.torch_dist import DistCheckpoint, DistTensor, chunk_array
from megarl.weights.layout import megatron_regions
from megarl.weights.region import Box, Region, Shape

SLOTS = ("param", "fp32_param", "exp_avg", "exp_avg_sq")
"""Optimizer state with a tensor per parameter (``distrib_optim_sharding_type: fully_reshardable``)."""

_LAYER = re.compile(r"(?P<block>(?:decoder|mtp)\.layers)\.(?P<layer>\d+)\.(?P<rest>.+)")
_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(?P<one>\d+)\.(?P<fc>linear_fc[12])\.(?P<kind>weight|bias)"
    r"|(?P<grouped_fc>linear_fc[12])\.(?P<grouped_kind>weight|bias)(?P<other>\d+))"
)
_LOCAL_KEYS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
_VOCABULARY_KEYS = ("embedding.word_embeddings.weight", "output_layer.weight")


@dataclass
class Entry:
    """A parameter of the uncut model inside a key's tensor.

    Args:
        key: the tensor.
        lead: index of the parameter in it: layer and expert, as far as it has them.
        shape: the parameter's.
        regions: canonical tensors in it.
    """

    key: str
    lead: tuple[int, ...]
    shape: Shape
    regions: list[Region] = field(default_factory=list)


@dataclass(frozen=True)
class DistView:
    """All entries of a model under one naming.

    Args:
        naming: whose layers wrote it.
        indexed: whether keys carry the layer.
        entries: one a parameter.
        vocab_size: rows of the vocabulary that are no padding.
    """

    naming: NamingScheme
    indexed: bool
    entries: Sequence[Entry]
    vocab_size: int

    def shapes(self) -> dict[str, Shape]:
        """The keys with their tensors' shapes, the vocabulary padded for one rank."""
        sizes: dict[str, tuple[list[int], Shape]] = {}
        for entry in self.entries:
            counts, _ = sizes.setdefault(entry.key, ([0] * len(entry.lead), entry.shape))
            for dim, index in enumerate(entry.lead):
                counts[dim] = max(counts[dim], index + 1)
        return {key: (*counts, *shape) for key, (counts, shape) in sizes.items()}


def dist_view(spec: ModelSpec, *, value_head: bool, naming: NamingScheme, indexed: bool = False) -> DistView:
    """The entries of a model."""
    entries: dict[str, Entry] = {}
    # The specification of latent attention has no key map.
    maps_norms = naming == "local" and spec.mla is None
    for region in megatron_regions(spec, ParallelLayout(), Coordinate(), value_head=value_head, naming=naming):
        entry = entries.get(region.local_name)
        if entry is None:
            key, lead = dist_key(region.local_name, indexed, maps_norms=maps_norms)
            entry = entries[region.local_name] = Entry(key, lead, region.local_shape)
        entry.regions.append(region)
    return DistView(naming, indexed, list(entries.values()), spec.vocab_size)


def is_indexed(spec: ModelSpec) -> bool:
    """Whether Megatron-Core keeps layers apart in the keys: where only some of them have experts."""
    return spec.moe is not None and bool(spec.moe.dense_layers)


def dist_key(name: str, indexed: bool, *, maps_norms: bool) -> tuple[str, tuple[int, ...]]:
    """Key of an uncut model's parameter and its index in the key's tensor.

    Args:
        name: the parameter.
        indexed: keys carry the layer.
        maps_norms: norms are saved under Transformer Engine's names.
    """
    match = _LAYER.fullmatch(name)
    if match is None:
        return name, ()
    block, layer, rest = match["block"], int(match["layer"]), match["rest"]
    lead: tuple[int, ...] = () if indexed else (layer,)
    prefix = f"{block}.{layer}." if indexed else f"{block}."
    if expert := _EXPERT.fullmatch(rest):
        fc, kind = expert["fc"] or expert["grouped_fc"], expert["kind"] or expert["grouped_kind"]
        return f"{prefix}mlp.experts.experts.{fc}.{kind}", (*lead, int(expert["one"] or expert["other"]))
    if maps_norms:
        for own, other in _LOCAL_KEYS.items():
            if rest.startswith(own):
                rest = other + rest.removeprefix(own)
    return prefix + rest, lead


def find_view(checkpoint: DistCheckpoint, spec: ModelSpec, *, value_head: bool) -> DistView:
    """The naming under which a checkpoint holds a model, by its keys.

    Raises:
        CheckpointError: no naming fits; the keys that are missing under the closest one are listed.
    """
    found: list[tuple[list[str], DistView]] = []
    namings: tuple[NamingScheme, ...] = ("te", "local")
    for naming in namings:
        for indexed in (False, True):
            view = dist_view(spec, value_head=value_head, naming=naming, indexed=indexed)
            found.append(([key for key in view.shapes() if key not in checkpoint.tensors], view))
            if not found[-1][0]:
                return view
    missing, _ = min(found, key=lambda candidate: len(candidate[0]))
    raise CheckpointError(
        f"the checkpoint lacks weights of the model: {listing(missing)}",
        where=str(checkpoint.directory),
        fix="give the configuration of the model that was saved",
    )


def dist_store(checkpoint: DistCheckpoint, view: DistView, slots: Iterable[str] = ()) -> tuple[Store, set[str]]:
    """A checkpoint's chunks as regions of one rank that owns everything, and the keys that were used.

    Args:
        checkpoint: what is read.
        view: its entries.
        slots: optimizer slots to read, as canonical tensors named by ``slot_prefix`` and the weight's name.

    Raises:
        CheckpointError: listing all tensors that are missing or of another shape than the model's.
    """
    store, used, problems = Store(), set(), []
    shapes = view.shapes()
    by_key: dict[str, list[Entry]] = {}
    for entry in view.entries:
        by_key.setdefault(entry.key, []).append(entry)
    for slot in ("", *slots):
        prefix = slot_prefix(slot)
        for key, entries in by_key.items():
            tensor = checkpoint.tensors.get(prefix + key)
            if tensor is None:
                problems.append(f"{prefix}{key} is missing")
            elif not _fits(tensor.shape, shapes[key], key in _VOCABULARY_KEYS, view.vocab_size):
                problems.append(f"{tensor.key} has shape {list(tensor.shape)}, expected {list(shapes[key])}")
            else:
                used.add(tensor.key)
                _add_chunks(store, tensor, entries, prefix)
    if problems:
        raise CheckpointError(f"checkpoint and model disagree: {listing(problems)}", where=str(checkpoint.directory))
    return store, used


def slot_prefix(slot: str) -> str:
    """What names of an optimizer slot begin with, on both sides; nothing for the weights themselves."""
    return f"optimizer.state.{slot}." if slot else ""


def _fits(shape: Shape, expected: Shape, is_vocabulary: bool, vocab_size: int) -> bool:
    """Whether a stored shape is the expected one; vocabularies are padded differently by every writer."""
    if is_vocabulary and expected[0] >= vocab_size:
        return len(shape) == len(expected) and shape[0] >= vocab_size and shape[1:] == expected[1:]
    return shape == expected


def _add_chunks(store: Store, tensor: DistTensor, entries: Sequence[Entry], prefix: str) -> None:
    by_lead = {entry.lead: entry for entry in entries}
    for chunk in tensor.chunks:
        name = f"{tensor.key}@{','.join(str(start) for start, _ in chunk.box)}"
        found: list[Region] = []
        for lead in _leads(chunk.box, len(entries[0].lead)):
            parts = (cut_to_chunk(region, lead, chunk.box, name) for region in by_lead[lead].regions)
            found += [prefixed(part, prefix) for part in parts if part is not None]
        if found:
            store.add(0, chunk_array(chunk, tensor), found)


def _leads(box: Box, dims: int) -> list[tuple[int, ...]]:
    """The entries that a chunk's dims in front cover."""
    leads: list[tuple[int, ...]] = [()]
    for start, stop in box[:dims]:
        leads = [(*lead, index) for lead in leads for index in range(start, stop)]
    return leads
