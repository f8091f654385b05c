"""Log-probs and entropy of target tokens straight from hidden states, on vocabulary shards, in chunks of tokens.

A microbatch of N tokens and a vocabulary of V has N x V float32 logits: 10 GB at 16,384 tokens and 152k entries. Here
they exist one chunk of tokens at a time, in the forward pass and again in the backward pass, which recomputes them.

Invariants:
1. Never more than ``chunk_tokens`` rows of logits are held; what is saved for backward is [M] or an input.
2. Logits are float32 sums of exact products, never rounded to the inputs' dtype; softmax, log-probs, entropy and sums
   are float32; the products of the backward pass keep the inputs' dtype.
3. Columns of the padded vocabulary are absent: no probability, no gradient.
4. The result is the same on every tensor-parallel rank and does not depend on the tensor-parallel size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def vocab_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    positions: Tensor | None = None,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    with_entropy: bool = False,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    sum_pi_squared: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target under softmax(hidden W^T / temperature), and the softmax's entropy if asked.

    ``lp = z_y - logsumexp(z)`` and ``H = logsumexp(z) - sum_v p_v z_v`` with ``z = hidden W^T / temperature``. Both are
    differentiable in ``hidden`` and ``weight``; with tensor parallelism the gradient of ``hidden`` is already summed
    over the shards (all-reduced, or reduce-scattered if sequence-parallel).

    Args:
        hidden: [N, H] hidden states, float32 or bfloat16; [N / tp, H], this rank's slice, if ``sequence_parallel``.
        weight: [Vp / tp, H], this rank's rows of the output matrix, Vp being the padded vocabulary.
        targets: [M] int64 token ids below ``vocab_size``.
        vocab_size: entries of the vocabulary that exist; rows of ``weight`` beyond it are ignored.
        positions: [M] int64 rows of the full [N, H] that predict the targets; None means all of them in order.
        temperature: softmax temperature, above 0.
        chunk_tokens: tokens whose logits are held at once.
        with_entropy: also return the entropy.
        tp_group: the tensor-parallel group; None is one rank.
        sequence_parallel: ``hidden`` is split over ``tp_group`` along the tokens.
        sum_pi_squared: [M] float32 that receives ``sum_v p_v^2`` of each softmax, without gradient; None is not
            computed.

    Returns:
        log-probs [M] float32 and entropy [M] float32 (None unless asked), in nats.

    Raises:
        ValueError: ``temperature`` or ``chunk_tokens`` is not positive.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0, not {temperature}: greedy sampling has no log-probs")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, not {chunk_tokens}")
    shard = _Shard(weight.shape[0], vocab_size, tp_group)
    log_probs, entropy = _VocabLogProbs.apply(
        hidden, weight, targets, positions, shard, temperature, chunk_tokens, with_entropy, sequence_parallel,
        sum_pi_squared,
    )  # fmt: skip
    return log_probs, entropy


class _Shard:
    """Which vocabulary entries this rank holds, and sums over the ranks that hold the others."""

    def __init__(self, rows: int, vocab_size: int, group: dist.ProcessGroup | None) -> None:
        self.group = group if group is not None and group.size() > 1 else None
        rank = self.group.rank() if self.group is not None else 0
        self.start = rank * rows
        self.size = max(0, min(rows, vocab_size - self.start))

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        if self.group is not None:
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor

    def gather_tokens(self, hidden: Tensor) -> Tensor:
        """[N / tp, H] of each rank -> [N, H]."""
        if self.group is None:
            return hidden
        full = hidden.new_empty(hidden.shape[0] * self.group.size(), *hidden.shape[1:])
        dist.all_gather_single(full, hidden.contiguous(), group=self.group)
        return full

    def reduce_scatter_tokens(self, grad: Tensor) -> Tensor:
        """[N, H] summed over ranks -> [N / tp, H] of each."""
        if self.group is None:
            return grad
        part = grad.new_empty(grad.shape[0] // self.group.size(), *grad.shape[1:])
        dist.reduce_scatter_single(part, grad.contiguous(), group=self.group)
        return part

    def local(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Row of each target in this shard (0 where it is elsewhere) and whether it is here."""
        here = (targets >= self.start) & (targets < self.start + self.size)
        return torch.where(here, targets - self.start, 0), here


def _operand(weight: Tensor) -> Tensor:
    """The output matrix as the logits' product takes it: in float32 on CPU, where PyTorch cannot widen the result."""
    return weight if weight.is_cuda else weight.float()


def _chunk_logits(hidden: Tensor, operand: Tensor, temperature: float) -> Tensor:
    """float32 logits [C, V'] of one chunk, divided by the temperature.

    Logits rounded to bfloat16 would cost as much accuracy as all layers together.
    """
    if operand.dtype == torch.float32:
        logits = hidden.float() @ operand.t()
    else:
        logits = torch.mm(hidden, operand.t(), out_dtype=torch.float32)
    return logits if temperature == 1.0 else logits.div_(temperature)


class _VocabLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        positions: Tensor | None,
        shard: _Shard,
        temperature: float,
        chunk_tokens: int,
        with_entropy: bool,
        sequence_parallel: bool,
        sum_pi_squared: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        rows = shard.gather_tokens(hidden) if sequence_parallel else hidden
        num_tokens = rows.shape[0]
        if positions is not None:
            rows = rows.index_select(0, positions)
        logsumexp = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        log_probs = torch.empty_like(logsumexp)
        entropy = torch.empty_like(logsumexp) if with_entropy else None
        operand = _operand(weight[: shard.size])
        for start in range(0, len(targets), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            logits = _chunk_logits(rows[chunk], operand, temperature)
            squares = None if sum_pi_squared is None else sum_pi_squared[chunk]
            largest, log_total, target, mean_logit = _statistics(logits, targets[chunk], shard, with_entropy, squares)
            logsumexp[chunk] = largest + log_total
            log_probs[chunk] = target - log_total
            if entropy is not None:
                entropy[chunk] = log_total - mean_logit
        ctx.save_for_backward(hidden, weight, targets, positions, logsumexp, entropy)
        ctx.shard, ctx.temperature, ctx.chunk_tokens = shard, temperature, chunk_tokens
        ctx.sequence_parallel, ctx.num_tokens = sequence_parallel, num_tokens
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, positions, logsumexp, entropy = ctx.saved_tensors
        shard: _Shard = ctx.shard
        rows = shard.gather_tokens(hidden) if ctx.sequence_parallel else hidden
        if positions is not None:
            rows = rows.index_select(0, positions)
        local = weight[: shard.size]
        operand = _operand(local)
        grad_rows = torch.empty_like(rows)
        # With adapters the matrix is frozen.
        is_trained = ctx.needs_input_grad[1]
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if is_trained else None
        for start in range(0, len(targets), ctx.chunk_tokens):
            chunk = slice(start, start + ctx.chunk_tokens)
            logits = _chunk_logits(rows[chunk], operand, ctx.temperature)
            index, here = shard.local(targets[chunk])
            grad_logits = _logits_gradient(
                logits,
                logsumexp[chunk],
                None if entropy is None else entropy[chunk],
                index,
                here,
                None if grads[0] is None else grads[0][chunk],
                None if grads[1] is None else grads[1][chunk],
            )
            if ctx.temperature != 1.0:
                grad_logits.div_(ctx.temperature)
            grad_logits = grad_logits.to(rows.dtype)
            grad_rows[chunk] = grad_logits @ local
            if grad_weight is None:
                continue
            if rows.dtype == torch.float32:
                grad_weight[: shard.size].addmm_(grad_logits.t(), rows[chunk])
            else:
                grad_weight[: shard.size] += grad_logits.t() @ rows[chunk]
        grad_hidden = _hidden_gradient(grad_rows, positions, ctx.num_tokens, shard, ctx.sequence_parallel)
        grad_of_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_of_weight, None, None, None, None, None, None, None, None


def _statistics(
    logits: Tensor, targets: Tensor, shard: _Shard, with_entropy: bool, sum_pi_squared: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Largest logit m, and relative to it log-sum-exp, target logit and mean logit, each [C] over the vocabulary.

    Relative, because adding m and taking it away again would cost the log-prob its last digits. The mean logit (under
    the softmax) is zero unless the entropy is wanted. Two collectives: the maximum, then the sums stacked. The sums of
    squared probabilities [C] are written into ``sum_pi_squared``.
    """
    if shard.size:
        largest = logits.amax(dim=-1)
    else:  # every column of this shard is padding
        largest = logits.new_full((logits.shape[0],), -torch.inf)
    shard.all_reduce(largest, dist.ReduceOp.MAX)
    index, here = shard.local(targets)
    sums = logits.new_zeros(4, logits.shape[0])
    if shard.size:
        logits = logits - largest[:, None]
        sums[0] = torch.where(here, logits.gather(1, index[:, None]).squeeze(1), 0.0)
        exponentials = logits.exp()
        sums[1] = exponentials.sum(dim=-1)
        if sum_pi_squared is not None:
            sums[3] = torch.linalg.vector_norm(exponentials, dim=-1).square()
        if with_entropy:
            sums[2] = exponentials.mul_(logits).sum(dim=-1)
    shard.all_reduce(sums)
    target, total, weighted, squares = sums
    if sum_pi_squared is not None:
        sum_pi_squared.copy_(squares / total.square())
    return largest, total.log(), target, weighted / total


def _logits_gradient(
    logits: Tensor,
    logsumexp: Tensor,
    entropy: Tensor | None,
    index: Tensor,
    here: Tensor,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """D loss / d z [C, V'] float32: ``g_lp (1[v = y] - p_v) - g_H p_v (log p_v + H)``."""
    log_p = logits.sub_(logsumexp[:, None])
    if grad_log_probs is None:
        grad_log_probs = torch.zeros_like(logsumexp)
    if grad_entropy is not None and entropy is not None:
        p = log_p.exp()
        factor = log_p.add_(entropy[:, None]).mul_(grad_entropy[:, None]).add_(grad_log_probs[:, None])
        grad = p.mul_(factor).neg_()
    else:
        grad = log_p.exp_().mul_(-grad_log_probs[:, None])
    if grad.shape[1]:
        grad.scatter_add_(1, index[:, None], torch.where(here, grad_log_probs, 0.0)[:, None])
    return grad


def _hidden_gradient(
    grad_rows: Tensor, positions: Tensor | None, num_tokens: int, shard: _Shard, sequence_parallel: bool
) -> Tensor:
    """Gradient of this rank's ``hidden`` from that of the selected rows: summed over shards, zero elsewhere."""
    if not sequence_parallel:
        shard.all_reduce(grad_rows)
    if positions is not None:
        full = grad_rows.new_zeros(num_tokens, grad_rows.shape[1])
        grad_rows = full.index_add_(0, positions, grad_rows)
    return shard.reduce_scatter_tokens(grad_rows) if sequence_parallel else grad_rows
