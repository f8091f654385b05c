"""Losses over rows of a batch: policy, value, and supervised fine-tuning.

Invariants:
1. What an objective returns for some rows is their share of the minibatch's loss: shares add up, whatever the cut.
2. ``response_mask`` alone says which tokens count; rejection has been applied to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from megarl.algorithms.aggregate import Denominators, aggregate
from megarl.algorithms.correction import difference_metrics, gap_metrics
from megarl.algorithms.kl import kl_penalty
from megarl.algorithms.policy_losses import PolicyInputs
from megarl.algorithms.value_losses import value_loss
from megarl.data.batch import Batch, Ragged
from megarl.observability.metrics import Mean, Metrics
from megarl.train.engine import PolicyUpdate, ValueUpdate
from megarl.train.megatron.forward import HeadOptions, TokenOutputs

FirstPass = Callable[[HeadOptions], "tuple[TokenOutputs, Sequence[int]] | None"]
"""Outputs of all this replica's rows of a minibatch at the current weights, and the rows; None off the last stage."""


class Objective(Protocol):
    """A loss over rows of a batch."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns it reads beside prompts, responses and response_mask."""
        ...

    @property
    def head(self) -> HeadOptions:
        """How the head is read."""
        ...

    def of_minibatch(self, number: int, batch: Batch, first_pass: FirstPass) -> Objective:
        """The objective of the call's ``number``-th minibatch, should it need to see it as a whole first."""
        ...

    def __call__(
        self, outputs: TokenOutputs, rows: Batch, numbers: Sequence[int], denominators: Denominators
    ) -> tuple[Tensor, Metrics]:
        """The share of the minibatch's loss that ``rows`` (numbered ``numbers`` in the batch) have, and metrics."""
        ...


class PolicyObjective:
    """A policy loss, less the entropy bonus, plus the KL to the reference policy; aggregated alike.

    ``loss = agg(L) - entropy_coef * agg(H) + kl_coef * agg(kl(lp, ref))``

    Args:
        update: the loss and its coefficients.
        optional_columns: further columns the batch has that a loss may read.
        reduce: sum of a tensor over data-parallel ranks, for losses with statistics of the whole minibatch.
        selected: tokens of each batch row chosen by the loss's first pass over one minibatch.
    """

    def __init__(
        self,
        update: PolicyUpdate,
        optional_columns: Sequence[str],
        reduce: Callable[[Tensor], Tensor] | None,
        selected: Mapping[int, Tensor] | None = None,
    ) -> None:
        self.update = update
        self.optional_columns = optional_columns
        self.reduce = reduce
        self.columns = ("advantages", *optional_columns)
        if update.kl_estimator is not None:
            self.columns += ("ref_log_probs",)
        self.head = HeadOptions(temperature=update.temperature, with_entropy=update.entropy_coef > 0)
        self.selected = selected

    def of_minibatch(self, number: int, batch: Batch, first_pass: FirstPass) -> PolicyObjective:
        if not self.update.loss.needs_first_pass:
            return self
        outcome = first_pass(self.head)
        if outcome is None:
            return self
        outputs, numbers = outcome
        rows = batch.require("sample_id").select(numbers).to(_device_of(outputs))
        chosen = self.update.loss.first_pass(
            policy_inputs(outputs, rows),
            row_id=rows.tensor("sample_id"),
            seed=self.update.seed + number,
            reduce=self.reduce,
        )
        by_row = Ragged.from_padded(chosen, rows.response_lengths).rows()
        return PolicyObjective(self.update, self.optional_columns, self.reduce, dict(zip(numbers, by_row, strict=True)))

    def __call__(
        self, outputs: TokenOutputs, rows: Batch, numbers: Sequence[int], denominators: Denominators
    ) -> tuple[Tensor, Metrics]:
        selected = None if self.selected is None else Ragged.from_rows([self.selected[n] for n in numbers]).padded()
        inputs = policy_inputs(outputs, rows, selected)
        mask = inputs.response_mask

        def total(token_loss: Tensor, is_masked: bool = True) -> Tensor:
            return aggregate(
                token_loss,
                mask,
                self.update.loss.aggregation or self.update.aggregation,
                denominators=denominators,
                length=self.update.aggregation_length,
                is_masked=is_masked,
            )

        policy = self.update.loss(inputs)
        pg_loss = loss = total(policy.loss)
        metrics = {**policy.metrics, "actor/pg_loss": share_metric(pg_loss, numbers, denominators)}
        if "old_log_probs" not in rows and inputs.rollout_log_probs is not None:
            # Nobody has compared the two policies yet.
            metrics |= difference_metrics(inputs.old_log_probs, inputs.rollout_log_probs, mask)
            metrics |= gap_metrics(inputs.old_log_probs, inputs.rollout_log_probs, mask)
        if inputs.entropy is not None:
            loss = loss - self.update.entropy_coef * total(inputs.entropy, is_masked=False)
            metrics["actor/entropy"] = _token_mean(inputs.entropy, mask)
        if self.update.kl_estimator is not None:
            reference = rows.ragged("ref_log_probs").padded()
            kl = kl_penalty(inputs.log_probs, reference, mask, self.update.kl_estimator)
            loss = loss + self.update.kl_coef * total(kl)
            metrics["actor/kl_loss"] = _token_mean(kl, mask)
        return loss, metrics


def policy_inputs(outputs: TokenOutputs, rows: Batch, selected: Tensor | None = None) -> PolicyInputs:
    """What a policy loss reads of these rows, padded [B, T].

    Without the column ``old_log_probs`` the policy before the update is the current one: ratios are 1.
    """

    def column(name: str) -> Tensor | None:
        return rows.ragged(name).padded() if name in rows else None

    log_probs, old_log_probs = _padded(outputs.log_probs, rows), column("old_log_probs")
    return PolicyInputs(
        log_probs=log_probs,
        old_log_probs=log_probs.detach() if old_log_probs is None else old_log_probs,
        advantages=rows.ragged("advantages").padded(),
        response_mask=rows.ragged("response_mask").padded(),
        rollout_log_probs=column("rollout_log_probs"),
        importance_weights=column("importance_weights"),
        entropy=None if outputs.entropy is None else _padded(outputs.entropy, rows),
        selected=selected,
    )


class ValueObjective:
    """Clipped regression of values on returns, mean over tokens."""

    columns = ("values", "returns")
    head = HeadOptions()

    def __init__(self, update: ValueUpdate) -> None:
        self.update = update

    def of_minibatch(self, number: int, batch: Batch, first_pass: FirstPass) -> ValueObjective:
        return self

    def __call__(
        self, outputs: TokenOutputs, rows: Batch, numbers: Sequence[int], denominators: Denominators
    ) -> tuple[Tensor, Metrics]:
        mask = rows.ragged("response_mask").padded()
        result = value_loss(
            _padded(outputs.values, rows),
            old_values=rows.ragged("values").padded(),
            returns=rows.ragged("returns").padded(),
            response_mask=mask,
            clip=self.update.clip_value,
        )
        loss = aggregate(result.loss, mask, "token-mean", denominators=denominators, is_masked=True)
        return loss, {**result.metrics, "critic/vf_loss": share_metric(loss, numbers, denominators)}


class SftObjective:
    """Cross-entropy of the tokens under ``response_mask``, mean over tokens."""

    columns: tuple[str, ...] = ()
    head = HeadOptions()

    def of_minibatch(self, number: int, batch: Batch, first_pass: FirstPass) -> SftObjective:
        return self

    def __call__(
        self, outputs: TokenOutputs, rows: Batch, numbers: Sequence[int], denominators: Denominators
    ) -> tuple[Tensor, Metrics]:
        mask = rows.ragged("response_mask").padded()
        return aggregate(-_padded(outputs.log_probs, rows), mask, "token-mean", denominators=denominators), {}


def _padded(values: Tensor | None, rows: Batch) -> Tensor:
    """Flat per-token outputs [M] as [B, T], with their graph."""
    if values is None:
        raise AssertionError("the head did not compute what the objective reads")
    return rows.ragged("responses").with_values(values).padded()


def share_metric(share: Tensor, rows: Sequence[int], denominators: Denominators) -> Mean:
    """A share of a minibatch's loss as a metric: over it, sums are its loss and counts are 1."""
    return Mean(float(share.detach()), len(rows) / denominators.num_rows)


def _token_mean(values: Tensor, mask: Tensor) -> Mean:
    return Mean(float(torch.where(mask, values.detach(), 0.0).sum()), float(mask.sum()))


def _device_of(outputs: TokenOutputs) -> torch.device:
    present = outputs.log_probs if outputs.log_probs is not None else outputs.values
    return torch.device("cpu") if present is None else present.device
