"""Checkpoints that are damaged, incomplete, packed or of another model: what is wrong is said, of any file."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megarl.errors import CheckpointError, MegarlError, ModelError
from megarl.parallel.grid import ParallelLayout
from megarl.weights.conversion.dist_target import dist_target
from megarl.weights.conversion.session import Settings, convert
from megarl.weights.conversion.sources import open_source
from megarl.weights.conversion.targets import legacy_target
from tests.unit.weights.test_conversion_faults import make_model, to_dist, to_hf

FILES = {
    "hf": ["config.json", "model.safetensors.index.json", "model-00001*.safetensors"],
    "torch_dist": [".metadata", "common.pt", "metadata.json", "__0_0.distcp"],
    "legacy": ["latest_checkpointed_iteration.txt", "release/mp_rank_00/model_optim_rng.pt"],
}
# Headers lie at the beginning of a file, directories of archives at its end; between are numbers, any of which is one.
EDGE_BYTES = 6000


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("checkpoints")
    make_model(place)
    source = open_source(place / "hf")
    for kind, build in (("torch_dist", dist_target), ("legacy", legacy_target)):

        def make(directory: Path, build: Callable[..., object] = build) -> object:
            layout = ParallelLayout(tp=2)
            return build(directory, source.spec, layout, source.dtypes, value_head=False, naming="te")

        convert(source, place / kind, make, {}, Settings(durable=False))
    return place


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Some bytes changed, added or taken out near an end, or the rest cut off."""
    at = draw.randrange(min(len(data), EDGE_BYTES))
    at = draw.choice((at, len(data) - 1 - at))
    count = draw.choice((1, 4, 100))
    match draw.randrange(4):
        case 0:
            return data[:at] + draw.randbytes(count) + data[at + count :]
        case 1:
            return data[:at] + draw.randbytes(count) + data[at:]
        case 2:
            return data[:at] + data[at + count :]
        case _:
            return data[:at]


@pytest.mark.parametrize("count", [4, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", FILES)
def test_any_change_of_any_file_is_an_error_with_a_place_or_none(checkpoints, kind, count):
    refused = 0
    for pattern in FILES[kind]:
        (path,) = (checkpoints / kind).glob(pattern)
        whole = path.read_bytes()
        try:
            for seed in range(count):
                path.write_bytes(damaged(whole, random.Random(f"{pattern} {seed}")))
                try:
                    open_source(checkpoints / kind)
                except MegarlError as error:
                    refused += 1
                    assert error.where, (pattern, seed, str(error))
        finally:
            path.write_bytes(whole)
    assert refused > 0
    assert open_source(checkpoints / kind).format == kind


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def copy(tmp_path, model) -> Path:
    shutil.copytree(model, tmp_path / "copy")
    return tmp_path / "copy"


def test_a_source_truncated_under_way_is_an_error_not_a_signal(tmp_path, copy):
    source = open_source(copy)
    shard = sorted(copy.glob("*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="the file ends at byte"):
        to_dist(source, tmp_path / "dist", Settings(durable=False))
    with pytest.raises(ModelError, match="truncated"):
        open_source(copy)


def test_a_clone_without_its_large_files_is_said_to_be_one(copy):
    shard = sorted(copy.glob("*.safetensors"))[-1]
    shard.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1c6f\nsize 4976698672\n")
    with pytest.raises(ModelError, match=rf"pointer of git-lfs, not the weights \[.*{shard.name}\] Fix: git lfs pull"):
        open_source(copy)


def test_missing_shards_and_foreign_tensors_are_named(copy):
    index = json.loads((copy / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.layers.7.extra"] = sorted(set(index["weight_map"].values()))[0]
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"the index names tensors their files have not: model.layers.7.extra"):
        open_source(copy)
    sorted(copy.glob("*.safetensors"))[0].unlink()
    with pytest.raises(ModelError, match="missing weight files"):
        open_source(copy)


def test_a_model_of_another_size_is_refused_with_every_difference(tmp_path, copy, model):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "intermediate_size": 100, "num_hidden_layers": 4}))
    with pytest.raises(ModelError) as caught:
        open_source(copy)
    assert "expected [100, 64]" in str(caught.value) and "model.layers.3.mlp.up_proj.weight is absent" in str(
        caught.value
    )
    to_dist(open_source(model), tmp_path / "dist", Settings(durable=False))
    with pytest.raises(CheckpointError, match=r"linear_fc1.weight has shape \[3, 192, 64\], expected \[4, 200, 64\]"):
        open_source(tmp_path / "dist", config=copy)


def test_packed_dtypes_and_other_quantisations_are_refused(copy):
    config = json.loads((copy / "config.json").read_text())
    quantised = {**config, "quantization_config": {"quant_method": "awq", "bits": 4}}
    (copy / "config.json").write_text(json.dumps(quantised))
    with pytest.raises(ModelError, match="quantised by 'awq'"):
        open_source(copy)


def test_block_scaled_fp8_becomes_bfloat16(tmp_path):
    directory = make_model(tmp_path, hidden_size=192, intermediate_size=320, shard_bytes=10**9, head_dim=48)
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    expected, stored = {}, {}
    for name, tensor in tensors.items():
        if not name.endswith("proj.weight"):
            expected[name] = stored[name] = tensor
            continue
        rows, columns = (-(-size // 128) for size in tensor.shape)
        scales = torch.rand(rows, columns) + 0.5
        quantised = tensor.to(torch.float8_e4m3fn)
        stored[name], stored[f"{name}_scale_inv"] = quantised, scales
        wide = scales.repeat_interleave(128, 0)[: tensor.shape[0]].repeat_interleave(128, 1)[:, : tensor.shape[1]]
        expected[name] = (quantised.float() * wide).bfloat16()
    save_file(stored, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    options = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": options}))
    source = open_source(directory)
    to_dist(source, tmp_path / "dist", Settings(durable=False))
    to_hf(open_source(tmp_path / "dist"), tmp_path / "plain")
    written = {}
    for shard in (tmp_path / "plain").glob("*.safetensors"):
        written.update(load_file(shard))
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())


def test_a_missing_legacy_shard_is_named(tmp_path, model):
    source = open_source(model)
    convert(
        source,
        tmp_path / "legacy",
        lambda place: legacy_target(
            place, source.spec, ParallelLayout(tp=2, pp=3), source.dtypes, value_head=False, naming="te"
        ),
        {},
        Settings(durable=False),
    )
    assert open_source(tmp_path / "legacy").layout.pp == 3
    shutil.rmtree(tmp_path / "legacy/release/mp_rank_01_002")
    with pytest.raises(MegarlError, match="lacks shards: tp1 pp2 ep0"):
        open_source(tmp_path / "legacy")
    for stage in range(2):  # the last rank, of which only the arguments of the others tell
        shutil.rmtree(tmp_path / f"legacy/release/mp_rank_01_00{stage}")
    with pytest.raises(MegarlError, match="lacks shards: tp1 pp0 ep0, tp1 pp1 ep0, tp1 pp2 ep0"):
        open_source(tmp_path / "legacy")
    shutil.rmtree(tmp_path / "legacy/release/mp_rank_00_002")
    with pytest.raises(MegarlError, match="tp0 pp2 ep0"):
        open_source(tmp_path / "legacy")
    (tmp_path / "legacy/latest_checkpointed_iteration.txt").write_text("500")
    with pytest.raises(CheckpointError, match="names '500', but iter_0000500 is not there"):
        open_source(tmp_path / "legacy")
