"""Selection of valid tokens and the numbers taken from them: the one place where a mask meets arithmetic.

Masks select with ``torch.where`` before anything is computed; nothing is ever multiplied by a mask, since 0 * nan is
nan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

# A sum over all parts of a split batch, such as an all-reduce over data-parallel ranks. None: the batch is whole.
Reduce: TypeAlias = Callable[[Tensor], Tensor] | None

LOG_RATIO_BOUND = 20.0
# Rows are taken in blocks of about this many tokens on CPU: temporaries then stay in cache, where elementwise
# operations run three times as fast as from memory. One block on an accelerator, where launches cost more than traffic.
_BLOCK_TOKENS = 1 << 17


def widen(values: Tensor) -> Tensor:
    """The tensor in float32, or unchanged if it is float64."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def select(mask: Tensor, values: Tensor) -> Tensor:
    """Values where the mask is true and 0 elsewhere, at least float32; the gradient is 0 off the mask too."""
    return torch.where(mask, widen(values), 0.0)


def blocks(num_rows: int, tokens_per_row: int, device: torch.device) -> Iterator[slice]:
    """Slices of rows that cover the batch; a single slice off the CPU."""
    rows = num_rows if device.type != "cpu" else max(1, _BLOCK_TOKENS // max(1, tokens_per_row))
    for start in range(0, num_rows, max(1, rows)):
        yield slice(start, min(start + rows, num_rows))


def num_tokens(mask: Tensor) -> Tensor:
    """Number of true places as an int64 scalar tensor. Integer sums over bool are slow on CPU unless narrowed."""
    return row_tokens(mask).sum()


def row_tokens(mask: Tensor) -> Tensor:
    """True places of each row: [B] int64."""
    return mask.sum(-1, dtype=torch.int32).long()


def count_below(left: Tensor, right: Tensor | float) -> Tensor:
    """How many elements of ``left`` are below ``right``: a scalar tensor."""
    return torch.lt(left, right, out=torch.empty_like(left)).sum()


def attach(source: Tensor, value: Tensor, slope: Tensor) -> Tensor:
    """``value`` with the given elementwise derivative ``slope`` with respect to ``source``; all of one shape.

    Losses state their derivative beside their formula: one saved tensor instead of an autograd graph of twenty.
    """
    if not (source.requires_grad and torch.is_grad_enabled()):
        return value
    attached: Tensor = _Attach.apply(source, value, slope)
    return attached


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, source: Tensor, value: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        ctx.source_dtype = source.dtype
        return value.view_as(value)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return (grad * slope).to(ctx.source_dtype), None, None


def to_floats(scalars: Mapping[str, Tensor]) -> dict[str, float]:
    """Scalar tensors as Python floats with one device synchronisation."""
    if not scalars:
        return {}
    stacked = torch.stack([scalar.detach().double() for scalar in scalars.values()])
    return dict(zip(scalars, stacked.tolist(), strict=True))
