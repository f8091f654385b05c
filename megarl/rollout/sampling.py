"""Sampling settings as a value, and what the log-probs sampled under them mean.

Invariants:
1. A sample's settings travel with it: two policies that sampled alike have equal ``Sampling``.
2. ``rollout_log_probs`` are those of the distribution sampled from: the softmax of ``logits / temperature`` (of the
   plain logits where temperature is 0), renormalised over the tokens that top_p, top_k and min_p left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megarl.errors import RolloutError


@dataclass(frozen=True, slots=True)
class Sampling:
    """How responses are sampled; the fields are those of ``rollout.sampling``.

    Args:
        temperature: softmax temperature; 0 is greedy.
        top_p: nucleus; 1 keeps all tokens.
        top_k: likeliest tokens kept; -1 keeps all.
        min_p: tokens less likely than this fraction of the likeliest are dropped.
        max_tokens: longest response in tokens.
        stop_token_ids: tokens that end a response, beside the model's end-of-sequence tokens.

    Raises:
        RolloutError: a value outside its range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: int = 1024
    stop_token_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        # A list, as configuration has it, would make the value unhashable and mutable.
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        wrong = [
            name
            for name, fine in {
                "temperature": self.temperature >= 0,
                "top_p": 0 < self.top_p <= 1,
                "top_k": self.top_k == -1 or self.top_k > 0,
                "min_p": 0 <= self.min_p < 1,
                "max_tokens": self.max_tokens > 0,
            }.items()
            if not fine
        ]
        if wrong:
            raise RolloutError("sampling settings out of range: " + ", ".join(f"{n}={getattr(self, n)}" for n in wrong))

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken each time."""
        return self.temperature == 0

    @property
    def is_full_softmax(self) -> bool:
        """Whether a trainer that divides logits by the temperature computes the same log-probs."""
        return self.is_greedy or (self.top_p == 1 and self.top_k == -1 and self.min_p == 0)

    def greedy(self) -> Sampling:
        """The same limits with the likeliest token each time."""
        return dataclasses.replace(self, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0)

    def record(self) -> dict[str, Any]:
        """The settings and the meaning of the log-probs, as stored with every sample."""
        return dataclasses.asdict(self) | {"log_probs": "full_softmax" if self.is_full_softmax else "renormalized"}
