"""What inspect.py prints."""

from __future__ import annotations

import argparse
from math import prod
from pathlib import Path

from megarl.errors import CheckpointError
from megarl.models.registry import load_spec
from megarl.weights.conversion.receipt import MANIFEST, read_receipt
from megarl.weights.conversion.source import Source
from megarl.weights.conversion.sources import config_home, format_of, open_source
from megarl.weights.files.arrays import ITEM_BYTES
from megarl.weights.files.legacy import read_legacy, resolve_tracker
from megarl.weights.files.safetensors_header import directory_arrays
from megarl.weights.files.torch_dist import read_torch_dist
from megarl.weights.layout import megatron_regions
from megarl.weights.region import Region, local_box
from tools.convert.options import layout_of


def describe(given: argparse.Namespace) -> int:
    """The files as they are, without a model in mind."""
    directory = resolve_tracker(Path(given.source))
    kind = format_of(directory)
    print(f"{directory}: {kind}")
    lines = {"hf": _hf_lines, "torch_dist": _dist_lines, "legacy": _legacy_lines}[kind](directory)
    for line in lines[: given.limit]:
        print("  " + line)
    if len(lines) > given.limit:
        print(f"  and {len(lines) - given.limit} more (--limit)")
    if (directory / MANIFEST).exists():
        receipt = read_receipt(directory)
        print(f"converted from {receipt['source']['directory']} ({receipt['source']['format']})")
        print(f"  digest {receipt['target']['digest'][:16]}, plan {receipt['plan']['digest']}")
    return 0


def _hf_lines(directory: Path) -> list[str]:
    arrays = directory_arrays(directory)
    total = sum(array.num_bytes for array in arrays.values())
    lines = [f"{len(arrays)} tensors, {total / 1e9:.3f} GB in {len({array.path for array in arrays.values()})} files"]
    return lines + [
        f"{name}  {array.dtype} {list(array.shape)}  {array.path.name} at {array.begin}"
        for name, array in arrays.items()
    ]


def _dist_lines(directory: Path) -> list[str]:
    checkpoint = read_torch_dist(directory)
    total = sum(prod(tensor.shape) * ITEM_BYTES[tensor.dtype] for tensor in checkpoint.tensors.values())
    state = checkpoint.common()
    lines = [
        f"{len(checkpoint.tensors)} keys, {total / 1e9:.3f} GB; {len(checkpoint.objects)} entries that are no tensor",
        f"common state: {', '.join(sorted(map(str, state))) or 'none'}; iteration {state.get('iteration', '?')}",
    ]
    for key, tensor in sorted(checkpoint.tensors.items()):
        files = len({chunk.path for chunk in tensor.chunks})
        lines.append(f"{key}  {tensor.dtype} {list(tensor.shape)}  {len(tensor.chunks)} chunks in {files} files")
    groups: dict[str, int] = {}
    for name in checkpoint.objects:
        groups[name.split("/")[0]] = groups.get(name.split("/")[0], 0) + 1
    return lines + [f"{name}  {count} objects" for name, count in sorted(groups.items())]


def _legacy_lines(directory: Path) -> list[str]:
    shards = read_legacy(directory)
    first = next(iter(shards.values()))
    lines = [f"{len(shards)} shards; beside weights: {', '.join(first.rest) or 'nothing'}"]
    for (tp, pp, ep), shard in sorted(shards.items()):
        size = sum(array.num_bytes for array in shard.arrays.values())
        lines.append(
            f"tp {tp} pp {pp} ep {ep}: {len(shard.arrays)} parameters, {size / 1e9:.3f} GB  {shard.path.parent.name}"
        )
    return lines + [f"{name}  {array.dtype} {list(array.shape)}" for name, array in first.arrays.items()]


def places_in_files(given: argparse.Namespace) -> int:
    """Where a tensor's parts lie in the checkpoint's files."""
    source = open_source(given.source, config=given.config)
    for tensor in _matching(given, set(source.dtypes)):
        print(tensor)
        for rank, regions in source.store.regions.items():
            for region in regions:
                if region.tensor == tensor and region.numel:
                    print("  " + _place(source, rank, region))
    return 0


def _place(source: Source, rank: int, region: Region) -> str:
    array = source.store.array(rank, region)
    begin = array.begin + region.offset * array.item_bytes
    replica = f", replica {region.replica}" if region.replica else ""
    file = array.path.relative_to(source.directory)
    return f"{_box(region)}  {file} at byte {begin}, in {region.local_name} {list(region.local_shape)}{replica}"


def places_in_layout(given: argparse.Namespace) -> int:
    """Which ranks of a layout hold a tensor, and where."""
    home = None if given.config is None else Path(given.config)
    spec = load_spec(config_home(home, resolve_tracker(Path(given.source)), Path(given.source)))
    layout = layout_of(given, has_experts=spec.moe is not None)
    naming = given.naming or "te"
    held: dict[str, list[str]] = {}
    for rank, coordinate in enumerate(layout.coordinates()):
        regions = megatron_regions(spec, layout, coordinate, naming=naming, grouped_experts=given.grouped_experts)
        for region in regions:
            if region.numel:
                inside = local_box(region)
                rows = "" if inside is None else f"[{', '.join(f'{start}:{stop}' for start, stop in inside)}]"
                replica = f" (replica {region.replica})" if region.replica else ""
                place = f"stage {coordinate.pp} tp {coordinate.tp} rank {rank}"
                line = f"{_box(region)}  {place}: {region.local_name}{rows}{replica}"
                held.setdefault(region.tensor, []).append(line)
    for tensor in _matching(given, set(held)):
        print(tensor)
        for line in held[tensor]:
            print("  " + line)
    return 0


def _box(region: Region) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in region.box) + "]"


def _matching(given: argparse.Namespace, names: set[str]) -> list[str]:
    found = [given.tensor] if given.tensor in names else sorted(name for name in names if given.tensor in name)
    if not found:
        raise CheckpointError(f"no tensor is called {given.tensor} or has that in its name", where=str(given.source))
    return found[: given.limit]
