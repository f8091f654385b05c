"""What an advantage estimator is: its inputs, its result, and how one is built by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from megarl.algorithms.masking import Reduce, blocks, row_tokens, select, spread_rows, widen
from megarl.algorithms.registry import Registry, bind_options, keywords_of
from megarl.errors import ConfigError, DataError
from megarl.observability.metrics import Metrics

Need: TypeAlias = Literal["groups", "values", "greedy_baseline", "reward_components", "sum_pi_squared"]
GroupStatistics: TypeAlias = Literal["kept", "all"]


@dataclass(frozen=True, slots=True)
class Advantages:
    """Result of an estimator: advantages [B, T] and, where the estimator defines them, returns [B, T] (else None).

    Both are at least float32 and exactly 0 off the mask (and on tokens that were rejected).
    """

    advantages: Tensor
    returns: Tensor | None
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class RowInputs:
    """What an estimator on row scores sees; it runs anywhere, since no token tensor is involved.

    Args:
        scores: s, the sum of a row's token rewards over its response: [B] float64.
        group: dense group index from 0: [B] int64.
        num_groups: G.
        counted: rows that take part in their group's statistics: [B] bool.
        num_tokens: kept tokens of the row: [B] int64.
        reward_components: per-key scores [B], for estimators that need them.
        reduce: sum over the parts of a split batch; groups are never split.
    """

    scores: Tensor
    group: Tensor
    num_groups: int
    counted: Tensor
    num_tokens: Tensor
    reward_components: Mapping[str, Tensor] | None = None
    reduce: Reduce = None


@dataclass(frozen=True)
class TokenInputs:
    """What an estimator on token tensors sees. Shapes [B, T] unless said otherwise; off the mask anything may stand.

    Args:
        rewards: token_level_rewards.
        response_mask: tokens of the response, rejected ones included: rewards and returns run over these. Bool.
        kept: tokens that train: statistics over tokens, and the result, are over these. Bool.
        make_rows: makes ``rows``.
        values: of the critic.
        truncated: rows cut at a limit rather than ended by the policy: [B] bool.
        greedy_scores: score of the greedy response to the row's prompt: [B].
        old_log_probs, sum_pi_squared, importance_weights: of the proximal policy, for the optimal token baseline.
        reduce: sum over the parts of a split batch; groups are never split.
    """

    rewards: Tensor
    response_mask: Tensor
    kept: Tensor
    make_rows: Callable[[], RowInputs]
    values: Tensor | None = None
    truncated: Tensor | None = None
    greedy_scores: Tensor | None = None
    old_log_probs: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    importance_weights: Tensor | None = None
    reduce: Reduce = None

    @cached_property
    def rows(self) -> RowInputs:
        """The same batch as row scores, computed when first read."""
        return self.make_rows()


@dataclass(frozen=True, slots=True)
class EstimatorEntry:
    """A registered estimator: a function on row scores (-> [B] and metrics) or on tokens (-> Advantages)."""

    function: Callable[..., Any]
    on_rows: bool
    needs: frozenset[Need] = frozenset()


class Estimator:
    """An advantage estimator with its options bound."""

    def __init__(self, kind: str, entry: EstimatorEntry, keywords: Mapping[str, Any]) -> None:
        self.kind = kind
        self.keywords = dict(keywords)
        self._entry = entry

    @property
    def needs(self) -> frozenset[Need]:
        """What beside rewards and mask must be given."""
        return self._entry.needs

    @property
    def needs_values(self) -> bool:
        """Whether a critic is needed."""
        return "values" in self.needs

    @property
    def needs_groups(self) -> bool:
        """Whether a baseline comes from the other responses to the same prompt, so that one response is not enough."""
        return "groups" in self.needs

    @property
    def needs_greedy_baseline(self) -> bool:
        """Whether the score of a greedy response to each prompt is needed."""
        return "greedy_baseline" in self.needs

    @property
    def on_rows(self) -> bool:
        """Whether row scores are enough, so that it can run where no token tensor is."""
        return self._entry.on_rows

    def rows(self, inputs: RowInputs) -> tuple[Tensor, Metrics]:
        """Advantage of each row, [B] float64, for an estimator on row scores."""
        with torch.no_grad():
            advantages, metrics = self._entry.function(inputs, **self.keywords)
        return advantages, metrics

    def __call__(
        self,
        token_level_rewards: Tensor,
        response_mask: Tensor,
        group_id: Tensor,
        *,
        values: Tensor | None = None,
        truncated: Tensor | None = None,
        kept: Tensor | None = None,
        counted: Tensor | None = None,
        group_stats: GroupStatistics = "kept",
        greedy_scores: Tensor | None = None,
        reward_components: Mapping[str, Tensor] | None = None,
        old_log_probs: Tensor | None = None,
        sum_pi_squared: Tensor | None = None,
        importance_weights: Tensor | None = None,
        reduce: Reduce = None,
    ) -> Advantages:
        """Advantages of a batch.

        Args:
            token_level_rewards: [B, T] float.
            response_mask: [B, T] bool, tokens of the response whether rejected or not.
            group_id: [B] int64, any numbers.
            values: [B, T] float.
            truncated: [B] bool.
            kept: [B, T] bool, what rollout correction left of the mask; None keeps all. A row without a kept token
            leaves
                its group's baseline unless group_stats is "all".
            counted: [B] bool, rows that count in group statistics (one final trajectory per session); None counts all.
            group_stats: whether rows rejected whole count.
            greedy_scores: [B] float.
            reward_components: name -> [B] float.
            old_log_probs: [B, T] float.
            sum_pi_squared: [B, T] float, sum over the vocabulary of squared probabilities.
            importance_weights: [B, T] float.
            reduce: sum over the ranks that hold the rest of the batch; groups must be whole on a rank.

        Raises:
            DataError: an input this estimator needs is missing.
        """
        given = {
            "values": values,
            "greedy_baseline": greedy_scores,
            "reward_components": reward_components,
            "sum_pi_squared": sum_pi_squared,
        }
        missing = sorted(need for need in self.needs if need in given and given[need] is None)
        if missing:
            raise DataError(f"estimator {self.kind!r} needs {', '.join(missing)}")
        kept = response_mask if kept is None or kept is response_mask else kept & response_mask
        with torch.no_grad():

            def make_rows() -> RowInputs:
                rows = _row_inputs(token_level_rewards, response_mask, kept, group_id, counted, group_stats)
                return replace(rows, reward_components=reward_components, reduce=reduce)

            if self.on_rows:
                per_row, metrics = self.rows(make_rows())
                return Advantages(spread_rows(per_row.to(widen(token_level_rewards[:0]).dtype), kept), None, metrics)
            inputs = TokenInputs(
                token_level_rewards, response_mask, kept, make_rows, values, truncated, greedy_scores, old_log_probs,
                sum_pi_squared, importance_weights, reduce,
            )  # fmt: skip
            result: Advantages = self._entry.function(inputs, **self.keywords)
            if not isinstance(result, Advantages):
                raise ConfigError(f"estimator {self.kind!r} returned {type(result).__name__}, not Advantages")
            return result


def _row_inputs(
    rewards: Tensor,
    response_mask: Tensor,
    kept: Tensor,
    group_id: Tensor,
    counted: Tensor | None,
    group_stats: GroupStatistics,
) -> RowInputs:
    num_kept = row_tokens(kept)
    present = num_kept > 0
    if group_stats == "all" and kept is not response_mask:
        present = row_tokens(response_mask) > 0
    unique, group = torch.unique(group_id, return_inverse=True)
    return RowInputs(
        scores=row_scores(rewards, response_mask),
        group=group,
        num_groups=len(unique),
        counted=present if counted is None else present & counted,
        num_tokens=num_kept,
    )


def row_scores(rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Sum of a row's token rewards over its response: [B] float64 (group statistics of equal scores are then exact)."""
    scores = torch.empty(len(rewards), dtype=torch.float64, device=rewards.device)
    for rows in blocks(rewards.shape[0], rewards.shape[1], rewards.device):
        scores[rows] = select(response_mask[rows], rewards[rows]).sum(-1)
    return scores


def _adopt(kind: str, found: object) -> EstimatorEntry:
    if isinstance(found, EstimatorEntry):
        return found
    if not callable(found) or inspect.isclass(found):
        raise ConfigError(f"advantage estimator {kind!r} is a {type(found).__name__}, not a function")
    return EstimatorEntry(_masked(found), on_rows=False)


def _masked(function: Callable[..., Advantages]) -> Callable[..., Advantages]:
    """A user's estimator cannot put anything off the mask."""

    def call(inputs: TokenInputs, **keywords: Any) -> Advantages:
        result = function(inputs, **keywords)
        returns = None if result.returns is None else select(inputs.kept, result.returns)
        return Advantages(select(inputs.kept, result.advantages), returns, result.metrics)

    call.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return call


ESTIMATORS: Registry[EstimatorEntry] = Registry("advantage estimator", _adopt)


def custom_estimator(
    name: str | None = None, *, needs: frozenset[Need] = frozenset()
) -> Callable[[Callable[..., Advantages]], EstimatorEntry]:
    """Decorator for a user's estimator ``f(inputs: TokenInputs, *, option=...) -> Advantages`` with needs of its own.

    Keyword-only parameters are its options; gamma, lam, norm_by_std and bootstrap_truncated are filled from the
    configuration where it takes them. A plain function works by its import path without this.
    """

    def decorate(function: Callable[..., Advantages]) -> EstimatorEntry:
        entry = EstimatorEntry(_masked(function), on_rows=False, needs=needs)
        return entry if name is None else ESTIMATORS.add(name, entry)

    return decorate


def build_estimator(
    kind: str,
    *,
    gamma: float,
    lam: float,
    norm_by_std: bool,
    bootstrap_truncated: bool,
    options: Mapping[str, Any] | None = None,
) -> Estimator:
    """The estimator of a registered name or import path with its settings.

    Raises:
        ConfigError: unknown kind, or options the estimator does not take (the message lists those it takes).
    """
    entry = ESTIMATORS.get(kind)
    shared = {"gamma": gamma, "lam": lam, "norm_by_std": norm_by_std, "bootstrap_truncated": bootstrap_truncated}
    taken = keywords_of(entry.function)
    return Estimator(kind, entry, bind_options("advantage estimator", kind, taken, shared, options or {}))
