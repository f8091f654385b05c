"""Hugging Face configurations: what is read, and that what cannot be represented is refused by name."""

import json
from pathlib import Path

import pytest

from megarl import models
from megarl.errors import ModelError
from megarl.models import RopeScaling, load_spec, spec_from_config
from megarl.models.registry import FAMILIES, REFUSED
from megarl.models.spec import LatentAttention, MixtureOfExperts, ModelSpec, YarnScaling
from megarl.models.tiny import tiny_config
from tests.unit.weights.awkward import AWKWARD

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

# The published configurations' keys, as transformers 4 wrote them.
QWEN25_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
LLAMA32_1B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": LLAMA3_ROPE,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
QWEN3_06B = {
    **{key: QWEN25_7B[key] for key in ("hidden_act", "initializer_range", "rms_norm_eps", "use_sliding_window")},
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}


def test_published_configurations_give_their_published_parameter_counts():
    """The counts are those of the models' safetensors files."""
    assert spec_from_config(QWEN25_7B).num_parameters() == 7_615_616_512
    assert spec_from_config(LLAMA32_1B).num_parameters() == 1_235_814_400
    assert spec_from_config(QWEN3_06B).num_parameters() == 596_049_920


def test_llama3_scaling_is_read_in_the_styles_of_transformers_4_and_5():
    old = spec_from_config(LLAMA32_1B)
    new = {key: value for key, value in LLAMA32_1B.items() if key not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {**LLAMA3_ROPE, "rope_theta": 500000.0}
    assert old.rope_scaling == RopeScaling(32.0)
    assert old.rope_theta == 500000.0
    assert spec_from_config(new) == old


def test_options_of_the_families_are_read():
    qwen2, qwen3, llama = map(spec_from_config, (QWEN25_7B, QWEN3_06B, LLAMA32_1B))
    assert (qwen2.qkv_bias, qwen2.qk_norm, qwen2.head_dim, qwen2.tied_embeddings) == (True, False, 128, False)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim, qwen3.tied_embeddings) == (False, True, 128, True)
    assert (llama.qkv_bias, llama.qk_norm, llama.head_dim) == (False, False, 64)
    assert llama.eos_token_ids == (128001, 128008, 128009)
    assert (qwen2.bos_token_id, qwen2.eos_token_ids) == (151643, (151645,))


def test_sizes_that_transformers_derives_are_derived():
    config = {key: value for key, value in LLAMA32_1B.items() if key not in ("head_dim", "num_key_value_heads")}
    spec = spec_from_config(config)
    assert (spec.head_dim, spec.num_kv_heads) == (64, 32)
    without = {key: value for key, value in QWEN3_06B.items() if key != "head_dim"}
    assert spec_from_config(without).head_dim == 128


@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        ("llama", {"attention_bias": True}, "attention_bias is True"),
        ("llama", {"mlp_bias": True}, "mlp_bias is True"),
        ("qwen3", {"attention_bias": True}, "attention_bias is True"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window is True"),
        ("mistral", {"sliding_window": 4096}, "sliding_window is 4096"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention'"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "rope_type is 'yarn'"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None}, "'linear'"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("llama", {"rope_parameters": {**LLAMA3_ROPE, "low_freq_factor": 2.0}}, "low_freq_factor is 2.0"),
        ("llama", {"rope_parameters": {**LLAMA3_ROPE, "high_freq_factor": 8.0}}, "high_freq_factor is 8.0"),
        (
            "llama",
            {"rope_parameters": {**LLAMA3_ROPE, "original_max_position_embeddings": 4096}},
            "original_max_position_embeddings is 4096",
        ),
        ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters is"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "twist": 3}}, "twist is 3"),
        ("llama", {"rope_theta": 5e5}, "rope_theta is 500000.0"),
        ("llama", {"logit_scale": 0.5}, "logit_scale is 0.5"),
        ("qwen2", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config is"),
        ("qwen2", {"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ("qwen2", {"num_key_value_heads": 3}, "3 key-value heads"),
        ("qwen2", {"hidden_size": "128"}, "hidden_size is '128'"),
        ("qwen2", {"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0"),
        ("qwen2", {"tie_word_embeddings": None}, "tie_word_embeddings is None"),
    ],
)
def test_an_option_that_cannot_be_represented_is_refused_by_name(family, change, named):
    config = {**tiny_config(family), **change}
    with pytest.raises(ModelError, match=r"cannot represent") as caught:
        spec_from_config(config)
    assert named in str(caught.value)


@pytest.mark.parametrize("key", ["num_key_value_heads", "vocab_size", "intermediate_size"])
def test_a_missing_size_is_an_error_where_transformers_would_guess(key):
    config = tiny_config("qwen2")
    del config[key]
    with pytest.raises(ModelError, match=f"{key} is missing"):
        spec_from_config(config)


def test_mistral_without_the_key_has_a_window_and_is_refused():
    config = tiny_config("mistral")
    del config["sliding_window"]
    with pytest.raises(ModelError, match="sliding_window is missing"):
        spec_from_config(config)


def test_all_problems_come_at_once():
    config = {**tiny_config("llama"), "hidden_act": "gelu", "mlp_bias": True, "vocab_size": 0}
    with pytest.raises(ModelError) as caught:
        spec_from_config(config)
    for key in ("hidden_act", "mlp_bias", "vocab_size"):
        assert key in str(caught.value)


def test_an_unknown_key_passes_only_when_empty():
    assert spec_from_config({**tiny_config(), "future_option": None, "other_option": False}) == spec_from_config(
        tiny_config()
    )


def test_an_unknown_family_is_named_with_the_known_ones():
    with pytest.raises(ModelError, match=r"'mamba'.*llama, mistral, mixtral, qwen2"):
        spec_from_config({"model_type": "mamba"})
    with pytest.raises(ModelError, match="names no model_type"):
        spec_from_config({})


def test_a_directory_without_or_with_a_broken_configuration_is_named(tmp_path):
    with pytest.raises(ModelError, match="No such file") as caught:
        load_spec(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)
    with pytest.raises(ModelError, match=r"there is no directory .*nowhere") as caught:
        load_spec(tmp_path / "nowhere")
    assert "hf download" in str(caught.value.fix)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="no JSON"):
        load_spec(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA32_1B))
    assert load_spec(tmp_path) == spec_from_config(LLAMA32_1B)


def test_flops_of_a_7b_model_are_twice_its_matrix_weights_plus_attention():
    spec = spec_from_config(QWEN25_7B)
    matrices = spec.num_parameters() - spec.vocab_size * spec.hidden_size - (2 * 3584 + 4608) * 28 - 3584
    assert spec.flops_per_token(2048) == 2 * matrices + 2 * 28 * 3584 * 2048


DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
MIXTRAL_8X7B = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
QWEN3_30B_A3B = {
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


@pytest.mark.parametrize(
    ("config", "billions", "active_billions"),
    [(DEEPSEEK_V3, 671.0, 37.6), (MIXTRAL_8X7B, 46.7, 12.9), (QWEN3_30B_A3B, 30.5, 3.3)],
)
def test_published_sizes_of_expert_models(config, billions, active_billions):
    """The model cards' totals, and active parameters: two operations each a token, without embedding look-ups."""
    spec = spec_from_config(config)
    assert spec.num_parameters() / 1e9 == pytest.approx(billions, abs=0.06)
    looked_up = spec.vocab_size * spec.hidden_size
    assert spec.flops_per_token(0) / 2e9 == pytest.approx(active_billions - looked_up / 1e9, rel=0.02)


def test_deepseek_v3_is_read_whole():
    spec = spec_from_config(DEEPSEEK_V3)
    assert spec.moe == MixtureOfExperts(
        num_experts=256,
        top_k=8,
        ffn_hidden_size=2048,
        dense_layers=(0, 1, 2),
        shared_ffn_hidden_size=2048,
        score="sigmoid",
        expert_bias=True,
        routed_scale=2.5,
        num_groups=8,
        top_groups=4,
    )
    assert spec.mla == LatentAttention(1536, 512, 128, 64, 128)
    assert spec.rope_scaling == YarnScaling(40.0, 4096, mscale_all_dim=1.0)
    assert spec.not_trained is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk_group": 8}, "chosen by other sums of scores"),  # one expert of a group, where DeepSeek-V3 takes two
        ({"num_experts_per_tok": 12}, "chosen by other sums of scores"),
        ({"norm_topk_prob": False}, "sigmoid scores are not divided"),
        ({"rope_scaling": {**DEEPSEEK_V3["rope_scaling"], "mscale": 0.7, "mscale_all_dim": 0}}, "no mscale_all_dim"),
    ],
)
def test_what_megatron_computes_otherwise_is_not_trained(changes, message):
    assert message in spec_from_config({**DEEPSEEK_V3, **changes}).not_trained


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (DEEPSEEK_V3, {"topk_method": "greedy"}, "topk_method is 'greedy'"),
        (DEEPSEEK_V3, {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        (DEEPSEEK_V3, {"num_key_value_heads": 8}, "a key for each of 128 heads"),
        (DEEPSEEK_V3, {"first_k_dense_replace": 62}, "first_k_dense_replace is 62, expected 0 to 61"),
        (DEEPSEEK_V3, {"num_experts_per_tok": 300}, "300 of 256 experts"),
        (DEEPSEEK_V3, {"kv_lora_rank": None}, "kv_lora_rank is None"),
        (MIXTRAL_8X7B, {"sliding_window": 4096}, "sliding_window is 4096"),
        (MIXTRAL_8X7B, {"num_local_experts": 0}, "num_local_experts is 0, expected an integer of at least 1"),
        (QWEN3_30B_A3B, {"num_local_experts": 64}, "num_experts and num_local_experts differ"),
        (QWEN3_30B_A3B, {"mlp_only_layers": [48]}, "expected layers from 0 to 47"),
        (QWEN3_30B_A3B, {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        (QWEN3_30B_A3B, {"n_shared_experts": 1}, "an option megarl does not know"),
    ],
)
def test_expert_options_that_cannot_be_represented_are_named(config, changes, message):
    with pytest.raises(ModelError, match=message):
        spec_from_config({**config, **changes})


def test_some_layers_of_a_sparse_model_are_dense():
    spec = spec_from_config({**QWEN3_30B_A3B, "decoder_sparse_step": 2, "mlp_only_layers": [5]})
    assert [layer for layer in range(8) if spec.has_experts(layer)] == [1, 3, 7]


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_a_family_that_cannot_be_held_is_refused_with_the_reason(family):
    with pytest.raises(ModelError, match=f"'{family}' is refused: it has (norm|experts)"):
        spec_from_config({"model_type": family})


def test_the_readme_says_which_families_are_held_trained_and_refused():
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in (Path(models.__file__).parent / "README.md").read_text().splitlines()
        if line.startswith("| `")
    ]
    told = {name.strip("` "): row[1:3] for row in rows for name in row[0].split(",")}

    def trained(spec: ModelSpec) -> str:
        return "refused" if spec.not_trained else "on CPU only" if spec.not_trained_on_gpu else "yes"

    expected = {family: ["yes", trained(spec)] for family, spec in AWKWARD.items()}
    assert told == expected | {family: ["refused", "refused"] for family in REFUSED}
    assert AWKWARD.keys() == FAMILIES.keys()
