from __future__ import annotations

import pytest

from megarl.config.load import load_sft, load_train
from megarl.config.schema.train import LoraConfig, OptimizerConfig
from megarl.parallel.grid import ParallelLayout
from megarl.planning.finding import errors
from megarl.planning.forecast import check_memory, forecast
from megarl.planning.gpus import GPUS
from megarl.planning.known_models import known_spec
from megarl.planning.memory import engine_bytes
from megarl.planning.model_fit import check_specs
from megarl.planning.state import state_bytes
from megarl.planning.storage import checkpoint_bytes

H100 = GPUS["h100"]
GIB = 2**30


@pytest.mark.parametrize(
    ("preset", "model"),
    [
        ("grpo_7b", "Qwen2.5-7B"),
        ("ppo_7b", "Qwen2.5-7B"),
        ("grpo_70b", "Llama-3.3-70B"),
        ("ppo_70b", "Llama-3.3-70B"),
        ("sft_70b", "Llama-3.1-70B"),
        ("grpo_235b_moe", "Qwen3-235B-A22B"),
    ],
)
def test_presets_fit_the_gpus_they_are_made_for(preset: str, model: str):
    load = load_sft if preset.startswith("sft") else load_train
    config, spec = load(preset).config, known_spec(model)
    expected = forecast(config, spec, spec, H100)
    assert not list(check_memory(config, expected, gpu=H100, host_bytes=1000 * GIB))
    assert all(0.2 < sum(parts.values()) / H100.memory_bytes < 0.9 for parts in expected.phases.values())


def test_state_is_eighteen_bytes_a_parameter_and_less_with_replicas():
    """Adam in mixed precision: 2 weight, 4 gradient, 12 optimizer (arXiv:1910.02054, 3.1; gradients in float32)."""
    spec = known_spec("Llama-3.1-8B")
    one = state_bytes(spec, ParallelLayout(), "bfloat16")
    assert one.total / spec.num_parameters() == pytest.approx(18, rel=1e-3)
    eight = state_bytes(spec, ParallelLayout(dp=8), "bfloat16")
    assert eight.total / spec.num_parameters() == pytest.approx(6 + 12 / 8, rel=1e-3)
    assert state_bytes(spec, ParallelLayout(dp=8), "bfloat16", optimizer=OptimizerConfig(distributed=False)) == one


def test_roles_that_take_turns_are_not_on_the_device_together():
    config, spec = load_train("grpo_7b").config, known_spec("Qwen2.5-7B")
    turns = forecast(config, spec, spec, H100)
    assert "actor state" not in turns.phases["rollout"] and "kv cache" not in turns.phases["update_actor"]
    assert turns.host["actor offloaded"] > 0
    both = load_train("grpo_7b", ["actor.engine.offload=false"]).config
    stay = forecast(both, spec, spec, H100)
    assert "actor state" in stay.phases["rollout"] and "kv cache" in stay.phases["update_actor"]
    assert "actor offloaded" not in stay.host
    assert [finding.key for finding in errors(check_memory(both, stay, gpu=H100, host_bytes=None))]


def test_moments_and_the_copy_of_a_background_save_follow_the_optimizer():
    spec = known_spec("Llama-3.1-8B")
    plain, sgd = (
        state_bytes(spec, ParallelLayout(), "bfloat16", optimizer=OptimizerConfig(kind=kind, distributed=False))
        for kind in ("adam", "sgd")
    )
    assert (plain.total - sgd.total) / spec.num_parameters() == pytest.approx(4, rel=1e-3)
    config = load_train("grpo_7b", ["checkpoint.background=true", "checkpoint.every_steps=10"]).config
    expected = forecast(config, known_spec("Qwen2.5-7B"), spec, H100)
    # A node has all of the role: 14 bytes a parameter, weights and float32 state once, whatever the replicas.
    copied = expected.host["actor checkpoint"] / known_spec("Qwen2.5-7B").num_parameters()
    assert copied == pytest.approx(14, rel=0.02) if config.cluster.num_nodes == 1 else copied < 14


@pytest.mark.parametrize(
    ("options", "device", "host"),
    [
        (
            {"cpu_offload_fraction": 1.0},
            6,
            16,
        ),  # weights and gradients stay; there are float32 ones of both, and moments
        ({"cpu_offload_fraction": 1.0, "main_grads_dtype": "bfloat16"}, 4, 16),
        ({"cpu_offload_fraction": 0.5}, 6 + 12 / 2, 16 / 2),
        ({"cpu_offload_fraction": 0.5, "main_grads_dtype": "bfloat16"}, 4 + 12 / 2, 16 / 2),
        ({"precision_aware": True}, 6 + 2 + 8, 0),  # half of a float32 weight is the bfloat16 one
        ({"precision_aware": True, "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "float16"}, 6 + 2 + 4, 0),
        ({"precision_aware": True, "main_params_dtype": "float16", "main_grads_dtype": "bfloat16"}, 4 + 2 + 8, 0),
    ],
)
def test_state_on_the_host_or_in_less_than_float32_is_counted(options: dict, device: float, host: float):
    spec = known_spec("Llama-3.1-8B")
    state = state_bytes(spec, ParallelLayout(), "bfloat16", optimizer=OptimizerConfig(**options))
    assert state.total / spec.num_parameters() == pytest.approx(device, rel=1e-3)
    assert state.host / spec.num_parameters() == pytest.approx(host, rel=1e-3)


def test_state_on_the_host_is_the_nodes_and_saved_whole():
    flags = ["checkpoint.background=true", "checkpoint.every_steps=10"]
    plain, moved = (
        forecast(load_train("grpo_7b", [*flags, *more]).config, spec, spec, H100)
        for spec in [known_spec("Qwen2.5-7B")]
        for more in ([], ["actor.optimizer.cpu_offload_fraction=1"])
    )
    assert moved.ranks["actor"]["optimizer"] == 0 < moved.ranks["actor"]["optimizer_on_host"]
    assert sum(moved.phases["update_actor"].values()) < sum(plain.phases["update_actor"].values())
    assert moved.host["actor optimizer"] > 0 and "actor optimizer" not in plain.host
    assert moved.host["actor checkpoint"] == plain.host["actor checkpoint"]
    assert moved.host["actor offloaded"] < plain.host["actor offloaded"]


def test_adapters_leave_weights_their_own_state_and_no_reference():
    """rank (rows + columns) numbers a layer, with gradient and Adam's state; the base keeps two bytes a weight."""
    spec, lora = known_spec("Llama-3.1-8B"), LoraConfig(rank=16)
    hidden, ffn, qkv = spec.hidden_size, spec.ffn_hidden_size, spec.query_size + 2 * spec.kv_size
    sides = (qkv + hidden) + (hidden + spec.query_size) + (2 * ffn + hidden) + (hidden + ffn)
    numbers = spec.num_layers * lora.rank * sides
    state = state_bytes(spec, ParallelLayout(), "bfloat16", lora=lora)
    assert state.weights == pytest.approx(2 * (spec.num_parameters() + numbers), rel=1e-3)
    assert (state.gradients, state.optimizer) == (pytest.approx(4 * numbers), pytest.approx(12 * numbers))
    critic = state_bytes(spec, ParallelLayout(), "bfloat16", lora=lora, value_head=True)
    assert critic.gradients == pytest.approx(4 * (numbers + hidden), abs=4 * 128)
    config = load_train("grpo_7b", ["algorithm.kl.where=loss", "actor.lora.rank=16"]).config
    expected = forecast(config, known_spec("Qwen2.5-7B"), spec, H100)
    assert set(expected.ranks) == {"actor"}
    disk = checkpoint_bytes(config.actor.engine, config.actor.optimizer, spec, value_head=True, lora=lora)
    assert disk == (2 + 4 + 8) * (numbers + hidden)
    assert expected.phases["ref_log_probs"] == expected.phases["old_log_probs"]
    whole = forecast(load_train("grpo_7b", ["algorithm.kl.where=loss"]).config, known_spec("Qwen2.5-7B"), spec, H100)
    assert sum(expected.phases["update_actor"].values()) < 0.6 * sum(whole.phases["update_actor"].values())


def test_fp8_halves_what_goes_into_products_and_adds_copies_of_weights():
    spec = known_spec("Llama-3.1-8B")
    sections = ["actor.engine.recompute=none", "algorithm.kl.where=loss"]
    plain, fp8 = (
        forecast(load_train("grpo_7b", [*sections, f"actor.engine.fp8={value}"]).config, spec, spec, H100)
        for value in ("null", "hybrid")
    )
    config = load_train("grpo_7b", sections).config
    layout = config.actor.layout.grid()
    assert layout.pp == 1
    hidden, ffn, qkv = spec.hidden_size, spec.ffn_hidden_size, spec.query_size + 2 * spec.kv_size
    matrices = spec.num_layers * hidden * (qkv + spec.query_size + 3 * ffn) // layout.tp
    found, before = fp8.ranks["actor"], plain.ranks["actor"]
    assert (
        found["inference"] - before["inference"]
        == fp8.ranks["reference"]["inference"] - before["inference"]
        == matrices
    )
    assert all(found[part] == before[part] for part in ("weights", "gradients", "optimizer"))
    share = hidden // (layout.tp if layout.sequence_parallel else 1)
    saved = config.actor.engine.microbatch_tokens * spec.num_layers * (2 * share + (ffn - spec.query_size) // layout.tp)
    assert before["training"] - found["training"] == pytest.approx(saved - 2 * matrices, abs=4)


def test_a_microbatch_holds_no_more_than_the_rows_of_a_rank():
    spec, sections = known_spec("Qwen2.5-7B"), ["data.prompts_per_step=4", "rollout.samples_per_prompt=2"]
    sections += ["data.max_prompt_tokens=100", "rollout.sampling.max_tokens=100", "algorithm.minibatch_size=null"]
    sections += ["rollout.replicas=1", "actor.layout.dp=2", "rollout.tp=1", "cluster.gpus_per_node=8"]

    def training(*overrides: str) -> int:
        config = load_train("grpo_7b", [*sections, *overrides]).config
        return forecast(config, spec, spec, H100).ranks["actor"]["training"]

    assert training("actor.engine.microbatch_tokens=800") == training("actor.engine.microbatch_tokens=100000")
    assert training("actor.engine.microbatch_tokens=400") < training("actor.engine.microbatch_tokens=800")
    assert training("actor.engine.microbatch_tokens=100000", "algorithm.minibatch_size=4") == training(
        "actor.engine.microbatch_tokens=400"
    )


def test_split_roles_do_not_meet():
    keys = ["cluster.placement=split", "cluster.num_nodes=2", "actor.engine.offload=false"]
    config, spec = load_train("grpo_7b", keys).config, known_spec("Qwen2.5-7B")
    phases = forecast(config, spec, spec, H100).phases
    assert "actor state" not in phases["rollout"]
    assert not {"kv cache", "engine weights"} & phases["update_actor"].keys()


def test_key_value_heads_are_copied_where_ranks_are_more():
    spec = known_spec("Qwen2.5-7B")
    assert engine_bytes(spec, 4, "bfloat16")[1] == engine_bytes(spec, 4 * 7, "bfloat16")[1]
    assert engine_bytes(spec, 2, "bfloat16")[1] == 2 * engine_bytes(spec, 4, "bfloat16")[1]


def test_an_engines_ranks_cut_every_expert():
    spec = known_spec("Qwen3-235B-A22B")
    assert engine_bytes(spec, 8, "bfloat16")[0] == pytest.approx(2 * spec.num_parameters() / 8, rel=0.01)
    assert not list(check_specs(load_train("grpo_235b_moe").config, spec, spec))


def test_fine_tuning_evaluates_where_sequences_are_held_out():
    spec = known_spec("Qwen2.5-7B")
    config = load_sft("sft_tiny", ["data.validation=[]", "eval_every_steps=null"]).config
    assert list(forecast(config, spec, spec, None).phases) == ["update"]
    assert list(forecast(load_sft("sft_tiny").config, spec, spec, None).phases) == ["update", "evaluation"]


def test_an_evaluation_is_as_large_as_its_cap_however_few_sequences_a_step_has():
    spec = known_spec("Qwen2.5-7B")

    def evaluation(*keys: str) -> int:
        config = load_sft("sft_tiny", ["actor.engine.inference_microbatch_tokens=4096", *keys]).config
        return forecast(config, spec, spec, H100).phases["evaluation"]["actor pass"]

    few, many = "data.sequences_per_step=2", "data.sequences_per_step=4096"
    assert evaluation(few) == evaluation(many)
    assert evaluation(few) < evaluation(few, "actor.engine.inference_microbatch_tokens=16384")


@pytest.mark.parametrize(
    ("keys", "leaving"),
    [
        ([], ["actor", "critic"]),
        (["actor.engine.offload=false"], ["critic"]),
        (["critic.engine.offload=false"], ["actor"]),
        (["actor.engine.offload=false", "critic.engine.offload=false"], []),
        (["cluster.placement=split", "cluster.num_nodes=2"], []),
    ],
)
def test_the_forecast_and_the_controller_agree_on_who_leaves_the_device(keys: list[str], leaving: list[str]):
    from megarl.controller import roles
    from megarl.planning import forecast as planned

    config, spec = load_train("ppo_7b", keys).config, known_spec("Qwen2.5-7B")
    assert planned.leaving_roles(config) == roles.leaving_roles(config) == leaving
    assert roles.takes_turns(config) == bool(leaving)
    expected = forecast(config, spec, spec, H100)
    shares = config.cluster.placement == "colocated"
    for role in ("actor", "critic"):
        assert (f"{role} state" in expected.phases["rollout"]) == (shares and role not in leaving)
        assert (f"{role} offloaded" in expected.host) == (role in leaving)
    assert ("kv cache" in expected.phases["update_critic"]) == (shares and not leaving)
