"""Prompts in a seeded, resumable order."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megarl.data.sources import Messages, Row, Source
from megarl.data.stream import Stream
from megarl.data.tokenizer import Tokenizer, render_prompt
from megarl.errors import DataError


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the policy continues, and what the reward needs to judge it.

    Args:
        prompt_id: number of the row among all rows of all sources: the same in every epoch and run.
        text: the rendered text.
        token_ids: its tokens.
        answer: reference answer, or None.
        data_source: name of the source.
        metadata: the source's further columns, or what its scorer needs.
        messages: the chat messages of the row, when it held messages.
    """

    prompt_id: int
    text: str
    token_ids: list[int]
    answer: Any
    data_source: str
    metadata: dict[str, Any] = field(default_factory=dict)
    messages: Messages | None = None


class PromptSource(Stream[Prompt]):
    """Prompts of several sources in proportion to their weights.

    Args:
        sources: from ``sources.open_source``.
        tokenizer: of the policy.
        max_prompt_tokens: longest prompt after the template.
        overlong: what to do with a longer one; ``truncate-left`` keeps its last tokens (``text`` stays whole).
        system_prompt: system message put before every prompt that brings none.
        apply_chat_template: render with the tokenizer's template, or tokenize the text as it is.
        seed: of the order.
        shuffle: visit in a permutation, another one each epoch.
        held_out: rendered texts that are never drawn, such as those of the validation; counted as dropped.

    Raises:
        DataError: no source, an empty one, or a first row that cannot be rendered.
    """

    noun = "prompts"

    def __init__(
        self,
        sources: Sequence[Source],
        tokenizer: Tokenizer,
        *,
        max_prompt_tokens: int,
        overlong: Literal["error", "drop", "truncate-left"] = "error",
        system_prompt: str | None = None,
        apply_chat_template: bool = True,
        seed: int = 0,
        shuffle: bool = True,
        held_out: Collection[str] = (),
    ) -> None:
        super().__init__(sources, seed=seed, shuffle=shuffle)
        self._held_out = frozenset(held_out)
        self._tokenizer = tokenizer
        self._max_tokens = max_prompt_tokens
        self._overlong = overlong
        self._system_prompt = system_prompt
        self._apply_chat_template = apply_chat_template
        self._check_first_rows()

    def _make(self, row: Row, row_id: int, source: Source) -> Prompt:
        text, token_ids = render_prompt(
            self._tokenizer,
            row.prompt,
            system_prompt=self._system_prompt,
            apply_chat_template=self._apply_chat_template,
            where=row.where,
        )
        if not token_ids:
            raise DataError("the prompt has no tokens", where=row.where)
        return Prompt(
            prompt_id=row_id,
            text=text,
            token_ids=token_ids,
            answer=row.answer,
            data_source=source.name,
            metadata=row.metadata,
            messages=row.prompt if isinstance(row.prompt, list) else None,
        )

    def _fit(self, item: Prompt, where: str) -> Prompt | None:
        if item.text in self._held_out:
            return None
        length = len(item.token_ids)
        if length <= self._max_tokens:
            return item
        if self._overlong == "error":
            raise DataError(
                f"a prompt has {length} tokens, at most {self._max_tokens} are allowed",
                where=where,
                fix="raise data.max_prompt_tokens, or set data.overlong to drop or truncate-left",
            )
        if self._overlong == "drop":
            return None
        return replace(item, token_ids=item.token_ids[-self._max_tokens :])
