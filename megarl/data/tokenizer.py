"""Tokenizers: loading one, rendering a prompt, rendering a conversation with the mask of what the assistant wrote.

Invariants:
1. Token ids of a rendered chat are those of the template's whole text: never joined from separately tokenized turns.
2. The assistant mask goes by provenance: the template's own generation markers, or the text the template adds for an
   assistant turn. A template that renders earlier turns differently later is refused, not guessed at.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from megarl.data.sources import Messages
from megarl.errors import DataError

_GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Tokenizer(Protocol):
    """What megarl uses of a Hugging Face tokenizer."""

    chat_template: Any
    eos_token_id: int | None
    pad_token_id: int | None
    is_fast: bool

    def __len__(self) -> int: ...

    def __call__(self, text: str, **options: Any) -> Any: ...

    def decode(self, token_ids: Sequence[int], **options: Any) -> str: ...

    def batch_decode(self, sequences: Sequence[Any], **options: Any) -> list[str]: ...

    def apply_chat_template(self, conversation: Messages, **options: Any) -> Any: ...


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face model directory (or hub name, where there is a network or a cache).

    Raises:
        DataError: there is none, or it cannot be read.
    """
    from transformers import AutoTokenizer  # takes a second; a pure reader of this module does not need it

    local = Path(directory)
    fix = "copy tokenizer.json and tokenizer_config.json of the model there"
    if not local.is_dir() and (str(directory).startswith((".", "/")) or len(local.parts) > 2):
        raise DataError("the model directory does not exist", where=str(local), fix="set model.path to one that does")
    if local.is_dir() and not any((local / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise DataError(f"no tokenizer; the directory holds {_listing(local)}", where=str(local), fix=fix)
    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(str(directory))
    except (OSError, ValueError, KeyError) as error:
        problem = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(f"cannot load the tokenizer: {problem[0]}", where=str(directory), fix=fix) from error
    return tokenizer


def render_prompt(
    tokenizer: Tokenizer,
    prompt: str | Messages,
    *,
    system_prompt: str | None,
    apply_chat_template: bool,
    where: str = "",
) -> tuple[str, list[int]]:
    """Text and token ids the policy continues.

    A text becomes one user message; a prompt that brings its own system message keeps it. Without the chat template
    the text is tokenized as it is, with the special tokens the tokenizer adds by itself.

    Raises:
        DataError: no chat template, a template that refuses the messages, or messages without ``apply_chat_template``.
    """
    if apply_chat_template:
        text = _render(tokenizer, as_messages(prompt, system_prompt), where, add_generation_prompt=True)
        return text, _tokenize(tokenizer, text, special=False)
    _need_text(prompt, system_prompt, where)
    return str(prompt), _tokenize(tokenizer, str(prompt), special=True)


def render_conversation(
    tokenizer: Tokenizer, messages: Messages, *, system_prompt: str | None, where: str = ""
) -> tuple[list[int], list[bool]]:
    """Token ids of a whole conversation and, for each, whether the assistant wrote it.

    Ends of turn count as written by the assistant up to and including its first end-of-sequence token.

    Raises:
        DataError: no chat template, no assistant message, or a template that is not prefix-stable.
    """
    messages = as_messages(messages, system_prompt)
    if all(message["role"] != "assistant" for message in messages):
        raise DataError("the conversation has no assistant message to learn from", where=where)
    if isinstance(tokenizer.chat_template, str) and _GENERATION_MARKER.search(tokenizer.chat_template):
        out = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return list(out["input_ids"]), [bool(flag) for flag in out["assistant_masks"]]
    text = _render(tokenizer, messages, where)
    spans = _assistant_spans(tokenizer, messages, text, where)
    if not tokenizer.is_fast:
        raise DataError(
            "a slow tokenizer does not say which text a token comes from",
            where=where,
            fix="use one with tokenizer.json",
        )
    out = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    token_ids = list(out["input_ids"])
    mask = [False] * len(token_ids)
    for start, stop in spans:
        for position, (first, last) in enumerate(out["offset_mapping"]):
            if start <= first and last <= stop and first < last:
                mask[position] = True
                if token_ids[position] == tokenizer.eos_token_id:
                    break
    return token_ids, mask


def render_completion(
    tokenizer: Tokenizer, prompt: str, answer: str, *, system_prompt: str | None, where: str = ""
) -> tuple[list[int], list[bool]]:
    """Prompt and answer without a template: the ids of ``render_prompt``, then the answer's and the end token's.

    Raises:
        DataError: the prompt is no text, or the tokenizer has no end-of-sequence token.
    """
    _need_text(prompt, system_prompt, where)
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no end-of-sequence token to end the answer with", where=where)
    before = _tokenize(tokenizer, prompt, special=True)
    after = [*_tokenize(tokenizer, answer, special=False), tokenizer.eos_token_id]
    return before + after, [False] * len(before) + [True] * len(after)


def as_messages(prompt: str | Messages, system_prompt: str | None) -> Messages:
    """Chat messages of a prompt; its own system message takes the place of ``system_prompt``."""
    messages: Messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def _assistant_spans(tokenizer: Tokenizer, messages: Messages, text: str, where: str) -> list[tuple[int, int]]:
    spans = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(tokenizer, messages[:turn], where, add_generation_prompt=True)
        until = _render(tokenizer, messages[: turn + 1], where)
        if not (until.startswith(before) and text.startswith(until)):
            raise DataError(
                f"the chat template renders message {turn} differently once later messages follow, "
                "so that the assistant's tokens cannot be told apart",
                where=where,
                fix="use a template with {% generation %} markers, or rows with one assistant message at the end",
            )
        spans.append((len(before), len(until)))
    return spans


def _render(tokenizer: Tokenizer, messages: Messages, where: str, *, add_generation_prompt: bool = False) -> str:
    from jinja2 import TemplateError

    if tokenizer.chat_template is None:
        raise DataError(
            "the tokenizer has no chat template",
            where=where,
            fix="set data.apply_chat_template=false for a base model, or use the tokenizer of an instruct model",
        )
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    except (TemplateError, TypeError, KeyError) as error:  # templates add content to text, or read absent keys
        raise DataError(f"the chat template refuses the messages: {error}", where=where) from error
    return text


def _tokenize(tokenizer: Tokenizer, text: str, *, special: bool) -> list[int]:
    # Quiet about texts beyond the model's length: the caller has its own limit and counts what exceeds it.
    return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def _need_text(prompt: str | Messages, system_prompt: str | None, where: str) -> None:
    if not isinstance(prompt, str):
        raise DataError("chat messages need the chat template", where=where, fix="set data.apply_chat_template=true")
    if system_prompt is not None:
        raise DataError("a system prompt needs the chat template", where=where, fix="set data.apply_chat_template=true")


def _listing(directory: Path) -> str:
    names = sorted(path.name for path in directory.iterdir())
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") or "nothing"
