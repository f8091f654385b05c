"""How token losses become one number whose denominators belong to the global minibatch."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from megarl.algorithms.masking import bits_of, blocks, keep_bits, spread_rows, widen
from megarl.algorithms.masking import row_tokens as count_row_tokens
from megarl.errors import ConfigError

logger = logging.getLogger(__name__)

Aggregation: TypeAlias = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"
]


@dataclass(frozen=True, slots=True)
class Denominators:
    """What the means of one optimizer update divide by: counts over the whole minibatch, over all ranks.

    Args:
        num_tokens: valid tokens.
        num_rows: rows with at least one valid token.
    """

    num_tokens: int
    num_rows: int

    def __add__(self, other: Denominators) -> Denominators:
        return Denominators(self.num_tokens + other.num_tokens, self.num_rows + other.num_rows)


def count(response_mask: Tensor) -> Denominators:
    """Denominators of the rows at hand; add those of all ranks and microbatches before the first backward.

    Shapes: response_mask [B, T] bool.
    """
    per_row = count_row_tokens(response_mask)
    tokens, rows = torch.stack([per_row.sum(), (per_row > 0).sum()]).tolist()
    return Denominators(tokens, rows)


def aggregate(
    token_loss: Tensor,
    response_mask: Tensor,
    mode: Aggregation,
    *,
    denominators: Denominators,
    length: int | None = None,
    is_masked: bool = False,
) -> Tensor:
    """A microbatch's contribution to the loss: contributions of all microbatches and ranks add up to the global value.

    token-mean: sum / num_tokens (DAPO, arXiv:2503.14476, eq. 8). token-sum: sum. seq-mean-token-sum: sum / num_rows.
    seq-mean-token-sum-norm: sum / (num_rows * length), a constant length (Dr. GRPO, arXiv:2503.20783, section 3.2).
    seq-mean-token-mean: mean over rows of the row's own token mean (GRPO, arXiv:2402.03300, eq. 3).

    A minibatch without valid tokens gives 0 with a graph, and a warning. Under data parallelism gradients of the
    contributions must be summed over ranks, not averaged.

    Shapes: token_loss [B, T] float, response_mask [B, T] bool; a row must be whole. Returns a scalar, at least float32.

    Args:
        token_loss: loss of each token, whatever it holds off the mask.
        response_mask: tokens that count.
        mode: the mean.
        denominators: counts of the global minibatch.
        length: of seq-mean-token-sum-norm.
        is_masked: token_loss and its derivative are 0 off the mask, as those of ``TokenLoss`` and ``kl_penalty`` are;
            then no masked copy is made, forward or backward.

    Raises:
        ConfigError: unknown mode, or seq-mean-token-sum-norm without a length.
    """
    wide = widen(token_loss)
    row_sums: Tensor = wide.sum(-1) if is_masked else _RowSums.apply(wide, response_mask)
    return aggregate_rows(row_sums, response_mask, mode, denominators=denominators, length=length)


def aggregate_rows(
    row_sums: Tensor,
    response_mask: Tensor,
    mode: Aggregation,
    *,
    denominators: Denominators,
    length: int | None = None,
) -> Tensor:
    """The same from the sums of the token losses over each row, of which every mean is made.

    Shapes: row_sums [B] at least float32, 0 for empty rows; response_mask [B, T] bool. Returns a scalar.

    Raises:
        ConfigError: as above.
    """
    if denominators.num_tokens == 0:
        logger.warning("minibatch without a single valid token: its loss is 0")
    tokens = max(denominators.num_tokens, 1)
    rows = max(denominators.num_rows, 1)
    if mode == "token-mean":
        weight: Tensor | float = 1 / tokens
    elif mode == "token-sum":
        weight = 1.0
    elif mode == "seq-mean-token-sum":
        weight = 1 / rows
    elif mode == "seq-mean-token-sum-norm":
        if length is None:
            raise ConfigError("seq-mean-token-sum-norm needs a constant length", fix="set aggregation_length")
        weight = 1 / (rows * length)
    elif mode == "seq-mean-token-mean":
        per_row = count_row_tokens(response_mask).clamp(min=1)
        weight = (per_row * rows).to(row_sums.dtype).reciprocal()
    else:
        raise ConfigError(f"unknown loss aggregation {mode!r}")
    return (row_sums * weight).sum()


class _RowSums(torch.autograd.Function):
    """Sum of each row over its mask, [B, T] -> [B], without a masked copy of the input."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, values: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        sums = torch.empty(len(values), dtype=values.dtype, device=values.device)
        for rows in blocks(values.shape[0], values.shape[1], values.device):
            sums[rows] = keep_bits(bits_of(mask[rows], values.dtype), values[rows]).sum(-1)
        return sums

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return spread_rows(grad, mask), None
