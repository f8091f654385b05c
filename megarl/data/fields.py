"""The one table of batch fields: what each column is, what it is aligned to, who writes it and what it needs.

Invariants:
1. A column that is not declared here cannot enter a ``Batch``; a plug-in declares its own with ``declare``.
2. ``needs`` names the fields without which a column can be neither checked nor read. It is structural: what a stage
   reads beyond that, the stage says with ``Batch.require``.
3. A name keeps its meaning in every stage; replacing a column does not change what it is aligned to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal, TypeAlias

import torch

from megarl.errors import DataError

Alignment: TypeAlias = Literal["sample", "prompt", "response", "sequence"]

FINISH_REASONS = ("stop", "length", "abort", "tool_limit")
"""``stop`` is a terminated response; ``length`` and ``tool_limit`` are truncated ones; ``abort`` has no usable end."""


@dataclass(frozen=True, slots=True)
class Field:
    """Declaration of one batch column.

    Args:
        name: the column's name.
        dtype: torch dtype of a tensor column, or the Python type of each object of a list column.
        aligned_to: ``sample`` is one value a row (tensor [B] or list of B); ``prompt``, ``response`` and ``sequence``
            (prompt then response) are one value a token (``Ragged``).
        stage: stage of the step that writes it.
        needs: fields that must be in the batch already or arrive together with this one.
        finite: values where ``response_mask`` is true must be finite (response columns), or all values (others).
        choices: the only values allowed, for columns of strings.
        meaning: one line for readers.
    """

    name: str
    dtype: torch.dtype | type
    aligned_to: Alignment
    stage: str
    needs: tuple[str, ...] = ()
    finite: bool = False
    choices: tuple[str, ...] = ()
    meaning: str = ""

    @property
    def is_tensor(self) -> bool:
        """Whether the column holds tensors; otherwise it is a list of Python objects."""
        return isinstance(self.dtype, torch.dtype)


def _per_token(name: str, stage: str, meaning: str) -> Field:
    return Field(name, torch.float32, "response", stage, ("responses", "response_mask"), finite=True, meaning=meaning)


def _table(fields: Iterable[Field]) -> dict[str, Field]:
    return {field.name: field for field in fields}


FIELDS: dict[str, Field] = _table(
    [
        Field("sample_id", torch.int64, "sample", "prompts", meaning="unique number of the response in the run"),
        Field("group_id", torch.int64, "sample", "prompts", meaning="equal for the responses of one prompt"),
        Field("prompts", torch.int64, "prompt", "prompts", meaning="token ids the response was conditioned on"),
        Field("data_source", str, "sample", "prompts", meaning="name of the source the prompt came from"),
        Field("answer", object, "sample", "prompts", meaning="reference answer for the reward, or None"),
        Field("metadata", object, "sample", "prompts", meaning="what else the reward needs, picklable"),
        Field("responses", torch.int64, "response", "generate", ("prompts",), meaning="token ids after the prompt"),
        Field(
            "response_mask",
            torch.bool,
            "response",
            "generate",
            ("responses",),
            meaning="true on tokens the policy sampled and may learn from, and only there",
        ),
        _per_token("rollout_log_probs", "generate", "log-probs of the policy that sampled, from the rollout engine"),
        Field(
            "finish_reason",
            str,
            "sample",
            "generate",
            ("responses",),
            choices=FINISH_REASONS,
            meaning="why the response ended",
        ),
        Field(
            "weight_versions",
            object,
            "sample",
            "generate",
            ("responses",),
            meaning="spans of response tokens and the weight version that sampled each",
        ),
        Field("sampling", object, "sample", "generate", ("responses",), meaning="sampling settings of the response"),
        Field("is_greedy", torch.bool, "sample", "generate", meaning="a greedy response for the baseline, not trained"),
        Field("scores", torch.float32, "sample", "score", ("responses",), finite=True, meaning="response's reward"),
        Field(
            "reward_components",
            object,
            "sample",
            "score",
            ("responses",),
            meaning="what the reward returned, by name, its score among them",
        ),
        Field(
            "greedy_scores",
            torch.float32,
            "sample",
            "score",
            ("responses",),
            finite=True,
            meaning="score of the greedy response to the same prompt",
        ),
        _per_token("old_log_probs", "old_log_probs", "log-probs of the proximal policy: weights before this update"),
        _per_token("entropy", "old_log_probs", "entropy of the policy's distribution at each response token, in nats"),
        _per_token("sum_pi_squared", "old_log_probs", "sum over the vocabulary of squared probabilities"),
        _per_token("ref_log_probs", "ref_log_probs", "log-probs of the frozen reference policy"),
        _per_token("values", "values", "critic's value before each response token"),
        _per_token("token_level_scores", "rewards", "rewards per token before KL and shaping"),
        _per_token("token_level_rewards", "rewards", "rewards per token after KL and shaping"),
        _per_token("importance_weights", "correction", "weights of the rollout-to-proximal correction"),
        _per_token("advantages", "advantages", "advantage of each response token"),
        _per_token("returns", "advantages", "regression target of the critic"),
    ]
)


def declare(field: Field) -> None:
    """Add a field to the table.

    Raises:
        DataError: the name is taken by a different declaration, or a needed field is not declared.
    """
    if FIELDS.get(field.name, field) != field:
        raise DataError(f"field {field.name!r} is already declared differently", where=repr(FIELDS[field.name]))
    for needed in field.needs:
        lookup(needed)
    FIELDS[field.name] = field


def lookup(name: str) -> Field:
    """The declaration of a field.

    Raises:
        DataError: no field of that name is declared; names the closest ones.
    """
    field = FIELDS.get(name)
    if field is None:
        close = get_close_matches(name, FIELDS, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"declared are {', '.join(FIELDS)}"
        raise DataError(f"no batch field is called {name!r}", fix=f"{hint} Own fields are added with fields.declare.")
    return field
