"""What the torch-free configuration says about algorithms is what the registry does."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from megarl.algorithms.advantages import ESTIMATORS, build_estimator
from megarl.algorithms.correction import STATISTICS, Correction, Rejection
from megarl.algorithms.kl import kl_penalty
from megarl.algorithms.policy_losses import POLICY_LOSSES, build_policy_loss
from megarl.algorithms.registry import keywords_of
from megarl.config.algorithm_rules import (
    ESTIMATOR_OPTIONS,
    ESTIMATOR_SETTINGS,
    FIXED_AGGREGATION,
    GROUP_ESTIMATORS,
    LOSS_OPTIONS,
    LOSS_SETTINGS,
    OTHER_ESTIMATORS,
    REQUIRED_OPTIONS,
    VALUE_ESTIMATORS,
)
from megarl.config.schema.algorithm import AlgorithmConfig, KlEstimator, RejectionStatistic
from megarl.config.schema.correction_presets import CORRECTION_PRESETS, CorrectionPreset


def test_estimators_need_what_the_rules_say() -> None:
    made = {
        k: build_estimator(k, gamma=1.0, lam=1.0, norm_by_std=True, bootstrap_truncated=False)
        for k in ESTIMATORS.names()
    }
    assert {k for k, e in made.items() if e.needs_groups} == GROUP_ESTIMATORS
    assert {k for k, e in made.items() if e.needs_values} == VALUE_ESTIMATORS
    assert set(made) == VALUE_ESTIMATORS | GROUP_ESTIMATORS | OTHER_ESTIMATORS


def test_estimators_and_losses_take_what_the_rules_say() -> None:
    taken = {name: set(keywords_of(ESTIMATORS.get(name).function)) for name in ESTIMATORS.names()}
    assert {name: keywords - set(ESTIMATOR_SETTINGS) for name, keywords in taken.items()} == ESTIMATOR_OPTIONS
    for setting, readers in ESTIMATOR_SETTINGS.items():
        assert {name for name, keywords in taken.items() if setting in keywords} == readers, setting
    fed = {"row_id", "seed", "reduce"}
    entries = {name: POLICY_LOSSES.get(name) for name in POLICY_LOSSES.names()}
    formulas = {name: keywords_of(entry.formula) for name, entry in entries.items()}
    passes = {name: keywords_of(entry.first_pass) if entry.first_pass else {} for name, entry in entries.items()}
    keywords = {name: {**passes[name], **formulas[name]} for name in entries}
    options = {name: set(found) - fed - set(LOSS_SETTINGS) for name, found in keywords.items()}
    assert options == LOSS_OPTIONS
    for setting, readers in LOSS_SETTINGS.items():
        assert {name for name, found in keywords.items() if setting in found} == readers, setting
    required = {name: tuple(key for key in options[name] if not keywords[name][key]) for name in entries}
    assert {name: keys for name, keys in required.items() if keys} == REQUIRED_OPTIONS
    fixed = {name: entry.aggregation for name, entry in entries.items()}
    assert {name: aggregation for name, aggregation in fixed.items() if aggregation} == FIXED_AGGREGATION


def test_names_agree() -> None:
    assert set(get_args(RejectionStatistic)) == set(STATISTICS)
    assert set(get_args(CorrectionPreset)) == set(CORRECTION_PRESETS)
    for estimator in get_args(KlEstimator):
        kl_penalty(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), estimator)


@pytest.mark.parametrize("name", CORRECTION_PRESETS)
def test_preset_binds_builds_and_survives_a_round_trip(name: str) -> None:
    config = AlgorithmConfig.model_validate({"correction": {"preset": name}})
    assert AlgorithmConfig.model_validate(config.model_dump()) == config
    assert config.old_log_probs == {"disabled": "decoupled"}.get(name, name.partition("_")[0])
    section = config.correction
    Correction(
        None if section.weights == "none" else section.weights, section.upper, section.lower, section.normalize,
        [Rejection(r.statistic, r.upper, r.lower) for r in section.reject],
    )  # fmt: skip
    loss = config.policy_loss
    build_policy_loss(
        loss.kind, clip_low=loss.clip_low, clip_high=loss.clip_high, dual_clip=loss.dual_clip, options=loss.options
    )


def test_numbers_beside_a_preset_override_it_and_contradictions_do_not() -> None:
    config = AlgorithmConfig.model_validate({"correction": {"preset": "decoupled_token_is", "upper": 5.0}})
    assert config.correction.upper == 5.0 and config.correction.weights == "token"
    with pytest.raises(ValueError, match=r"policy_loss\.kind=reinforce, found ppo"):
        AlgorithmConfig.model_validate({"correction": {"preset": "bypass_pg_is"}, "policy_loss": {"kind": "ppo"}})
    with pytest.raises(ValueError, match="weights must be none"):
        AlgorithmConfig.model_validate({"old_log_probs": "bypass", "correction": {"weights": "token"}})
