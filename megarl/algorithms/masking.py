"""Selection of valid tokens and the numbers taken from them: the one place where a mask meets arithmetic.

What stands off the mask is replaced by 0 before anything is computed; no number is ever multiplied by a mask, since 0 *
nan is nan. Selection multiplies a value's bit pattern, read as an integer, by 1 or 0: exact for every value. On CPU,
once the mask is in such integers, that takes half the time of ``torch.where``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from megarl.errors import DataError

# A sum over all parts of a split batch, such as an all-reduce over data-parallel ranks. None: the batch is whole.
Reduce: TypeAlias = Callable[[Tensor], Tensor] | None

LOG_RATIO_BOUND = 20.0
# Rows are taken in blocks of about this many tokens a thread on CPU: temporaries then stay in cache, where elementwise
# operations run three times as fast as from memory. One block on an accelerator, where launches cost more than traffic.
_BLOCK_TOKENS = 1 << 18
_EVEN_BYTES = 0x00FF00FF00FF00FF
_ONE_PER_LANE = 0x0001000100010001


def widen(values: Tensor) -> Tensor:
    """The tensor in float32, or unchanged if it is float64."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def bits_of(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask as 1 or 0 in integers as wide as ``dtype`` (float32 or float64).

    Raises:
        DataError: the mask is not bool.
    """
    if mask.dtype != torch.bool:
        raise DataError(f"a response mask is bool, found {mask.dtype}", fix="compare with 0")
    return mask.view(torch.int8).to(integer_like(dtype))


def keep_bits(bits: Tensor, values: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Values where bits are 1, 0 elsewhere whatever stood there; shapes broadcast, no gradient.

    ``out`` may be ``values``.
    """
    if out is None:
        return torch.mul(values.view(bits.dtype), bits).view(values.dtype)
    torch.mul(values.view(bits.dtype), bits, out=out.view(bits.dtype))
    return out


def integer_like(dtype: torch.dtype) -> torch.dtype:
    """The integers as wide as float32 or float64."""
    return torch.int64 if dtype == torch.float64 else torch.int32


def select(mask: Tensor, values: Tensor) -> Tensor:
    """Values where the mask is true and 0 elsewhere, at least float32; the gradient is 0 off the mask too."""
    wide = widen(values)
    bits = bits_of(mask, wide.dtype)
    if wide.requires_grad and torch.is_grad_enabled():
        selected: Tensor = _Select.apply(wide, bits)
        return selected
    return keep_bits(bits, wide)


class _Select(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, values: Tensor, bits: Tensor) -> Tensor:
        ctx.save_for_backward(bits)
        return keep_bits(bits, values)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        (bits,) = ctx.saved_tensors
        return keep_bits(bits, grad), None


def spread_rows(per_row: Tensor, mask: Tensor) -> Tensor:
    """Each row's number at its true places, 0 elsewhere: [B] and [B, T] -> [B, T]; no gradient."""
    return torch.where(mask, per_row[:, None], per_row.new_zeros(()))


def blocks(num_rows: int, tokens_per_row: int, device: torch.device) -> Iterator[slice]:
    """Slices of rows that cover the batch; a single slice off the CPU, and for no rows an empty one."""
    rows = num_rows
    if device.type == "cpu":
        rows = max(1, _BLOCK_TOKENS * torch.get_num_threads() // max(1, tokens_per_row))
    for start in range(0, max(1, num_rows), max(1, rows)):
        yield slice(start, min(start + rows, num_rows))


def num_tokens(mask: Tensor) -> Tensor:
    """Number of true places as an int64 scalar tensor."""
    return row_tokens(mask).sum()


def row_tokens(mask: Tensor) -> Tensor:
    """True places along the last axis: [B] int64 for a mask [B, T]."""
    packed = mask.is_contiguous() and mask.shape[-1] % 8 == 0 and mask.storage_offset() % 8 == 0 and mask.numel()
    if not packed:
        return mask.sum(-1, dtype=torch.int32).long()
    # Eight bools are one int64 whose bytes add up without carry as long as no more than 255 are added: six times as
    # fast as a sum over bools, which converts each of them first.
    words = mask.view(torch.int64)
    total = torch.zeros(mask.shape[:-1], dtype=torch.int64, device=mask.device)
    for part in words.split(248, dim=-1):
        lanes = part.sum(-1)
        pairs = (lanes & _EVEN_BYTES) + ((lanes >> 8) & _EVEN_BYTES)
        total += ((pairs * _ONE_PER_LANE) >> 48) & 0xFFFF
    return total


def count_below(left: Tensor, right: Tensor) -> Tensor:
    """How many elements of ``left`` are below ``right``: a scalar tensor."""
    return torch.lt(left, right, out=torch.empty_like(left)).sum()


def attach(source: Tensor, value: Tensor, slope: Tensor) -> Tensor:
    """``value`` with the given elementwise derivative ``slope`` with respect to ``source``.

    Shapes: source and slope [B, T]; value [B, T], or [B] where it is the sum of a row whose terms have that slope.
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
        if grad.dim() < slope.dim():
            grad = grad[:, None]
        return (grad * slope).to(ctx.source_dtype), None, None


def to_floats(scalars: Mapping[str, Tensor]) -> dict[str, float]:
    """Scalar tensors as Python floats with one device synchronisation."""
    if not scalars:
        return {}
    stacked = torch.stack([scalar.detach().double() for scalar in scalars.values()])
    return dict(zip(scalars, stacked.tolist(), strict=True))
