"""Random ragged batches with poison off the mask, and the golden batch of docs/algorithms.md."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Ragged:
    """[B, T] float64 tensors; the mask has gaps, an empty row and a full one; off it stand NaN and inf."""

    mask: Tensor
    rewards: Tensor
    values: Tensor
    old_values: Tensor
    returns: Tensor
    log_probs: Tensor
    old: Tensor
    ref: Tensor
    rollout: Tensor
    advantages: Tensor
    weights: Tensor
    pi2: Tensor
    group: Tensor
    truncated: Tensor
    greedy: Tensor


def ragged(seed: int = 0, rows: int = 12, length: int = 9, group_size: int = 3, poison: bool = True) -> Ragged:
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float = 1.0) -> Tensor:
        return torch.randn(rows, length, generator=generator, dtype=torch.float64) * scale

    mask = torch.rand(rows, length, generator=generator) < 0.7
    mask[0], mask[1 % rows] = True, False
    bad = torch.where(torch.rand(rows, length, generator=generator) < 0.5, torch.nan, torch.inf)

    def poisoned(x: Tensor) -> Tensor:
        return torch.where(mask, x, bad) if poison else torch.where(mask, x, 0.0)

    old = -normal().abs() - 0.05
    return Ragged(
        mask=mask,
        rewards=poisoned(normal()),
        values=poisoned(normal()),
        old_values=poisoned(normal()),
        returns=poisoned(normal()),
        log_probs=poisoned(-(old + normal(0.4)).abs() - 0.01),
        old=poisoned(old),
        ref=poisoned(old + normal(0.3)),
        rollout=poisoned(old + normal(0.2)),
        advantages=poisoned(normal()),
        weights=poisoned(normal().abs()),
        pi2=poisoned(old.exp().square()),
        group=torch.arange(rows) // group_size * 7 - 5,
        truncated=torch.rand(rows, generator=generator) < 0.5,
        greedy=torch.randn(rows, generator=generator, dtype=torch.float64),
    )


MASK = torch.tensor([[1, 1, 0, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 0]]).bool()
REWARDS = torch.zeros(4, 5)
REWARDS[0, 4], REWARDS[1, 2], REWARDS[3, 3] = 1.0, 0.5, 2.0
VALUES = torch.tensor(
    [[0.1, 0.2, 0.9, 0.3, 0.4], [0.5, 0.4, 0.3, 0.8, 0.8], [0.2, 0.7, 0.7, 0.7, 0.7], [0.1, 0.1, 0.2, 0.3, 0.6]]
)
GROUP = torch.tensor([0, 0, 1, 1])
OLD = torch.tensor([[-1, -0.5, -9, -2, -0.1], [-0.7, -1.5, -0.3, 0, 0], [-2, 0, 0, 0, 0], [-0.4, -0.9, -1.1, -3, 0]])
NEW = torch.tensor(
    [[-0.6, -0.7, -9, -2.1, -0.1], [-0.5, -1, -2.3, 0, 0], [-1.2, 0, 0, 0, 0], [-0.9, -0.9, -0.2, -1.5, 0]]
)
ROLLOUT = OLD + torch.tensor([[0.1, -0.3, 0, 0.5, 0], [0.9, -0.2, 0.1, 0, 0], [-1.5, 0, 0, 0, 0], [0, 0, 0.2, -0.1, 0]])
ADVANTAGES = torch.tensor([1.0, -1.0, -2.0, 0.5])[:, None].expand(4, 5)
