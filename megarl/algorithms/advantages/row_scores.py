"""Estimators on row scores: one number a row, the same on each of its tokens.

Notation: s = row score, mu and sigma = mean and sample deviation (ddof 1) of the counted scores of a row's group, n =
their number. A group with fewer than two counted rows has no baseline: its rows get 0 and it is counted in
``adv/singleton_groups``. A group of equal scores gets 0 and is counted in ``adv/zero_signal_groups``. Statistics are
float64 on [B] vectors, so the mean of equal scores is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.advantages.base import RowInputs
from megarl.algorithms.whitening import whiten_rows
from megarl.errors import ConfigError
from megarl.observability.metrics import Mean, Metrics, Sum

EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Groups:
    """Statistics of each row's group, all [B]; ``signal`` marks rows of groups with at least two different scores."""

    size: Tensor
    centered: Tensor
    deviation: Tensor
    signal: Tensor
    metrics: Metrics


def group_statistics(inputs: RowInputs, scores: Tensor) -> Groups:
    """Mean, deviation and size of the counted scores of each group, seen from each row.

    Shapes: scores [B] float64. A row that is not counted still sees its group.
    """
    counted = inputs.counted.to(scores.dtype)
    masked = torch.where(inputs.counted, scores, 0.0)
    size_G = group_sum(inputs, counted)
    mean_G = group_sum(inputs, masked) / size_G.clamp(min=1)
    centered = scores - mean_G[inputs.group]
    squares = torch.where(inputs.counted, centered.square(), 0.0)
    deviation_G = (group_sum(inputs, squares) / (size_G - 1).clamp(min=1)).sqrt()
    largest_G = _group_extreme(inputs, scores, "amax")
    smallest_G = _group_extreme(inputs, scores, "amin")
    signal_G = (size_G >= 2) & (largest_G > smallest_G)
    nonempty = float((size_G > 0).sum())
    metrics: Metrics = {
        "adv/singleton_groups": Sum(float((size_G == 1).sum())),
        "adv/zero_signal_groups": Sum(float(((size_G >= 2) & ~signal_G).sum())),
        "adv/zero_signal_groups_frac": Mean(float(((size_G >= 1) & ~signal_G).sum()), nonempty),
    }
    return Groups(
        size=size_G[inputs.group],
        centered=centered,
        deviation=deviation_G[inputs.group],
        signal=signal_G[inputs.group],
        metrics=metrics,
    )


def group_sum(inputs: RowInputs, values: Tensor) -> Tensor:
    """Sum over each group: [B] -> [G]."""
    return values.new_zeros(inputs.num_groups).index_add_(0, inputs.group, values)


def _group_extreme(inputs: RowInputs, scores: Tensor, which: str) -> Tensor:
    fill = -torch.inf if which == "amax" else torch.inf
    candidates = torch.where(inputs.counted, scores, fill)
    return scores.new_full((inputs.num_groups,), fill).scatter_reduce_(0, inputs.group, candidates, which)


def grpo(inputs: RowInputs, *, norm_by_std: bool) -> tuple[Tensor, Metrics]:
    """GRPO (arXiv:2402.03300, section 4.1.2): (s - mu) / (sigma + 1e-6).

    Without norm_by_std s - mu (Dr. GRPO, arXiv:2503.20783). Libraries differ: sigma has ddof 1 here and in verl, 0 in
    torchtitan; eps is 1e-4 in TRL; a group of one gives its raw reward in verl.
    """
    groups = group_statistics(inputs, inputs.scores)
    return _grpo(groups, norm_by_std), groups.metrics


def _grpo(groups: Groups, norm_by_std: bool) -> Tensor:
    scale = groups.deviation + EPS if norm_by_std else 1.0
    return torch.where(groups.signal, groups.centered / scale, 0.0)


def rloo(inputs: RowInputs) -> tuple[Tensor, Metrics]:
    """RLOO (arXiv:2402.14740, section 3): s minus the mean of the others, (s - mu) n / (n - 1)."""
    groups = group_statistics(inputs, inputs.scores)
    scale = groups.size / (groups.size - 1).clamp(min=1)
    return torch.where(groups.signal, groups.centered * scale, 0.0), groups.metrics


def reinforce_plus_plus_baseline(inputs: RowInputs) -> tuple[Tensor, Metrics]:
    """REINFORCE++-baseline (arXiv:2501.03262): s - mu, whitened over the tokens of the batch."""
    groups = group_statistics(inputs, inputs.scores)
    centered = torch.where(groups.signal, groups.centered, 0.0)
    whitened, metrics = whiten_rows(centered, inputs.num_tokens, inputs.reduce)
    return whitened, groups.metrics | metrics


def opo(inputs: RowInputs) -> tuple[Tensor, Metrics]:
    """OPO (arXiv:2505.23585, eq. 8): s - sum(length s) / sum(length) over the group, length in kept tokens."""
    groups = group_statistics(inputs, inputs.scores)
    length = torch.where(inputs.counted, inputs.num_tokens.to(inputs.scores.dtype), 0.0)
    scores = torch.where(inputs.counted, inputs.scores, 0.0)
    baseline_G = group_sum(inputs, length * scores) / group_sum(inputs, length).clamp(min=1)
    return torch.where(groups.signal, inputs.scores - baseline_G[inputs.group], 0.0), groups.metrics


def gpg(inputs: RowInputs) -> tuple[Tensor, Metrics]:
    """GPG (arXiv:2504.02546): alpha (s - mu), alpha = B / max(1, number of rows with s != 0) over the counted rows."""
    groups = group_statistics(inputs, inputs.scores)
    counts = torch.stack([inputs.counted.sum(), (inputs.counted & (inputs.scores != 0)).sum()]).double()
    if inputs.reduce is not None:
        counts = inputs.reduce(counts)
    alpha = counts[0] / counts[1].clamp(min=1)
    return torch.where(groups.signal, groups.centered * alpha, 0.0), groups.metrics


def grpo_passk(inputs: RowInputs, *, norm_by_std: bool) -> tuple[Tensor, Metrics]:
    """Pass@k (arXiv:2503.19595): (max - second) / (sigma + 1e-6) for the best row of a group, 0 for the others.

    Without norm_by_std max - second. A tie for the best gives 0.
    """
    groups = group_statistics(inputs, inputs.scores)
    best_G = _group_extreme(inputs, inputs.scores, "amax")
    is_best = inputs.counted & (inputs.scores == best_G[inputs.group])
    others = RowInputs(inputs.scores, inputs.group, inputs.num_groups, inputs.counted & ~is_best, inputs.num_tokens)
    second_G = _group_extreme(others, inputs.scores, "amax")
    is_alone = group_sum(inputs, is_best.double())[inputs.group] == 1
    scale = groups.deviation + EPS if norm_by_std else 1.0
    lead = (best_G - second_G)[inputs.group] / scale
    return torch.where(is_best & is_alone & groups.signal, lead, 0.0), groups.metrics


def gdpo(inputs: RowInputs, *, norm_by_std: bool, weights: dict[str, float] | None = None) -> tuple[Tensor, Metrics]:
    """GDPO (arXiv:2601.05242): grpo on each reward component, their weighted sum, whitened over the tokens.

    Args:
        inputs: with reward_components.
        norm_by_std: as in grpo.
        weights: component -> weight; None weighs all given components 1. Components without a weight are left out.

    Raises:
        ConfigError: a weight names a component that no reward gives.
    """
    components = inputs.reward_components or {}
    chosen = weights if weights is not None else dict.fromkeys(components, 1.0)
    unknown = sorted(set(chosen) - set(components))
    if unknown:
        raise ConfigError(
            f"gdpo: no reward gives {', '.join(unknown)}", fix=f"components: {', '.join(sorted(components)) or 'none'}"
        )
    metrics = group_statistics(inputs, inputs.scores).metrics
    total = torch.zeros_like(inputs.scores)
    for name, weight in chosen.items():
        groups = group_statistics(inputs, components[name].to(inputs.scores))
        total = total + weight * _grpo(groups, norm_by_std)
    whitened, whitening = whiten_rows(total, inputs.num_tokens, inputs.reduce)
    return whitened, metrics | whitening
