"""Golden regions, by hand from megatron-core's attention.py and mlp.py, and what the layout refuses."""

from dataclasses import replace

import pytest

from megarl.errors import LayoutError
from megarl.models import FAMILIES, spec_from_config
from megarl.models.registry import family_named
from megarl.models.rules import Replicate, Rule, Tensor
from megarl.models.tiny import tiny_config
from megarl.parallel.grid import Coordinate, ParallelLayout
from megarl.weights.check import check_complete, check_names, detect_naming, match_rules
from megarl.weights.layout import canonical_shapes, megatron_regions, parameter_shapes
from megarl.weights.region import Region, local_box
from tests.unit.weights.awkward import AWKWARD

QWEN2 = spec_from_config(tiny_config("qwen2"))
UNTIED = spec_from_config(tiny_config("qwen2", tie_word_embeddings=False))


ONE, ORIGIN = ParallelLayout(), Coordinate()


def regions_of(parameter: str, spec=QWEN2, layout=ONE, at=ORIGIN, **options):
    return [r for r in megatron_regions(spec, layout, at, **options) if r.local_name == parameter]


def test_qkv_rows_are_interleaved_by_group():
    """Four heads and two groups of dimension 32: q0 q1 k0 v0 q2 q3 k1 v1."""
    found = {
        (r.tensor.split(".")[-2], r.box[0]): r.offset // 128
        for r in regions_of("decoder.layers.0.self_attention.linear_qkv.weight")
    }
    assert found == {
        ("q_proj", (0, 64)): 0,
        ("k_proj", (0, 32)): 64,
        ("v_proj", (0, 32)): 96,
        ("q_proj", (64, 128)): 128,
        ("k_proj", (32, 64)): 192,
        ("v_proj", (32, 64)): 224,
    }
    second = regions_of(
        "decoder.layers.0.self_attention.linear_qkv.bias", layout=ParallelLayout(tp=2), at=Coordinate(tp=1)
    )
    assert [(r.tensor.split(".")[-2], r.box, r.offset) for r in second] == [
        ("q_proj", ((64, 128),), 0),
        ("k_proj", ((32, 64),), 64),
        ("v_proj", ((32, 64),), 96),
    ]


def test_gate_and_up_are_stacked_per_rank():
    found = regions_of("decoder.layers.0.mlp.linear_fc1.weight", layout=ParallelLayout(tp=2), at=Coordinate(tp=1))
    assert [(r.tensor.split(".")[-2], r.box[0], r.offset // 128, r.local_shape) for r in found] == [
        ("gate_proj", (176, 352), 0, (352, 128)),
        ("up_proj", (176, 352), 176, (352, 128)),
    ]


def test_row_parallel_weights_are_cut_by_columns():
    (found,) = regions_of("decoder.layers.0.mlp.linear_fc2.weight", layout=ParallelLayout(tp=2), at=Coordinate(tp=1))
    assert (found.box, found.local_shape, found.strides) == (((0, 128), (176, 352)), (128, 176), (176, 1))


def test_vocabulary_shards_hold_padding_in_the_last_and_may_be_all_padding():
    """261 tokens on four ranks: padded to 512, so 128 a rank; the third holds five tokens, the last none."""
    spec = spec_from_config(tiny_config("llama", num_key_value_heads=4, num_attention_heads=4))
    shards = [
        regions_of("embedding.word_embeddings.weight", spec, ParallelLayout(tp=4), Coordinate(tp=t)) for t in range(4)
    ]
    assert [[r.box[0] for r in shard] for shard in shards] == [[(0, 128)], [(128, 256)], [(256, 261)], [(261, 261)]]
    assert {r.local_shape for shard in shards for r in shard} == {(128, 128)}
    layout = ParallelLayout(tp=4)
    ranks = {t: megatron_regions(spec, layout, Coordinate(tp=t)) for t in range(4)}
    coverage = check_complete(ranks, canonical_shapes(spec))
    name = "embedding.word_embeddings.weight"
    assert coverage.padding == {(2, name): 123 * 128, (3, name): 128 * 128}


def test_layers_are_numbered_by_stage_and_stages_may_be_uneven():
    layout = ParallelLayout(pp=2, first_stage_layers=1)
    first = {r.tensor for r in megatron_regions(UNTIED, layout, Coordinate(pp=0))}
    last = megatron_regions(UNTIED, layout, Coordinate(pp=1))
    assert {name.split(".")[2] for name in first if "layers" in name} == {"0"}
    assert {(r.tensor.split(".")[2], r.local_name.split(".")[2]) for r in last if "layers" in r.tensor} == {
        ("1", "0"),
        ("2", "1"),
        ("3", "2"),
    }


def test_a_tied_head_is_a_copy_on_the_last_of_several_stages_only():
    assert regions_of("output_layer.weight", layout=ParallelLayout(tp=2)) == []
    last = regions_of("output_layer.weight", layout=ParallelLayout(tp=2, pp=2), at=Coordinate(tp=1, pp=1))
    assert [(r.tensor, r.box[0], r.is_owner) for r in last] == [("model.embed_tokens.weight", (192, 261), False)]
    (head,) = regions_of("output_layer.weight", UNTIED)
    assert (head.tensor, head.is_owner) == ("lm_head.weight", True)


def test_a_value_model_has_a_head_of_one_row_and_no_vocabulary_head():
    for spec in (QWEN2, UNTIED):
        layout = ParallelLayout(tp=2, pp=2)
        (head,) = regions_of("output_layer.weight", spec, layout, Coordinate(tp=1, pp=1), value_head=True)
        assert (head.tensor, head.box, head.replica) == ("score.weight", ((0, 1), (0, 128)), 1)
        assert "lm_head.weight" not in canonical_shapes(spec, value_head=True)


def test_only_one_rank_owns_what_several_hold():
    layout = ParallelLayout(tp=2, pp=2, dp=2, cp=2)
    owners: dict[tuple, int] = {}
    for rank in range(layout.world_size):
        for region in megatron_regions(QWEN2, layout, layout.coordinate(rank)):
            key = (region.tensor, region.box)
            owners[key] = owners.get(key, 0) + region.is_owner
    assert set(owners.values()) == {1}


def test_transformer_engine_fuses_the_norms_into_the_linear_layers():
    names = parameter_shapes(megatron_regions(QWEN2, ParallelLayout(), Coordinate(), naming="te"))
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in names
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in names
    assert detect_naming(names) == "te"
    local = parameter_shapes(megatron_regions(QWEN2, ParallelLayout(), Coordinate()))
    assert detect_naming(local) == "local"
    assert len(local) == len(names)
    with pytest.raises(LayoutError, match="found neither"):
        detect_naming(["weight"])
    with pytest.raises(LayoutError, match="found both"):
        detect_naming([*local, *names])


def test_what_is_not_represented_is_refused():
    for layout in (ParallelLayout(tp=2, ep=2), ParallelLayout(tp=2, etp=2)):
        with pytest.raises(LayoutError, match="qwen2 has no experts"):
            megatron_regions(QWEN2, layout, Coordinate())
    with pytest.raises(LayoutError, match="2 key-value heads do not divide by tp=3"):
        megatron_regions(QWEN2, ParallelLayout(tp=3), Coordinate())
    with pytest.raises(LayoutError, match="6 experts do not divide by ep=4"):
        megatron_regions(AWKWARD["mixtral"], ParallelLayout(dp=4, ep=4), Coordinate())
    with pytest.raises(LayoutError, match="5 rows of an expert do not divide by etp=2"):
        megatron_regions(AWKWARD["mixtral"], ParallelLayout(tp=1, dp=2, etp=2), Coordinate())
    with pytest.raises(LayoutError, match="3"):
        megatron_regions(QWEN2, ParallelLayout(pp=3), Coordinate())


def test_a_models_parameters_are_compared_by_name_and_shape_all_at_once():
    regions = megatron_regions(QWEN2, ParallelLayout(), Coordinate())
    actual = parameter_shapes(regions)
    check_names(regions, {**actual, "decoder.layers.0.self_attention.linear_qkv._extra_state": ()})
    actual["decoder.final_layernorm.weight"] = (64,)
    actual["decoder.layers.0.mlp.router.weight"] = (4, 128)
    del actual["decoder.layers.3.mlp.linear_fc2.weight"]
    with pytest.raises(LayoutError) as caught:
        check_names(regions, actual)
    for part in ("no rule matches decoder.layers.0.mlp.router", "no parameter for decoder.layers.3", "(64,), expected"):
        assert part in str(caught.value)


def test_a_name_matched_by_no_rule_or_by_two_is_listed():
    names = list(canonical_shapes(UNTIED))
    with pytest.raises(LayoutError) as caught:
        match_rules(
            [
                *names,
                "model.layers.0.mlp.gate.weight",
                "model.layers.x.mlp.up_proj.weight",
                "model.layers.4.mlp.up_proj.weight",  # the model has layers 0 to 3
            ],
            UNTIED,
        )
    assert str(caught.value).count("matched by no rule") == 3
    twice = Rule("other", (Tensor("model.norm.weight", ("hidden",)),), Replicate(), "last")
    with pytest.raises(LayoutError, match=r"model\.norm\.weight is matched by two rules"):
        match_rules(names, UNTIED, rules=(*family_named("qwen2").rules, twice))
    matched = match_rules(names, UNTIED)
    assert matched["model.layers.3.mlp.up_proj.weight"].megatron.endswith("linear_fc1.weight")


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("value_head", [False, True])
def test_every_name_of_every_family_is_matched_by_one_rule(family, tied, value_head):
    spec = replace(AWKWARD[family], tied_embeddings=tied)
    names = canonical_shapes(spec, value_head=value_head)
    assert len(match_rules(names, spec, value_head=value_head)) == len(names)
    for naming in ("local", "te"):
        for grouped in (False, True):
            regions = megatron_regions(spec, ONE, ORIGIN, naming=naming, value_head=value_head, grouped_experts=grouped)
            held = parameter_shapes(regions)
            assert len(match_rules(held, spec, naming=naming, value_head=value_head)) == len(held)
            assert detect_naming(held) == naming


def test_a_region_is_a_box_inside_its_parameter():
    shape = (6, 10)
    inside = Region("t", (20, 30), ((4, 6), (5, 9)), "p", shape, 23, (10, 1))
    assert local_box(inside) == ((2, 4), (3, 7))
    transposed = Region("t", (20, 30), ((4, 8), (5, 7)), "p", shape, 23, (1, 10))
    assert local_box(transposed) == ((2, 4), (3, 7))
    beyond = Region("t", (20, 30), ((4, 6), (5, 13)), "p", shape, 23, (10, 1))
    assert local_box(beyond) is None
    interleaved = Region("t", (20, 30), ((4, 6), (5, 7)), "p", shape, 0, (10, 2))
    assert local_box(interleaved) is None


def test_gaps_overlaps_and_strangers_are_listed_with_their_rank():
    layout = ParallelLayout(tp=2)
    ranks = {t: megatron_regions(QWEN2, layout, Coordinate(tp=t)) for t in range(2)}
    shapes = canonical_shapes(QWEN2)
    broken = {0: ranks[0], 1: ranks[0]}
    with pytest.raises(LayoutError) as caught:
        check_complete(broken, shapes)
    assert "elements are held by no rank" in str(caught.value)
    assert "replicas [0, 0]" in str(caught.value)
    with pytest.raises(LayoutError, match="which the model has not"):
        check_complete(ranks, {name: shape for name, shape in shapes.items() if "q_proj" not in name})
    with pytest.raises(LayoutError, match="filled twice"):
        check_complete({0: [*ranks[0], ranks[0][0]], 1: ranks[1]}, shapes)
