"""Losses over rows of a batch: policy, value, and supervised fine-tuning.

Invariants:
1. What an objective returns for some rows is their share of the minibatch's loss: shares add up, whatever the cut.
2. ``response_mask`` says which tokens count. Rejection before the update has been applied to it; rejection that
   compares with the current policy (bypass mode) is applied to the whole minibatch before its first microbatch, and the
   denominators are counted anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

import torch
from torch import Tensor

from megarl.algorithms.aggregate import Denominators, aggregate, aggregate_rows
from megarl.algorithms.correction import Rejection, difference_metrics, gap_metrics, reject
from megarl.algorithms.kl import kl_penalty
from megarl.algorithms.masking import select
from megarl.algorithms.policy_losses import PolicyInputs
from megarl.algorithms.update_metrics import ratio_metrics
from megarl.algorithms.value_losses import value_loss
from megarl.data.batch import Batch, Ragged
from megarl.observability.metrics import Mean, Metrics
from megarl.train.engine import PolicyUpdate, ValueUpdate
from megarl.train.megatron.forward import HeadOptions, TokenOutputs

CLIPS_TOKENS = frozenset({"ppo", "vanilla", "clip_cov"})
"""Losses whose clip acts on a token's own ratio, on one side for each sign of the advantage."""

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

    @property
    def kept(self) -> Denominators | None:
        """Tokens and rows of this replica that an objective of one minibatch kept; None if it kept all."""
        ...

    @property
    def minibatch_metrics(self) -> Metrics:
        """What an objective of one minibatch measured on this replica before its first microbatch."""
        ...

    def num_rows(self, numbers: Sequence[int]) -> int:
        """How many of these batch rows count."""
        ...

    def of_minibatch(self, number: int, batch: Batch, first_pass: FirstPass) -> Objective:
        """The objective of the call's ``number``-th minibatch, should it need to see it as a whole first."""
        ...

    def __call__(
        self, outputs: TokenOutputs, rows: Batch, numbers: Sequence[int], denominators: Denominators
    ) -> tuple[Tensor, Metrics]:
        """The share of the minibatch's loss that ``rows`` (numbered ``numbers`` in the batch) have, and metrics."""
        ...


class _Plain:
    """An objective that needs to see no minibatch as a whole."""

    kept: Denominators | None = None
    minibatch_metrics: Metrics = {}  # noqa: RUF012  # never written

    def num_rows(self, numbers: Sequence[int]) -> int:
        return len(numbers)

    def of_minibatch(self, number: int, batch: Batch, first_pass: FirstPass) -> Self:
        return self


@dataclass(frozen=True, slots=True)
class FirstLook:
    """What a pass over a whole minibatch decided, before any gradient; tokens by batch row.

    Args:
        selected: tokens chosen by the loss's first pass.
        mask: tokens that are left after rejection.
        metrics: of the rejection.
    """

    selected: Mapping[int, Tensor] | None = None
    mask: Mapping[int, Tensor] | None = None
    metrics: Metrics = field(default_factory=dict)


class PolicyObjective:
    """A policy loss, less the entropy bonus, plus the KL to the reference policy; aggregated alike.

    ``loss = agg(L) - entropy_coef * agg(H) + kl_coef * agg(kl(lp, ref))``

    Args:
        update: the loss and its coefficients.
        optional_columns: further columns the batch has that a loss may read.
        reduce: sum of a tensor over data-parallel ranks, for losses with statistics of the whole minibatch.
        look: what was decided over one minibatch.
    """

    def __init__(
        self,
        update: PolicyUpdate,
        optional_columns: Sequence[str],
        reduce: Callable[[Tensor], Tensor] | None,
        look: FirstLook | None = None,
    ) -> None:
        self.update = update
        self.optional_columns = optional_columns
        self.reduce = reduce
        self.columns = ("advantages", *optional_columns)
        if update.kl_estimator is not None:
            self.columns += ("ref_log_probs",)
        self.head = HeadOptions(
            temperature=update.temperature, with_entropy=update.entropy_coef > 0 or update.measures_entropy
        )
        self.look = FirstLook() if look is None else look

    @property
    def kept(self) -> Denominators | None:
        if self.look.mask is None:
            return None
        sizes = [int(mask.sum()) for mask in self.look.mask.values()]
        return Denominators(sum(sizes), sum(size > 0 for size in sizes))

    @property
    def minibatch_metrics(self) -> Metrics:
        return self.look.metrics

    def num_rows(self, numbers: Sequence[int]) -> int:
        mask = self.look.mask
        return len(numbers) if mask is None else sum(bool(mask[number].any()) for number in numbers)

    def of_minibatch(self, number: int, batch: Batch, first_pass: FirstPass) -> PolicyObjective:
        update = self.update
        if not (update.loss.needs_first_pass or update.rejections):
            return self
        outcome = first_pass(HeadOptions(temperature=update.temperature))
        if outcome is None:  # another pipeline stage than the last
            return self._after(FirstLook(mask={} if update.rejections else None))
        outputs, numbers = outcome
        rows = batch.require("sample_id").select(numbers).to(_device_of(outputs))
        inputs = policy_inputs(outputs, rows)
        selected, kept, metrics = None, None, Metrics()
        if update.rejections:
            mask, metrics = _reject(inputs, update.rejections)
            inputs = replace(inputs, response_mask=mask)
            kept = _by_row(mask, rows, numbers)
        if update.loss.needs_first_pass:
            chosen = update.loss.first_pass(
                inputs, row_id=rows.tensor("sample_id"), seed=update.seed + number, reduce=self.reduce
            )
            selected = _by_row(chosen, rows, numbers)
        return self._after(FirstLook(selected, kept, metrics))

    def _after(self, look: FirstLook) -> PolicyObjective:
        return PolicyObjective(self.update, self.optional_columns, self.reduce, look)

    def __call__(
        self, outputs: TokenOutputs, rows: Batch, numbers: Sequence[int], denominators: Denominators
    ) -> tuple[Tensor, Metrics]:
        update, inputs = self.update, policy_inputs(outputs, rows, _padded_rows(self.look.selected, numbers))
        metrics = _gap(inputs, is_current="old_log_probs" not in rows) if update.measures_gap else {}
        if (kept := _padded_rows(self.look.mask, numbers)) is not None:
            inputs = replace(inputs, response_mask=kept)
        mask = inputs.response_mask

        def total(row_sums: Tensor) -> Tensor:
            mode = update.loss.aggregation or update.aggregation
            return aggregate_rows(row_sums, mask, mode, denominators=denominators, length=update.aggregation_length)

        policy = update.loss.row_sums(inputs)
        pg_loss = loss = total(policy.sums)
        metrics |= policy.metrics | _ratios(update, inputs)
        metrics["actor/pg_loss"] = share_metric(pg_loss, self.num_rows(numbers), denominators)
        if inputs.entropy is not None:
            metrics["actor/entropy"] = _token_mean(inputs.entropy, mask)
            if update.entropy_coef > 0:
                loss = loss - update.entropy_coef * total(select(mask, inputs.entropy).sum(-1))
        if update.kl_estimator is not None:
            reference = rows.ragged("ref_log_probs").padded()
            kl = kl_penalty(inputs.log_probs, reference, mask, update.kl_estimator)
            loss = loss + update.kl_coef * total(kl.sum(-1))
            metrics["actor/kl_loss"] = _token_mean(kl, mask)
        return loss, metrics


def _reject(inputs: PolicyInputs, rejections: Sequence[Rejection]) -> tuple[Tensor, Metrics]:
    """What the bounds on rollout/current leave of the mask."""
    if inputs.rollout_log_probs is None:
        raise AssertionError("rejection in the update needs rollout_log_probs")
    with torch.no_grad():
        log_ratio = inputs.log_probs.float() - inputs.rollout_log_probs.float()
        return reject(log_ratio, inputs.response_mask, rejections)


def _gap(inputs: PolicyInputs, *, is_current: bool) -> Metrics:
    """Current against rollout policy; their difference only where no update lies between the two."""
    rollout, mask = inputs.rollout_log_probs, inputs.response_mask
    if rollout is None:
        return {}
    current = inputs.log_probs.detach()
    return (difference_metrics(current, rollout, mask) if is_current else {}) | gap_metrics(current, rollout, mask)


def _ratios(update: PolicyUpdate, inputs: PolicyInputs) -> Metrics:
    keywords = update.loss.keywords if update.loss.kind in CLIPS_TOKENS else {}
    return ratio_metrics(
        inputs.log_probs,
        inputs.old_log_probs,
        inputs.advantages,
        inputs.response_mask,
        clip_low=keywords.get("clip_low"),
        clip_high=keywords.get("clip_high"),
    )


def _by_row(tokens: Tensor, rows: Batch, numbers: Sequence[int]) -> dict[int, Tensor]:
    return dict(zip(numbers, Ragged.from_padded(tokens, rows.response_lengths).rows(), strict=True))


def _padded_rows(tokens: Mapping[int, Tensor] | None, numbers: Sequence[int]) -> Tensor | None:
    return None if tokens is None else Ragged.from_rows([tokens[number] for number in numbers]).padded()


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


class ValueObjective(_Plain):
    """Clipped regression of values on returns, mean over tokens."""

    columns = ("values", "returns")
    head = HeadOptions()

    def __init__(self, update: ValueUpdate) -> None:
        self.update = update

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
        return loss, {**result.metrics, "critic/vf_loss": share_metric(loss, len(numbers), denominators)}


class SftObjective(_Plain):
    """Cross-entropy of the tokens under ``response_mask``, mean over tokens."""

    columns: tuple[str, ...] = ()
    head = HeadOptions()

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


def share_metric(share: Tensor, num_rows: int, denominators: Denominators) -> Mean:
    """A share of a minibatch's loss as a metric: over it, sums are its loss and counts are 1."""
    return Mean(float(share.detach()), num_rows / max(denominators.num_rows, 1))


def _token_mean(values: Tensor, mask: Tensor) -> Mean:
    return Mean(float(torch.where(mask, values.detach(), 0.0).sum()), float(mask.sum()))


def _device_of(outputs: TokenOutputs) -> torch.device:
    present = outputs.log_probs if outputs.log_probs is not None else outputs.values
    return torch.device("cpu") if present is None else present.device
