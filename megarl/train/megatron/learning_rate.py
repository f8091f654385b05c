"""Learning rate of an optimizer update: a warm-up, then one of five shapes. Pure.

Invariant: the rate depends on the number of updates applied before it and on the configuration alone, so a resumed run
continues the schedule.
"""

from __future__ import annotations

import math

from megarl.config.schema.train import ScheduleConfig
from megarl.errors import ConfigError


def learning_rate(update: int, peak: float, schedule: ScheduleConfig, total_updates: int | None = None) -> float:
    """Learning rate of an optimizer update.

    Warm-up: ``peak * (update + 1) / warmup_steps``, so that the first update is not a no-op. Then

    - constant: ``peak``;
    - linear, cosine: from there to ``min_lr`` linearly or along half a cosine (arXiv:1608.03983, eq. 5, without
      restarts), reached at ``decay_steps`` and kept;
    - inverse_sqrt: ``peak * sqrt(w / (update + 1))`` with ``w = max(1, warmup_steps)`` (arXiv:1706.03762, eq. 3), not
      below ``min_lr``;
    - wsd: ``peak`` until ``cooldown_steps`` before ``decay_steps``, then linearly to ``min_lr`` (warm-up, stable,
      decay; arXiv:2404.06395, section 4).

    Args:
        update: number of updates applied before it.
        peak: highest rate.
        schedule: shape of the schedule.
        total_updates: planned updates of the run; stands in for ``decay_steps`` where the schedule gives none.

    Raises:
        ConfigError: a schedule that ends without any number of steps, or whose cooldown is longer than what is left
            after the warm-up.
    """
    warmup = schedule.warmup_steps
    if update < warmup:
        return peak * (update + 1) / warmup
    if schedule.kind == "constant":
        return peak
    if schedule.kind == "inverse_sqrt":
        return max(schedule.min_lr, peak * math.sqrt(max(1, warmup) / (update + 1)))
    end = schedule.decay_steps if schedule.decay_steps is not None else total_updates
    if end is None:
        raise ConfigError(f"a {schedule.kind} schedule needs decay_steps", where="optimizer.schedule.decay_steps")
    start = warmup if schedule.kind != "wsd" else end - _cooldown_steps(schedule, end)
    progress = min(1.0, max(0.0, (update - start) / max(1, end - start)))
    left = (1 + math.cos(math.pi * progress)) / 2 if schedule.kind == "cosine" else 1 - progress
    return schedule.min_lr + (peak - schedule.min_lr) * left


def _cooldown_steps(schedule: ScheduleConfig, end: int) -> int:
    after_warmup = max(1, end - schedule.warmup_steps)
    if schedule.cooldown_steps is None:
        return math.ceil(after_warmup / 10)
    if schedule.cooldown_steps > after_warmup:
        raise ConfigError(
            f"a cooldown of {schedule.cooldown_steps} steps does not fit the {after_warmup} after the warm-up",
            where="optimizer.schedule.cooldown_steps",
        )
    return schedule.cooldown_steps
