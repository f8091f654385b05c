"""Conversations to imitate, with the mask of the tokens the assistant wrote.

Invariants:
1. A row's prompt ids are those the same prompt has in reinforcement learning (``tokenizer.render_prompt``).
2. Every row that is returned has a token the loss counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from megarl.data.batch import Batch, Ragged
from megarl.data.sources import Row, Source
from megarl.data.stream import Stream
from megarl.data.tokenizer import Tokenizer, as_messages, render_completion, render_conversation
from megarl.errors import DataError


@dataclass(frozen=True, slots=True)
class SftRow:
    """One sequence: its tokens, and for each whether the loss counts it."""

    row_id: int
    token_ids: list[int]
    mask: list[bool]
    data_source: str


class SftSource(Stream[SftRow]):
    """Training sequences of several sources in proportion to their weights.

    A file row holds a conversation with assistant messages, or a prompt with an answer column; a reasoning-gym item is
    its question and its own answer.

    Args:
        sources: from ``sources.open_source``.
        tokenizer: of the model.
        max_tokens: longest sequence.
        overlong: what to do with a longer one; ``truncate-right`` keeps its first tokens.
        system_prompt: system message put before every conversation that brings none.
        apply_chat_template: render with the tokenizer's template, or join prompt, answer and end token.
        seed: of the order.
        shuffle: visit in a permutation, another one each epoch.

    Raises:
        DataError: no source, an empty one, or a first row that cannot be rendered.
    """

    noun = "rows"

    def __init__(
        self,
        sources: Sequence[Source],
        tokenizer: Tokenizer,
        *,
        max_tokens: int,
        overlong: Literal["error", "drop", "truncate-right"] = "error",
        system_prompt: str | None = None,
        apply_chat_template: bool = True,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        super().__init__(sources, seed=seed, shuffle=shuffle)
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._overlong = overlong
        self._system_prompt = system_prompt
        self._apply_chat_template = apply_chat_template
        self._check_first_rows()

    def _make(self, row: Row, row_id: int, source: Source) -> SftRow:
        token_ids, mask = self._tokens(row)
        if not any(mask):
            raise DataError("the row has no token the assistant wrote", where=row.where)
        return SftRow(row_id, token_ids, mask, source.name)

    def _tokens(self, row: Row) -> tuple[list[int], list[bool]]:
        answer = None if row.answer is None else str(row.answer)
        if self._apply_chat_template:
            messages = as_messages(row.prompt, None)
            if answer is not None:
                messages.append({"role": "assistant", "content": answer})
            return render_conversation(self._tokenizer, messages, system_prompt=self._system_prompt, where=row.where)
        if answer is None:
            raise DataError(
                "a row without the chat template needs an answer",
                where=row.where,
                fix="set answer_column of the source",
            )
        return render_completion(
            self._tokenizer,
            row.prompt,  # type: ignore[arg-type]  # render_completion refuses messages
            answer,
            system_prompt=self._system_prompt,
            where=row.where,
        )

    def _fit(self, item: SftRow, where: str) -> SftRow | None:
        length = len(item.token_ids)
        if length <= self._max_tokens:
            return item
        if self._overlong == "error":
            raise DataError(
                f"a row has {length} tokens, at most {self._max_tokens} are allowed",
                where=where,
                fix="raise data.max_tokens, or set data.overlong to drop or truncate-right",
            )
        mask = item.mask[: self._max_tokens]
        if self._overlong == "drop" or not any(mask):
            return None
        return replace(item, token_ids=item.token_ids[: self._max_tokens], mask=mask)


def sft_batch(rows: Sequence[SftRow]) -> Batch:
    """The rows as a batch whose ``response_mask`` is the assistant mask.

    The response starts at the first token that counts, so that its length and the mask inside it mean the same as in
    reinforcement learning; tokens of later user turns lie inside the response, unmasked. The first token of a sequence
    has nothing to be predicted from and never counts.
    """
    starts = [max(1, row.mask.index(True)) for row in rows]
    pairs = list(zip(rows, starts, strict=True))
    return Batch.create(
        sample_id=torch.arange(len(rows), dtype=torch.int64),
        prompts=Ragged.from_rows([row.token_ids[:start] for row, start in pairs], torch.int64),
        responses=Ragged.from_rows([row.token_ids[start:] for row, start in pairs], torch.int64),
        response_mask=Ragged.from_rows([row.mask[start:] for row, start in pairs], torch.bool),
        data_source=[row.data_source for row in rows],
    )
