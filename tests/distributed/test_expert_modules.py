"""Names and shapes by arithmetic are those of the modules that the installed Megatron-Core builds, rank by rank.

Its own layers are built as they are. Transformer Engine is not installable on CPU: Megatron-Core's specification for it
is built with stand-ins for its classes, which cut as Megatron's own do and name parameters as Transformer Engine does,
so that the tree of modules is Megatron's and the names inside a class are ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import experts, router, shared_experts, token_dispatcher
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch.testing._internal.distributed.fake_pg import FakeStore

from megarl.models.spec import ModelSpec
from megarl.parallel.grid import ExpertCoordinate, ParallelLayout
from megarl.platform.cuda_on_cpu import torch_on_cpu
from megarl.platform.device import get_device
from megarl.train.megatron.layers import RMSNorm
from megarl.weights.check import check_names
from megarl.weights.layout import megatron_regions
from tests.distributed.ranks import Rank, RankError, RankPool
from tests.unit.weights.awkward import AWKWARD

try:
    from megatron.core.transformer import mla_qk_norm_config as mla_norms
except ImportError:  # megatron-core 0.16 takes the classes of the specification
    mla_norms = None  # type: ignore[assignment]

IS_NEW = hasattr(experts, "GroupedMLPSubmodules")
"""megatron-core 0.19 rather than 0.16."""


class NoAttention(torch.nn.Module):
    """In the place of the core attention, which has no weights: Megatron's own refuses latent attention."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


class NormAndLinear(ColumnParallelLinear):
    """Parameters of TELayerNormColumnParallelLinear."""

    def __init__(self, input_size: int, output_size: int, **options: Any) -> None:
        super().__init__(input_size, output_size, **options)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size))


class Duplicated(torch.nn.Module):
    """Parameters of TELinear with ``parallel_mode="duplicated"``."""

    def __init__(self, input_size: int, output_size: int, *, parallel_mode: str, **_: Any) -> None:
        super().__init__()
        assert parallel_mode == "duplicated"
        self.weight = torch.nn.Parameter(torch.zeros(output_size, input_size))


class Grouped(torch.nn.Module):
    """Parameters of a TEGroupedLinear: one weight a local expert."""

    cut: int

    def __init__(
        self, num_gemms: int, input_size: int, output_size: int, *, config: TransformerConfig, **_: Any
    ) -> None:
        super().__init__()
        shape = [output_size, input_size]
        shape[self.cut] //= parallel_state.get_expert_tensor_parallel_world_size()
        for index in range(num_gemms):
            self.register_parameter(f"weight{index}", torch.nn.Parameter(torch.zeros(*shape)))


class GroupedColumns(Grouped):
    cut = 0


class GroupedRows(Grouped):
    cut = 1


class StandIns:
    """Answers for TESpecProvider: the stand-in of each class."""

    def linear(self) -> type:
        return Duplicated

    def column_parallel_linear(self) -> type:
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return RowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return NormAndLinear

    def layer_norm(self, *_: Any, **__: Any) -> type:
        return RMSNorm

    def core_attention(self) -> type:
        return NoAttention

    def activation_func(self) -> None:
        return None

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool, *_: Any, **__: Any) -> Any:
        if moe_use_grouped_gemm:
            kind, linears = TEGroupedMLP, {"linear_fc1": GroupedColumns, "linear_fc2": GroupedRows}
            made = getattr(experts, "GroupedMLPSubmodules", MLPSubmodules)
        else:
            kind, linears = SequentialMLP, {"linear_fc1": ColumnParallelLinear, "linear_fc2": RowParallelLinear}
            made = MLPSubmodules
        # megatron-core 0.19 takes a maker of the module, 0.16 its class and parts.
        return partial(kind, submodules=made(**linears)) if IS_NEW else (kind, made(**linears))


def backend(implementation: str) -> Any:
    """What megatron-core 0.19 asks for the classes of latent attention."""
    return StandIns() if implementation == "transformer_engine" else LocalSpecProvider()


@contextmanager
def stand_ins() -> Iterator[None]:
    """Stand-ins in the places where Megatron-Core imports Transformer Engine's classes, and the CPU as the device."""
    places = [
        (gpt_layer_specs, "TESpecProvider", StandIns),
        (gpt_layer_specs, "TENorm", RMSNorm),
        (gpt_layer_specs, "LNImpl", RMSNorm),
        (multi_latent_attention, "TELinear", Duplicated),
        *([(mla_norms, "get_backend", lambda implementation: backend(implementation))] if mla_norms else []),
        *((module, "torch", torch_on_cpu()) for module in (router, shared_experts, token_dispatcher)),
    ]
    before = [getattr(module, name, None) for module, name, _ in places]
    for module, name, value in places:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(places, before, strict=True):
            setattr(module, name, value)


def config_of(spec: ModelSpec, layout: ParallelLayout, naming: str, grouped: bool) -> TransformerConfig:
    options: dict[str, Any] = {
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "ffn_hidden_size": spec.ffn_hidden_size,
        "num_attention_heads": spec.num_heads,
        "normalization": "RMSNorm",
        "qk_layernorm": spec.qk_norm or spec.mla is not None,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": spec.qkv_bias,
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "num_layers_in_first_pipeline_stage": layout.first_stage_layers,
        "num_layers_in_last_pipeline_stage": layout.last_stage_layers,
        "pipeline_model_parallel_layout": layout.pipeline,
        "pipeline_dtype": torch.float32,
    }
    if IS_NEW:
        options["transformer_impl"] = "transformer_engine" if naming == "te" else "local"
    if spec.moe is not None:
        moe = spec.moe
        options |= {
            "num_moe_experts": moe.num_experts,
            "moe_ffn_hidden_size": moe.ffn_hidden_size,
            "moe_router_topk": moe.top_k,
            "moe_layer_freq": [int(spec.has_experts(layer)) for layer in range(spec.num_layers)],
            "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size or None,
            "moe_shared_expert_gate": moe.shared_gate,
            "moe_router_score_function": moe.score,
            "moe_router_enable_expert_bias": moe.expert_bias,
            "moe_grouped_gemm": grouped,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "none",
        }
    if spec.mla is None:
        return TransformerConfig(**options, num_query_groups=spec.num_kv_heads, kv_channels=spec.head_dim)
    return MLATransformerConfig(
        **options,
        multi_latent_attention=True,
        q_lora_rank=spec.mla.q_lora_rank,
        kv_lora_rank=spec.mla.kv_lora_rank,
        qk_head_dim=spec.mla.nope_head_dim,
        qk_pos_emb_head_dim=spec.mla.rope_head_dim,
        v_head_dim=spec.mla.v_head_dim,
        rope_type="rope",
    )


def compare(
    _: Rank,
    layout: ParallelLayout,
    spec: ModelSpec,
    naming: str,
    grouped: bool,
    expected: ModelSpec | None = None,
) -> int:
    """Builds every rank's modules in turn, with torch's fake process group: nothing communicates while building.

    Raises LayoutError where names or shapes differ; returns how many parameters agree.
    """
    get_device("cpu").prepare_megatron()
    agreed = 0
    for rank in range(layout.world_size):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
        try:
            held = parameters_of(rank, layout, spec, naming, grouped)
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
        regions = megatron_regions(
            spec if expected is None else expected,
            layout,
            layout.coordinate(rank),
            naming=naming,  # type: ignore[arg-type]
            grouped_experts=grouped,
        )
        check_names(regions, held)
        agreed += len(held)
    return agreed


def parameters_of(
    rank: int, layout: ParallelLayout, spec: ModelSpec, naming: str, grouped: bool
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what Megatron-Core builds on one rank."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        create_gloo_process_groups=False,
    )
    coordinate = layout.coordinate(rank)
    found = ExpertCoordinate(
        etp=parallel_state.get_expert_tensor_parallel_rank(),
        ep=parallel_state.get_expert_model_parallel_rank(),
        dp=parallel_state.get_expert_data_parallel_rank(),
    )
    assert layout.expert_coordinate(coordinate) == found
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    held: dict[str, tuple[int, ...]] = {}
    with stand_ins():
        config = config_of(spec, layout, naming, grouped)
        for chunk in range(layout.vpp):
            stage = chunk if layout.vpp > 1 else None
            decoder = get_gpt_decoder_block_spec(
                config, use_transformer_engine=naming == "te", normalization="RMSNorm", vp_stage=stage
            )
            for layer in decoder.layer_specs:
                attention = layer.submodules.self_attention.submodules
                attention.core_attention = NoAttention
                if spec.mla is not None and spec.mla.q_lora_rank is None:
                    attention.q_layernorm = IdentityOp  # there is no latent of the query to be normalised
            model = GPTModel(
                config,
                decoder,
                layout.padded_vocab_size(spec.vocab_size),
                spec.max_position,
                pre_process=(coordinate.pp, chunk) == (0, 0),
                post_process=(coordinate.pp, chunk) == (layout.pp - 1, layout.vpp - 1),
                share_embeddings_and_output_weights=spec.tied_embeddings,
                position_embedding_type="rope",
                vp_stage=stage,
            )
            # Megatron-Core counts layers from one.
            layers = [layer.layer_number - 1 for layer in model.decoder.layers]
            assert layers == list(layout.layers_of_stage(spec.num_layers, coordinate.pp, chunk))
            prefix = f"model{chunk}." if layout.vpp > 1 else ""
            held |= {
                prefix + name: tuple(value.shape)
                for name, value in model.state_dict().items()
                if isinstance(value, torch.Tensor)
            }
    return held


LAYOUTS = {
    "one": ParallelLayout(),
    "tp2": ParallelLayout(tp=2, etp=2),
    "tp2-ep2": ParallelLayout(tp=2, ep=2),
    "pp2-ep2": ParallelLayout(pp=2, dp=2, ep=2),
    "vpp2": ParallelLayout(pp=2, vpp=2),
    "uneven": ParallelLayout(pp=3, first_stage_layers=1, last_stage_layers=1),
    "spelled": ParallelLayout(pp=2, vpp=2, pipeline="Et|tt||tL"),
    "ep2-etp2": ParallelLayout(tp=2, dp=2, ep=2, etp=2),
    "ep2-etp2-cp2": ParallelLayout(tp=2, cp=2, dp=2, ep=2, etp=2),
    "uneven-vpp2": ParallelLayout(pp=2, vpp=2, first_stage_layers=2),
}


@pytest.mark.parametrize("scheme", [("local", False), ("te", False), ("te", True)], ids=["local", "te", "te-grouped"])
@pytest.mark.parametrize("family", sorted(AWKWARD))
def test_every_family_on_one_rank_and_cut(ranks: RankPool, family: str, scheme: tuple[str, bool]) -> None:
    spec = AWKWARD[family]
    layouts = [ParallelLayout(), ParallelLayout(tp=2, ep=2 if spec.moe else 1)]
    for layout in layouts:
        if IS_NEW and spec.mla is not None and spec.mla.q_lora_rank is None:
            # 0.19 puts a norm on the query's projection that DeepSeek-V2-Lite has not, or refuses its own layers.
            with pytest.raises(RankError, match="linear_q_proj"):
                ranks(1).run(compare, layout, spec, *scheme)
        else:
            assert ranks(1).run(compare, layout, spec, *scheme)[0] > 0


def test_fewer_key_value_heads_than_ranks(ranks: RankPool) -> None:
    """Megatron-Core cuts the rows of a group; whether it then computes depends on the release."""
    for spec in (AWKWARD["qwen2"], replace(AWKWARD["qwen2"], num_kv_heads=1)):
        for scheme in ("local", "te"):
            assert ranks(1).run(compare, ParallelLayout(tp=4), spec, scheme, False)[0] > 0


def test_a_wrong_shape_is_noticed(ranks: RankPool) -> None:
    spec = AWKWARD["deepseek_v3"]
    assert spec.mla is not None
    wrong = replace(spec, mla=replace(spec.mla, v_head_dim=6))
    with pytest.raises(RankError, match=r"linear_proj.weight has shape .*, expected"):
        ranks(1).run(compare_specs, ParallelLayout(), spec, wrong)


def compare_specs(rank: Rank, layout: ParallelLayout, built: ModelSpec, expected: ModelSpec) -> int:
    """Modules of one model against the arithmetic of another."""
    return compare(rank, layout, built, "local", False, expected)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("scheme", [("local", False), ("te", True)], ids=["local", "te-grouped"])
def test_every_pipeline_and_expert_layout(ranks: RankPool, layout: ParallelLayout, scheme: tuple[str, bool]) -> None:
    for family in ("glm4_moe", "deepseek_v3"):
        assert ranks(1).run(compare, layout, AWKWARD[family], *scheme)[0] > 0
