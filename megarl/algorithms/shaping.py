"""Between a reward and an advantage: penalties on length, several rewards in one, clipping, whitening, group filter.

All functions take and return one number a row, [B] float.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megarl.algorithms.masking import widen
from megarl.errors import ConfigError
from megarl.observability.metrics import Last, Mean, Metrics, Sum


def overlong_penalty(lengths: Tensor, *, max_length: int, buffer: int, factor: float = 1.0) -> Tensor:
    """Soft overlong punishment (DAPO, arXiv:2503.14476, eq. 13), to be added to the score: [B] float32 in [-factor, 0].

    0 up to max_length - buffer, falling linearly to -factor at max_length, -factor beyond.

    Shapes: lengths [B] int64, response tokens.

    Raises:
        ConfigError: not 0 < buffer <= max_length.
    """
    if not 0 < buffer <= max_length:
        raise ConfigError(f"overlong penalty: expected 0 < buffer <= max_length, found {buffer} and {max_length}")
    excess = (lengths.float() - (max_length - buffer)) / buffer
    return -factor * excess.clamp(0, 1)


def length_penalty(lengths: Tensor, correct: Tensor, group: Tensor, *, factor: float) -> Tensor:
    """Reward for being short among the responses to a prompt (Kimi k1.5, arXiv:2501.12599, section 2.3.3): [B] float32.

    lam = 0.5 - (length - min) / (max - min) over the group; factor * lam for a correct response, factor * min(0, lam)
    for a wrong one; 0 in a group of equal lengths.

    Shapes: lengths [B] int64, correct [B] bool, group [B] int64 (any numbers).
    """
    unique, index = torch.unique(group, return_inverse=True)
    size = lengths.float()
    longest = size.new_zeros(len(unique)).scatter_reduce(0, index, size, "amax", include_self=False)[index]
    shortest = size.new_zeros(len(unique)).scatter_reduce(0, index, size, "amin", include_self=False)[index]
    rank = 0.5 - (size - shortest) / (longest - shortest).clamp(min=1)
    reward = factor * torch.where(correct, rank, rank.clamp(max=0))
    return torch.where(longest > shortest, reward, 0.0)


def combine_rewards(components: Mapping[str, Tensor], weights: Mapping[str, float]) -> tuple[Tensor, Metrics]:
    """Weighted sum of reward components, and the mean of each as ``reward/<name>``.

    Args:
        components: name -> [B] float.
        weights: name -> weight; a component without a weight is measured but not added.

    Raises:
        ConfigError: no weight, or a weight without a component.
    """
    unknown = sorted(set(weights) - set(components))
    if unknown or not weights:
        raise ConfigError(
            f"reward weights name {', '.join(unknown) or 'no component'}",
            fix=f"the rewards give: {', '.join(sorted(components)) or 'none'}",
        )
    total = torch.stack([weight * widen(components[name]) for name, weight in weights.items()]).sum(0)
    metrics: Metrics = {f"reward/{name}": Mean(float(x.double().sum()), len(x)) for name, x in components.items()}
    return total, metrics


def clip_scores(scores: Tensor, *, low: float, high: float) -> tuple[Tensor, Metrics]:
    """Scores within [low, high], and the share that was outside as ``reward/clipfrac``.

    Raises:
        ConfigError: low above high.
    """
    if low > high:
        raise ConfigError(f"reward clipping: expected low <= high, found {low} and {high}")
    clipped = scores.clamp(low, high)
    return clipped, {"reward/clipfrac": Mean(float((clipped != scores).sum()), len(scores))}


def whiten_scores(scores: Tensor, counted: Tensor) -> Tensor:
    """(s - mean) / sqrt(var + 1e-8) over the counted rows, ddof 1; 0 for others; unchanged with fewer than two.

    Shapes: scores [B] float, counted [B] bool (rows with a response).
    """
    valid = scores[counted].double()
    if len(valid) < 2:
        return torch.where(counted, scores, 0.0)
    whitened = (scores.double() - valid.mean()) * (valid.var() + 1e-8).rsqrt()
    return torch.where(counted, whitened, 0.0).to(widen(scores).dtype)


def groups_with_signal(scores: Tensor, group: Tensor) -> Tensor:
    """Rows whose group holds at least two different scores: [B] bool.

    Shapes: scores [B] float, group [B] int64 (any numbers).
    """
    unique, index = torch.unique(group, return_inverse=True)
    empty = scores.new_zeros(len(unique))
    largest = empty.scatter_reduce(0, index, scores, "amax", include_self=False)
    smallest = empty.scatter_reduce(0, index, scores, "amin", include_self=False)
    return (largest > smallest)[index]


class GroupFilter:
    """Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): drop groups of equal scores, sample until enough are.

    One filter serves one step: ``admit`` each round's rows, until it is full or out of rounds. It holds no samples.

    Args:
        wanted_groups: groups a step trains on.
        max_rounds: rounds of sampling a step may take, the first included.
    """

    def __init__(self, wanted_groups: int, max_rounds: int) -> None:
        self.wanted_groups = wanted_groups
        self.max_rounds = max_rounds
        self._rounds = self._seen = self._dropped = self._admitted = 0

    @property
    def missing(self) -> int:
        """Groups still wanted."""
        return self.wanted_groups - self._admitted

    @property
    def may_continue(self) -> bool:
        """Whether another round is wanted and allowed."""
        return self.missing > 0 and self._rounds < self.max_rounds

    def admit(self, scores: Tensor, group: Tensor) -> Tensor:
        """Indices of the rows to keep of one round, whole groups in order of appearance: [K] int64.

        Groups beyond the wanted number are left out and counted as surplus.

        Shapes: scores [B] float, any score or component; group [B] int64.
        """
        self._rounds += 1
        passed = groups_with_signal(scores, group)
        order = list(dict.fromkeys(group.tolist()))
        with_signal = set(group[passed].tolist())
        chosen = [g for g in order if g in with_signal][: self.missing]
        self._seen += len(order)
        self._dropped += len(order) - len(with_signal)
        self._admitted += len(chosen)
        return torch.isin(group, torch.tensor(chosen, dtype=group.dtype, device=group.device)).nonzero()[:, 0]

    def metrics(self) -> Metrics:
        """Counts of this step, ``filter/...``."""
        return {
            "filter/rounds": Last(self._rounds),
            "filter/groups_seen": Sum(self._seen),
            "filter/groups_dropped": Sum(self._dropped),
            "filter/groups_surplus": Sum(self._seen - self._dropped - self._admitted),
            "filter/groups_missing": Sum(self.missing),
        }
