"""Learning-rate schedules."""

from __future__ import annotations

from itertools import pairwise

import pytest

from megarl.config.schema.train import ScheduleConfig
from megarl.errors import ConfigError
from megarl.train.megatron.learning_rate import learning_rate


def rates(schedule: ScheduleConfig, updates: int, total: int | None = None) -> list[float]:
    return [learning_rate(update, 1.0, schedule, total) for update in range(updates)]


def test_warm_up_rises_linearly_and_its_first_update_is_not_lost():
    assert rates(ScheduleConfig(warmup_steps=4), 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_decay_reaches_min_lr_at_decay_steps_and_stays():
    schedule = ScheduleConfig(kind="linear", warmup_steps=2, decay_steps=6, min_lr=0.2)
    assert rates(schedule, 9) == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_cosine_decay_is_halfway_down_in_the_middle():
    schedule = ScheduleConfig(kind="cosine", decay_steps=8, min_lr=0.1)
    values = rates(schedule, 10)
    assert values[0] == 1.0
    assert values[4] == pytest.approx(0.55)
    assert values[8] == values[9] == pytest.approx(0.1)
    assert all(a >= b for a, b in pairwise(values))


def test_inverse_square_root_meets_the_warm_up_at_the_peak():
    schedule = ScheduleConfig(kind="inverse_sqrt", warmup_steps=4, min_lr=0.6)
    values = rates(schedule, 100)
    assert values[:4] == [0.25, 0.5, 0.75, 1.0]
    # Step n has the rate sqrt(4 / n) of the peak (arXiv:1706.03762, eq. 3), here not below 0.6.
    assert values[4:11] == pytest.approx([(4 / n) ** 0.5 for n in range(5, 12)])
    assert values[15] == values[99] == 0.6
    assert rates(ScheduleConfig(kind="inverse_sqrt"), 4) == pytest.approx([1, 2**-0.5, 3**-0.5, 0.5])


def test_a_stable_stretch_ends_in_a_linear_cooldown():
    schedule = ScheduleConfig(kind="wsd", warmup_steps=2, decay_steps=10, cooldown_steps=4, min_lr=0.2)
    expected = [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    assert rates(schedule, 12) == pytest.approx(expected)
    tenth = rates(ScheduleConfig(kind="wsd", warmup_steps=10), 111, total=110)
    assert tenth[100] == 1.0 and tenth[101] == pytest.approx(0.9) and tenth[110] == 0.0
    with pytest.raises(ConfigError, match="cooldown of 9 steps"):
        rates(ScheduleConfig(kind="wsd", warmup_steps=2, cooldown_steps=9), 4, total=10)


def test_the_planned_updates_stand_in_for_decay_steps():
    linear = ScheduleConfig(kind="linear")
    assert rates(linear, 5, total=4) == [1.0, 0.75, 0.5, 0.25, 0.0]
    with pytest.raises(ConfigError, match="decay_steps"):
        rates(linear, 1)
