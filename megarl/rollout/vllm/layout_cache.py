"""Traced layouts on disk: they depend on vLLM, the model's configuration and the rank, and on nothing else.

Invariants:
1. A cached layout is used only if every parameter of it has the same shape and dtype in the live model.
2. A cache that cannot be read or written is as good as none.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import vllm
from torch import nn

from megarl.platform import env
from megarl.rollout.vllm.trace import Trace, loadable
from megarl.weights.region import Shape
from megarl.weights.schedule import region_fields, region_of

logger = logging.getLogger(__name__)

# Of the file and of what tracing means; another number makes all files of before unused.
_FORMAT = 1


def directory() -> Path:
    """``MEGARL_CACHE`` or ``~/.cache/megarl``, and in it the layouts'."""
    return env.cache_directory() / "vllm-layouts"


def key(vllm_config: Any, rank: int, shapes: Mapping[str, Shape], dtype: torch.dtype) -> str:
    """Names a layout."""
    hasher = hashlib.sha256()
    parts = [_FORMAT, vllm.__version__, torch.__version__, vllm_config.compute_hash(), rank, str(dtype)]
    parts.append(vllm_config.model_config.hf_config.to_json_string())
    hasher.update(json.dumps([*parts, sorted(shapes.items())]).encode())
    return hasher.hexdigest()[:32]


def read(name: str, model: nn.Module) -> Trace | None:
    """The cached layout of that name, if it is there and fits the model."""
    try:
        content = json.loads((directory() / f"{name}.json").read_text())
        found = Trace([region_of(fields) for fields in content["regions"]], dict(content["dtypes"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    known = loadable(model)
    for region in found.regions:
        if known.get(region.local_name) != (region.local_shape, found.dtypes.get(region.local_name)):
            logger.warning("the cached layout %s does not fit this model and is not used", name)
            return None
    return found


def write(name: str, found: Trace) -> None:
    """Keep a layout; the file appears whole or not at all."""
    content = {"regions": [region_fields(region) for region in found.regions], "dtypes": found.dtypes}
    temporary = directory() / f".{name}.{os.getpid()}"
    try:
        directory().mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content, separators=(",", ":")))
        temporary.rename(directory() / f"{name}.json")
    except OSError as error:
        logger.info("the traced layout is not cached: %s", error)
