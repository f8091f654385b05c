"""Megatron-Core's torch_dist format, which is torch.distributed.checkpoint's, read and laid out directly. No torch.

    .metadata        pickled Metadata: shape and chunks of each tensor, and where each chunk's archive lies
    __R_K.distcp     archives of ``torch.save``, one a chunk, one after the other
    metadata.json    names the format; written last, so that without it there is no checkpoint
    common.pt        state that is no tensor (up to Megatron-Core 0.16; later the entry ``common_state/shard_0_1``)

Tensor keys are global: ``decoder.layers.self_attention.linear_qkv.weight`` has all layers along a dim of its own.

Invariants:
1. Reading executes nothing that a file names, and reads no tensor.
2. What is laid out is what Megatron-Core 0.16 and 0.19 and torch's own reader load.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from megarl.errors import CheckpointError
from megarl.weights.files.arrays import ITEM_BYTES, TORCH_NAMES, Array
from megarl.weights.files.pickles import Call, Global, Opaque, dumps, instance, loads
from megarl.weights.files.torch_archive import Stored, lay_out, plain_archive, read_archive, tensor_value
from megarl.weights.region import Box, Shape

METADATA_FILE, CONFIG_FILE, COMMON_FILE = ".metadata", "metadata.json", "common.pt"
COMMON_KEY = "common_state/shard_0_1"
CONFIG = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}

_DCP = "torch.distributed.checkpoint.metadata"
_DTYPE_OF_TORCH = {name: dtype for dtype, name in TORCH_NAMES.items()}


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor and the archive that holds it."""

    box: Box
    path: Path
    offset: int
    length: int

    @property
    def shape(self) -> Shape:
        return tuple(stop - start for start, stop in self.box)


@dataclass(frozen=True, slots=True)
class DistTensor:
    """A global tensor of a checkpoint."""

    key: str
    dtype: str
    shape: Shape
    chunks: tuple[Chunk, ...]


@dataclass
class DistCheckpoint:
    """What a torch_dist directory holds.

    Args:
        directory: with ``.metadata``.
        tensors: by key.
        objects: archive of each entry that is no tensor: path, offset, length.
    """

    directory: Path
    tensors: dict[str, DistTensor] = field(default_factory=dict)
    objects: dict[str, tuple[Path, int, int]] = field(default_factory=dict)

    def common(self) -> dict[str, Any]:
        """State that is no tensor, unknown classes as ``Opaque``; empty where there is none."""
        path = self.directory / COMMON_FILE
        if path.exists():
            value = read_archive(path)
        elif COMMON_KEY in self.objects:
            held = read_archive(*self.objects[COMMON_KEY])
            value = held[0] if isinstance(held, list) and held else {}
        else:
            return {}
        return value if isinstance(value, dict) else {}

    def files(self) -> list[Path]:
        """All files that belong to it."""
        found = {chunk.path for tensor in self.tensors.values() for chunk in tensor.chunks}
        found |= {path for path, _, _ in self.objects.values()}
        extra = [self.directory / name for name in (METADATA_FILE, CONFIG_FILE, COMMON_FILE)]
        return sorted(found) + [path for path in extra if path.exists()]


def is_torch_dist(directory: Path) -> bool:
    """Whether a directory is a complete torch_dist checkpoint."""
    return (directory / METADATA_FILE).exists() and (directory / CONFIG_FILE).exists()


def read_torch_dist(directory: Path) -> DistCheckpoint:
    """Opens a checkpoint: metadata only.

    Raises:
        CheckpointError: no or an unfinished checkpoint, a missing or truncated file, broken metadata, or a dtype that
            megarl does not read.
    """
    if (directory / METADATA_FILE).exists() and not (directory / CONFIG_FILE).exists():
        raise CheckpointError(
            f"the checkpoint is unfinished: {CONFIG_FILE}, which is written last, is missing", where=str(directory)
        )
    try:
        config = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
        data = (directory / METADATA_FILE).read_bytes()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"no torch_dist checkpoint: {error}", where=str(directory)) from error
    backend = config.get("sharded_backend") if isinstance(config, dict) else None
    if backend != "torch_dist":
        raise CheckpointError(f"the checkpoint's backend is {backend!r}, not torch_dist", where=str(directory))
    metadata = loads(data, where=str(directory / METADATA_FILE))
    try:
        return _described(metadata, directory)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        # A pickle can be whole and hold anything: what it lacks shows where it is asked for.
        raise CheckpointError(
            f"the metadata are none of torch.distributed.checkpoint: {error}", where=str(directory), fix="copy it again"
        ) from error


def _described(metadata: Any, directory: Path) -> DistCheckpoint:
    """The checkpoint of which a directory has the unpickled metadata."""
    entries, storage = _fields(metadata, directory, "state_dict_metadata", "storage_data")
    places: dict[tuple[str, tuple[int, ...] | None], tuple[Path, int, int]] = {}
    sizes: dict[Path, int] = {}
    for index, info in storage.items():
        path = directory / str(info.field("relative_path"))
        offset, length = int(info.field("offset")), int(info.field("length"))
        if path not in sizes:
            sizes[path] = path.stat().st_size if path.is_file() else -1
        if sizes[path] < offset + length:
            what = "is missing" if sizes[path] < 0 else f"has {sizes[path]} bytes, {offset + length} are expected"
            raise CheckpointError(f"damaged checkpoint: {path.name} {what}", where=str(directory), fix="copy it again")
        if info.field("transform_descriptors"):
            raise CheckpointError("entries are compressed, which megarl does not read", where=str(path))
        start = index.field("offset")
        places[index.field("fqn"), None if start is None else tuple(start)] = (path, offset, length)
    found = DistCheckpoint(directory)
    for key, entry in entries.items():
        if isinstance(entry, Opaque) and entry.name.endswith("TensorStorageMetadata"):
            found.tensors[key] = _tensor(key, entry, places, directory)
        elif (place := places.get((key, None))) is not None:
            found.objects[key] = place
    return found


def chunk_array(chunk: Chunk, tensor: DistTensor) -> Array:
    """Where a chunk's elements lie, from its archive's directory.

    Raises:
        CheckpointError: a broken archive, or one that holds something else.
    """
    stored = read_archive(chunk.path, chunk.offset, chunk.length)
    if not isinstance(stored, Stored) or not stored.is_contiguous or prod(stored.array.shape) != prod(chunk.shape):
        raise CheckpointError(f"{tensor.key} {chunk.box} is not what the metadata say", where=str(chunk.path))
    if stored.array.dtype != tensor.dtype:
        raise CheckpointError(f"{tensor.key} is {stored.array.dtype}, the metadata say {tensor.dtype}")
    return Array(chunk.path, stored.array.begin, tensor.dtype, chunk.shape)


def _tensor(key: str, entry: Opaque, places: Mapping[Any, tuple[Path, int, int]], directory: Path) -> DistTensor:
    properties = entry.field("properties")
    torch_dtype = getattr(properties.state[0], "name", "").rsplit(".", 1)[-1]
    dtype = _DTYPE_OF_TORCH.get(torch_dtype)
    if dtype is None:
        raise CheckpointError(f"{key} has dtype {torch_dtype}, which megarl does not read", where=str(directory))
    chunks = []
    for chunk in entry.field("chunks"):
        offsets, sizes = tuple(chunk.field("offsets")), tuple(chunk.field("sizes"))
        place = places.get((key, offsets))
        if place is None:
            raise CheckpointError(f"the chunk of {key} at {offsets} is in no file", where=str(directory))
        box = tuple((start, start + size) for start, size in zip(offsets, sizes, strict=True))
        if not all(0 <= start <= stop <= size for (start, stop), size in zip(box, entry.field("size"), strict=True)):
            raise CheckpointError(f"the chunk of {key} at {offsets} lies outside of it", where=str(directory))
        chunks.append(Chunk(box, *place))
    return DistTensor(key, dtype, tuple(entry.field("size")), tuple(chunks))


def _fields(metadata: Any, directory: Path, *names: str) -> list[dict[Any, Any]]:
    values = [metadata.field(name) if isinstance(metadata, Opaque) else None for name in names]
    if not all(isinstance(value, dict) for value in values):
        raise CheckpointError("the metadata are none of torch.distributed.checkpoint", where=str(directory))
    return values  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """A chunk to be written: its tensor's key, its box, and the number of its file."""

    key: str
    box: Box
    file: int


@dataclass
class DistLayout:
    """A checkpoint laid out.

    Args:
        arrays: each chunk's array, paths relative to the directory.
        sizes: bytes of each data file.
        segments: bytes to write at offsets of the data files.
        metadata: contents of ``.metadata``.
    """

    arrays: dict[PlannedChunk, Array]
    sizes: dict[str, int]
    segments: dict[str, list[tuple[int, bytes]]]
    metadata: bytes


def lay_out_torch_dist(
    tensors: Mapping[str, tuple[str, Shape]],
    chunks: Sequence[PlannedChunk],
    objects: Mapping[str, bytes] | None = None,
) -> DistLayout:
    """Where everything of a checkpoint goes.

    Args:
        tensors: dtype and shape of every key.
        chunks: boxes that tile each tensor.
        objects: archives (``torch_archive.plain_archive``) of entries that are no tensors; they go into the first file.
    """
    names = {chunk.file: f"__{chunk.file}_0.distcp" for chunk in chunks}
    first = names[min(names)]
    layout = DistLayout({}, {name: 0 for _, name in sorted(names.items())}, {name: [] for name in names.values()}, b"")
    storage: dict[Call, Call] = {}
    boxes: dict[str, list[Box]] = {key: [] for key in tensors}
    build = _MetadataBuilder()
    for chunk in chunks:
        name, (dtype, _) = names[chunk.file], tensors[chunk.key]
        shape = tuple(stop - start for start, stop in chunk.box)
        begin = layout.sizes[name]
        archive = lay_out(tensor_value(0, dtype, shape), [prod(shape) * ITEM_BYTES[dtype]], begin)
        layout.segments[name] += [(begin + position, data) for position, data in archive.segments]
        layout.arrays[chunk] = Array(Path(name), begin + archive.data_begin[0], dtype, shape)
        layout.sizes[name] = begin + archive.num_bytes
        storage[build.index(chunk.key, chunk.box, len(boxes[chunk.key]))] = build.place(name, begin, archive.num_bytes)
        boxes[chunk.key].append(chunk.box)
    for key, data in (objects or {}).items():
        begin = layout.sizes[first]
        layout.segments[first].append((begin, data))
        layout.sizes[first] += len(data)
        storage[build.index(key, None, None)] = build.place(first, begin, len(data))
    entries: dict[str, Call] = {key: build.tensor(dtype, shape, boxes[key]) for key, (dtype, shape) in tensors.items()}
    entries.update({key: instance(build.kind("BytesStorageMetadata"), None) for key in objects or {}})
    layout.metadata = build.metadata(entries, storage)
    return layout


class _MetadataBuilder:
    """torch's metadata objects as pickled calls; every name is one object, so that the pickle spells it once."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str], Global] = {}
        self._properties: dict[str, Call] = {}

    def kind(self, name: str, module: str = _DCP) -> Global:
        return self._kinds.setdefault((module, name), Global(module, name))

    def size(self, shape: Iterable[int]) -> Call:
        return Call(self.kind("Size", "torch"), tuple(shape))

    def index(self, key: str, box: Box | None, number: int | None) -> Call:
        state: dict[str, Any] = {"fqn": key, "index": number}
        if box is not None:
            state["offset"] = self.size(start for start, _ in box)
        return instance(self.kind("MetadataIndex"), state)

    def place(self, name: str, offset: int, length: int) -> Call:
        kind = self.kind("_StorageInfo", "torch.distributed.checkpoint.filesystem")
        return instance(kind, {"relative_path": name, "offset": offset, "length": length})

    def tensor(self, dtype: str, shape: Shape, boxes: Sequence[Box]) -> Call:
        chunks = [
            instance(
                self.kind("ChunkStorageMetadata"),
                {
                    "offsets": self.size(start for start, _ in box),
                    "sizes": self.size(stop - start for start, stop in box),
                },
            )
            for box in boxes
        ]
        state = {"properties": self._of_dtype(dtype), "size": self.size(shape), "chunks": chunks}
        return instance(self.kind("TensorStorageMetadata"), state)

    def _of_dtype(self, dtype: str) -> Call:
        if dtype not in self._properties:
            strided = Call(self.kind("_get_layout", "torch.serialization"), "torch.strided")
            memory_format = Call(self.kind("_MEM_FORMAT_ENCODING"), 0)
            state = (self.kind(TORCH_NAMES[dtype], "torch"), strided, False, memory_format, False)
            self._properties[dtype] = instance(self.kind("TensorProperties"), state)
        return self._properties[dtype]

    def metadata(self, entries: dict[str, Call], storage: dict[Call, Call]) -> bytes:
        state = {"state_dict_metadata": entries, "planner_data": None, "storage_data": storage, "storage_meta": None}
        return dumps(instance(self.kind("Metadata"), state))


def config_bytes() -> bytes:
    """Contents of ``metadata.json``."""
    return json.dumps(CONFIG).encode()


def object_bytes(value: Any) -> bytes:
    """An entry that is no tensor, as Megatron-Core stores it: a list of the ranks' values."""
    return plain_archive([value])
