"""Discounted sums from the end of a row: y_t = x_t + c y_{t+1} over the valid tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.masking import bits_of, keep_bits, row_tokens

# A discount power below this contributes nothing to a float32 sum of comparable terms.
_NEGLIGIBLE = 1e-12
_CHUNK = 32


class ReverseSum:
    """y_t = x_t + discount * y_{t+1} along the last axis, y after the end 0.

    No step waits for the one before it in time, unlike the loop over T that peers run. On CPU chunks of 32 tokens, and
    then the carries between chunks, are products with triangular matrices of powers. Elsewhere (and where float32
    products may be rounded to less, or the length does not divide) sums double their span: log2(T) vector operations.

    Args:
        length: T.
        discount: in [0, 1].
        like: a tensor of the device and dtype of the values.
    """

    def __init__(self, length: int, discount: float, like: Tensor) -> None:
        self._discount = discount
        exact = like.dtype == torch.float64 or torch.get_float32_matmul_precision() == "highest"
        self._by_chunks = like.device.type == "cpu" and exact and length % _CHUNK == 0 and length > _CHUNK
        if self._by_chunks:
            self._within = _triangle(_CHUNK, discount, like)
            self._between = _triangle(length // _CHUNK, discount**_CHUNK, like)
            self._reach = like.new_tensor([discount**k for k in range(_CHUNK, 0, -1)])

    def __call__(self, values: Tensor, out: Tensor) -> Tensor:
        """Sums of [b, T] float values, gaps already closed (``Packing``), into ``out`` [b, T] contiguous."""
        if not self._by_chunks:
            return out.copy_(_by_doubling(values, self._discount))
        torch.mm(values.view(-1, _CHUNK), self._within, out=out.view(-1, _CHUNK))
        chunks = out.view(len(values), -1, _CHUNK)
        heads = chunks[:, :, 0] @ self._between
        chunks[:, :-1].addcmul_(heads[:, 1:, None], self._reach)
        return out


def _triangle(size: int, discount: float, like: Tensor) -> Tensor:
    """Entry (s, t) is discount^(s - t) for s >= t, else 0: x @ triangle sums from the end."""
    place = torch.arange(size, device=like.device)
    ahead = place[:, None] - place
    powers = like.new_tensor([discount**k for k in range(size)])
    return torch.where(ahead >= 0, powers[ahead.clamp(min=0)], 0.0)


def _by_doubling(values: Tensor, discount: float) -> Tensor:
    length = values.shape[-1]
    current, other = values.clone(), torch.empty_like(values)
    span = 1
    while span < length and (power := discount**span) > _NEGLIGIBLE:
        torch.add(current[:, :-span], current[:, span:], alpha=power, out=other[:, :-span])
        other[:, -span:] = current[:, -span:]
        current, other = other, current
        span *= 2
    return current


def has_gaps(mask: Tensor) -> bool:
    """Whether any row of a mask [B, T] has a true place after a false one."""
    # As integers: to compare bools and to look whether any is true costs five times as much.
    places = mask.view(torch.int8)
    return mask.shape[1] > 1 and len(mask) > 0 and int((places[:, 1:] - places[:, :-1]).max()) > 0


@dataclass(frozen=True, slots=True)
class Packing:
    """Rows with the gaps in their masks closed: valid tokens moved to the front, so that a carry bridges gaps.

    Args:
        mask: [B, T] bool.
        front: [B, T] bool, the same count of true places at the front of each row; ``mask`` itself if it has no gaps.
        lengths: valid tokens per row: [B] int64.
        has_gaps: whether any row has an invalid token before a valid one.
    """

    mask: Tensor
    front: Tensor
    lengths: Tensor
    has_gaps: bool

    @staticmethod
    def of(mask: Tensor) -> Packing:
        """Looks whether any row has a valid token after an invalid one."""
        lengths = row_tokens(mask)
        if not has_gaps(mask):
            return Packing(mask, mask, lengths, False)
        front = torch.arange(mask.shape[1], device=mask.device) < lengths[:, None]
        return Packing(mask, front, lengths, True)

    def rows(self, index: slice) -> Packing:
        """The packing of some rows."""
        return Packing(self.mask[index], self.front[index], self.lengths[index], self.has_gaps)

    def pack(self, *tensors: Tensor) -> list[Tensor]:
        """Valid values at the front of their row, 0 behind them; what stood off the mask is gone. New tensors."""
        if not self.has_gaps:
            bits = bits_of(self.mask, tensors[0].dtype)
            return [keep_bits(bits, values) for values in tensors]
        return [torch.zeros_like(x).masked_scatter_(self.front, x.masked_select(self.mask)) for x in tensors]

    def unpack_(self, packed: Tensor) -> None:
        """Front values back to their places, 0 elsewhere, in place; nothing to do where there are no gaps."""
        if self.has_gaps:
            values = packed.masked_select(self.front)
            packed.zero_().masked_scatter_(self.mask, values)
