from __future__ import annotations

import pytest
import torch

from megarl.algorithms.shaping import (
    GroupFilter,
    clip_scores,
    combine_rewards,
    groups_with_signal,
    length_penalty,
    overlong_penalty,
    whiten_scores,
)
from megarl.errors import ConfigError


def test_overlong_penalty_is_soft_within_the_buffer() -> None:
    # DAPO, arXiv:2503.14476, eq. 13, with L_max 100 and L_cache 20.
    lengths = torch.tensor([0, 80, 85, 100, 130])
    assert overlong_penalty(lengths, max_length=100, buffer=20).tolist() == [0, 0, -0.25, -1, -1]
    assert overlong_penalty(lengths, max_length=100, buffer=20, factor=2.0)[2] == -0.5
    with pytest.raises(ConfigError):
        overlong_penalty(lengths, max_length=10, buffer=20)


def test_length_penalty_ranks_within_the_group() -> None:
    # Kimi k1.5, arXiv:2501.12599, section 2.3.3.
    lengths = torch.tensor([10, 20, 30, 5, 5])
    correct = torch.tensor([True, False, False, True, False])
    reward = length_penalty(lengths, correct, torch.tensor([3, 3, 3, -1, -1]), factor=1.0)
    assert reward.tolist() == [0.5, 0.0, -0.5, 0.0, 0.0]


def test_components_are_weighted_and_measured() -> None:
    components = {
        "format": torch.tensor([1.0, 0.0]),
        "answer": torch.tensor([0.0, 1.0]),
        "length": torch.tensor([4.0, 6.0]),
    }
    total, metrics = combine_rewards(components, {"format": 0.5, "answer": 2.0})
    assert total.tolist() == [0.5, 2.0]
    assert metrics["reward/length"].value() == 5.0
    for weights in ({"style": 1.0}, {}):
        with pytest.raises(ConfigError, match="answer, format, length"):
            combine_rewards(components, weights)


def test_clip_and_whiten() -> None:
    scores = torch.tensor([-3.0, 0.5, 9.0])
    clipped, metrics = clip_scores(scores, low=-1, high=1)
    assert clipped.tolist() == [-1, 0.5, 1]
    assert metrics["reward/clipfrac"].value() == pytest.approx(2 / 3)
    white = whiten_scores(torch.tensor([1.0, 3.0, torch.nan]), torch.tensor([True, True, False]))
    assert white.tolist() == pytest.approx([-0.70711, 0.70711, 0.0], abs=1e-4)
    assert whiten_scores(scores, torch.tensor([True, False, False])).tolist() == [-3.0, 0.0, 0.0]
    with pytest.raises(ConfigError):
        clip_scores(scores, low=1, high=0)


def test_group_filter_refills_with_whole_groups_within_its_bound() -> None:
    group = torch.tensor([9, 9, 4, 4, 7, 7])
    scores = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    assert groups_with_signal(scores, group).tolist() == [True, True, False, False, True, True]
    chosen = GroupFilter(wanted_groups=3, max_rounds=2)
    assert chosen.admit(scores, group).tolist() == [0, 1, 4, 5]
    assert chosen.missing == 1 and chosen.may_continue
    assert chosen.admit(scores, group + 100).tolist() == [0, 1]
    assert not chosen.may_continue
    values = {name: metric.value() for name, metric in chosen.metrics().items()}
    assert values == {
        "filter/rounds": 2, "filter/groups_seen": 6, "filter/groups_dropped": 2,
        "filter/groups_surplus": 1, "filter/groups_missing": 0,
    }  # fmt: skip


def test_group_filter_stops_at_its_bound() -> None:
    chosen = GroupFilter(wanted_groups=2, max_rounds=1)
    assert chosen.admit(torch.zeros(4), torch.tensor([0, 0, 1, 1])).tolist() == []
    assert chosen.missing == 2 and not chosen.may_continue
