"""What a policy loss is: its inputs, its result, and how one is built by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms.aggregate import Aggregation
from megarl.algorithms.masking import (
    LOG_RATIO_BOUND,
    Reduce,
    attach,
    bits_of,
    blocks,
    keep_bits,
    num_tokens,
    row_tokens,
    select,
    to_floats,
    widen,
)
from megarl.algorithms.registry import Registry, bind_options, keywords_of
from megarl.errors import ConfigError
from megarl.observability.metrics import Mean, Metrics


@dataclass(frozen=True, slots=True)
class PolicyInputs:
    """One microbatch (or a whole local minibatch in a first pass), padded on the right.

    Shapes: response_mask [B, T] bool; all others [B, T] float, whatever they hold off the mask.

    Args:
        log_probs: of the current policy, differentiable.
        old_log_probs: of the proximal policy; in bypass mode those of the rollout policy.
        advantages: without gradient.
        response_mask: tokens that count, after rejection.
        rollout_log_probs: of the policy that sampled.
        importance_weights: detached factors of the token loss, from rollout correction.
        entropy: of the current policy's distribution at each token, differentiable.
        selected: tokens chosen by the loss's own first pass (``PolicyLoss.first_pass``), bool.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    response_mask: Tensor
    rollout_log_probs: Tensor | None = None
    importance_weights: Tensor | None = None
    entropy: Tensor | None = None
    selected: Tensor | None = None

    def rows(self, index: slice | Tensor) -> PolicyInputs:
        """The same inputs of some rows."""
        return PolicyInputs(*(None if (x := getattr(self, name)) is None else x[index] for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Loss of each token before aggregation: [B, T] at least float32, exactly 0 off the mask; and what was measured."""

    loss: Tensor
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class RowLoss:
    """Sums of the token loss over each row: [B] at least float32, 0 for an empty row; and what was measured.

    All that an aggregation reads, and cheaper than the tokens' losses, which then never leave the cache.
    """

    sums: Tensor
    metrics: Metrics


class Block:
    """Some rows of the inputs with everything off the mask replaced by 0: what the formulas of the losses read.

    All tensors are [b, T], at least float32, without gradient; off the mask the log-ratio and the advantage are 0 and
    the ratio is 1. ``loss`` and ``slope`` are where the formula's results end up: one that writes its last operation
    there saves a copy.
    """

    def __init__(self, inputs: PolicyInputs, loss: Tensor, slope: Tensor) -> None:
        self.inputs = inputs
        self.mask = inputs.response_mask
        self.loss = loss
        self.slope = slope
        self._bits = bits_of(self.mask, loss.dtype)

    def select(self, values: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Values on the mask, 0 elsewhere."""
        return keep_bits(self._bits, values.to(self.loss.dtype), out=out)

    @cached_property
    def log_probs(self) -> Tensor:
        """Current log-probs lp."""
        return self.select(self.inputs.log_probs)

    @cached_property
    def old_log_probs(self) -> Tensor:
        """Proximal log-probs old."""
        return self.select(self.inputs.old_log_probs)

    @cached_property
    def advantages(self) -> Tensor:
        """Advantages A."""
        return self.select(self.inputs.advantages)

    @cached_property
    def free_log_ratio(self) -> Tensor:
        """Log-ratio lp - old, unclamped."""
        difference = self.inputs.log_probs.to(self.loss.dtype) - self.inputs.old_log_probs.to(self.loss.dtype)
        return keep_bits(self._bits, difference, out=difference)

    @cached_property
    def log_ratio(self) -> Tensor:
        """Log-ratio d = clamp(lp - old, -20, 20)."""
        return self.free_log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)

    def sum_of_log_ratios(self) -> Tensor:
        """Sum of d; the last thing read of a block, as it may take the free log-ratio's memory."""
        if "log_ratio" in self.__dict__ or "free_log_ratio" in self.__dict__:
            return self.log_ratio.sum()
        return self.free_log_ratio.clamp_(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).sum()

    @cached_property
    def inside(self) -> Tensor:
        """1.0 where the clamp of d does not act, so that d follows lp; else 0.0."""
        return torch.eq(self.log_ratio, self.free_log_ratio, out=torch.empty_like(self.log_ratio))

    @cached_property
    def ratio(self) -> Tensor:
        """Ratio rho = exp(d)."""
        return self.log_ratio.exp()

    @cached_property
    def selected(self) -> tuple[Tensor, Tensor]:
        """Rows and positions of the valid tokens chosen by the first pass, which are few: int64 [N] each."""
        assert self.inputs.selected is not None  # PolicyLoss.__call__ refuses inputs without it
        rows, positions = (self.inputs.selected & self.mask).nonzero(as_tuple=True)
        return rows, positions

    @property
    def weight(self) -> Tensor:
        """Importance weights."""
        assert self.inputs.importance_weights is not None
        return self.select(self.inputs.importance_weights)

    @property
    def row_weight(self) -> Tensor:
        """Geometric mean of a row's importance weights [b, 1]; 0 if one of them is 0."""
        assert self.inputs.importance_weights is not None
        return self.row_mean(self.select(self.inputs.importance_weights.to(self.loss.dtype).log())).exp()

    @cached_property
    def tokens_of_row(self) -> Tensor:
        """Valid tokens of each row, at least 1: [b, 1]."""
        return row_tokens(self.mask).clamp(min=1)[:, None]

    def row_mean(self, values: Tensor) -> Tensor:
        """Mean over a row's valid tokens of values that are 0 off the mask: [b, 1]; 0 for an empty row."""
        return values.sum(-1, keepdim=True) / self.tokens_of_row


@dataclass(frozen=True, slots=True)
class Terms:
    """A formula's result on a block.

    Args:
        loss: token loss [b, T], 0 off the mask.
        slope: its derivative with respect to log_probs [b, T]. For a loss that couples the tokens of a row, the
            derivative of the row's mean loss times the row's number of tokens.
        sums: totals over the block's valid tokens, scalars; each becomes the metric ``actor/<name>``, a token mean.
    """

    loss: Tensor
    slope: Tensor
    sums: dict[str, Tensor]


# (inputs of the whole local minibatch with log_probs of the current weights, row_id [B], seed, reduce, options) -> [B,
# T]
FirstPass = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class LossEntry:
    """A registered policy loss before its options are bound.

    Args:
        formula: built-in: Block -> Terms; a user's: PolicyInputs -> TokenLoss, differentiated by autograd.
        is_custom: whether ``formula`` is a user's.
        aggregation: the only aggregation the loss is defined for, if there is one.
        first_pass: selects tokens from statistics over the whole minibatch, before any gradient.
        weighs_rows: importance weights enter as their geometric mean over the row, as the loss itself is one number a
        row.
    """

    formula: Callable[..., Any]
    is_custom: bool = False
    aggregation: Aggregation | None = None
    first_pass: FirstPass | None = None
    weighs_rows: bool = False


class PolicyLoss:
    """A policy loss with its options bound, called on one microbatch after another."""

    def __init__(self, kind: str, entry: LossEntry, keywords: Mapping[str, Any]) -> None:
        self.kind = kind
        self.keywords = dict(keywords)
        self._entry = entry

    @property
    def aggregation(self) -> Aggregation | None:
        """The aggregation this loss forces, or None if any will do."""
        return self._entry.aggregation

    @property
    def needs_first_pass(self) -> bool:
        """Whether log-probs of the whole minibatch at the current weights are needed before its first microbatch."""
        return self._entry.first_pass is not None

    def first_pass(self, inputs: PolicyInputs, *, row_id: Tensor, seed: int, reduce: Reduce = None) -> Tensor:
        """Tokens the loss treats apart, chosen over the whole minibatch: [B, T] bool, for ``PolicyInputs.selected``.

        Args:
            inputs: all rows of the minibatch on this rank, log_probs at the current weights (gradients not needed).
            row_id: [B] int64, unique and the same however rows are distributed (sample_id): the random order hangs on
            it.
            seed: changes from update to update.
            reduce: sum over the ranks that hold the other rows; every rank must call.
        """
        if self._entry.first_pass is None:
            return torch.zeros_like(inputs.response_mask)
        with torch.no_grad():
            keywords = self._keywords_for(self._entry.first_pass)
            return self._entry.first_pass(inputs, row_id=row_id, seed=seed, reduce=reduce, **keywords)

    def __call__(self, inputs: PolicyInputs) -> TokenLoss:
        """Token loss and metrics of one microbatch.

        Raises:
            ConfigError: the loss has a first pass and ``selected`` is missing.
        """
        keywords = self._checked_keywords(inputs)
        if self._entry.is_custom:
            return _run_custom(self._entry.formula, inputs, keywords)
        source = inputs.log_probs
        loss = torch.empty(source.shape, dtype=widen(source[:0]).dtype, device=source.device)
        slope, metrics = _run(self._entry, inputs, keywords, lambda rows, terms: None, loss)
        return TokenLoss(attach(source, loss, slope), metrics)

    def row_sums(self, inputs: PolicyInputs) -> RowLoss:
        """The same, summed over each row: for ``aggregate_rows``.

        Raises:
            ConfigError: as above.
        """
        keywords = self._checked_keywords(inputs)
        if self._entry.is_custom:
            result = _run_custom(self._entry.formula, inputs, keywords)
            return RowLoss(result.loss.sum(-1), result.metrics)
        source = inputs.log_probs
        sums = torch.empty(source.shape[:1], dtype=widen(source[:0]).dtype, device=source.device)

        def add(rows: slice, loss: Tensor) -> None:
            torch.sum(loss, -1, out=sums[rows])

        slope, metrics = _run(self._entry, inputs, keywords, add)
        return RowLoss(attach(source, sums, slope), metrics)

    def _checked_keywords(self, inputs: PolicyInputs) -> dict[str, Any]:
        if self.needs_first_pass and inputs.selected is None:
            raise ConfigError(f"policy loss {self.kind!r} needs PolicyInputs.selected from its first_pass")
        return self._keywords_for(self._entry.formula)

    def _keywords_for(self, function: Callable[..., object]) -> dict[str, Any]:
        taken = keywords_of(function)
        return {name: value for name, value in self.keywords.items() if name in taken}


def _run(
    entry: LossEntry,
    inputs: PolicyInputs,
    keywords: Mapping[str, Any],
    use: Callable[[slice, Tensor], None],
    loss: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Slope [B, T] and metrics. Token losses go to ``loss``, or to memory that each block takes over from the last.

    ``use`` gets the rows of each block and their token losses.
    """
    source = inputs.log_probs
    slope = torch.empty(source.shape, dtype=widen(source[:0]).dtype, device=source.device)
    scratch: Tensor | None = None
    sums: dict[str, list[Tensor]] = {}
    with torch.no_grad():
        for rows in blocks(source.shape[0], source.shape[1], source.device):
            if loss is None and scratch is None:
                scratch = torch.empty_like(slope[rows])
            place = scratch[: rows.stop - rows.start] if scratch is not None else loss[rows]  # type: ignore[index]
            block = Block(inputs.rows(rows), place, slope[rows])
            terms: Terms = entry.formula(block, **keywords)
            if inputs.importance_weights is not None:
                weight = block.row_weight if entry.weighs_rows else block.weight
                torch.mul(terms.loss, weight, out=block.loss)
                torch.mul(terms.slope, weight, out=block.slope)
            else:
                for result, there in ((terms.loss, block.loss), (terms.slope, block.slope)):
                    if result is not there:
                        there.copy_(result)
            use(rows, block.loss)
            for name, total in {**terms.sums, "ppo_kl": -block.sum_of_log_ratios()}.items():
                sums.setdefault(name, []).append(total)
        totals = {name: torch.stack(parts).double().sum() for name, parts in sums.items()}
        values = to_floats({**totals, "tokens": num_tokens(inputs.response_mask)})
    tokens = values.pop("tokens")
    return slope, {f"actor/{name}": Mean(total, tokens) for name, total in values.items()}


def _run_custom(function: Callable[..., TokenLoss], inputs: PolicyInputs, keywords: Mapping[str, Any]) -> TokenLoss:
    """A user's loss sees 0 off the mask and cannot put anything there."""
    mask = inputs.response_mask
    clean = {
        name: select(mask, x)
        for name in ("log_probs", "old_log_probs", "advantages", "rollout_log_probs", "importance_weights", "entropy")
        if (x := getattr(inputs, name)) is not None
    }
    result = function(replace(inputs, **clean), **keywords)
    return TokenLoss(select(mask, result.loss), result.metrics)


def _adopt(kind: str, found: object) -> LossEntry:
    if isinstance(found, LossEntry):
        return found
    if not callable(found) or inspect.isclass(found):
        raise ConfigError(f"policy loss {kind!r} is a {type(found).__name__}, not a function")
    return LossEntry(found, is_custom=True)


POLICY_LOSSES: Registry[LossEntry] = Registry("policy loss", _adopt)


def custom_policy_loss(
    name: str | None = None, *, aggregation: Aggregation | None = None
) -> Callable[[Callable[..., TokenLoss]], LossEntry]:
    """Decorator for a user's loss ``f(inputs: PolicyInputs, *, option=...) -> TokenLoss`` with traits of its own.

    Keyword-only parameters are its options; clip_low, clip_high and dual_clip are filled from the configuration where
    it takes them. It must apply ``importance_weights`` itself. A plain function works by its import path without this.
    """

    def decorate(function: Callable[..., TokenLoss]) -> LossEntry:
        entry = LossEntry(function, is_custom=True, aggregation=aggregation)
        return entry if name is None else POLICY_LOSSES.add(name, entry)

    return decorate


def build_policy_loss(
    kind: str,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    options: Mapping[str, Any] | None = None,
) -> PolicyLoss:
    """The policy loss of a registered name or import path with its settings.

    Raises:
        ConfigError: unknown kind, or options the loss does not take (the message lists those it takes).
    """
    entry = POLICY_LOSSES.get(kind)
    shared = {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip}
    taken = keywords_of(entry.formula)
    if entry.first_pass is not None:
        taken |= keywords_of(entry.first_pass)
    for name in ("row_id", "seed", "reduce"):
        taken.pop(name, None)
    return PolicyLoss(kind, entry, bind_options("policy loss", kind, taken, shared, options or {}))
