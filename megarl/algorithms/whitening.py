"""Whitening over the valid tokens of a batch that may be spread over ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.masking import Reduce, blocks, num_tokens, select
from megarl.observability.metrics import Metrics, Sum

# Added to the variance, as in verl and TRL.
_EPS = 1e-8


def whiten(values: Tensor, mask: Tensor, reduce: Reduce = None) -> tuple[Tensor, Metrics]:
    """(x - mean) / sqrt(var + 1e-8) over the valid tokens, var with ddof 1; 0 off the mask.

    With fewer than two valid tokens the values come back as they are and ``adv/whitening_skipped`` counts 1.
    Two passes (mean, then squared deviations) and float64 totals keep it stable for long batches far from 0.

    Shapes: values [B, T] float, mask [B, T] bool. ``reduce`` sums over the ranks that hold the rest of the batch.
    """
    result = select(mask, values)
    rows = list(blocks(result.shape[0], result.shape[1], result.device))
    first = torch.stack([num_tokens(mask).double(), _total([result[r].sum() for r in rows], result)])
    count, total = (first if reduce is None else reduce(first)).tolist()
    if count < 2:
        return result, {"adv/whitening_skipped": Sum(1.0)}
    mean = total / count
    squares = _total([_sum_of_squares(select(mask[r], result[r] - mean)) for r in rows], result)
    if reduce is not None:
        squares = reduce(squares)
    scale = float((squares.item() / (count - 1) + _EPS) ** -0.5)
    for r in rows:
        result[r] = torch.where(mask[r], (result[r] - mean).mul_(scale), 0.0)
    return result, {"adv/whitening_skipped": Sum(0.0)}


def whiten_rows(row_values: Tensor, num_tokens: Tensor, reduce: Reduce = None) -> tuple[Tensor, Metrics]:
    """The same for values equal on all tokens of a row: [B] float64 with token counts [B]; 0 for empty rows."""
    weight = num_tokens.to(row_values.dtype)
    values = torch.where(num_tokens > 0, row_values, 0.0)
    first = torch.stack([weight.sum(), (weight * values).sum()])
    count, total = (first if reduce is None else reduce(first)).tolist()
    if count < 2:
        return values, {"adv/whitening_skipped": Sum(1.0)}
    centered = values - total / count
    squares = (weight * centered.square()).sum()
    if reduce is not None:
        squares = reduce(squares)
    whitened = centered * (squares.item() / (count - 1) + _EPS) ** -0.5
    return torch.where(num_tokens > 0, whitened, 0.0), {"adv/whitening_skipped": Sum(0.0)}


def _total(parts: list[Tensor], like: Tensor) -> Tensor:
    if not parts:
        return like.new_zeros((), dtype=torch.float64)
    return torch.stack(parts).double().sum()


def _sum_of_squares(values: Tensor) -> Tensor:
    return torch.linalg.vector_norm(values, dim=-1).double().square().sum()
