"""Rows that are cut over context-parallel ranks, made whole where losses are computed.

Invariants:
1. Losses, estimators, aggregations and correction take whole rows, so none of them knows of context parallelism.
2. What a rank computes from whole rows is bit for bit what every other rank of its replica computes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.masking import Reduce, widen


def whole_rows(part: Tensor, positions: Tensor, length: int, reduce: Reduce) -> Tensor:
    """Rows put together from the parts that context-parallel ranks hold: the same [B, length] on each of them.

    A row's sum, mean or ratio (``gspo``, ``geo_mean``, sequence weights, row means) and a scan along it then need
    nothing of their own: the ranks of a replica share some bytes a token, each computes the same loss of the same rows,
    and the gradient flows back into its own part alone. So gradients of parameters are summed over context-parallel
    ranks, as over data-parallel ones, while denominators and metrics are those of one context-parallel rank.

    Shapes: part [B, t] float or bool; positions [t] int64, the places in the row of this rank's tokens, no place on two
    ranks. Returns bool, or at least float32, [B, length]; 0 at places that no rank holds. Differentiable in part.

    Args:
        part: this rank's tokens of each row.
        positions: where they stand.
        length: T, the same on all ranks.
        reduce: sum over the context-parallel ranks; None where rows are whole already.
    """
    if part.dtype == torch.bool:
        whole: Tensor = _Whole.apply(part.to(torch.uint8), positions, length, reduce)
        return whole.bool()
    whole = _Whole.apply(widen(part), positions, length, reduce)
    return whole


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, part: Tensor, positions: Tensor, length: int, reduce: Reduce
    ) -> Tensor:
        ctx.save_for_backward(positions)
        rows = part.new_zeros(part.shape[0], length)
        rows[:, positions] = part
        return rows if reduce is None else reduce(rows)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (positions,) = ctx.saved_tensors
        return grad[:, positions], None, None, None
