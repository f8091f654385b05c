"""Discounted sums from the end of a row: y_t = x_t + c y_{t+1} over the valid tokens, in log2(T) vector operations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# A discount power below this contributes nothing to a float32 sum of comparable terms, however long.
_NEGLIGIBLE = 1e-30


def discounted_reverse_sum(values: Tensor, discount: float) -> Tensor:
    """y_t = x_t + discount * y_{t+1} along the last axis, y after the end 0.

    By doubling: after step k each element holds the sum of its next 2^k terms. The summation is a tree, so its error
    grows with log T; no step depends on the one before it in time, unlike the loop over T that peers run.

    Shapes: [b, T] float, gaps already closed (``Packing``). Returns [b, T].
    """
    length = values.shape[-1]
    current, other = values, torch.empty_like(values)
    span = 1
    while span < length and (power := discount**span) > _NEGLIGIBLE:
        torch.add(current[:, :-span], current[:, span:], alpha=power, out=other[:, :-span])
        other[:, -span:] = current[:, -span:]
        # The caller's tensor is read only; from the second step on two own buffers alternate.
        current, other = other, torch.empty_like(values) if current is values else current
        span *= 2
    return current


@dataclass(frozen=True, slots=True)
class Packing:
    """Rows with the gaps in their masks closed: valid tokens moved to the front, so that a carry bridges gaps.

    Args:
        mask: [B, T] bool.
        front: [B, T] bool, the same count of true places at the front of each row; ``mask`` itself if it has no gaps.
        lengths: valid tokens per row: [B] int64.
    """

    mask: Tensor
    front: Tensor
    lengths: Tensor

    @staticmethod
    def of(mask: Tensor) -> Packing:
        """Looks whether any row has a valid token after an invalid one."""
        lengths = mask.sum(-1, dtype=torch.int32).long()
        has_gaps = bool((mask[:, 1:] & ~mask[:, :-1]).any())
        if not has_gaps:
            return Packing(mask, mask, lengths)
        front = torch.arange(mask.shape[1], device=mask.device) < lengths[:, None]
        return Packing(mask, front, lengths)

    def rows(self, index: slice) -> Packing:
        """The packing of some rows."""
        return Packing(self.mask[index], self.front[index], self.lengths[index])

    @property
    def has_gaps(self) -> bool:
        """Whether packing moves anything."""
        return self.front is not self.mask

    def pack(self, values: Tensor) -> Tensor:
        """Valid values at the front of their row, 0 behind them; what stood off the mask is gone."""
        if not self.has_gaps:
            return torch.where(self.mask, values, 0.0)
        return torch.zeros_like(values).masked_scatter_(self.front, values.masked_select(self.mask))

    def unpack(self, packed: Tensor) -> Tensor:
        """Front values back at their places, 0 elsewhere."""
        if not self.has_gaps:
            return torch.where(self.mask, packed, 0.0)
        return torch.zeros_like(packed).masked_scatter_(self.mask, packed.masked_select(self.front))
