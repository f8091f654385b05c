"""What a spec cannot say to Megatron-Core is an error that names it; what it says arrives in the configuration."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megarl.errors import LayoutError, ModelError
from megarl.models.spec import RopeScaling
from megarl.parallel.grid import ParallelLayout
from megarl.platform.device import get_device
from megarl.train.megatron.initialize import random_weights
from megarl.train.megatron.layers import RMSNorm
from megarl.train.megatron.model import transformer_config
from megarl.weights.layout import megatron_regions
from tests.distributed.models import LLAMA3, QWEN2, QWEN3
from tests.distributed.parity import LATENT

CPU = get_device("cpu")


@pytest.mark.parametrize(
    ("option", "value"), [("low_freq_factor", 2.0), ("high_freq_factor", 8.0), ("original_max_position", 4096)]
)
def test_rope_scaling_that_megatron_fixes_is_refused(option: str, value: float) -> None:
    spec = replace(LLAMA3, rope_scaling=replace(RopeScaling(8.0), **{option: value}))
    with pytest.raises(ModelError, match=f"{option}={value}"):
        transformer_config(spec, ParallelLayout(), device=CPU, dtype=torch.float32)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(LayoutError, match="2 key-value heads do not divide by tp=4"):
        transformer_config(QWEN2, ParallelLayout(tp=4), device=CPU, dtype=torch.float32)


def test_a_latent_that_does_not_divide_is_refused() -> None:
    assert LATENT.mla is not None
    spec = replace(LATENT, mla=replace(LATENT.mla, kv_lora_rank=25))
    with pytest.raises(LayoutError, match="31 rows of the keys' and values' latent do not divide by tp=2"):
        transformer_config(spec, ParallelLayout(tp=2, sequence_parallel=True), device=CPU, dtype=torch.float32)


def test_queries_without_a_latent_are_refused_with_transformer_engine() -> None:
    assert LATENT.mla is not None
    spec = replace(LATENT, mla=replace(LATENT.mla, q_lora_rank=None))
    gpu = SimpleNamespace(layer_implementation="transformer_engine")
    with pytest.raises(ModelError, match="queries without a latent") as refused:
        transformer_config(spec, ParallelLayout(), device=gpu, dtype=torch.float32)  # type: ignore[arg-type]
    assert "cluster.device=cpu" in str(refused.value)
    assert transformer_config(spec, ParallelLayout(), device=CPU, dtype=torch.float32).q_lora_rank is None


def test_latent_attention_and_its_router_arrive_in_the_configuration() -> None:
    config = transformer_config(LATENT, ParallelLayout(), device=CPU, dtype=torch.float32)
    assert (config.q_lora_rank, config.kv_lora_rank, config.qk_head_dim) == (20, 26, 8)
    assert (config.qk_pos_emb_head_dim, config.v_head_dim, config.rotary_base) == (6, 10, LATENT.rope_theta)
    assert (config.rope_type, config.rotary_scaling_factor, config.original_max_position_embeddings) == ("yarn", 4, 16)
    assert (config.mscale, config.mscale_all_dim, config.qk_layernorm) == (0.7, 0.7, False)
    assert (config.moe_router_num_groups, config.moe_router_group_topk) == (4, 2)
    assert (config.moe_router_enable_expert_bias, config.moe_router_bias_update_rate) == (True, 0.0)


def test_the_spec_arrives_in_the_configuration() -> None:
    layout = ParallelLayout(tp=2, pp=2, sequence_parallel=True, first_stage_layers=1)
    config = transformer_config(QWEN3, layout, device=CPU, dtype=torch.bfloat16, recompute="full")
    assert (config.kv_channels, config.num_query_groups, config.qk_layernorm) == (16, 2, True)
    assert (config.add_qkv_bias, config.add_bias_linear) == (False, False)
    assert (config.bf16, config.params_dtype, config.pipeline_dtype) == (True, torch.bfloat16, torch.bfloat16)
    assert (config.num_layers_in_first_pipeline_stage, config.sequence_parallel) == (1, True)
    assert (config.recompute_granularity, config.recompute_num_layers) == ("full", 1)
    assert (config.hidden_dropout, config.attention_dropout) == (0.0, 0.0)


def test_rms_norm_is_the_formula_and_carries_the_flag() -> None:
    layout = ParallelLayout(tp=2, sequence_parallel=True)
    config = transformer_config(QWEN2, layout, device=CPU, dtype=torch.float32)
    norm = RMSNorm(config, 6, eps=1e-3)
    norm.weight.data.copy_(torch.arange(1.0, 7.0))
    hidden = torch.randn(3, 1, 6, generator=torch.Generator().manual_seed(0))
    expected = hidden / (hidden.square().mean(-1, keepdim=True) + 1e-3).sqrt() * torch.arange(1.0, 7.0)
    torch.testing.assert_close(norm(hidden), expected)
    assert norm.weight.sequence_parallel is True


def test_initial_weights_depend_on_name_and_seed_alone() -> None:
    draw, again, other = (random_weights(QWEN2, seed=seed) for seed in (1, 1, 2))
    regions = megatron_regions(QWEN2, ParallelLayout(), ParallelLayout().coordinate(0))
    matrix = next(region for region in regions if region.tensor.endswith("0.mlp.down_proj.weight"))
    assert torch.equal(draw(matrix), again(matrix))
    assert not torch.equal(draw(matrix), other(matrix))
    expected_std = QWEN2.init_std / (2 * QWEN2.num_layers) ** 0.5
    assert float(draw(matrix).std()) == pytest.approx(expected_std, rel=0.1)
    for region in regions:
        if region.tensor.endswith("norm.weight"):
            assert torch.all(draw(region) == 1)
        elif region.tensor.endswith(".bias"):
            assert torch.all(draw(region) == 0)
