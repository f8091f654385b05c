"""torch's archives and torch.distributed.checkpoint's directories, read and written without torch, against torch."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import tracemalloc
import warnings
from argparse import Namespace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from megarl.errors import CheckpointError
from megarl.weights.checksum import checksum
from megarl.weights.conversion.sources import kept_state
from megarl.weights.files.bits import checksum_bits, converter, scale_blocks, to_float
from megarl.weights.files.pickles import Opaque, dumps, is_plain, loads
from megarl.weights.files.torch_archive import lay_out, plain_archive, read_archive, tensor_value
from megarl.weights.files.torch_dist import (
    COMMON_KEY,
    PlannedChunk,
    chunk_array,
    config_bytes,
    lay_out_torch_dist,
    object_bytes,
    read_torch_dist,
)

UNSIGNED = {2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.contiguous().view(UNSIGNED[tensor.element_size()]).numpy()


def test_tensors_of_an_archive_are_found_where_torch_put_them(tmp_path):
    path = tmp_path / "model.pt"
    content = {
        "a": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "part": torch.arange(10)[2:5],
        "parameter": torch.nn.Parameter(torch.ones(3, 2)),
        "fp8": torch.ones(4).to(torch.float8_e4m3fn),
        "step": torch.tensor(3.0),
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "args": Namespace(num_layers=2),
        "plain": [1, 2.5, "x", None, True],
    }
    torch.save(content, path)
    read = read_archive(path)
    assert read["plain"] == content["plain"] and read["args"].num_layers == 2
    assert not read["turned"].is_contiguous and read["a"].is_contiguous
    for name in ("a", "part", "parameter", "fp8", "step"):
        array = read[name].array
        raw = np.fromfile(path, np.uint8, array.num_bytes, offset=array.begin)
        assert raw.tobytes() == content[name].detach().reshape(-1).view(torch.uint8).numpy().tobytes(), name
        assert array.shape == tuple(content[name].shape)


class Harmful:
    """Would leave a file if it were unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (self.path,))


def test_nothing_that_a_pickle_names_is_executed(tmp_path):
    path = tmp_path / "harmful.pt"
    torch.save({"model": {"w": torch.ones(2)}, "args": Harmful(str(tmp_path / "made"))}, path)
    read = read_archive(path)
    assert isinstance(read["args"], Opaque) and read["args"].name == "posix.mkdir"
    assert not is_plain(read) and read["model"]["w"].array.shape == (2,)
    assert not (tmp_path / "made").exists()
    torch.load(path, weights_only=False)
    assert (tmp_path / "made").exists()


@pytest.mark.parametrize("cut", [0, 10, 100, -1, -30])
def test_a_truncated_archive_is_refused(tmp_path, cut):
    path = tmp_path / "model.pt"
    torch.save({"w": torch.ones(200)}, path)
    data = path.read_bytes()
    path.write_bytes(data[:cut])
    with pytest.raises(CheckpointError, match="broken torch archive"):
        read_archive(path)


def test_the_format_of_before_torch_1_6_is_refused_by_name(tmp_path):
    path = tmp_path / "old.pt"
    torch.save({"w": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"before 1\.6"):
        read_archive(path)


def test_a_pickle_that_is_none_is_refused():
    for data in (b"", b"\x80\x02", b"nonsense", pickle.dumps({"a": 1})[:-4]):
        with pytest.raises(CheckpointError, match="broken pickle"):
            loads(data)
    value = {"a": [1, (2, None)], "b": {"c": 1.5, "d": b"x"}, "e": Namespace(f=True)}
    assert loads(dumps(value)) == value == pickle.loads(dumps(value))


@pytest.mark.parametrize(
    "data",
    [
        b"cbuiltins\nbytearray\n(I9999999999999\ntR.",
        b"\x80\x04\x96\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x80\x05\x96" + (1 << 28).to_bytes(8, "little") + b".",
        b"cargparse\nNamespace\n(N}X\x04\x00\x00\x00_get}stb.",
    ],
    ids=["bytearray", "length", "possible-length", "class"],
)
def test_a_pickle_takes_no_memory_of_its_own_choice_and_changes_no_class(data):
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="broken pickle"):
        loads(data)
    assert tracemalloc.get_traced_memory()[1] < 1 << 24
    tracemalloc.stop()
    # Entry 2^31 - 1 of its memory: the reader in C makes room for all of those before.
    assert loads(b"\x80\x02]r\xff\xff\xff\x7f.") == []
    assert loads(pickle.dumps(bytearray(b"ab"), 2)) == b"ab" and loads(pickle.dumps(bytearray(), 2)) == b""


def test_torch_loads_an_archive_that_was_laid_out(tmp_path):
    path = tmp_path / "ours.pt"
    archive = lay_out({"n": 3, "t": tensor_value(0, "BF16", (2, 3)), "u": tensor_value(1, "F32", (4,))}, [12, 16])
    data = bytearray(archive.num_bytes)
    for position, part in archive.segments:
        data[position : position + len(part)] = part
    data[archive.data_begin[1] : archive.data_begin[1] + 16] = np.arange(4, dtype=np.float32).tobytes()
    path.write_bytes(data)
    for loaded in (torch.load(io.BytesIO(data), weights_only=True), torch.load(path, mmap=True)):
        assert loaded["n"] == 3 and loaded["t"].dtype == torch.bfloat16
        assert torch.equal(loaded["u"], torch.arange(4.0)) and torch.equal(loaded["t"].float(), torch.zeros(2, 3))
    assert torch.load(io.BytesIO(plain_archive({"iteration": 7})), weights_only=True) == {"iteration": 7}


def test_archives_beyond_four_gigabytes(tmp_path):
    """A file with holes: 64-bit sizes and offsets, without the disk space."""
    path, size = tmp_path / "large.pt", (1 << 32) + 1000
    archive = lay_out({"t": tensor_value(0, "U8", (size,)), "s": tensor_value(1, "U8", (4,))}, [size, 4])
    with path.open("wb") as file:
        file.truncate(archive.num_bytes)
        for position, part in archive.segments:
            file.seek(position)
            file.write(part)
        file.seek(archive.data_begin[0] + size - 1)
        file.write(b"\7")
        file.seek(archive.data_begin[1])
        file.write(b"abcd")
    loaded = torch.load(path, mmap=True)
    assert loaded["t"][-1] == 7 and bytes(loaded["s"].tolist()) == b"abcd"
    read = read_archive(path)
    assert [read[name].array.begin for name in ("t", "s")] == list(archive.data_begin)


def write_dist(directory: Path, layout: Any, fill: Any) -> None:
    directory.mkdir()
    for name, size in layout.sizes.items():
        with (directory / name).open("wb") as file:
            file.truncate(size)
            for position, part in layout.segments[name]:
                file.seek(position)
                file.write(part)
            for chunk, array in layout.arrays.items():
                if str(array.path) == name:
                    file.seek(array.begin)
                    file.write(fill(chunk, array))
    (directory / ".metadata").write_bytes(layout.metadata)
    (directory / "metadata.json").write_bytes(config_bytes())


def test_torch_loads_a_directory_that_was_laid_out(tmp_path):
    whole = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)
    chunks = [PlannedChunk("w", ((0, 4), (0, 3)), 0), PlannedChunk("w", ((0, 4), (3, 6)), 1)]
    layout = lay_out_torch_dist({"w": ("BF16", (4, 6))}, chunks, {"a._extra_state/shard_0_4": object_bytes(None)})

    def fill(chunk: PlannedChunk, array: Any) -> bytes:
        return bits(whole[tuple(slice(*bounds) for bounds in chunk.box)]).tobytes()

    write_dist(tmp_path / "ours", layout, fill)
    state = {"w": torch.zeros(4, 6, dtype=torch.bfloat16), "a._extra_state/shard_0_4": io.BytesIO()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / "ours"), no_dist=True)
    assert torch.equal(state["w"], whole)
    read = read_torch_dist(tmp_path / "ours")
    assert {chunk.box for chunk in read.tensors["w"].chunks} == {chunk.box for chunk in chunks}
    assert read_archive(*read.objects["a._extra_state/shard_0_4"]) == [None]


@pytest.fixture
def saved(tmp_path) -> Path:
    directory = tmp_path / "saved"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(
            {"w": torch.arange(24, dtype=torch.bfloat16).reshape(2, 3, 4), "o": io.BytesIO(b"xyz")},
            storage_writer=dcp.FileSystemWriter(directory, single_file_per_rank=True),
            no_dist=True,
        )
    (directory / "metadata.json").write_bytes(config_bytes())
    return directory


def test_a_directory_that_torch_saved_is_read(saved):
    read = read_torch_dist(saved)
    (chunk,) = read.tensors["w"].chunks
    array = chunk_array(chunk, read.tensors["w"])
    assert (array.dtype, array.shape) == ("BF16", (2, 3, 4)) and "o" in read.objects
    raw = np.fromfile(array.path, np.uint16, 24, offset=array.begin)
    assert np.array_equal(raw, bits(torch.arange(24, dtype=torch.bfloat16)))


def test_damaged_directories_are_refused(saved):
    data = (saved / "__0_0.distcp").read_bytes()
    (saved / "__0_0.distcp").write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=r"__0_0.distcp has \d+ bytes, \d+ are expected"):
        read_torch_dist(saved)
    (saved / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__0_0.distcp is missing"):
        read_torch_dist(saved)
    (saved / "metadata.json").unlink()
    with pytest.raises(CheckpointError, match="unfinished"):
        read_torch_dist(saved)
    (saved / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(CheckpointError, match="zarr"):
        read_torch_dist(saved)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("shape", "box"),
    [
        ((7, 13), ((2, 7), (3, 13))),
        ((7, 16), ((0, 7), (0, 16))),
        ((5,), ((1, 4),)),
        ((3, 4, 8), ((1, 3), (0, 4), (0, 8))),
        ((3, 4, 5), ((1, 3), (1, 4), (2, 5))),
    ],
)
def test_checksums_of_bits_are_those_of_tensors(dtype, shape, box):
    piece = torch.randn(shape).to(dtype)[tuple(slice(*bounds) for bounds in box)]
    assert checksum_bits(bits(piece), box) == checksum(piece, box)


def test_conversions_round_as_torch_does():
    names = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
    edges = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 3.4e38, 65504.0, 65520.0, 1e-8, 1.00390625]
    values = torch.cat([torch.randn(20000) * torch.logspace(-45, 38, 20000), torch.tensor(edges)])
    for source, source_dtype in names.items():
        for target, target_dtype in names.items():
            if source == target:
                assert converter(source, target) is None
                continue
            held = values.to(source_dtype)
            got = torch.from_numpy(converter(source, target)(bits(held))).view(target_dtype)
            expected = held.to(target_dtype)
            assert torch.equal(got.isnan(), expected.isnan())
            assert torch.equal(bits_or_zero(got), bits_or_zero(expected)), (source, target)
    with pytest.raises(CheckpointError, match="I8 does not convert"):
        converter("I8", "BF16")


def bits_or_zero(tensor: torch.Tensor) -> torch.Tensor:
    return torch.where(tensor.isnan(), torch.zeros_like(tensor), tensor)


def test_block_scaled_fp8_is_what_torch_computes():
    weight = torch.randn(300, 200).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2) + 0.5
    expected = weight.float() * scales.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :200]
    raw = weight.view(torch.uint8).numpy()
    for box in (((0, 300), (0, 200)), ((100, 290), (0, 200))):
        part = tuple(slice(*bounds) for bounds in box)
        got = scale_blocks(to_float(raw[part], "F8_E4M3"), scales.numpy(), box)
        assert torch.equal(torch.from_numpy(got), expected[part])
    every = torch.arange(256, dtype=torch.uint8)
    torch.testing.assert_close(
        torch.from_numpy(to_float(every.numpy(), "F8_E4M3")),
        every.view(torch.float8_e4m3fn).float(),
        rtol=0,
        atol=0,
        equal_nan=True,
    )


def test_the_converter_loads_no_torch():
    code = """
import sys
sys.path.insert(0, "")
import tools.convert.recast, tools.convert.describe, tools.convert.checks
assert "torch" not in sys.modules and "safetensors" not in sys.modules
"""
    root = Path(__file__).resolve().parents[3]
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


class Backend(Enum):
    """Stands for the enumerations in a run's arguments, which a reader need not have."""

    FUSED = 1


@pytest.mark.parametrize("is_plain_state", [True, False])
def test_common_state_of_either_kind_goes_along(tmp_path, is_plain_state):
    state: dict[str, Any] = {"iteration": 7, "args": Namespace(num_layers=2)}
    if not is_plain_state:
        state["args"].backend = Backend.FUSED
    entry = io.BytesIO()
    torch.save([state], entry)
    chunks = [PlannedChunk("w", ((0, 4),), 0)]
    layout = lay_out_torch_dist({"w": ("F32", (4,))}, chunks, {COMMON_KEY: entry.getvalue()})
    write_dist(tmp_path / "dist", layout, lambda chunk, array: bytes(16))
    checkpoint = read_torch_dist(tmp_path / "dist")
    kept, iteration = kept_state(checkpoint)
    assert iteration == 7 and checkpoint.common()["args"].num_layers == 2
    if is_plain_state:
        assert torch.load(io.BytesIO(kept.common), weights_only=False) == state and kept.entry is None
    else:
        # What would need a class to be written again is kept byte for byte.
        assert kept.entry == entry.getvalue() and kept.common is None
