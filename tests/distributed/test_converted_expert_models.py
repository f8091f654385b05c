"""Expert models that were converted load in real Megatron-Core, and what Megatron-Core saves of them converts back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.identity_op import IdentityOp

from megarl.models.spec import ModelSpec
from megarl.parallel.grid import ParallelLayout
from megarl.platform.device import get_device
from megarl.train.megatron.checkpoint_writer import RankFile
from megarl.weights.conversion.dist_target import dist_target
from megarl.weights.conversion.dist_view import is_indexed
from megarl.weights.conversion.session import Settings, convert
from megarl.weights.conversion.sources import open_source
from megarl.weights.conversion.targets import hf_target
from megarl.weights.files.safetensors_reader import SafetensorsReader
from megarl.weights.files.safetensors_writer import write_hf
from megarl.weights.layout import canonical_shapes, megatron_regions
from megarl.weights.pieces import assemble, fill, pieces
from tests.distributed.ranks import Rank, RankPool
from tests.distributed.test_expert_modules import NoAttention, config_of, stand_ins
from tests.unit.weights.awkward import AWKWARD

FAST = Settings(durable=False)
FAMILIES = [name for name, spec in AWKWARD.items() if spec.moe is not None]
QUICK = {("mixtral", "local"), ("deepseek_v3", "te")}
SAVED_AT = ParallelLayout(pp=2, dp=2, ep=2)
LOADED_AT = [ParallelLayout(), ParallelLayout(tp=2, ep=2), ParallelLayout(pp=2, first_stage_layers=1)]


def build(rank: Rank, layout: ParallelLayout, spec: ModelSpec, naming: str) -> GPTModel:
    """The real modules of this rank, without what computes."""
    if not torch.distributed.is_initialized():
        rank.join()
    get_device("cpu").prepare_megatron()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config = config_of(spec, layout, naming, grouped=False)
    if not is_indexed(spec):
        # A list makes Megatron-Core keep layers apart even where all are alike; its arguments give 1.
        config.moe_layer_freq = 1
    decoder = get_gpt_decoder_block_spec(config, use_transformer_engine=naming == "te", normalization="RMSNorm")
    for layer in decoder.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = NoAttention
        if spec.mla is not None and spec.mla.q_lora_rank is None:
            attention.q_layernorm = IdentityOp  # there is no latent of the query to be normalised
    coordinate = layout.coordinate(rank.rank)
    return GPTModel(
        config,
        decoder,
        layout.padded_vocab_size(spec.vocab_size),
        spec.max_position,
        pre_process=coordinate.pp == 0,
        post_process=coordinate.pp == layout.pp - 1,
        share_embeddings_and_output_weights=spec.tied_embeddings,
        position_embedding_type="rope",
    )


def tensors_of(model: GPTModel) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)}


def metadata() -> dict[str, Any]:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return {"dp_cp_group": group, "singleton_local_shards": False}


def load(rank: Rank, layout: ParallelLayout, spec: ModelSpec, naming: str, directory: Path) -> Any:
    with stand_ins():
        model = build(rank, layout, spec, naming)
        state = {"model": model.sharded_state_dict(metadata=metadata())}
        loaded = dist_checkpointing.load(state, str(directory), strict="raise_unexpected")
        model.load_state_dict(loaded["model"])
    regions = megatron_regions(spec, layout, layout.coordinate(rank.rank), naming=naming)  # type: ignore[arg-type]
    return [(region, piece.detach().clone()) for region, piece in pieces(regions, tensors_of(model))]


def save(
    rank: Rank, layout: ParallelLayout, spec: ModelSpec, naming: str, directory: Path, weights: dict[str, torch.Tensor]
) -> None:
    with stand_ins():
        model = build(rank, layout, spec, naming)
        regions = megatron_regions(spec, layout, layout.coordinate(rank.rank), naming=naming)  # type: ignore[arg-type]
        fill(regions, tensors_of(model), lambda region: weights[region.tensor][region.slices])
        if rank.rank == 0:
            directory.mkdir()
        torch.distributed.barrier()
        state = {"model": model.sharded_state_dict(metadata=metadata())}
        file = RankFile(None, lambda: None)
        dist_checkpointing.save(state, str(directory), sharded_strategy=file)
        file.write()
        everywhere = file.gather()
        if rank.rank == 0:
            file.write_index(everywhere)
        torch.distributed.barrier()


@pytest.mark.parametrize(
    ("family", "naming"),
    [
        pytest.param(family, naming, marks=() if (family, naming) in QUICK else pytest.mark.slow)
        for family in FAMILIES
        for naming in ("local", "te")
    ],
)
def test_expert_models_go_into_megatron_and_come_out_of_it(
    ranks: RankPool, tmp_path: Path, family: str, naming: Any
) -> None:
    spec = AWKWARD[family]
    generator = torch.Generator().manual_seed(4)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in canonical_shapes(spec).items()}
    table = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items()}
    write_hf(tmp_path / "model", weights.items(), table)
    source = open_source(tmp_path / "model", spec=spec)
    convert(
        source,
        tmp_path / "dist",
        lambda place: dist_target(place, spec, SAVED_AT, source.dtypes, value_head=False, naming=naming),
        {},
        FAST,
    )
    for layout in LOADED_AT:
        results = ranks(layout.world_size).run(load, layout, spec, naming, tmp_path / "dist")
        held = assemble(piece for found in results for piece in found)
        assert all(torch.equal(held[name], tensor) for name, tensor in weights.items()), layout

    ranks(SAVED_AT.world_size).run(save, SAVED_AT, spec, naming, tmp_path / "saved", weights)
    again = open_source(tmp_path / "saved", spec=spec)
    assert again.naming == naming or family == "glm4_moe"
    convert(again, tmp_path / "hf", lambda place: hf_target(place, spec, again.dtypes, value_head=False), {}, FAST)
    with SafetensorsReader(tmp_path / "hf") as reader:
        assert all(torch.equal(reader.read(name), tensor) for name, tensor in weights.items())
