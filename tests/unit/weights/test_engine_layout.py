"""Golden regions as vLLM's linear, vocabulary and expert layers cut them, complete for every family."""

import pytest

from megarl.errors import LayoutError
from megarl.models import FAMILIES
from megarl.parallel.grid import ParallelLayout
from megarl.weights.check import check_complete, check_plan
from megarl.weights.engine_layout import engine_regions, engine_replicas
from megarl.weights.layout import canonical_shapes, megatron_regions, parameter_shapes
from megarl.weights.plan import plan
from tests.unit.weights.awkward import AWKWARD, awkward


def rows_of(parameter: str, *args: object, **options: object) -> list[tuple[str, tuple[int, int], int]]:
    """Tensor, rows (or columns where all rows are there) and first local row of a parameter's regions."""
    return [
        (r.tensor.removesuffix(".weight").split(".")[-1], r.box[0], r.offset // r.strides[0])
        for r in engine_regions(*args, **options)  # type: ignore[arg-type]
        if r.local_name == parameter
    ]


def test_queries_keys_and_values_are_stacked_and_heads_repeated():
    """Four query heads and two key-value heads of six rows over four ranks: vLLM's QKVParallelLinear."""
    name = "model.layers.0.self_attn.qkv_proj.weight"
    assert rows_of(name, AWKWARD["llama"], 2, 1) == [
        ("q_proj", (12, 24), 0),
        ("k_proj", (6, 12), 12),
        ("v_proj", (6, 12), 18),
    ]
    assert [rows_of(name, AWKWARD["llama"], 4, rank)[1] for rank in range(4)] == [
        ("k_proj", (0, 6), 6),
        ("k_proj", (0, 6), 6),
        ("k_proj", (6, 12), 6),
        ("k_proj", (6, 12), 6),
    ]


def test_gate_and_up_are_stacked():
    assert rows_of("model.layers.1.mlp.gate_up_proj.weight", AWKWARD["llama"], 2, 1) == [
        ("gate_proj", (6, 12), 0),
        ("up_proj", (6, 12), 6),
    ]


def test_the_vocabulary_is_padded_to_64_rows_and_then_cut():
    spec = awkward("llama", vocab_size=67)  # 128 rows in all
    (first,) = rows_of("model.embed_tokens.weight", spec, 4, 2)
    assert first == ("embed_tokens", (64, 67), 0)
    assert parameter_shapes(engine_regions(spec, 4, 3))["model.embed_tokens.weight"] == (32, 10)
    assert rows_of("model.embed_tokens.weight", spec, 4, 3) == [("embed_tokens", (67, 67), 0)]
    assert "lm_head.weight" not in parameter_shapes(engine_regions(awkward("llama", tied_embeddings=True), 1, 0))


def test_experts_are_two_parameters_cut_or_dealt_out():
    spec = AWKWARD["qwen3_moe"]  # six experts of 8 rows, hidden 10
    name = "model.layers.0.mlp.experts.routed_experts.w13_weight"
    cut = [r for r in engine_regions(spec, 2, 1) if r.local_name == name]
    assert cut[0].local_shape == (6, 8, 10) and len(cut) == 12
    assert (cut[3].tensor, cut[3].box, cut[3].offset) == (
        "model.layers.0.mlp.experts.1.up_proj.weight",
        ((4, 8), (0, 10)),
        80 + 40,
    )
    dealt = [r for r in engine_regions(spec, 2, 1, expert_parallel=True) if r.local_name == name]
    assert dealt[0].local_shape == (3, 16, 10)
    assert dealt[0].tensor == "model.layers.0.mlp.experts.3.gate_proj.weight"
    mixtral = parameter_shapes(engine_regions(AWKWARD["mixtral"], 1, 0))
    assert mixtral["model.layers.0.block_sparse_moe.experts.routed_experts.w2_weight"] == (6, 10, 5)


def test_the_latents_of_query_and_key_are_one_parameter():
    name = "model.layers.0.self_attn.fused_qkv_a_proj.weight"
    assert rows_of(name, AWKWARD["deepseek_v3"], 2, 1) == [
        ("q_a_proj", (0, 16), 0),
        ("kv_a_proj_with_mqa", (0, 18), 16),
    ]


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_an_engine_holds_every_element_and_a_plan_fills_it(family, tp, expert_parallel):
    spec = AWKWARD[family] if family != "mixtral" or tp == 1 or expert_parallel else None
    if spec is None:
        with pytest.raises(LayoutError, match="5 rows, columns or heads do not divide by an engine's tp=2"):
            engine_regions(AWKWARD[family], tp, 0)
        return
    ranks = {rank: engine_regions(spec, tp, rank, expert_parallel=expert_parallel) for rank in range(tp)}
    # Dealt-out experts and cut matrices alike: every element held, replicas numbered, nothing filled twice.
    assert check_complete(ranks, canonical_shapes(spec)).num_elements == spec.num_parameters()
    layout = ParallelLayout(tp=2, pp=2, dp=2, ep=2 if spec.moe else 1)
    sources = {rank: megatron_regions(spec, layout, layout.coordinate(rank)) for rank in range(layout.world_size)}
    made = plan(sources, engine_replicas(spec, replicas=2, tp=tp, expert_parallel=expert_parallel))
    proof = check_plan(made)
    assert proof.num_elements == 2 * sum(region.numel for regions in ranks.values() for region in regions)


def test_what_does_not_divide_is_refused():
    with pytest.raises(LayoutError, match="128 rows, columns or heads do not divide by an engine's tp=3"):
        engine_regions(AWKWARD["llama"], 3, 0)  # vLLM pads the vocabulary to 64 rows, not to 64 a rank
    with pytest.raises(LayoutError, match="3 key-value heads do not divide by tp=2"):
        engine_regions(awkward("llama", num_heads=6, num_kv_heads=3), 2, 0)
    with pytest.raises(LayoutError, match="6 experts do not divide by tp=4"):
        engine_regions(AWKWARD["qwen3_moe"], 4, 0, expert_parallel=True)
    with pytest.raises(LayoutError, match="rank 2 is outside tp=2"):
        engine_regions(AWKWARD["llama"], 2, 2)
