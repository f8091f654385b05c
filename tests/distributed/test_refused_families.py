"""What Megatron-Core lacks of the families that are refused: a release that has it shows here."""

from __future__ import annotations

from dataclasses import fields

import pytest

from megarl.models.registry import REFUSED
from tests.distributed.ranks import Rank, RankPool


def places(rank: Rank) -> dict[str, set[str]]:
    """Names of what a model and a layer can be told and can hold."""
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

    return {
        "config": {field.name for field in fields(TransformerConfig)},
        "layer": {field.name for field in fields(TransformerLayerSubmodules)},
    }


def test_megatron_has_no_place_for_what_the_refusals_name(ranks: RankPool) -> None:
    (found,) = ranks(1).run(places)
    norms = {name for name in found["layer"] if "norm" in name}
    assert norms == {"input_layernorm", "pre_cross_attn_layernorm", "pre_mlp_layernorm"}, REFUSED["glm4"]
    lacking = ("softcap", "soft_cap", "capping", "embedding_multiplier", "embedding_scale", "local_base", "base_local")
    assert [name for name in found["config"] for word in lacking if word in name] == [], REFUSED["gemma2"]


@pytest.mark.parametrize("option", ["softmax_type", "window_attn_skip_freq", "activation_func_clamp_value"])
def test_megatron_has_what_gpt_oss_needs(ranks: RankPool, option: str) -> None:
    """Its refusal names megarl's planner, not Megatron-Core."""
    assert option in ranks(1).run(places)[0]["config"]
