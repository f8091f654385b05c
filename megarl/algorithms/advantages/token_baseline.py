"""The optimal token baseline: a baseline of its own for each group and position."""

from __future__ import annotations

from megarl.algorithms.advantages.base import Advantages, TokenInputs
from megarl.algorithms.advantages.row_scores import group_statistics
from megarl.algorithms.advantages.token_scans import discounted_returns
from megarl.algorithms.masking import select
from megarl.errors import DataError

_EPS = 1e-8


def optimal_token_baseline(inputs: TokenInputs) -> Advantages:
    """G_t - B_t with B_t = sum_group(G W m) / (sum_group(W m) + 1e-8) (optimal token baseline, arXiv:2602.07078).

    w = 1 - 2 pi + sum_v pi_v^2, times the squared importance weight if there are any; W = cumsum(w m) along the row; G
    is the undiscounted reward to go. Sums run over the counted rows of the group at the same position. Rows of a group
    with fewer than two counted rows get 0.

    Raises:
        DataError: old_log_probs missing.
    """
    if inputs.old_log_probs is None:
        raise DataError("estimator 'optimal_token_baseline' needs old_log_probs")
    assert inputs.sum_pi_squared is not None  # declared in needs
    kept, rows = inputs.kept, inputs.rows
    returns = select(kept, discounted_returns(inputs, 1.0))
    energy = 1 - 2 * select(kept, inputs.old_log_probs).exp() + select(kept, inputs.sum_pi_squared)
    if inputs.importance_weights is not None:
        energy *= select(kept, inputs.importance_weights).square()
    weight = select(kept & rows.counted[:, None], select(kept, energy).cumsum(-1))

    shape = (rows.num_groups, returns.shape[1])
    numerator_GT = returns.new_zeros(shape).index_add_(0, rows.group, returns * weight)
    denominator_GT = returns.new_zeros(shape).index_add_(0, rows.group, weight)
    baseline = (numerator_GT / (denominator_GT + _EPS))[rows.group]
    groups = group_statistics(rows, rows.scores)
    has_baseline = kept & (groups.size >= 2)[:, None]
    return Advantages(select(has_baseline, returns - baseline), returns, groups.metrics)
