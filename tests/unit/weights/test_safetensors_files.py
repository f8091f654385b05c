"""Checkpoint files: every way a directory can be incomplete, and writing that leaves all or nothing."""

import errno
import json
import os
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.errors import CheckpointError, ModelError
from megarl.models import spec_from_config
from megarl.models.tiny import tiny_config, write_tiny
from megarl.parallel.grid import Coordinate, ParallelLayout
from megarl.weights.files.safetensors_reader import SafetensorsReader, check_model, load_into
from megarl.weights.files.safetensors_writer import SafetensorsWriter, table_of, write_hf
from megarl.weights.layout import canonical_shapes, megatron_regions, parameter_shapes
from megarl.weights.pieces import assemble, pieces

SPEC = spec_from_config(tiny_config("qwen2", num_hidden_layers=2))
SHAPES = canonical_shapes(SPEC)


@pytest.fixture
def model():
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@pytest.fixture
def directory(tmp_path, model):
    """Three shards, an index, configuration and tokenizer."""
    write_tiny(tmp_path / "source", tiny_config("qwen2", num_hidden_layers=2))
    target = tmp_path / "model"
    write_hf(
        target,
        model.items(),
        table_of(SHAPES, torch.float32),
        copy_from=tmp_path / "source",
        max_shard_bytes=600_000,
    )
    assert len(list(target.glob("model-*-of-00003.safetensors"))) == 3
    return target


def shard_of(directory, name):
    return directory / json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"][name]


def rewrite(directory, name, tensor=None):
    """Replaces or removes one tensor of its shard; the index stays."""
    path = shard_of(directory, name)
    tensors = load_file(path)
    del tensors[name]
    if tensor is not None:
        tensors[name] = tensor
    save_file(tensors, path, metadata={"format": "pt"})


def test_what_was_written_is_read_by_slices(directory, model):
    with SafetensorsReader(directory) as reader:
        assert set(reader.tensors) == set(model)
        assert all(torch.equal(reader.read(name), tensor) for name, tensor in model.items())
        name = "model.layers.1.mlp.down_proj.weight"
        assert torch.equal(reader.read(name, ((3, 9), (20, 31))), model[name][3:9, 20:31])
        assert check_model(reader, SPEC) == {}
        with pytest.raises(ModelError, match=r"nothing\.weight is absent"):
            reader.read("nothing.weight")


def test_other_libraries_read_it(directory, model):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(directory).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.items())
    assert transformers.AutoTokenizer.from_pretrained(directory).decode([54, 55]) == "12"


def test_a_single_file_by_another_library_is_read(tmp_path, model):
    save_file(model, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with SafetensorsReader(tmp_path) as reader:
        assert all(torch.equal(reader.read(name), tensor) for name, tensor in model.items())


@pytest.mark.parametrize("layout", [ParallelLayout(tp=2, pp=2), ParallelLayout(tp=1, pp=2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_fill_their_parameters_from_it_and_hand_them_back(directory, model, layout, dtype):
    reader = SafetensorsReader(directory)
    held = []
    for rank in range(layout.world_size):
        regions = megatron_regions(SPEC, layout, layout.coordinate(rank))
        params = {name: torch.full(shape, 7, dtype=dtype) for name, shape in parameter_shapes(regions).items()}
        load_into(regions, reader, params)
        held += list(pieces(regions, params))
    again = assemble(held)
    assert all(torch.equal(again[name], tensor.to(dtype)) for name, tensor in model.items())


def test_a_truncated_file_is_named_with_the_tensor_it_cuts(directory):
    path = shard_of(directory, "model.norm.weight")
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    with pytest.raises(ModelError, match=r"tensor \S+ ends at byte \d+ of a file of \d+: the file is trunc") as caught:
        SafetensorsReader(directory)
    assert str(path) in str(caught.value)
    with path.open("r+b") as file:
        file.truncate(30)
    with pytest.raises(ModelError, match="header claims"):
        SafetensorsReader(directory)
    with path.open("r+b") as file:
        file.truncate(3)
    with pytest.raises(ModelError, match="too few for a header"):
        SafetensorsReader(directory)


def test_a_missing_shard_is_named(directory):
    path = shard_of(directory, "model.norm.weight")
    path.unlink()
    with pytest.raises(ModelError, match=f"missing weight files: {re.escape(path.name)}"):
        SafetensorsReader(directory)


def test_an_index_that_names_a_tensor_its_file_has_not_is_refused(directory):
    rewrite(directory, "model.norm.weight")
    with pytest.raises(ModelError, match=r"index names tensors their files have not: model\.norm\.weight"):
        SafetensorsReader(directory)


def test_a_broken_index_is_refused(directory):
    (directory / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    with pytest.raises(ModelError, match="index is broken"):
        SafetensorsReader(directory)


def test_a_directory_without_weights_says_what_it_found(tmp_path):
    with pytest.raises(ModelError, match="no safetensors weights"):
        SafetensorsReader(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"pytorch_model\.bin, which would execute code"):
        SafetensorsReader(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        SafetensorsReader(tmp_path)


def test_a_dtype_that_cannot_be_read_is_named(tmp_path):
    header = json.dumps({"w": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    with pytest.raises(ModelError, match="tensor w has dtype F4"):
        SafetensorsReader(tmp_path)


def test_disagreements_with_the_model_come_all_at_once(directory, model):
    rewrite(directory, "model.norm.weight", torch.zeros(64))
    rewrite(directory, "model.layers.0.mlp.up_proj.weight", torch.zeros(352, 128, dtype=torch.int32))
    path = shard_of(directory, "model.layers.1.self_attn.q_proj.weight")
    tensors = load_file(path)
    tensors["model.layers.7.self_attn.q_norm.weight"] = tensors.pop("model.layers.1.self_attn.q_proj.weight")
    save_file(tensors, path)
    index = directory / "model.safetensors.index.json"
    text = index.read_text().replace("model.layers.1.self_attn.q_proj.weight", "model.layers.7.self_attn.q_norm.weight")
    index.write_text(text)
    with pytest.raises(ModelError) as caught:
        check_model(SafetensorsReader(directory), SPEC)
    for part in (
        "model.norm.weight has shape [64], expected [128] (model-",
        "model.layers.0.mlp.up_proj.weight has dtype torch.int32",
        "model.layers.1.self_attn.q_proj.weight is absent",
        "model.layers.7.self_attn.q_norm.weight belongs to no weight of the model (model-",
    ):
        assert part in str(caught.value)


def test_only_what_is_declared_droppable_is_dropped(tmp_path, model):
    extra = {
        "lm_head.weight": model["model.embed_tokens.weight"].clone(),
        "score.weight": torch.zeros(1, 128),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(16),
    }
    save_file({**model, **extra}, tmp_path / "model.safetensors")
    reader = SafetensorsReader(tmp_path)
    dropped = check_model(reader, SPEC)
    assert set(dropped) == set(extra)
    assert dropped["lm_head.weight"] == "the configuration ties it to the embedding"
    as_critic = check_model(reader, SPEC, value_head=True)
    assert set(as_critic) == set(extra) - {"score.weight"}
    no_bias = spec_from_config(tiny_config("llama", num_hidden_layers=2))
    with pytest.raises(ModelError, match=r"q_proj\.bias belongs to no weight"):
        check_model(reader, no_bias)


def test_a_critic_may_start_without_a_head(directory):
    reader = SafetensorsReader(directory)
    with pytest.raises(ModelError, match=r"score\.weight is absent"):
        check_model(reader, SPEC, value_head=True)
    check_model(reader, SPEC, value_head=True, new_value_head=True)
    regions = megatron_regions(SPEC, ParallelLayout(), Coordinate(), value_head=True)
    params = {name: torch.full(shape, 7.0) for name, shape in parameter_shapes(regions).items()}
    load_into(regions, reader, params, fresh={"score.weight": torch.ones(1, 128)})
    assert torch.equal(params["output_layer.weight"], torch.ones(1, 128))


def test_pieces_from_several_writers_make_one_directory(tmp_path, model):
    layout = ParallelLayout(tp=2, pp=2)
    table = table_of(SHAPES, torch.float32)
    first = SafetensorsWriter(tmp_path / "out", table, max_shard_bytes=400_000)
    for rank in range(layout.world_size):
        writer = SafetensorsWriter(tmp_path / "out", table, max_shard_bytes=400_000, attach=True)
        for region in megatron_regions(SPEC, layout, layout.coordinate(rank)):
            if region.is_owner and region.numel:
                writer.write_box(region.tensor, region.box, model[region.tensor][region.slices])
        writer.close()
        assert not (tmp_path / "out").exists()
    first.commit(config={"model_type": "qwen2"})
    reader = SafetensorsReader(tmp_path / "out")
    assert all(torch.equal(reader.read(name), tensor) for name, tensor in model.items())
    assert os.listdir(tmp_path) == ["out"]


def test_a_write_converts_to_the_announced_dtype(tmp_path, model):
    write_hf(tmp_path / "out", model.items(), table_of(SHAPES, torch.bfloat16))
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(loaded[name], tensor.bfloat16()) for name, tensor in model.items())


def test_a_failed_write_leaves_nothing_and_keeps_what_was_there(tmp_path, model, directory):
    before = (directory / "config.json").read_text()

    def half():
        yield from list(model.items())[:5]
        raise RuntimeError("the producer died")

    table = table_of(SHAPES, torch.float32)
    with pytest.raises(RuntimeError, match="producer died"):
        write_hf(tmp_path / "out", half(), table)
    with pytest.raises(CheckpointError, match="not written once"):
        write_hf(tmp_path / "out", list(model.items())[1:], table)
    twice = [*model.items(), ("model.norm.weight", model["model.norm.weight"])]
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight \(256 of 128\)"):
        write_hf(directory, twice, table, overwrite=True)
    with pytest.raises(CheckpointError, match="not among those announced"):
        write_hf(tmp_path / "out", [("other", torch.zeros(1))], table)
    with pytest.raises(CheckpointError, match="is not the box"):
        write_hf(tmp_path / "out", [("model.norm.weight", torch.zeros(1))], table)
    assert sorted(os.listdir(tmp_path)) == ["model", "source"]
    assert (directory / "config.json").read_text() == before
    assert check_model(SafetensorsReader(directory), SPEC) == {}


def test_a_full_disk_is_found_before_anything_is_written(tmp_path, model, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CheckpointError, match=r"cannot reserve 0\.00 GB for the export: No space left"):
        write_hf(tmp_path / "out", model.items(), table_of(SHAPES, torch.float32))
    assert os.listdir(tmp_path) == []


def test_an_existing_directory_is_replaced_only_when_asked(directory, model):
    table = table_of(SHAPES, torch.float32)
    with pytest.raises(CheckpointError, match="exists"):
        write_hf(directory, model.items(), table)
    doubled = {name: 2 * tensor for name, tensor in model.items()}
    write_hf(directory, doubled.items(), table, copy_from=directory, overwrite=True)
    reader = SafetensorsReader(directory)
    assert torch.equal(reader.read("model.norm.weight"), doubled["model.norm.weight"])
    assert (directory / "tokenizer.json").exists()
    assert not list(directory.glob("model-*-of-00003.safetensors"))
