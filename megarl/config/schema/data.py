"""Prompts and rewards."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from megarl.config.schema.base import StrictModel


class FileSource(StrictModel):
    """Prompts from JSONL or Parquet."""

    kind: Literal["file"] = "file"
    """Which sort of source this is; a source without it is a file."""
    path: str
    """A .jsonl or .parquet file."""
    prompt_column: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages."""
    answer_column: str | None = None
    """Column handed to the reward as ``answer``; None hands none."""
    name: str | None = None
    """``data_source`` of its samples; None takes the file's stem."""
    weight: float = Field(1.0, gt=0)
    """Share of the prompts relative to the other sources."""


class GymSource(StrictModel):
    """Procedural tasks of reasoning-gym, scored by their own verifiers."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    """Which sort of source this is."""
    task: str
    """Task name, such as chain_sum."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the task's generator."""
    size: int = Field(10_000, ge=1)
    """Number of distinct prompts."""
    seed: int = 0
    """Seed of the generator; held-out prompts use another."""
    weight: float = Field(1.0, gt=0)
    """Share of the prompts relative to the other sources."""


def _kind(source: Any) -> Any:
    """The tag of a source: ``kind``, which may be left out for files."""
    return source.get("kind", "file") if isinstance(source, dict) else getattr(source, "kind", None)


SourceConfig = Annotated[
    Annotated[FileSource, Tag("file")] | Annotated[GymSource, Tag("reasoning_gym")], Discriminator(_kind)
]
"""A source of prompts; ``kind`` says which, so that a wrong key is reported against one of them and not all."""


class DataConfig(StrictModel):
    """Where prompts come from and how they are made into tokens."""

    train: list[SourceConfig] = Field(min_length=1)
    """Training sources."""
    validation: list[SourceConfig] = Field(default_factory=list)
    """Held-out sources."""
    prompts_per_step: int = Field(128, ge=1)
    """Prompts of one step; responses are samples_per_prompt times as many."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Longest prompt in tokens after the template."""
    overlong: Literal["error", "drop", "truncate-left"] = "error"
    """What to do with a longer prompt; dropped and truncated prompts are counted."""
    system_prompt: str | None = None
    """System message put before every prompt."""
    apply_chat_template: bool = True
    """Render prompts with the tokenizer's chat template; false tokenizes the prompt text as it is."""
    shuffle: bool = True
    """Visit prompts in a seeded random order, another one each epoch."""


class RewardConfig(StrictModel):
    """How a response is scored."""

    kind: Literal["reasoning_gym", "math_verify", "regex", "function"] = "reasoning_gym"
    """reasoning_gym: the task's scorer; math_verify: mathematical equality with the answer; regex: the pattern's first
    group equals the answer (without an answer: the pattern matches); function: your own."""
    path: str | None = None
    """``package.module:function`` or ``path/to/file.py:function`` for kind function. It is called with
    ``prompt, response, answer, data_source, metadata`` by keyword and returns a number or a dict with ``score``."""
    pattern: str | None = None
    """Regular expression of kind regex; with kind reasoning_gym or math_verify it extracts the answer first."""
    workers: int = Field(2, ge=1)
    """Processes that score."""
    timeout_s: float = Field(10.0, gt=0)
    """Time for one sample; beyond it the sample counts as failed."""
    failure_score: float = 0.0
    """Score of a sample whose scoring raised or timed out; such samples are counted."""
