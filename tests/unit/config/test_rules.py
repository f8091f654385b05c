"""Each rule with a configuration that breaks it and one that keeps it."""

from __future__ import annotations

import pytest

from megarl.config.load import load_sft, load_train
from megarl.config.rules import COMMON_RULES, SFT_RULES, TRAIN_RULES
from megarl.errors import ConfigError
from tests.unit.config.layout_rules import CRITIC, LAYOUT_CASES
from tests.unit.config.optimizer_rules import GPU, OPTIMIZER_CASES

TP = ["actor.layout.tp=2", "actor.layout.sequence_parallel=true"]
WEIGHTS = "algorithm.correction.weights=token"
REJECT = "algorithm.correction.reject=[{statistic: token_k3, upper: 1}]"
OTB = "algorithm.advantage.kind=optimal_token_baseline"
GDPO = "algorithm.advantage.kind=gdpo"
FILTER = "algorithm.filter.max_rounds=3"
CURRENT = "algorithm.old_log_probs=current"
NORM = "algorithm.policy_loss.aggregation=seq-mean-token-sum-norm"

# rule -> (first key of the message, overrides that break it, overrides that keep it)
TRAIN_CASES: dict[str, list[tuple[str, list[str], list[str]]]] = {
    "frozen_samples_leave_the_engine_busy": [
        (
            "sync.in_flight",
            ["sync.in_flight=continue", "sync.verify=values"],
            ["sync.in_flight=abort", "sync.verify=values"],
        )
    ],
    **LAYOUT_CASES,
    **OPTIMIZER_CASES,
    "adapters_are_on_layers_once": [
        (
            "actor.lora.targets",
            ["actor.lora.targets=[linear_qkv,linear_fc1,linear_qkv]"],
            ["actor.lora.targets=[linear_qkv,linear_fc1]"],
        )
    ],
    "adapters_train_by_element": [
        (
            "critic.optimizer.kind",
            [*CRITIC, "critic.lora={}", "critic.optimizer.kind=muon", "critic.optimizer.distributed=false"],
            [*CRITIC, "critic.lora={}", "critic.optimizer.kind=sgd", "critic.optimizer.distributed=false"],
        )
    ],
    "adapters_multiply_like_their_base": [
        (
            "actor.engine.fp8",
            [*GPU, "actor.lora={}", "actor.engine.fp8=hybrid"],
            [*GPU, "actor.lora={}", "actor.engine.fp8=null"],
        )
    ],
    "adapters_leave_biases": [
        (
            "actor.engine.moe_bias_update_rate",
            ["actor.lora={}", "actor.engine.moe_bias_update_rate=0.001"],
            ["actor.engine.moe_bias_update_rate=0.001"],
        )
    ],
    "microbatch_holds_longest_sequence": [
        (
            "actor.engine.microbatch_tokens",
            ["actor.engine.microbatch_tokens=2047"],
            ["actor.engine.microbatch_tokens=2048"],
        ),
        (
            "actor.engine.inference_microbatch_tokens",
            ["actor.engine.inference_microbatch_tokens=2047"],
            ["actor.engine.inference_microbatch_tokens=2048"],
        ),
        (
            "actor.engine.microbatch_tokens",
            [*GPU, "actor.engine.fp8=hybrid", "data.max_prompt_tokens=1025", "actor.engine.microbatch_tokens=2063"],
            [*GPU, "actor.engine.fp8=hybrid", "data.max_prompt_tokens=1025", "actor.engine.microbatch_tokens=2064"],
        ),
        (
            "actor.engine.microbatch_tokens",
            [*TP, "data.max_prompt_tokens=1025", "actor.engine.microbatch_tokens=2049"],
            [*TP, "data.max_prompt_tokens=1025", "actor.engine.microbatch_tokens=2050"],
        ),
    ],
    "fp8_multiplies_bfloat16": [
        ("actor.engine.fp8", ["actor.engine.fp8=e4m3"], [*GPU, "actor.engine.fp8=e4m3"]),
        (
            "critic.engine.fp8",
            [*GPU, *CRITIC, "critic.engine.fp8=e4m3", "critic.engine.dtype=float32"],
            [*GPU, *CRITIC, "critic.engine.fp8=e4m3"],
        ),
    ],
    "shared_prompts_need_our_attention": [
        (
            "actor.engine.share_prompts",
            [*GPU, "actor.engine.share_prompts=true"],
            [*GPU, "actor.engine.share_prompts=false"],
        ),
        (
            "critic.engine.share_prompts",
            [*CRITIC, "critic.engine.share_prompts=true", "critic.layout.cp=2"],
            [*CRITIC, "critic.engine.share_prompts=true"],
        ),
    ],
    "device_has_its_gpus": [
        ("cluster.gpus_per_node", ["cluster.gpus_per_node=1"], []),
        ("cluster.gpus_per_node", ["cluster.device=cuda"], GPU),
    ],
    "roles_fit_the_cluster": [
        ("cluster.num_nodes", [*GPU, "actor.layout.dp=9", "data.prompts_per_step=9"], [*GPU, "actor.layout.dp=8"]),
        ("cluster.num_nodes", [*GPU, "rollout.replicas=9"], [*GPU, "rollout.replicas=8"]),
        (
            "cluster.num_nodes",
            [*GPU, "cluster.placement=split", "actor.layout.tp=4", "rollout.replicas=5"],
            [*GPU, "cluster.placement=split", "actor.layout.tp=4", "rollout.replicas=4"],
        ),
        (
            "cluster.num_nodes",
            [*GPU, *CRITIC, "cluster.placement=split", "critic.layout.tp=4", "rollout.replicas=5"],
            [
                *GPU,
                *CRITIC,
                "cluster.placement=split",
                "critic.layout.tp=4",
                "rollout.replicas=5",
                "cluster.num_nodes=2",
            ],
        ),
    ],
    "held_out_is_held_out": [
        ("data.validation.0.seed", ["data.validation.0.seed=1"], ["data.validation.0.seed=3"]),
        (
            "data.validation.0.path",
            ["data.validation=[{path: prompts.jsonl, answer_column: a}]"],
            ["data.validation=[{path: other.jsonl, answer_column: a}]"],
        ),
    ],
    "algorithm_is_known": [
        ("algorithm.advantage.kind", ["algorithm.advantage.kind=gprpo"], ["algorithm.advantage.kind='mine:estimate'"]),
        ("algorithm.policy_loss.kind", ["algorithm.policy_loss.kind=pppo"], ["algorithm.policy_loss.kind=gpg"]),
        (
            "algorithm.policy_loss.options",
            ["algorithm.policy_loss.kind=sapo", "algorithm.policy_loss.options={tau: 1}"],
            ["algorithm.policy_loss.kind=sapo", "algorithm.policy_loss.options={tau_pos: 1}"],
        ),
        (
            "algorithm.policy_loss.options",
            ["algorithm.policy_loss.kind=dro"],
            ["algorithm.policy_loss.kind=dro", "algorithm.policy_loss.options={dro_beta: 0.1}"],
        ),
    ],
    "group_estimator_needs_group": [
        ("rollout.samples_per_prompt", ["rollout.samples_per_prompt=1"], ["rollout.samples_per_prompt=1", *CRITIC])
    ],
    "estimator_gets_its_inputs": [
        ("algorithm.old_log_probs", [OTB, CURRENT], [OTB]),
        ("algorithm.old_log_probs", [OTB, "algorithm.old_log_probs=bypass"], [CURRENT]),
    ],
    "gdpo_reads_components": [
        ("algorithm.kl.where", [GDPO, "algorithm.kl.where=reward"], [GDPO, "algorithm.kl.where=loss"]),
        (
            "algorithm.shaping.whiten",
            [GDPO, "algorithm.shaping.whiten=true"],
            [GDPO, "algorithm.shaping.weights={accuracy: 1}"],
        ),
        ("algorithm.shaping.length_factor", [GDPO, "algorithm.shaping.length_factor=0.1"], [GDPO]),
        (
            "algorithm.advantage.options",
            [GDPO, "algorithm.advantage.options={weights: {a: 1}}", "algorithm.shaping.weights={accuracy: 1}"],
            [GDPO, "algorithm.advantage.options={weights: {a: 1}}"],
        ),
    ],
    "shaping_is_possible": [
        (
            "algorithm.shaping.clip_low",
            ["algorithm.shaping.clip_low=1", "algorithm.shaping.clip_high=0"],
            ["algorithm.shaping.clip_low=0", "algorithm.shaping.clip_high=0.5"],
        ),
        (
            "algorithm.shaping.length_factor",
            ["algorithm.shaping.length_factor=0.1", "rollout.samples_per_prompt=1", *CRITIC],
            ["algorithm.shaping.length_factor=0.1", *CRITIC],
        ),
        (
            "algorithm.shaping.whiten",
            ["algorithm.shaping.whiten=true", "algorithm.advantage.kind=remax"],
            ["algorithm.shaping.whiten=true"],
        ),
    ],
    "filter_has_groups": [
        ("algorithm.filter", [FILTER, "rollout.samples_per_prompt=1", *CRITIC], [FILTER, *CRITIC]),
    ],
    "components_are_returned": [
        (
            "algorithm.shaping.weights",
            ["algorithm.shaping.weights={brevity: 1}"],
            ["algorithm.shaping.weights={accuracy: 1, extracted: 0.1}"],
        ),
        (
            "algorithm.filter.metric",
            ["algorithm.filter.metric=brevity"],
            ["algorithm.filter.metric=brevity", "reward.kind=function", "reward.path='a.py:score'"],
        ),
    ],
    "critic_matches_estimator": [
        ("critic", ["algorithm.advantage.kind=gae"], CRITIC),
        ("critic", ["+critic.warmup_steps=0"], ["+critic.warmup_steps=0", "algorithm.advantage.kind='mine:estimate'"]),
    ],
    "minibatch_divides_batch": [
        ("algorithm.minibatch_size", ["algorithm.minibatch_size=3"], ["algorithm.minibatch_size=4"]),
        ("critic.minibatch_size", [*CRITIC, "critic.minibatch_size=3"], [*CRITIC, "critic.minibatch_size=2"]),
    ],
    "minibatch_feeds_every_rank": [
        (
            "algorithm.minibatch_size",
            ["algorithm.minibatch_size=2", "actor.layout.dp=4"],
            ["algorithm.minibatch_size=4", "actor.layout.dp=4"],
        ),
        ("algorithm.minibatch_size", ["actor.layout.dp=9"], ["actor.layout.dp=8"]),
        (
            "critic.minibatch_size",
            [*CRITIC, "critic.minibatch_size=2", "critic.layout.dp=4"],
            [*CRITIC, "critic.minibatch_size=4", "critic.layout.dp=4"],
        ),
        (
            "algorithm.minibatch_size",
            [*CRITIC, "algorithm.minibatch_size=2", "critic.layout.dp=4"],
            [*CRITIC, "algorithm.minibatch_size=2", "critic.minibatch_size=8", "critic.layout.dp=4"],
        ),
    ],
    "kl_has_weight": [
        (
            "algorithm.kl.coef",
            ["algorithm.kl.where=loss", "algorithm.kl.coef=0"],
            ["algorithm.kl.where=loss", "algorithm.kl.coef=0.1"],
        )
    ],
    "adaptive_kl_is_in_reward": [
        (
            "algorithm.kl.adaptive",
            ["algorithm.kl.where=loss", "algorithm.kl.adaptive=true"],
            ["algorithm.kl.where=reward", "algorithm.kl.adaptive=true"],
        )
    ],
    "reward_kl_has_no_gradient": [
        (
            "algorithm.kl.estimator",
            ["algorithm.kl.where=reward", "algorithm.kl.estimator=k3+"],
            ["algorithm.kl.where=loss", "algorithm.kl.estimator=k3+"],
        )
    ],
    "ratios_need_full_softmax": [
        (
            "rollout.sampling.top_p",
            ["algorithm.old_log_probs=bypass", "rollout.sampling.top_p=0.9"],
            ["algorithm.old_log_probs=bypass"],
        ),
        ("rollout.sampling.top_p", [WEIGHTS, "rollout.sampling.top_p=0.9"], ["rollout.sampling.top_p=0.9"]),
        ("rollout.sampling.min_p", [REJECT, "rollout.sampling.min_p=0.1"], [REJECT]),
        (
            "rollout.sampling.top_k",
            ["algorithm.old_log_probs=bypass", "rollout.sampling.top_k=20"],
            ["rollout.sampling.top_k=20"],
        ),
        (
            "rollout.sampling.min_p",
            ["algorithm.old_log_probs=bypass", "rollout.sampling.min_p=0.1"],
            ["rollout.sampling.min_p=0.1"],
        ),
    ],
    "current_needs_one_update": [
        ("algorithm.old_log_probs", [CURRENT, "algorithm.epochs=2"], [CURRENT]),
        ("algorithm.old_log_probs", [CURRENT, "algorithm.minibatch_size=4"], ["algorithm.minibatch_size=4"]),
        ("algorithm.old_log_probs", [CURRENT, "algorithm.correction.weights=token"], [CURRENT]),
        (
            "algorithm.old_log_probs",
            [CURRENT, "algorithm.kl.where=reward"],
            [CURRENT, "algorithm.kl.where=loss"],
        ),
    ],
    "norm_needs_length": [
        ("algorithm.policy_loss.aggregation_length", [NORM], [NORM, "algorithm.policy_loss.aggregation_length=64"])
    ],
    "loss_fits_aggregation": [
        (
            "algorithm.policy_loss.aggregation",
            ["algorithm.policy_loss.kind=gspo"],
            ["algorithm.policy_loss.kind=gspo", "algorithm.policy_loss.aggregation=seq-mean-token-mean"],
        )
    ],
    "training_samples": [
        (
            "rollout.sampling.temperature",
            ["rollout.sampling.temperature=0"],
            ["rollout.sampling.temperature=0.5", "validation.temperature=0"],
        )
    ],
    "model_len_holds_longest_sequence": [
        ("rollout.max_model_len", ["rollout.max_model_len=2047"], ["rollout.max_model_len=2048"])
    ],
    "engine_fits_a_node": [
        (
            "rollout.tp",
            [*GPU, "cluster.num_nodes=2", "rollout.tp=3", "rollout.replicas=3"],
            [*GPU, "cluster.num_nodes=2", "rollout.tp=3", "rollout.replicas=2"],
        ),
        ("rollout.tp", [*GPU, "cluster.num_nodes=2", "rollout.tp=16"], [*GPU, "cluster.num_nodes=2", "rollout.tp=8"]),
    ],
    "validation_needs_data": [
        (
            "data.validation",
            ["data.validation=[]"],
            ["data.validation=[]", "validation.at_start=false", "validation.at_end=false"],
        )
    ],
    "reward_is_complete": [
        ("reward.path", ["reward.kind=function"], ["reward.kind=function", "reward.path='a.py:score'"]),
        ("reward.path", ["reward.kind=function", "reward.path=a.py"], ["reward.kind=function", "reward.path='a:b'"]),
        ("reward.pattern", ["reward.kind=regex"], ["reward.kind=regex", "reward.pattern='^a$'"]),
        ("reward.pattern", ["reward.pattern='(a'"], ["reward.pattern='(a)'"]),
    ],
    "reward_finds_its_answer": [
        (
            "reward.kind",
            ["reward.kind=reasoning_gym"],
            ["reward.kind=reasoning_gym", "data.train=[{kind: reasoning_gym, task: countdown}]"],
        ),
        ("data.train.1.answer_column", ["data.train.1.answer_column=null"], ["data.train.1.answer_column=solution"]),
    ],
    "critic_has_no_logits": [
        (
            "critic.engine.logits_chunk_tokens",
            [*CRITIC, "critic.engine.logits_chunk_tokens=64"],
            [*CRITIC, "actor.engine.logits_chunk_tokens=64"],
        ),
    ],
    "warmup_ends": [
        ("critic.warmup_steps", [*CRITIC, "critic.warmup_steps=4"], [*CRITIC, "critic.warmup_steps=3"]),
    ],
}

SFT_CASES: dict[str, list[tuple[str, list[str], list[str]]]] = {
    "sequences_feed_every_rank": [
        (
            "data.sequences_per_step",
            ["data.sequences_per_step=2", "actor.layout.dp=4"],
            ["data.sequences_per_step=4", "actor.layout.dp=4"],
        )
    ],
    "evaluation_needs_data": [
        (
            "data.validation",
            ["eval_every_steps=5"],
            ["eval_every_steps=5", "data.validation=[{kind: reasoning_gym, task: chain_sum, seed: 9}]"],
        )
    ],
    "nothing_shares_its_devices": [
        ("actor.engine.offload", [*GPU, "actor.engine.offload=true"], GPU),
        ("cluster.placement", ["cluster.placement=split"], ["cluster.placement=colocated"]),
    ],
    "microbatch_holds_longest_sequence": [
        ("actor.engine.microbatch_tokens", ["data.max_tokens=16385"], ["data.max_tokens=16384"])
    ],
    "held_out_is_held_out": [
        (
            "data.validation.0.seed",
            ["data.validation=[{kind: reasoning_gym, task: chain_sum}]"],
            ["data.validation=[{kind: reasoning_gym, task: chain_sum, options: {max_terms: 3}}]"],
        )
    ],
}


def flat(cases: dict[str, list[tuple[str, list[str], list[str]]]]) -> list[tuple[str, str, list[str], list[str]]]:
    return [(rule, *case) for rule, rows in cases.items() for case in rows]


def test_every_rule_has_a_case():
    assert {rule.__name__ for rule in (*TRAIN_RULES, *COMMON_RULES)} == set(TRAIN_CASES)
    assert {rule.__name__ for rule in SFT_RULES} <= set(SFT_CASES)


def test_every_rule_says_why():
    for rule in (*TRAIN_RULES, *COMMON_RULES, *SFT_RULES):
        assert rule.__doc__, rule.__name__


@pytest.mark.parametrize(("rule", "key", "breaks", "keeps"), flat(TRAIN_CASES))
def test_train_rule(train_yaml: str, rule: str, key: str, breaks: list[str], keeps: list[str]):
    with pytest.raises(ConfigError) as caught:
        load_train(train_yaml, breaks)
    mine = [line for line in caught.value.violations if line.endswith(f"[rule {rule}]")]
    assert mine and mine[0].startswith(f"{key}: expected ")
    load_train(train_yaml, keeps)


@pytest.mark.parametrize(("rule", "key", "breaks", "keeps"), flat(SFT_CASES))
def test_sft_rule(sft_yaml: str, rule: str, key: str, breaks: list[str], keeps: list[str]):
    with pytest.raises(ConfigError) as caught:
        load_sft(sft_yaml, breaks)
    assert [line for line in caught.value.violations if line.endswith(f"[rule {rule}]") and line.startswith(key)]
    load_sft(sft_yaml, keeps)


def test_a_breach_shows_values_and_origins_of_all_its_keys(train_yaml: str):
    with pytest.raises(ConfigError) as caught:
        load_train(train_yaml, ["algorithm.minibatch_size=3"])
    assert caught.value.violations == (
        "algorithm.minibatch_size: expected a divisor of the 8 responses of a step, found "
        "algorithm.minibatch_size=3 (command line: algorithm.minibatch_size=3), "
        f"data.prompts_per_step=4 ({train_yaml}:19), rollout.samples_per_prompt=2 ({train_yaml}:21) "
        "[rule minibatch_divides_batch]",
    )
