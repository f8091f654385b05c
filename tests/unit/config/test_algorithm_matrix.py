"""Every estimator x loss x aggregation x KL: it binds and can be built, or a named rule says why not."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any, get_args

import pytest

from megarl.config.algorithm_rules import FIXED_AGGREGATION, LOSS_OPTIONS, VALUE_ESTIMATORS
from megarl.config.rules import check_rules
from megarl.config.schema import TrainConfig
from megarl.config.schema.algorithm import KlEstimator, LossAggregation
from megarl.controller.roles import check_algorithm
from tests.unit.algorithms.test_config_agrees import ESTIMATORS

ESTIMATOR_NAMES = ESTIMATORS.names()
KL = [("none", "k3"), *product(("loss", "reward"), get_args(KlEstimator))]
MODES = ("decoupled", "bypass", "current")


def configuration(estimator: str, loss: str, aggregation: str, kl: tuple[str, str], mode: str) -> TrainConfig:
    """A run of one update a step, with a critic where the estimator reads values."""
    values: dict[str, Any] = {
        "cluster": {"device": "cpu", "gpus_per_node": 0},
        "model": {"path": "model"},
        "data": {"train": [{"kind": "reasoning_gym", "task": "chain_sum"}], "prompts_per_step": 4},
        "validation": {"at_start": False, "at_end": False},
        "rollout": {"samples_per_prompt": 2},
        "algorithm": {
            "advantage": {"kind": estimator},
            "policy_loss": {
                "kind": loss,
                "aggregation": aggregation,
                "aggregation_length": 8 if aggregation == "seq-mean-token-sum-norm" else None,
                "options": {"dro_beta": 0.1} if loss == "dro" else {},
            },
            "kl": {"where": kl[0], "estimator": kl[1]},
            "old_log_probs": mode,
        },
        "critic": {} if estimator in VALUE_ESTIMATORS else None,
    }
    return TrainConfig.model_validate(values)


def reasons(estimator: str, loss: str, aggregation: str, kl: tuple[str, str], mode: str) -> set[str]:
    """The rules that a combination must break, from what the algorithms are."""
    expected = set()
    if FIXED_AGGREGATION.get(loss, aggregation) != aggregation:
        expected.add("loss_fits_aggregation")
    if kl[0] == "reward":
        if kl[1].endswith("+"):
            expected.add("reward_kl_has_no_gradient")
        if mode == "current":
            expected.add("current_needs_one_update")
        if estimator == "gdpo":
            expected.add("gdpo_reads_components")
    if estimator == "optimal_token_baseline" and mode != "decoupled":
        expected.add("estimator_gets_its_inputs")
    return expected


@pytest.mark.parametrize("mode", MODES)
def test_every_combination_binds_or_says_why_not(mode: str):
    counts = Counter[str]()
    for estimator, loss, aggregation, kl in product(ESTIMATOR_NAMES, LOSS_OPTIONS, get_args(LossAggregation), KL):
        config = configuration(estimator, loss, aggregation, kl, mode)
        broken = list(check_rules(config))
        combination = (estimator, loss, aggregation, *kl, mode)
        assert {breach.rule for breach in broken} == reasons(estimator, loss, aggregation, kl, mode), combination
        assert all(breach.expected for breach in broken)
        if not broken and kl[1] == "k3":  # what remains differs in the KL's estimator alone
            check_algorithm(config)
        counts["refused" if broken else "bound"] += 1
    total = len(ESTIMATOR_NAMES) * len(LOSS_OPTIONS) * 5 * 17
    assert counts.total() == total == 12_155
    assert counts["bound"] > 0.4 * total
