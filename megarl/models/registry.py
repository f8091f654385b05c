"""The families megarl knows, and the way from a Hugging Face directory to a spec."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.errors import ModelError
from megarl.models.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from megarl.models.families.glm4_moe import GLM4_MOE
from megarl.models.families.llama import LLAMA, MISTRAL
from megarl.models.families.mixtral import MIXTRAL
from megarl.models.families.qwen2 import QWEN2
from megarl.models.families.qwen2_moe import QWEN2_MOE
from megarl.models.families.qwen3 import QWEN3
from megarl.models.families.qwen3_moe import QWEN3_MOE
from megarl.models.family import Family
from megarl.models.hf_config import read_spec
from megarl.models.spec import ModelSpec

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        *(LLAMA, MISTRAL, QWEN2, QWEN3),
        *(MIXTRAL, QWEN2_MOE, QWEN3_MOE, DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE),
    )
}

_AGAIN = "take config.json from the model's page again"
_NORMS = "norms after attention and feed-forward part, for which Megatron-Core's layer (0.16 to 0.19) has no place"
_GEMMA = (
    "norm weights as 1 + w, which Megatron-Core's own norms (0.16 to 0.19) lack and Transformer Engine's have, and "
    "embeddings times the root of the hidden size, for which its embedding has no factor"
)
_TWO_BASES = "one rotary base for windowed layers and another for the rest, where it has one for all"

REFUSED: dict[str, str] = {
    "gemma": _GEMMA,
    "gemma2": f"{_NORMS}; {_GEMMA}; soft-capped attention scores and logits, which it lacks too",
    "gemma3": f"{_NORMS}; {_GEMMA}; {_TWO_BASES}",
    "gemma3_text": f"{_NORMS}; {_GEMMA}; {_TWO_BASES}",
    "glm4": _NORMS,
    "gpt_oss": (
        "experts whose gate and up columns alternate in one tensor of all experts, often packed as MXFP4, while "
        "megarl moves unpacked rectangles (Megatron-Core could hold them, the sinks and the window)"
    ),
}
"""Families that Megatron-Core cannot hold, or megarl cannot move yet, and why: each has ..."""


def family_named(name: str) -> Family:
    """The family of a ``model_type``. Raises ModelError for one that megarl does not know."""
    if name in REFUSED:
        raise ModelError(
            f"model_type {name!r} is refused: it has {REFUSED[name]}",
            fix="use a model of a known family",
        )
    if name not in FAMILIES:
        raise ModelError(
            f"model_type {name!r} is none of the families megarl knows ({', '.join(sorted(FAMILIES))})",
            fix="add a file to megarl/models/families, or use a model of a known family",
        )
    return FAMILIES[name]


def spec_from_config(config: Mapping[str, Any], *, where: str = "config.json") -> ModelSpec:
    """The spec of a Hugging Face configuration given as a mapping.

    Raises:
        ModelError: no or an unknown ``model_type``, a missing or wrong size, or an option that the family cannot
            represent; all problems of the configuration in one error, each naming its key and value.
    """
    if not isinstance(config.get("model_type"), str):
        raise ModelError("the configuration names no model_type", where=where, fix=_AGAIN)
    return read_spec(config, family_named(config["model_type"]), where=where)


def read_config(directory: str | Path) -> dict[str, Any]:
    """The configuration of a Hugging Face directory. Raises ModelError where there is none or it is no JSON object."""
    path = Path(directory) / "config.json"
    if not path.parent.exists():
        raise ModelError(
            f"there is no directory {path.parent}",
            where=str(directory),
            fix="give a Hugging Face model directory on this machine; hf download NAME --local-dir DIRECTORY makes one",
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(
            f"cannot read the model's configuration: {error.strerror}",
            where=str(path),
            fix="give a Hugging Face model directory, which has a config.json",
        ) from error
    except ValueError as error:
        raise ModelError(f"the model's configuration is no JSON: {error}", where=str(path), fix=_AGAIN) from error
    if not isinstance(config, dict):
        raise ModelError("the model's configuration is no JSON object", where=str(path), fix=_AGAIN)
    return config


def load_spec(directory: str | Path) -> ModelSpec:
    """The spec of a Hugging Face directory; raises like ``read_config`` and ``spec_from_config``."""
    return spec_from_config(read_config(directory), where=str(Path(directory) / "config.json"))
