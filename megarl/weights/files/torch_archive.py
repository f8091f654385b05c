"""torch's archives, read and laid out without torch: an uncompressed zip of a pickle and raw storages.

What ``torch.save`` writes (torch 2.13): ``archive/data.pkl`` and ``archive/data/<key>``, one a storage. A storage's
bytes lie in the file as they are in memory, so a tensor of the archive is an ``Array`` of the file.

Laid-out archives carry no CRC of the storages, like torch's own under ``set_crc32_options(False)``: torch does not
check it; ``unzip`` would complain.

Invariants:
1. Reading executes nothing that the pickle names (``pickles``).
2. Laying out says where every byte goes without holding a tensor; storages start at multiples of 64 bytes of the file.
"""

from __future__ import annotations

import struct
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from megarl.errors import CheckpointError
from megarl.weights.files.arrays import ITEM_BYTES, TORCH_NAMES, Array
from megarl.weights.files.pickles import Call, Global, Opaque, Reference, dumps, loads, opaque_class
from megarl.weights.region import Shape, contiguous_strides

STORAGE_TYPES = {
    "F64": "DoubleStorage",
    "F32": "FloatStorage",
    "F16": "HalfStorage",
    "BF16": "BFloat16Storage",
    "I64": "LongStorage",
    "I32": "IntStorage",
    "I16": "ShortStorage",
    "I8": "CharStorage",
    "U8": "ByteStorage",
    "BOOL": "BoolStorage",
}
_DTYPE_OF_STORAGE = {name: dtype for dtype, name in STORAGE_TYPES.items()}
_DTYPE_OF_TORCH = {name: dtype for dtype, name in TORCH_NAMES.items()}

_END, _CENTRAL, _LOCAL = b"PK\x05\x06", b"PK\x01\x02", b"PK\x03\x04"
_END64, _LOCATOR64 = b"PK\x06\x06", b"PK\x06\x07"
_BIG = 0xFFFFFFFF
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of an archive: a view of a storage."""

    array: Array
    strides: tuple[int, ...]

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie in row-major order without gaps."""
        wanted = contiguous_strides(self.array.shape)
        return all(
            size == 1 or mine == want for size, mine, want in zip(self.array.shape, self.strides, wanted, strict=True)
        )


def read_archive(path: Path, offset: int = 0, length: int | None = None) -> Any:
    """The object of an archive, tensors as ``Stored``.

    Args:
        path: the file.
        offset: first byte of the archive.
        length: its bytes; None is the rest of the file.

    Raises:
        CheckpointError: no archive of torch's zip format, or a truncated or broken one.
    """
    try:
        with path.open("rb") as file:
            if length is None:
                length = file.seek(0, 2) - offset
            records = _records(file, path, offset, length)
            name = next((name for name in records if name.endswith("/data.pkl")), None)
            if name is None:
                raise _broken(path, "it has no data.pkl")
            begin, size = records[name]
            file.seek(begin)
            data = file.read(size)
    except OSError as error:
        raise CheckpointError(f"cannot read: {error.strerror}", where=str(path)) from error
    except (struct.error, ValueError, OverflowError, MemoryError, StopIteration) as error:
        raise _broken(path, "its directory is damaged") from error  # numbers that are none, or beyond the file
    return _unpickle(data, path, {key.split("/", 1)[1]: place for key, place in records.items()})


def _unpickle(data: bytes, path: Path, records: dict[str, tuple[int, int]]) -> Any:
    def storage(pid: Any) -> tuple[str, int, int]:
        if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage":
            raise _broken(path, f"it refers to {pid!r}")
        kind = getattr(pid[1], "name", "").rsplit(".", 1)[-1]
        record = records.get(f"data/{pid[2]}")
        if record is None:
            raise _broken(path, f"storage {pid[2]} is missing")
        return _DTYPE_OF_STORAGE.get(kind, kind), record[0], record[1]

    def tensor(held: tuple[str, int, int], start: int, shape: Any, strides: Any, *_: Any) -> Any:
        dtype, begin, size = held
        if dtype not in ITEM_BYTES:
            return Opaque(f"tensor of {dtype}")
        step = ITEM_BYTES[dtype]
        array = Array(path, begin + start * step, dtype, tuple(shape))
        if min((start, *array.shape, *strides)) < 0 or (prod(shape) and start * step + array.num_bytes > size):
            raise _broken(path, f"a tensor of shape {list(shape)} exceeds its storage of {size} bytes")
        return Stored(array, tuple(strides))

    def typed(
        held: tuple[str, int, int], start: int, shape: Any, strides: Any, grad: Any, hooks: Any, dtype: Any
    ) -> Any:
        name = _DTYPE_OF_TORCH.get(getattr(dtype, "name", "").rsplit(".", 1)[-1], "")
        return tensor((name, held[1], held[2]), start, shape, strides)

    known: dict[tuple[str, str], Any] = {
        ("torch._utils", "_rebuild_tensor_v2"): tensor,
        ("torch._utils", "_rebuild_tensor_v3"): typed,
        ("torch._utils", "_rebuild_parameter"): lambda held, *_: held,
    }
    for kind in (*STORAGE_TYPES.values(), "UntypedStorage"):
        known["torch", kind] = opaque_class("torch", kind)
    for kind in TORCH_NAMES.values():
        known["torch", kind] = opaque_class("torch", kind)
    known["torch.storage", "UntypedStorage"] = opaque_class("torch.storage", "UntypedStorage")
    return loads(data, known=known, persistent=storage, where=str(path))


def _records(file: BinaryIO, path: Path, offset: int, length: int) -> dict[str, tuple[int, int]]:
    """First byte in the file and size of each record."""
    if length < 22:
        raise _broken(path, f"{length} bytes are too few for an archive")
    tail_size = min(length, 1 << 16)
    file.seek(offset + length - tail_size)
    tail = file.read(tail_size)
    if len(tail) != tail_size:
        raise _broken(path, "the file is truncated")
    end = tail.rfind(_END)
    if end < 0:
        file.seek(offset)
        if file.read(1) == b"\x80":
            raise CheckpointError(
                "the file is in torch's format from before 1.6",
                where=str(path),
                fix="load and save it with torch again",
            )
        raise _broken(path, "it is no zip archive, or it is cut short")
    if len(tail) - end != 22:
        raise _broken(path, "its end record is cut short")
    count, directory_size, directory = struct.unpack("<10xH2I", tail[end : end + 20])
    if end >= 20 and tail[end - 20 : end - 16] == _LOCATOR64:
        (end64,) = struct.unpack("<8xQ4x", tail[end - 20 : end])
        file.seek(offset + end64)
        record = file.read(56)
        if record[:4] != _END64:
            raise _broken(path, "its directory cannot be found")
        count, directory_size, directory = struct.unpack("<32xQQQ", record)
    file.seek(offset + directory)
    return _directory(file, path, offset, file.read(directory_size), count)


def _directory(file: BinaryIO, path: Path, offset: int, data: bytes, count: int) -> dict[str, tuple[int, int]]:
    records: dict[str, tuple[int, int]] = {}
    at = 0
    for _ in range(count):
        if data[at : at + 4] != _CENTRAL:
            raise _broken(path, "its directory is damaged")
        method, packed, size, name_size, extra_size, comment_size, header = struct.unpack(
            "<10xH8xIIHHH8xI", data[at : at + 46]
        )
        name = data[at + 46 : at + 46 + name_size].decode()
        size, packed, header = _wide(data[at + 46 + name_size : at + 46 + name_size + extra_size], size, packed, header)
        if method or packed != size:
            raise _broken(path, f"record {name} is compressed")
        file.seek(offset + header)
        local = file.read(30)
        if local[:4] != _LOCAL:
            raise _broken(path, f"record {name} cannot be found")
        local_name, local_extra = struct.unpack("<26xHH", local)
        records[name] = (offset + header + 30 + local_name + local_extra, size)
        at += 46 + name_size + extra_size + comment_size
    return records


def _wide(extra: bytes, size: int, packed: int, header: int) -> tuple[int, int, int]:
    """64-bit values of a directory entry, from its extra field."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack("<HH", extra[at : at + 4])
        if kind == 1:
            values = iter(struct.unpack(f"<{length // 8}Q", extra[at + 4 : at + 4 + length // 8 * 8]))
            size = next(values) if size == _BIG else size
            packed = next(values) if packed == _BIG else packed
            header = next(values) if header == _BIG else header
        at += 4 + length
    return size, packed, header


@dataclass(frozen=True, slots=True)
class Archive:
    """An archive laid out: its size, the bytes to write at offsets, and where each tensor's data start."""

    num_bytes: int
    segments: tuple[tuple[int, bytes], ...]
    data_begin: tuple[int, ...]


def lay_out(value: Any, storages: Sequence[int], start: int = 0) -> Archive:
    """An archive of a pickled value and storages of given sizes in bytes.

    Args:
        value: for ``pickles.dumps``, with tensors from ``tensor_value``.
        storages: bytes of storage 0, 1, ...
        start: where in its file the archive begins; offsets in the result count from there.
    """
    position = 0
    segments: list[tuple[int, bytes]] = []
    directory: list[bytes] = []
    begins: list[int] = []
    records: list[tuple[str, bytes | int]] = [("data.pkl", dumps(value)), ("byteorder", b"little")]
    records += [(f"data/{key}", size) for key, size in enumerate(storages)]
    records.append(("version", b"3\n"))
    for name, content in records:
        size = content if isinstance(content, int) else len(content)
        check = 0 if isinstance(content, int) else zlib.crc32(content)
        full = f"archive/{name}".encode()
        wide = size >= _BIG
        extra = struct.pack("<HHQQ", 1, 16, size, size) if wide else b""
        if isinstance(content, int):
            # An extra field of no meaning moves the data to a multiple of the alignment.
            unpadded = start + position + 30 + len(full) + len(extra) + 4
            extra += struct.pack("<HH", 0x4246, pad := -unpadded % _ALIGNMENT) + bytes(pad)
        small = _BIG if wide else size
        header = struct.pack(
            "<4s5H3IHH", _LOCAL, 45 if wide else 20, 0, 0, 0, 33, check, small, small, len(full), len(extra)
        )
        directory.append(_entry(full, size, check, position))
        segments.append((position, header + full + extra))
        position += len(header) + len(full) + len(extra)
        if isinstance(content, int):
            begins.append(position)
        else:
            segments.append((position, content))
        position += size
    entries = b"".join(directory)
    end = struct.pack("<4sQHHIIQQQQ", _END64, 44, 45, 45, 0, 0, len(records), len(records), len(entries), position)
    end += struct.pack("<4sIQI", _LOCATOR64, 0, position + len(entries), 1)
    end += struct.pack("<4s4H2IH", _END, 0, 0, len(records), len(records), len(entries), min(position, _BIG), 0)
    segments.append((position, entries + end))
    return Archive(position + len(entries) + len(end), tuple(segments), tuple(begins))


def _entry(name: bytes, size: int, check: int, position: int) -> bytes:
    """A directory entry; values of 64 bits go into its extra field."""
    wide = [value for value in (size, size, position) if value >= _BIG]
    extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    small, version = min(size, _BIG), 45 if wide else 20
    before = struct.pack("<4s6H", _CENTRAL, version, version, 0, 0, 0, 33)
    sizes = struct.pack("<3I2H", check, small, small, len(name), len(extra))
    return before + sizes + struct.pack("<3H2I", 0, 0, 0, 0, min(position, _BIG)) + name + extra


def tensor_value(key: int, dtype: str, shape: Shape, strides: Sequence[int] | None = None) -> Call:
    """A tensor that is the whole of a storage, for ``lay_out``."""
    size = prod(shape)
    storage = Reference(("storage", Global("torch", STORAGE_TYPES[dtype]), str(key), "cpu", size))
    steps = tuple(contiguous_strides(shape) if strides is None else strides)
    hooks = Call(Global("collections", "OrderedDict"))
    return Call(Global("torch._utils", "_rebuild_tensor_v2"), storage, 0, tuple(shape), steps, False, hooks)


def plain_archive(value: Any) -> bytes:
    """An archive of a value without tensors."""
    archive = lay_out(value, ())
    out = bytearray(archive.num_bytes)
    for position, data in archive.segments:
        out[position : position + len(data)] = data
    return bytes(out)


def tensors_of(value: Any, prefix: str = "") -> OrderedDict[str, Stored]:
    """Tensors of nested dicts by dotted name."""
    found: OrderedDict[str, Stored] = OrderedDict()
    for key, entry in value.items():
        name = f"{prefix}{key}"
        if isinstance(entry, Stored):
            found[name] = entry
        elif isinstance(entry, dict):
            found.update(tensors_of(entry, f"{name}."))
    return found


def _broken(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"broken torch archive: {what}", where=str(path), fix="copy the file again")
