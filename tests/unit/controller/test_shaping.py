"""From what a reward returned to token rewards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megarl.algorithms.advantages import build_estimator
from megarl.algorithms.correction import Correction
from megarl.algorithms.kl import KlController
from megarl.config.schema.algorithm import KlConfig, ShapingConfig
from megarl.controller import credit, shaping
from megarl.data.batch import Batch
from megarl.errors import DataError
from megarl.observability.metrics import values
from tests.unit.controller.batches import scored

COMPONENTS = [{"right": 1.0, "form": 0.5}, {"right": 0.0, "form": 1.0}, {"right": 1.0, "form": 0.0}, {}]


def estimator(kind: str, **options: Any):
    return build_estimator(
        kind, gamma=1.0, lam=1.0, norm_by_std=False, bootstrap_truncated=False, options=options or None
    )


def test_weights_replace_the_score_and_a_missing_component_counts_as_zero():
    batch = scored([5.0, 6.0, 7.0, 8.0], [0, 0, 1, 1], components=COMPONENTS)
    weighed, _ = shaping.weigh(batch, ShapingConfig(weights={"right": 2.0, "form": 1.0}))
    assert weighed.tensor("scores").tolist() == [2.5, 1.0, 2.0, 0.0]
    with_score, _ = shaping.weigh(batch, ShapingConfig(weights={"score": 1.0, "form": -1.0}))
    assert with_score.tensor("scores").tolist() == [4.5, 5.0, 7.0, 8.0]
    assert shaping.weigh(batch, ShapingConfig())[0].tensor("scores").tolist() == [5.0, 6.0, 7.0, 8.0]


def test_a_weight_without_a_component_names_those_there_are():
    batch = scored([5.0, 6.0], [0, 0], components=COMPONENTS[:2])
    with pytest.raises(DataError, match=r"'length'.*form, right, score"):
        shaping.weigh(batch, ShapingConfig(weights={"length": 1.0}))


def test_bounds_on_one_side_or_both():
    batch = scored([-2.0, 0.5, 3.0, 1.0], [0, 0, 1, 1])
    both, metrics = shaping.weigh(batch, ShapingConfig(clip_low=-1.0, clip_high=1.0))
    assert both.tensor("scores").tolist() == [-1.0, 0.5, 1.0, 1.0]
    assert values(metrics) == {"reward/clipfrac": 0.5}
    low, _ = shaping.weigh(batch, ShapingConfig(clip_low=0.0))
    assert low.tensor("scores").tolist() == [0.0, 0.5, 3.0, 1.0]


def test_the_greedy_response_gives_its_score_to_its_group_and_goes():
    batch = scored(
        [1.0, 2.0, 3.0, 4.0, 10.0, 20.0],
        [7, 7, 3, 3, 7, 3],
        is_greedy=[False] * 4 + [True] * 2,
        lengths=[1, 2, 3, 2, 1, 1],
    )
    sampled = shaping.take_greedy(batch)
    assert sampled.tensor("greedy_scores").tolist() == [10.0, 10.0, 20.0, 20.0]
    assert sampled.tensor("scores").tolist() == [1.0, 2.0, 3.0, 4.0]
    assert shaping.take_greedy(sampled) is sampled


def test_penalties_on_length_and_whitening():
    batch = scored([1.0, 1.0, 0.0, 0.0], [0, 0, 1, 1], lengths=[2, 10, 6, 8])
    shaped, metrics = shaping.shaped_scores(batch, ShapingConfig(overlong_share=0.4), max_tokens=10)
    assert shaped.tolist() == pytest.approx([1.0, 0.0, 0.0, -0.5])
    assert values(metrics)["reward/overlong_penalty"] == pytest.approx(-1.5 / 4)
    shaped, metrics = shaping.shaped_scores(batch, ShapingConfig(length_factor=0.2), max_tokens=10)
    # The shorter right one gains, the longer one loses; of wrong ones only the longer one loses.
    assert shaped.tolist() == pytest.approx([1.1, 0.9, 0.0, -0.1])
    assert values(metrics)["reward/length"] == pytest.approx(-0.1 / 4)
    shaped, _ = shaping.shaped_scores(batch, ShapingConfig(whiten=True), max_tokens=10)
    assert shaped.mean().item() == pytest.approx(0.0, abs=1e-6) and shaped.std().item() == pytest.approx(1.0, abs=1e-4)


def test_token_rewards_are_the_shaped_scores_on_the_last_token():
    batch = scored([1.0, 0.5], [0, 0], lengths=[2, 4])
    kl = KlController(0.0, adaptive=False, target=1.0, horizon=1.0)
    shaped, metrics = credit.token_rewards(
        batch, ShapingConfig(overlong_share=0.5, overlong_factor=0.3), KlConfig(), kl, max_tokens=4
    )
    assert credit.padded(shaped, "token_level_rewards").tolist() == [
        [0.0, 1.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, pytest.approx(0.2)],
    ]
    assert values(metrics)["critic/score/mean"] == 0.75


def credited(batch: Batch, kind: str, **options: Any) -> torch.Tensor:
    kl = KlController(0.0, adaptive=False, target=1.0, horizon=1.0)
    batch, _ = credit.token_rewards(batch, ShapingConfig(), KlConfig(), kl, max_tokens=8)
    batch, _ = credit.advantages(batch, estimator(kind, **options), Correction(), "kept")
    return credit.padded(batch, "advantages")


def test_remax_subtracts_the_greedy_score():
    batch = scored([1.0, 2.0, 5.0], [0, 0, 0], lengths=[1, 2, 1], is_greedy=[False, False, True])
    assert credited(shaping.take_greedy(batch), "remax").tolist() == [[-4.0, 0.0], [-3.0, -3.0]]


def test_gdpo_reads_components_and_the_score_only_where_it_is_named():
    batch = scored([9.0, 0.0, 1.0, 3.0], [0, 0, 1, 1], components=COMPONENTS)
    parts = credited(batch, "gdpo")
    # Components: (right + form) differ by 1 - 0.5 in the first group, by 1 in the second.
    assert parts[0, 0] > 0 > parts[1, 0] and parts[2, 0] > 0 > parts[3, 0]
    named = credited(batch, "gdpo", weights={"score": 1.0})
    assert named[2, 0] < 0 < named[3, 0]


def test_the_optimal_token_baseline_gets_sums_of_squares():
    batch = scored([1.0, 0.0], [0, 0])
    ones = batch.ragged("rollout_log_probs")
    batch = batch.add(old_log_probs=ones, sum_pi_squared=ones.with_values(torch.ones_like(ones.values)))
    result = credited(batch, "optimal_token_baseline")
    assert (result[0] > 0).all() and (result[1] < 0).all()
