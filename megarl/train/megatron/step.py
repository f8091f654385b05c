"""Updates over minibatches: plan all of them, count their denominators over all replicas, then forward-backward-step.

Invariants:
1. Denominators are those of the global minibatch, known before its first microbatch; a microbatch's loss is its share
   of the minibatch's loss, so shares add up over microbatches and data-parallel ranks.
2. Everything that can be wrong with the input is found, on every rank, before the first microbatch of the call.
3. Metrics returned are merged over minibatches and replicas, and equal on all ranks that return them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.algorithms.aggregate import Denominators
from megarl.data.batch import Batch
from megarl.observability.metrics import Last, Mean, Metrics, Sum, merge
from megarl.parallel.groups import ParallelGroups
from megarl.train.megatron import microbatch as mb
from megarl.train.megatron.forward import HeadOptions, ModelParts, TokenOutputs, forward_backward, forward_only
from megarl.train.megatron.objectives import Objective, share_metric
from megarl.train.megatron.optimizer import Optimizer


@dataclass(frozen=True, slots=True)
class StepContext:
    """What an update needs beside the batch: one rank's model, optimizer, groups and microbatch cap.

    Args:
        parts: this rank's part of the model.
        optimizer: its optimizer; None where only losses are evaluated.
        groups: process groups.
        cap: most tokens of a microbatch.
        prefix: first part of metric names, ``actor`` or ``critic``.
    """

    parts: ModelParts
    optimizer: Optimizer | None
    groups: ParallelGroups
    cap: int
    prefix: str


@dataclass(frozen=True, slots=True)
class _Minibatch:
    microbatches: list[mb.Microbatch]
    denominators: Denominators
    num_sequences: int


def update(
    context: StepContext, batch: Batch, minibatches: Sequence[Sequence[int]], objective: Objective
) -> Metrics | None:
    """One optimizer update per minibatch, in order.

    Args:
        context: this rank's model, optimizer and groups.
        batch: rows of this replica.
        minibatches: rows of each minibatch; a row may be in several (epochs). Every replica gives as many.
        objective: the loss.

    Returns:
        merged metrics on reporting ranks, None on others.

    Raises:
        DataError: a column is missing, or a sequence does not fit a microbatch.
        TrainError: replicas disagree about the number of minibatches.
    """
    optimizer = context.optimizer
    if optimizer is None:
        raise AssertionError("an update needs an optimizer")
    collected: list[Metrics] = []
    for number, minibatch in enumerate(_plan(context, batch, minibatches, objective)):
        optimizer.zero_grad()
        current = objective.of_minibatch(number, batch, partial(_outputs, context, minibatch))
        if current.kept is not None:
            minibatch = replace(minibatch, denominators=_recounted(context, current.kept))
        collected.append(current.minibatch_metrics)
        collected += _microbatch_metrics(context, batch, minibatch, current, train=True)
        if not minibatch.denominators.num_tokens:
            # Nothing to learn from: no gradient, and no weight decay or moment decay either.
            collected.append(_once(context, {f"{context.prefix}/empty_minibatches": Sum(1.0)}))
            continue
        result = optimizer.step()
        measured: Metrics = {f"{context.prefix}/skipped_updates": Sum(0.0 if result.applied else 1.0)}
        if result.applied:
            measured[f"{context.prefix}/grad_norm"] = Mean(result.grad_norm, 1.0)
            if context.parts.balance is not None:
                context.parts.balance.move_biases()
        collected.append(_once(context, measured))
        collected.append({f"{context.prefix}/lr": Last(result.learning_rate)})
    return _merge_over_replicas(context, collected)


def _recounted(context: StepContext, kept: Denominators) -> Denominators:
    """Denominators of what replicas kept of a minibatch, known to all pipeline stages; collective."""
    counts = torch.tensor([kept.num_tokens, kept.num_rows], dtype=torch.int64)
    counts = mb.count_globally(counts, context.groups.dp)
    # Only the last stage saw the log-probs: the others have counted nothing.
    num_tokens, num_rows = mb.largest(counts, context.groups.pp).tolist()
    return Denominators(num_tokens=num_tokens, num_rows=num_rows)


def evaluate(context: StepContext, batch: Batch, objective: Objective) -> Metrics | None:
    """The objective's loss and metrics over all rows of all replicas, without gradients."""
    collected: list[Metrics] = []
    for minibatch in _plan(context, batch, [range(len(batch))], objective):
        collected += _microbatch_metrics(context, batch, minibatch, objective, train=False)
    return _merge_over_replicas(context, collected)


def _plan(
    context: StepContext, batch: Batch, minibatches: Sequence[Sequence[int]], objective: Objective
) -> list[_Minibatch]:
    """Microbatches and denominators of every minibatch; collective over data-parallel ranks, twice in all."""
    batch.require("prompts", "responses", "response_mask", *objective.columns)
    mask = batch.ragged("response_mask")
    tokens = torch.zeros(len(batch), dtype=torch.int64).index_add_(0, mask.row_index(), mask.values.to(torch.int64))
    kept = [[row for row in rows if tokens[row] > 0] for rows in minibatches]
    plans = context.parts.plan(batch, kept, context.cap, context.groups.dp)
    counts = torch.tensor([[int(tokens[rows].sum()), len(rows)] for rows in kept], dtype=torch.int64).reshape(-1, 2)
    counts = mb.count_globally(counts, context.groups.dp)
    return [
        _Minibatch(
            [context.parts.pack(batch, rows) for rows in plan],
            Denominators(num_tokens=num_tokens, num_rows=num_rows),
            num_sequences=num_rows,
        )
        for plan, (num_tokens, num_rows) in zip(plans, counts.tolist(), strict=True)
    ]


def _microbatch_metrics(
    context: StepContext, batch: Batch, minibatch: _Minibatch, objective: Objective, *, train: bool
) -> list[Metrics]:
    """Run the microbatches of one minibatch; with ``train`` the reduced gradient is left in the buffers."""
    name = f"{context.prefix}/loss"
    columns = batch.only("prompts", "responses", "response_mask", *objective.columns)

    def loss(outputs: TokenOutputs, microbatch: mb.Microbatch) -> tuple[Tensor, Metrics]:
        rows = columns.select(microbatch.rows).to(context.parts.device)
        share, metrics = objective(outputs, rows, microbatch.rows, minibatch.denominators)
        num_rows = objective.num_rows(microbatch.rows)
        return share, {**metrics, name: share_metric(share, num_rows, minibatch.denominators)}

    def measure(outputs: TokenOutputs, microbatch: mb.Microbatch) -> Metrics:
        return loss(outputs, microbatch)[1] if microbatch.rows else {}

    if train:
        balance = context.parts.balance
        if balance is not None:
            # Of all its sequences, also of those that the objective keeps out of its loss.
            balance.begin(minibatch.num_sequences)
        results = forward_backward(context.parts, minibatch.microbatches, loss, objective.head)
        return results if balance is None else [*results, _once(context, balance.metrics(context.prefix))]
    return forward_only(context.parts, minibatch.microbatches, measure, objective.head)


def _outputs(context: StepContext, minibatch: _Minibatch, head: HeadOptions) -> tuple[TokenOutputs, list[int]] | None:
    """Log-probs of all this replica's rows of the minibatch without gradients; None off the last stage."""
    parts = forward_only(context.parts, minibatch.microbatches, lambda outputs, _: outputs.log_probs, head)
    if not context.groups.is_last_stage:
        return None
    flat = [log_probs for log_probs in parts if log_probs is not None]
    nothing = torch.zeros(0, dtype=torch.float32, device=context.parts.device)
    rows = [row for microbatch in minibatch.microbatches for row in microbatch.rows]
    return TokenOutputs(log_probs=torch.cat([nothing, *flat])), rows


def _once(context: StepContext, metrics: Metrics) -> Metrics:
    """Metrics that every replica knows, counted on the first one only."""
    return metrics if context.groups.coordinate.dp == 0 else {}


def _merge_over_replicas(context: StepContext, collected: list[Metrics]) -> Metrics | None:
    if not context.groups.is_last_stage:
        return None
    mine = merge(collected)
    group = context.groups.dp
    if group.size() > 1:
        parts: list[Metrics] = [{}] * group.size()
        dist.all_gather_object(parts, mine, group=group)
        mine = merge(parts)
    return mine if context.groups.reports else None
