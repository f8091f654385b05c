from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.config.schema import SftConfig, TrainConfig
from megarl.errors import ModelError
from megarl.models.tiny import tiny_config
from megarl.planning.finding import errors
from megarl.planning.known_models import known_spec
from megarl.planning.model_fit import check_model, check_specs

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 120,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


def model(directory: Path, **changes: object) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**QWEN2, **changes}), encoding="utf-8")
    return str(directory)


def tiny_model(directory: Path, family: str) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(tiny_config(family)), encoding="utf-8")
    return str(directory)


def config(path: str, **sections: object) -> TrainConfig:
    data = {"train": [{"kind": "reasoning_gym", "task": "chain_sum"}]}
    return TrainConfig.model_validate({"model": {"path": path}, "data": data, **sections})


def test_a_model_that_fits_has_no_problems(tmp_path: Path):
    layout = {"tp": 4, "pp": 3}
    assert not errors(check_model(config(model(tmp_path), actor={"layout": layout}, rollout={"tp": 12})))


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"actor": {"layout": {"tp": 8}}}, ["12 attention heads, found 8", "4 key-value heads, found 8"]),
        ({"actor": {"layout": {"tp": 3}}}, ["4 key-value heads, found 3"]),
        ({"actor": {"layout": {"pp": 4}}}, ["actor.layout.pp: expected even stages of the model's 6 layers"]),
        ({"actor": {"layout": {"pp": 3, "num_layers_in_first_stage": 1}}}, ["actor.layout.pp"]),
        ({"critic": {"layout": {"tp": 6}}}, ["critic.layout.tp: expected a divisor of the model's 4 key-value heads"]),
        ({"rollout": {"tp": 6}}, ["rollout.tp: expected a divisor or a multiple of the model's 4 key-value heads"]),
        ({"rollout": {"tp": 5}}, ["12 attention heads, found 5", "4 key-value heads, found 5"]),
        ({"rollout": {"sampling": {"max_tokens": 1025}}}, ["expected at most 2048, the model's positions, found 2049"]),
    ],
)
def test_everything_that_does_not_fit_is_listed(tmp_path: Path, sections: dict[str, object], expected: list[str]):
    problems = errors(check_model(config(model(tmp_path), **sections)))
    assert len(problems) == len(expected)
    for problem, part in zip(problems, expected, strict=True):
        assert part in problem.line() and problem.fix


def test_uneven_stages_that_add_up_fit(tmp_path: Path):
    layout = {"pp": 3, "num_layers_in_first_stage": 1, "num_layers_in_last_stage": 3}
    assert not errors(check_model(config(model(tmp_path), actor={"layout": layout})))


def test_a_critic_must_read_the_policys_tokens(tmp_path: Path):
    critic = model(tmp_path / "critic", vocab_size=99)
    problems = errors(check_model(config(model(tmp_path / "policy"), critic={"path": critic})))
    assert [f"{problem.key}: {problem.problem}" for problem in problems] == [
        "critic.path: expected the policy's vocabulary of 100, since the critic reads the policy's tokens, found 99"
    ]


def test_much_padding_of_the_vocabulary_is_worth_a_remark(tmp_path: Path):
    (finding,) = check_model(config(model(tmp_path), actor={"layout": {"tp": 2}}))
    assert finding.level == "warning" and "padded to 128 rows" in finding.problem
    assert not check_model(config(model(tmp_path, vocab_size=128), actor={"layout": {"tp": 2}}))


def test_sft_sequences_fit_the_positions(tmp_path: Path):
    data = {"train": [{"kind": "reasoning_gym", "task": "chain_sum"}], "max_tokens": 4096}
    sft = SftConfig.model_validate({"model": {"path": model(tmp_path)}, "data": data})
    (finding,) = errors(check_model(sft))
    assert finding.key == "data.max_tokens"
    assert finding.problem == "expected at most 2048, the model's positions, found 4096"


def test_a_missing_model_is_an_error_of_its_own(tmp_path: Path):
    with pytest.raises(ModelError, match="there is no directory"):
        check_model(config(str(tmp_path / "nowhere")))


EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 4,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
    "use_sliding_window": False,
}


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({"ep": 4, "dp": 4}, ["actor.layout.ep: expected a divisor of the model's 6 experts of a layer, found 4"]),
        ({"etp": 3, "dp": 3}, ["actor.layout.etp: expected a divisor of the model's 40 rows of an expert, found 3"]),
        ({"tp": 2}, ["actor.layout.sequence_parallel: expected true for experts with tensor parallelism"]),
        # No layer is dense, so its 120 feed-forward rows are nowhere; but an engine cuts experts of 40 rows.
        ({"tp": 4, "sequence_parallel": True, "ep": 2, "etp": 2}, []),
    ],
)
def test_experts_divide_into_the_layout(tmp_path: Path, layout: dict[str, object], expected: list[str]):
    problems = errors(check_model(config(model(tmp_path, **EXPERTS), actor={"layout": layout})))
    text = [f"{problem.key}: {problem.problem}" for problem in problems]
    assert len(text) == len(expected) and all(e in t for e, t in zip(expected, text, strict=True)), text


def test_a_dense_model_has_no_experts_to_share_out(tmp_path: Path):
    problems = errors(check_model(config(model(tmp_path), actor={"layout": {"ep": 2, "dp": 2}})))
    assert [problem.key for problem in problems] == ["actor.layout.ep"]
    assert "no experts" in problems[0].problem and problems[0].fix == "set actor.layout.ep to 1"


def test_a_dense_model_has_no_load_to_balance(tmp_path: Path):
    engine = {"moe_aux_loss_coef": 0.01}
    problems = errors(check_model(config(model(tmp_path), actor={"engine": engine}, critic={"engine": engine})))
    assert [problem.key for problem in problems] == [
        "actor.engine.moe_aux_loss_coef",
        "critic.engine.moe_aux_loss_coef",
    ]
    assert not errors(check_model(config(model(tmp_path / "experts", **EXPERTS), actor={"engine": engine})))


def test_a_bias_that_no_expert_is_chosen_by_is_not_moved(tmp_path: Path):
    engine = {"moe_bias_update_rate": 0.01}
    (problem,) = errors(check_model(config(model(tmp_path, **EXPERTS), actor={"engine": engine})))
    assert problem.key == "actor.engine.moe_bias_update_rate" and "no bias that chooses experts" in problem.problem
    assert not errors(check_model(config(tiny_model(tmp_path / "glm", "glm4_moe"), actor={"engine": engine})))


def test_latent_attention_takes_no_adapters(tmp_path: Path):
    latent = tiny_model(tmp_path, "deepseek_v3")
    assert not errors(check_model(config(latent)))
    (problem,) = errors(check_model(config(latent, actor={"lora": {"targets": ["linear_proj"]}})))
    assert problem.key == "actor.lora" and problem.fix == "set actor.lora=null"


@pytest.mark.parametrize(("device", "family", "is_refused"), [
    ("cuda", "deepseek_v2", True), ("cpu", "deepseek_v2", False), ("cuda", "deepseek_v3", False),
])  # fmt: skip
def test_queries_without_a_latent_are_refused_on_gpu(tmp_path: Path, device: str, family: str, is_refused: bool):
    cluster = {"device": device} | ({"gpus_per_node": 0} if device == "cpu" else {})
    found = errors(check_model(config(tiny_model(tmp_path, family), cluster=cluster)))
    assert [finding.key for finding in found] == (["model.path"] if is_refused else [])
    assert all("without a latent" in one.problem and "cluster.device=cpu" in one.fix for one in found)


def test_a_router_that_megatron_has_not_is_refused(tmp_path: Path):
    problems = errors(check_model(config(model(tmp_path, **{**EXPERTS, "num_experts_per_tok": 1}))))
    assert any("only chosen expert" in problem.problem for problem in problems)


@pytest.mark.parametrize(("device", "is_refused"), [("cpu", True), ("cuda", False)])
def test_overlapped_reduction_is_refused_for_experts_on_cpu(tmp_path: Path, device: str, is_refused: bool):
    sections = {"actor": {"optimizer": {"overlap_grad_reduce": True}}, "cluster": {"device": device}}
    if device == "cpu":
        sections["cluster"]["gpus_per_node"] = 0
    found = check_model(config(model(tmp_path / "moe", **EXPERTS), **sections))
    keys = [finding.key for finding in errors(found)]
    assert ("actor.optimizer.overlap_grad_reduce" in keys) is is_refused
    assert errors(check_model(config(model(tmp_path / "dense"), **sections))) == []


def test_adapters_on_experts_and_in_stages_without_layers_are_listed(tmp_path: Path):
    lora = {"targets": ["linear_qkv", "linear_fc1"]}
    experts = known_spec("Qwen3-235B-A22B")
    (found,) = [
        finding
        for finding in errors(check_specs(config("m", actor={"lora": lora}), experts, experts))
        if finding.key == "actor.lora.targets"
    ]
    assert "whose experts take none, found linear_fc1" in found.problem
    assert found.fix == "actor.lora.targets=[linear_qkv,linear_proj]"
    layout = {"pp": 2, "vpp": 2, "pipeline": "Ettt|tt|t|L"}
    assert not errors(check_model(config(model(tmp_path), actor={"layout": layout})))
    (found,) = errors(check_model(config(model(tmp_path), actor={"layout": layout, "lora": {}})))
    assert found.key == "actor.layout.pipeline" and "to train its adapters" in found.problem


@pytest.mark.parametrize(("device", "is_refused"), [("cpu", True), ("cuda", False)])
@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"kv_lora_rank": 33}, "41 rows of the keys' and values' latent"),
        ({"q_lora_rank": 47}, "47 rows of the queries'"),
    ],
)
def test_ranks_on_cpu_share_out_the_latents(tmp_path: Path, device: str, is_refused: bool, changes, what: str):
    (tmp_path / "config.json").write_text(json.dumps({**tiny_config("deepseek_v3"), **changes}), encoding="utf-8")
    cluster = {"device": device} | ({"gpus_per_node": 0} if device == "cpu" else {})
    layout = {"tp": 2, "sequence_parallel": True}
    sections = {"actor": {"layout": layout}, "critic": {"layout": layout}, "cluster": cluster}
    found = errors(check_model(config(str(tmp_path), **sections)))
    assert [finding.key for finding in found] == ["actor.layout.tp", "critic.layout.tp"] * is_refused
    assert all(what in finding.problem and finding.fix.endswith("to 1") for finding in found)
