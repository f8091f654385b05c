"""Whitening over the valid tokens of a batch that may be spread over ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.masking import Reduce, bits_of, blocks, keep_bits, row_tokens
from megarl.observability.metrics import Metrics, Sum

# Added to the variance, as in verl and TRL.
_EPS = 1e-8
# Deviations of this many units in the last place of the mean are rounding.
_ROUNDING = 4


def whiten_(values: Tensor, mask: Tensor, reduce: Reduce = None) -> Metrics:
    """(x - mean) / sqrt(var + 1e-8) over the valid tokens, var with ddof 1; in place.

    With fewer than two valid tokens the values stay as they are and ``adv/whitening_skipped`` counts 1 for the batch
    (each part gives its share). Values that differ by no more than their own rounding become 0: dividing that noise by
    its deviation would make it a signal. Squared deviations are from the mean of a block of rows, and blocks are merged
    in float64: stable for long batches far from 0.

    Shapes: values [B, T] float32 or float64 and 0 off the mask, mask [B, T] bool. ``reduce`` sums over the ranks that
    hold the rest.
    """
    rows = list(blocks(values.shape[0], values.shape[1], values.device))
    parts = torch.zeros(max(1, len(rows)), 3, dtype=torch.float64, device=values.device)
    tokens = row_tokens(mask)
    for part, r in zip(parts, rows, strict=False):
        bits = bits_of(mask[r], values.dtype)
        block = values[r]
        part[0] = tokens[r].sum()
        part[1] = block.sum()
        deviation = block - (part[1] / part[0].clamp(min=1)).to(block.dtype)
        keep_bits(bits, deviation, out=deviation)
        part[2] = torch.linalg.vector_norm(deviation, dim=-1).double().square().sum()
    count, total, num_parts = _summed(parts[:, 0].sum(), parts[:, 1].sum(), reduce)
    if count < 2:
        return {"adv/whitening_skipped": Sum(1 / num_parts)}
    mean = total / count
    # Squares about a block's own (rounded) mean, moved to the global one.
    block_mean = (parts[:, 1] / parts[:, 0].clamp(min=1)).to(values.dtype).double()
    step = block_mean - mean
    squares = (parts[:, 2] + 2 * step * (parts[:, 1] - parts[:, 0] * block_mean) + parts[:, 0] * step.square()).sum()
    if reduce is not None:
        squares = reduce(squares)
    variance = squares.item() / (count - 1)
    scale = (variance + _EPS) ** -0.5
    if variance <= (_ROUNDING * torch.finfo(values.dtype).eps * mean) ** 2:
        values.zero_()
        return {"adv/whitening_skipped": Sum(0.0)}
    shift = torch.tensor(-mean * scale, dtype=values.dtype, device=values.device)
    for r in rows:
        torch.add(keep_bits(bits_of(mask[r], values.dtype), shift), values[r], alpha=scale, out=values[r])
    return {"adv/whitening_skipped": Sum(0.0)}


def whiten_rows(row_values: Tensor, num_tokens: Tensor, reduce: Reduce = None) -> tuple[Tensor, Metrics]:
    """The same for values equal on all tokens of a row: [B] float64 with token counts [B]; 0 for empty rows."""
    weight = num_tokens.to(row_values.dtype)
    values = torch.where(num_tokens > 0, row_values, 0.0)
    count, total, num_parts = _summed(weight.sum(), (weight * values).sum(), reduce)
    if count < 2:
        return values, {"adv/whitening_skipped": Sum(1 / num_parts)}
    centered = values - total / count
    squares = (weight * centered.square()).sum()
    if reduce is not None:
        squares = reduce(squares)
    whitened = centered * (squares.item() / (count - 1) + _EPS) ** -0.5
    return torch.where(num_tokens > 0, whitened, 0.0), {"adv/whitening_skipped": Sum(0.0)}


def _summed(count: Tensor, total: Tensor, reduce: Reduce) -> tuple[float, float, float]:
    """Count and total over all parts of the batch, and how many parts there are."""
    numbers = torch.stack([count, total, torch.ones_like(total)])
    count_all, total_all, num_parts = (numbers if reduce is None else reduce(numbers)).tolist()
    return count_all, total_all, num_parts
