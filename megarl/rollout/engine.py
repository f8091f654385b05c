"""What the controller asks of a rollout engine, whatever library samples.

One engine is one replica of the policy. A weight update is ``layout`` and ``connect`` (once per session), ``receive``,
``commit``; ``megarl/weights/sync.py`` has the protocol.

Invariants:
1. Token ids go in and come out; nothing is tokenized.
2. The same request with the same seed, settings and weights gives the same tokens.
3. An engine samples only under a committed weight version. From the start of an update to its commit, after a failed
   update and after its weights were discarded it refuses.
4. When a process of the engine dies, every call ends within seconds in a ``RolloutError`` that names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from megarl.rollout.sampling import Sampling
from megarl.weights.region import Shape
from megarl.weights.row_sums import ALL, Share
from megarl.weights.sync import InFlight, RankConnection, RankLayout, ReceiverReport

FinishReason = Literal["stop", "length", "abort"]
TokenIds: TypeAlias = npt.NDArray[np.int32]
LogProbs: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to be continued ``n`` times.

    Args:
        request_id: unique within the call.
        prompt_token_ids: the prompt.
        seed: in ``[0, 2^63)``; sample ``i`` of the request uses ``seed + i``, so seeds of a run should lie apart.
        group_id: requests of one group go to one replica; None is a group of its own.
        is_greedy: one greedy response, whatever the settings and the number of samples of the call.
    """

    request_id: int
    prompt_token_ids: Sequence[int]
    seed: int
    group_id: int | None = None
    is_greedy: bool = False


@dataclass(frozen=True, slots=True)
class WeightSpan:
    """Tokens ``[start, end)`` of a response were sampled under ``version``."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One sampled response, in arrays: on its way to the driver a list would be pickled number by number.

    Args:
        token_ids: [T] the tokens, the one that stopped it included.
        log_probs: [T] of each token, see ``sampling``.
        finish_reason: stop (a stop token), length (max_tokens or the engine's limit), abort.
        weight_versions: spans that cover the tokens.
    """

    token_ids: TokenIds
    log_probs: LogProbs
    finish_reason: FinishReason
    weight_versions: tuple[WeightSpan, ...]


class RolloutEngine(Protocol):
    """One replica."""

    async def start(self) -> None:
        """Build the engine. Raises RolloutError with the cause."""
        ...

    async def watch(self) -> None:
        """Returns when the engine is stopped. Raises RolloutError as soon as a process of it is dead."""
        ...

    async def generate(
        self, requests: Sequence[Request], sampling: Sampling, n: int = 1
    ) -> list[tuple[int, list[Completion]]]:
        """``n`` samples of every request (one of a greedy one), as (request_id, samples), in the order of the requests.

        Raises:
            RolloutError: the engine may not sample now, a request is invalid, or a process died.
        """
        ...

    async def layout(self, shapes: Mapping[str, Shape]) -> Sequence[RankLayout]:
        """What each tensor-parallel rank needs of tensors of these names and shapes. Raises SyncError."""
        ...

    async def connect(self, connections: Sequence[RankConnection]) -> None:
        """Connect every rank to the senders. Raises SyncError."""
        ...

    async def receive(
        self,
        version: int,
        timeout_s: float,
        digest: str,
        share: Share | None = ALL,
        in_flight: InFlight = "finish",
    ) -> ReceiverReport:
        """Take what the senders send; not yet in force. Raises SyncError and stays refusing.

        Args:
            version: of the weights.
            timeout_s: for all of it.
            digest: of the plan that senders go by.
            share: of every box that checksums cover, the senders' own; None for no checksums.
            in_flight: samples under way ``finish`` before, ``abort``, or wait and ``continue`` under the new version.
        """
        ...

    async def score(self, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """Log-probs of each (prompt, response)'s response tokens at temperature 1, under the weights received last.

        Raises RolloutError if there are none.
        """
        ...

    async def commit(self, version: int) -> None:
        """Put the received weights in force and sample again. Raises SyncError if others were received."""
        ...

    async def poison(self, reason: str) -> None:
        """Refuse to sample until the next commit."""
        ...

    async def abort(self) -> None:
        """End the samples under way, as if they had been cut off."""
        ...

    async def sleep(self) -> None:
        """Give device memory back, weights included; sampling needs ``wake_up`` and an update first."""
        ...

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory again: ``weights``, ``kv_cache`` or all."""
        ...

    async def stop(self) -> None:
        """End all processes of the engine."""
        ...
