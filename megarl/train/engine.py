"""What a role's worker needs from a model under training, whichever library holds it.

One ``TrainEngine`` is one process of a role. Every rank of a data-parallel replica (its tensor- and pipeline-parallel
ranks) is called with the same rows; replicas are called with different rows of one batch.

Invariants:
1. Losses, gradients and metrics use denominators of the global minibatch: they do not depend on how rows are spread
   over microbatches and replicas.
2. Methods that return per-token results or metrics return them on ranks of the last pipeline stage with tensor rank 0
   and None elsewhere; metrics are already reduced over all replicas and equal on those ranks.
3. A wrong input raises before the first microbatch, on every rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from megarl.algorithms.aggregate import Aggregation
from megarl.algorithms.correction import Rejection
from megarl.algorithms.policy_losses import PolicyLoss
from megarl.data.batch import Batch, Ragged
from megarl.observability.metrics import Metrics
from megarl.weights.region import Region


@dataclass(frozen=True, slots=True)
class PolicyUpdate:
    """Everything about a policy update but the samples.

    Args:
        loss: token loss with its options bound.
        aggregation: how token losses become one number (``algorithms.aggregate``).
        aggregation_length: constant length of ``seq-mean-token-sum-norm``.
        entropy_coef: weight of the entropy bonus; 0 computes no entropy gradient.
        kl_estimator: estimator of the KL to the reference policy in the loss; None leaves it out. Needs the column
            ``ref_log_probs``.
        kl_coef: its coefficient.
        rejections: bounds on rollout/current that a token or row must keep to train, in bypass mode, where no pass
            before the update could tell. They are checked at the weights before each minibatch, over all of it.
        temperature: sampling temperature the log-probs are taken at.
        measures_gap: compare current and rollout policy, as nobody has before.
        measures_entropy: measure the entropy although it has no weight.
        seed: of losses that choose tokens at random; another one for each call.
    """

    loss: PolicyLoss
    aggregation: Aggregation = "token-mean"
    aggregation_length: int | None = None
    entropy_coef: float = 0.0
    kl_estimator: str | None = None
    kl_coef: float = 0.0
    rejections: Sequence[Rejection] = ()
    temperature: float = 1.0
    measures_gap: bool = False
    measures_entropy: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ValueUpdate:
    """Everything about a critic update but the samples.

    Args:
        clip_value: values are clipped to within this of the column ``values``.
    """

    clip_value: float


@dataclass(frozen=True, slots=True)
class StateSummary:
    """Bytes this rank holds on its device, for the memory line of a phase, and of its optimizer in host memory."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    host_bytes: int = 0
    extra: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Moved:
    """What moved between a rank's device and host memory, and the seconds it took."""

    num_bytes: int = 0
    seconds: float = 0.0

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.num_bytes + other.num_bytes, self.seconds + other.seconds)


class TrainEngine(Protocol):
    """A model of one role, on one rank."""

    def log_probs(
        self, batch: Batch, *, temperature: float = 1.0, with_entropy: bool = False, with_sum_pi_squared: bool = False
    ) -> dict[str, Ragged] | None:
        """``log_probs`` of every response token at the current weights, without dropout.

        If asked also ``entropy``, and ``sum_pi_squared``, the sum over the vocabulary of squared probabilities.
        """
        ...

    def values(self, batch: Batch) -> Ragged | None:
        """Value before every response token."""
        ...

    def update_policy(self, batch: Batch, update: PolicyUpdate, minibatches: Sequence[Sequence[int]]) -> Metrics | None:
        """One optimizer update per minibatch (rows of ``batch`` on this replica), in order."""
        ...

    def update_values(self, batch: Batch, update: ValueUpdate, minibatches: Sequence[Sequence[int]]) -> Metrics | None:
        """One critic update per minibatch."""
        ...

    def update_sft(self, batch: Batch, minibatches: Sequence[Sequence[int]] | None = None) -> Metrics | None:
        """One update per minibatch (default: all rows) on the cross-entropy of tokens under ``response_mask``."""
        ...

    def eval_sft(self, batch: Batch) -> Metrics | None:
        """The same loss without an update."""
        ...

    def gather_weights(self) -> None:
        """Make weights whole that an update has left to the next pass to gather; collective."""
        ...

    def regions(self) -> list[Region]:
        """Where this rank's parameters lie in canonical tensors."""
        ...

    def pieces(self) -> Iterator[tuple[Region, Tensor]]:
        """Those regions with views of the parameters, or of copies into which adapters are merged.

        It is no collective: ``gather_weights`` comes first, on all ranks.
        """
        ...

    def without_adapters(self) -> AbstractContextManager[None]:
        """Within it the model is the one that its adapters, if it has some, were put on."""
        ...

    def export_hf(self, directory: Path) -> None:
        """Write the model as a Hugging Face directory; collective."""
        ...

    def save(
        self, directory: Path, counters: Mapping[str, Any] | None = None, *, background: bool = False
    ) -> dict[str, float]:
        """Write model, optimizer, schedule and random state into an empty directory; collective.

        With ``background`` this returns when they are copied, and ``finish_save`` must follow before the next save.
        """
        ...

    @property
    def save_is_written(self) -> bool:
        """Whether ``finish_save`` would not have to wait for this rank's file."""
        ...

    def finish_save(self) -> dict[str, float]:
        """Complete a save in the background; collective."""
        ...

    def load(self, directory: Path, *, fresh: Collection[str] = ()) -> dict[str, Any]:
        """Continue from ``save``, leaving ``fresh`` parts as they are; returns the counters given to it; collective."""
        ...

    def offload(self) -> Moved:
        """Move weights and optimizer state to host memory; gradients are dropped; collective."""
        ...

    def onload(self) -> Moved:
        """Bring them back, gradients as zeros."""
        ...

    def state_summary(self) -> StateSummary:
        """Memory this rank holds."""
        ...
