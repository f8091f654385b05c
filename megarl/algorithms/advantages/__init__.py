"""Advantage estimators by name."""

from __future__ import annotations

from megarl.algorithms.advantages.base import (
    ESTIMATORS,
    Advantages,
    Estimator,
    EstimatorEntry,
    Need,
    RowInputs,
    TokenInputs,
    build_estimator,
    custom_estimator,
    row_scores,
)
from megarl.algorithms.advantages.row_scores import (
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    opo,
    reinforce_plus_plus_baseline,
    rloo,
)
from megarl.algorithms.advantages.token_baseline import optimal_token_baseline
from megarl.algorithms.advantages.token_scans import gae, reinforce_plus_plus, remax

__all__ = [
    "ESTIMATORS",
    "Advantages",
    "Estimator",
    "RowInputs",
    "TokenInputs",
    "build_estimator",
    "custom_estimator",
    "row_scores",
]

_GROUPS: frozenset[Need] = frozenset({"groups"})

for _name, _entry in {
    "grpo": EstimatorEntry(grpo, on_rows=True, needs=_GROUPS),
    "rloo": EstimatorEntry(rloo, on_rows=True, needs=_GROUPS),
    "reinforce_plus_plus_baseline": EstimatorEntry(reinforce_plus_plus_baseline, on_rows=True, needs=_GROUPS),
    "opo": EstimatorEntry(opo, on_rows=True, needs=_GROUPS),
    "gpg": EstimatorEntry(gpg, on_rows=True, needs=_GROUPS),
    "grpo_passk": EstimatorEntry(grpo_passk, on_rows=True, needs=_GROUPS),
    "gdpo": EstimatorEntry(gdpo, on_rows=True, needs=_GROUPS | {"reward_components"}),
    "gae": EstimatorEntry(gae, on_rows=False, needs=frozenset({"values"})),
    "reinforce_plus_plus": EstimatorEntry(reinforce_plus_plus, on_rows=False),
    "remax": EstimatorEntry(remax, on_rows=False, needs=frozenset({"greedy_baseline"})),
    "optimal_token_baseline": EstimatorEntry(optimal_token_baseline, on_rows=False, needs=_GROUPS | {"sum_pi_squared"}),
}.items():
    ESTIMATORS.add(_name, _entry)
