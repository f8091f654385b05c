"""Every key that is set has an effect, or is refused."""

from __future__ import annotations

import pytest

from megarl.config.effect import RULE, SWITCHES
from megarl.config.load import load_train
from megarl.errors import ConfigError
from tests.unit.config.layout_rules import CRITIC
from tests.unit.config.optimizer_rules import GPU

LINEAR = "actor.optimizer.schedule.kind=linear"
SGD = "actor.optimizer.kind=sgd"
WEIGHTS = "algorithm.correction.weights=token"
REJECT = "algorithm.correction.reject=[{statistic: token_k3, upper: 1}]"
GPG = "algorithm.policy_loss.kind=gpg"
NORM = "algorithm.policy_loss.aggregation=seq-mean-token-sum-norm"


# key and value, and the override that gives it an effect
EFFECT_CASES = {
    "actor.optimizer.schedule.decay_steps": ("5", [LINEAR]),
    "actor.optimizer.schedule.min_lr": ("1e-8", [LINEAR, "actor.optimizer.schedule.decay_steps=5"]),
    "actor.optimizer.schedule.cooldown_steps": ("2", ["actor.optimizer.schedule.kind=wsd"]),
    "actor.optimizer.momentum": ("0.5", [SGD, "actor.optimizer.distributed=false"]),
    "actor.optimizer.beta1": ("0.8", None),
    "actor.optimizer.beta2": ("0.99", None),
    "actor.optimizer.eps": ("1e-6", None),
    "critic.optimizer.schedule.cooldown_steps": ("2", ["critic.optimizer.schedule.kind=wsd"]),
    "critic.optimizer.momentum": ("0.5", ["critic.optimizer.kind=sgd", "critic.optimizer.distributed=false"]),
    "critic.optimizer.beta1": ("0.8", None),
    "critic.optimizer.beta2": ("0.99", None),
    "critic.optimizer.eps": ("1e-6", None),
    "actor.engine.offload": ("true", GPU),
    **{
        f"{role}.optimizer.{name}": (value, on)
        for role in ("actor", "critic")
        for precise in [[*GPU, f"{role}.optimizer.precision_aware=true"]]
        for name, value, on in [
            ("overlap_cpu_offload", "true", [f"{role}.optimizer.cpu_offload_fraction=0.5"]),
            ("exp_avg_dtype", "bfloat16", precise),
            ("exp_avg_sq_dtype", "float16", precise),
            ("main_params_dtype", "float16", precise),
        ]
    },
    "actor.engine.fp8_recipe": ("tensorwise", [*GPU, "actor.engine.fp8=hybrid"]),
    "critic.engine.fp8_recipe": ("mxfp8", [*GPU, "critic.engine.fp8=e4m3"]),
    "critic.optimizer.schedule.decay_steps": ("5", ["critic.optimizer.schedule.kind=cosine"]),
    "critic.optimizer.schedule.min_lr": (
        "1e-8",
        ["critic.optimizer.schedule.kind=cosine", "critic.optimizer.schedule.decay_steps=5"],
    ),
    "critic.engine.offload": ("true", GPU),
    "algorithm.kl.coef": ("0.1", ["algorithm.kl.where=loss"]),
    "algorithm.kl.estimator": ("k1", ["algorithm.kl.where=reward"]),
    "algorithm.kl.target": ("3", ["algorithm.kl.where=reward", "algorithm.kl.adaptive=true"]),
    "algorithm.kl.horizon": ("3", ["algorithm.kl.where=reward", "algorithm.kl.adaptive=true"]),
    "algorithm.policy_loss.aggregation_length": ("8", [NORM]),
    "algorithm.shaping.overlong_factor": ("0.5", ["algorithm.shaping.overlong_share=0.2"]),
    "algorithm.correction.upper": ("3", [WEIGHTS]),
    "algorithm.correction.lower": ("0.5", [WEIGHTS]),
    "algorithm.correction.normalize": ("true", [WEIGHTS]),
    "algorithm.correction.group_stats": ("all", [REJECT]),
    "algorithm.advantage.gamma": ("0.9", CRITIC),
    "algorithm.advantage.lam": ("0.9", CRITIC),
    "algorithm.advantage.bootstrap_truncated": ("true", CRITIC),
    "algorithm.advantage.norm_by_std": ("true", None),
    "algorithm.policy_loss.clip_low": ("0.1", None),
    "algorithm.policy_loss.clip_high": ("0.1", None),
    "algorithm.policy_loss.dual_clip": ("4", None),
    "reward.path": ("'a:b'", ["reward.kind=function"]),
    "reward.pattern": ("'^a'", None),
    "checkpoint.keep_every_steps": ("20", ["checkpoint.every_steps=10"]),
    "checkpoint.export_hf_every": ("2", ["checkpoint.every_steps=10"]),
    "rollout.gpu_memory_utilization": ("0.5", GPU),
    "rollout.kv_cache_gib": ("2", None),
    "rollout.threads_per_rank": ("2", None),
}
OFF = {  # keys that have an effect in the test configuration, and what takes it away
    "algorithm.advantage.norm_by_std": CRITIC,
    "algorithm.policy_loss.clip_low": [GPG],
    "algorithm.policy_loss.clip_high": [GPG],
    "algorithm.policy_loss.dual_clip": [GPG],
    **{
        f"{role}.optimizer.{key}": [f"{role}.optimizer.kind=sgd", f"{role}.optimizer.distributed=false"]
        for role in ("actor", "critic")
        for key in ("beta1", "beta2", "eps")
    },
    "reward.pattern": ["reward.kind=function", "reward.path='a:b'"],
    "rollout.kv_cache_gib": GPU,
    "rollout.threads_per_rank": GPU,
}


@pytest.mark.parametrize("key", [switch.key for switch in SWITCHES])
def test_a_key_without_effect_is_refused(train_yaml: str, key: str):
    value, on = EFFECT_CASES[key]
    setup = CRITIC if key.startswith("critic.") else []
    with pytest.raises(ConfigError) as caught:
        load_train(train_yaml, [*setup, f"{key}={value}", *OFF.get(key, [])])
    assert [line for line in caught.value.violations if line.startswith(key) and line.endswith(f"[rule {RULE}]")]
    load_train(train_yaml, [*setup, f"{key}={value}", *(on or [])])


def test_nothing_makes_room_for_engines_elsewhere(train_yaml: str):
    split = [*GPU, "cluster.placement=split"]
    with pytest.raises(ConfigError, match=r"actor\.engine\.offload: expected placement colocated"):
        load_train(train_yaml, [*split, "actor.engine.offload=true"])
    load_train("grpo_7b", ["cluster.placement=split", "cluster.num_nodes=2"])  # the preset's key stands in nobody's way


def test_baselines_of_bypass_know_no_rejection(train_yaml: str):
    bypass = ["algorithm.old_log_probs=bypass", REJECT]
    load_train(train_yaml, bypass)
    with pytest.raises(ConfigError, match="key_has_effect"):
        load_train(train_yaml, [*bypass, "algorithm.correction.group_stats=all"])


def test_a_preset_does_not_stand_in_the_way_of_switching_off():
    loaded = load_train("grpo_7b", ["algorithm.kl.where=loss", "algorithm.kl.coef=0.01"])
    assert loaded.config.algorithm.kl.coef == 0.01
    load_train("ppo_7b", ["algorithm.kl.where=none"])  # the preset sets the estimator
    with pytest.raises(ConfigError, match="key_has_effect"):
        load_train("grpo_tiny", ["algorithm.kl.coef=0.1"])
    with pytest.raises(ConfigError, match="key_has_effect"):
        load_train("ppo_7b", ["algorithm.kl.where=none", "algorithm.kl.coef=0.1"])
