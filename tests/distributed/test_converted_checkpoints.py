"""What the converter writes loads in real Megatron-Core at any layout, and what trainers save converts back."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import dist_checkpointing
from torch import Tensor

from megarl.models.registry import load_spec
from megarl.models.spec import ModelSpec
from megarl.models.tiny import tiny_config, write_tiny
from megarl.parallel.grid import ParallelLayout
from megarl.weights.conversion.dist_target import dist_target
from megarl.weights.conversion.session import Settings, convert
from megarl.weights.conversion.sources import open_source
from megarl.weights.conversion.targets import hf_target, legacy_target
from megarl.weights.files.legacy import read_legacy
from megarl.weights.files.safetensors_reader import SafetensorsReader
from megarl.weights.files.safetensors_writer import table_of, write_hf
from megarl.weights.layout import canonical_shapes, megatron_regions
from megarl.weights.pieces import assemble, pieces
from tests.distributed.engines import make_engine, owned_weights, policy_update, recorded_batch, replica
from tests.distributed.models import build
from tests.distributed.ranks import Rank, RankPool

ROOT = Path(__file__).parents[2]
FAST = Settings(workers=2, durable=False)
LAYOUTS = {
    "one": ParallelLayout(),
    "tp2": ParallelLayout(tp=2, dp=2),
    "tp2-pp2": ParallelLayout(tp=2, pp=2),
    "pp2-uneven": ParallelLayout(pp=2, first_stage_layers=1),
}
FAMILIES = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {},
    "qwen3": {"head_dim": 24},
}


def model_dir(directory: Path, family: str, **options: Any) -> tuple[Path, dict[str, Tensor]]:
    """A tiny model with random weights: hidden 64, ffn 96, 4 heads, 2 key-value heads, 4 layers, vocabulary 261."""
    settings = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 16}
    config = tiny_config(family, **(settings | FAMILIES[family] | options))
    write_tiny(directory, config)
    shapes = canonical_shapes(load_spec(directory))
    generator = torch.Generator().manual_seed(5)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    write_hf(directory / "weights", weights.items(), table_of(shapes, torch.float32), copy_from=directory)
    return directory / "weights", weights


def to_dist(source: Any, target: Path, layout: ParallelLayout) -> dict[str, Any]:
    return convert(
        source,
        target,
        lambda place: dist_target(
            place,
            source.spec,
            layout,
            source.dtypes,
            value_head=source.value_head,
            naming="local",
            slots=source.slots,
            kept=source.kept,
        ),
        {},
        FAST,
    )


def to_hf(source: Any, target: Path) -> dict[str, Any]:
    return convert(
        source,
        target,
        lambda place: hf_target(place, source.spec, source.dtypes, value_head=source.value_head),
        {},
        FAST,
    )


def load_in_megatron(rank: Rank, layout: ParallelLayout, directory: Path, spec: ModelSpec) -> Any:
    """What a real model holds after Megatron-Core has loaded the checkpoint; nothing in it is left over."""
    groups = rank.start(layout)
    chunk = build(spec, groups, seed=77)
    metadata = {"dp_cp_group": groups.dp_cp, "singleton_local_shards": False}
    state = {"model": chunk.sharded_state_dict(metadata=metadata)}
    loaded = dist_checkpointing.load(state, str(directory), strict="raise_unexpected")
    chunk.load_state_dict(loaded["model"])
    regions = megatron_regions(spec, layout, groups.coordinate)
    return [(region, piece.clone()) for region, piece in pieces(regions, dict(chunk.named_parameters()))]


@pytest.mark.parametrize("family", FAMILIES)
def test_megatron_loads_what_was_converted_at_any_layout(ranks: RankPool, tmp_path: Path, family: str) -> None:
    directory, weights = model_dir(tmp_path / "model", family)
    source = open_source(directory)
    to_dist(source, tmp_path / "dist", ParallelLayout(tp=2, pp=2))
    for layout in LAYOUTS.values():
        results = ranks(layout.world_size).run(load_in_megatron, layout, tmp_path / "dist", source.spec)
        held = assemble(piece for found in results for piece in found)
        assert held.keys() == weights.keys()
        for name, tensor in weights.items():
            assert torch.equal(held[name], tensor), (layout, name)


def train_and_save(rank: Rank, layout: ParallelLayout, directory: Path, spec: ModelSpec, options: Any) -> Any:
    groups = rank.start(layout)
    engine = make_engine(spec, groups, **options)
    batch, minibatches = replica(recorded_batch(spec.vocab_size), groups)
    update = policy_update()
    engine.update_policy(batch, update, minibatches)
    engine.save(directory, {"step": 1})
    return owned_weights(engine)


def load_and_update(rank: Rank, layout: ParallelLayout, directory: Path, spec: ModelSpec, options: Any) -> Any:
    groups = rank.start(layout)
    engine = make_engine(spec, groups, seed=99, **options)
    counters = engine.load(directory)
    loaded = owned_weights(engine)
    batch, minibatches = replica(recorded_batch(spec.vocab_size), groups)
    engine.update_policy(batch, policy_update(), minibatches)
    return counters, loaded, owned_weights(engine)


@pytest.mark.parametrize(
    ("family", "options"),
    [("qwen2", {}), ("llama", {"dtype": "bfloat16"}), ("llama", {"distributed": False})],
    ids=["tied", "untied-bf16", "plain-optimizer"],
)
def test_a_trained_state_moves_to_another_layout_with_its_optimizer(
    ranks: RankPool, tmp_path: Path, family: str, options: Any
) -> None:
    directory, _ = model_dir(tmp_path / "model", family)
    spec = load_spec(directory)
    saved = ranks(4).run(train_and_save, ParallelLayout(tp=2, pp=2), tmp_path / "saved", spec, options)
    trained = assemble(piece for found in saved for piece in found)

    exported = to_hf(open_source(tmp_path / "saved", config=directory), tmp_path / "hf")
    with SafetensorsReader(tmp_path / "hf") as reader:
        for name, tensor in trained.items():
            assert torch.equal(reader.read(name), tensor), name
    assert {entry["reason"] for entry in exported["dropped"]} >= {"padding", "optimizer state, not asked for"}

    command = ["tools/convert/reshard.py", tmp_path / "saved", tmp_path / "moved", "--config", directory]
    words = [sys.executable, *map(str, command), "--naming", "local", "--no-fsync", "--quiet"]
    assert subprocess.run(words, cwd=ROOT).returncode == 0
    layout = ParallelLayout(dp=2)
    (moved, *_), (direct, *_) = (
        ranks(2).run(load_and_update, layout, tmp_path / name, spec, options) for name in ("moved", "saved")
    )
    assert moved[0] == direct[0] == {"step": 1}
    for (region, mine), (_, theirs) in zip(moved[1] + moved[2], direct[1] + direct[2], strict=True):
        # Same layout, same state: the update after it is the same bit for bit.
        assert torch.equal(mine, theirs), region.tensor


def test_replicas_that_drifted_apart_are_found(tmp_path: Path) -> None:
    directory, _ = model_dir(tmp_path / "model", "qwen2")
    source = open_source(directory)
    convert(
        source,
        tmp_path / "legacy",
        lambda place: legacy_target(
            place, source.spec, ParallelLayout(tp=2), source.dtypes, value_head=False, naming="te"
        ),
        {},
        FAST,
    )
    shard = read_legacy(tmp_path / "legacy/release")[1, 0, 0]
    array = shard.arrays["decoder.final_layernorm.weight"]
    held = np.memmap(array.path, np.float32, "r+", array.begin, (3,))
    held[1] += 1
    held.flush()
    with pytest.raises(Exception, match=r"replicas of model.norm.weight differ"):
        to_hf(open_source(tmp_path / "legacy"), tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
    assert json.loads((tmp_path / "legacy/hf/config.json").read_text())["model_type"] == "qwen2"
    assert replace(open_source(tmp_path / "legacy").layout, vocab_rows_multiple=64) == ParallelLayout(tp=2)


def load_legacy(rank: Rank, layout: ParallelLayout, directory: Path, spec: ModelSpec) -> Any:
    """A real model of this rank takes its shard as it is, by name, with nothing missing or left over."""
    groups = rank.start(layout)
    chunk = build(spec, groups, seed=77)
    at = groups.coordinate
    name = f"mp_rank_{at.tp:02d}" + (f"_{at.pp:03d}" if layout.pp > 1 else "")
    content = torch.load(directory / "release" / name / "model_optim_rng.pt", weights_only=False)
    chunk.load_state_dict(content["model"], strict=True)
    return [
        (region, piece.clone())
        for region, piece in pieces(megatron_regions(spec, layout, at), dict(chunk.named_parameters()))
    ]


def save_legacy(rank: Rank, layout: ParallelLayout, directory: Path, spec: ModelSpec) -> Any:
    """As Megatron-LM's training saves a shard."""
    from argparse import Namespace

    groups = rank.start(layout)
    chunk = build(spec, groups, seed=6)
    at = groups.coordinate
    place = directory / "iter_0000007" / (f"mp_rank_{at.tp:02d}" + (f"_{at.pp:03d}" if layout.pp > 1 else ""))
    place.mkdir(parents=True)
    content = {
        "args": Namespace(num_layers=spec.num_layers, rotary_base=int(spec.rope_theta), some_type=Namespace),
        "checkpoint_version": 3.0,
        "iteration": 7,
        "model": chunk.state_dict_for_save_checkpoint(),
        "rng_state": [{"python": (3, (1, 2), None)}],
    }
    torch.save(content, place / "model_optim_rng.pt")
    (directory / "latest_checkpointed_iteration.txt").write_text("7")
    return [
        (region, piece.clone())
        for region, piece in pieces(megatron_regions(spec, layout, at), dict(chunk.named_parameters()))
    ]


@pytest.mark.parametrize("layout", [ParallelLayout(tp=2), ParallelLayout(tp=2, pp=2)], ids=["tp2", "tp2-pp2"])
def test_legacy_shards_go_into_real_models_and_come_out_of_them(
    ranks: RankPool, tmp_path: Path, layout: ParallelLayout
) -> None:
    directory, weights = model_dir(tmp_path / "model", "qwen2")
    source = open_source(directory)
    convert(
        source,
        tmp_path / "legacy",
        lambda place: legacy_target(place, source.spec, layout, source.dtypes, value_head=False, naming="local"),
        {},
        FAST,
    )
    results = ranks(layout.world_size).run(load_legacy, layout, tmp_path / "legacy", source.spec)
    held = assemble(piece for found in results for piece in found)
    assert all(torch.equal(held[name], tensor) for name, tensor in weights.items())

    saved = ranks(layout.world_size).run(save_legacy, layout, tmp_path / "saved", source.spec)
    trained = assemble(piece for found in saved for piece in found)
    again = open_source(tmp_path / "saved", config=directory)
    assert again.iteration == 7 and again.arguments["num_layers"] == source.spec.num_layers
    to_hf(again, tmp_path / "hf")
    with SafetensorsReader(tmp_path / "hf") as reader:
        assert all(torch.equal(reader.read(name), tensor) for name, tensor in trained.items())
