"""Whether a model directory holds what a run reads from it: weights of the family's names and shapes, a tokenizer.

Reads headers and small JSON files only, and needs no torch (``weights/files`` does, and checks again when the run
starts).
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megarl.models import ModelSpec
from megarl.models.registry import family_named
from megarl.models.rules import VALUE_HEAD, flags
from megarl.planning.finding import Finding
from megarl.weights.layout import canonical_shapes

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_PLAIN_FLOATS = ("F64", "F32", "F16", "BF16")
_LARGEST_HEADER = 100_000_000
_SHOWN = 3
LEAST_TOKENIZER = 0.8
"""Share of a vocabulary that a tokenizer of the model fills at least: the rest is padding and reserve."""


def check_weights(key: str, directory: Path, spec: ModelSpec, *, value_head: bool = False) -> list[Finding]:
    """What is missing, truncated or of another shape in a directory of safetensors.

    Args:
        key: configuration key that names the directory.
        directory: the model directory.
        spec: the model.
        value_head: the model becomes a critic, whose head may be absent.
    """
    files, findings = _weight_files(key, directory)
    tensors: dict[str, tuple[tuple[int, ...], str]] = {}
    for file in files:
        try:
            tensors |= _header(file)
        except ValueError as error:
            findings.append(Finding("checkpoint", str(file), str(error), "download or copy the file again"))
    if findings or not files:
        return findings
    expected = canonical_shapes(spec, value_head=value_head)
    absent = [name for name in expected if name not in tensors and name != VALUE_HEAD]
    wrong = [
        f"{name} is {list(tensors[name][0])}, not {list(shape)}"
        for name, shape in expected.items()
        if name in tensors and tensors[name][0] != shape
    ]
    quantized = [f"{n} is {tensors[n][1]}" for n in expected if n in tensors and tensors[n][1] not in _PLAIN_FLOATS]
    unknown = _unknown(list(tensors), spec, value_head=value_head)
    for problem, names, fix in (
        ("tensors are absent", absent, "fetch the missing files, or use config.json of these weights"),
        ("tensors have another shape than config.json says", wrong, "use config.json and weights of one model"),
        ("tensors are quantized", quantized, "use the unquantized checkpoint"),
        ("tensors belong to no weight of the model", unknown, "use config.json and weights of one model"),
    ):
        if names:
            text = f"{len(names)} {problem}: {_listing(names)}"
            findings.append(Finding("checkpoint", f"{key}={directory}", text, fix))
    return findings


def check_tokenizer(key: str, directory: Path, spec: ModelSpec, *, needs_template: bool) -> Iterator[Finding]:
    """Whether there is a tokenizer, of the model's vocabulary, with a chat template where one is applied."""
    tokenizer, options = directory / "tokenizer.json", directory / "tokenizer_config.json"
    where = f"{key}={directory}"
    if not tokenizer.exists() and not options.exists():
        fix = "copy tokenizer.json and tokenizer_config.json of the model there"
        yield Finding("checkpoint", where, "there is no tokenizer", fix)
        return
    try:
        content = json.loads(tokenizer.read_text(encoding="utf-8")) if tokenizer.exists() else {}
        settings = json.loads(options.read_text(encoding="utf-8")) if options.exists() else {}
    except (OSError, ValueError) as error:
        yield Finding("checkpoint", where, f"the tokenizer cannot be read ({error})", "copy its files again")
        return
    ids = _token_ids(content)
    if ids and max(ids.values()) >= spec.vocab_size:
        problem = f"the tokenizer has token ids up to {max(ids.values())}, the model a vocabulary of {spec.vocab_size}"
        yield Finding("checkpoint", where, problem, "use the tokenizer of this model, or resize its embeddings")
    elif ids and len(ids) < LEAST_TOKENIZER * spec.vocab_size:
        problem = f"the tokenizer has {len(ids)} tokens, the model a vocabulary of {spec.vocab_size}"
        yield Finding("checkpoint", where, problem, "use the tokenizer of this model", level="warning")
    end = settings.get("eos_token")
    end = end.get("content") if isinstance(end, dict) else end
    if end is not None and ids and spec.eos_token_ids and ids.get(end) not in spec.eos_token_ids:
        problem = f"the tokenizer ends sequences with {end!r} ({ids.get(end)}), the model with {spec.eos_token_ids}"
        fix = "set rollout.sampling.stop_token_ids, or use the tokenizer of this model"
        yield Finding("checkpoint", where, problem, fix, level="warning")
    has_template = "chat_template" in settings or (directory / "chat_template.jinja").exists()
    if needs_template and not has_template:
        fix = "set data.apply_chat_template=false for a base model, or use an instruct model's tokenizer"
        yield Finding("checkpoint", "data.apply_chat_template", "the tokenizer has no chat template", fix)


def _weight_files(key: str, directory: Path) -> tuple[list[Path], list[Finding]]:
    index = directory / INDEX
    where = f"{key}={directory}"
    if not index.exists():
        if (directory / SINGLE).exists():
            return [directory / SINGLE], []
        pickled = any(directory.glob("pytorch_model*.bin"))
        shards = any(directory.glob("*.safetensors"))
        problem = f"there is neither {SINGLE} nor {INDEX}" + (", only pickled weights" if pickled else "")
        fix = "save the model with safe_serialization=True" if pickled else "download the weights"
        fix = "fetch the index file too" if shards else f"{fix}, or set model.init=random to train from scratch"
        return [], [Finding("checkpoint", where, problem, fix)]
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards_named = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [], [Finding("checkpoint", str(index), f"the index cannot be read ({error!r})", "fetch it again")]
    missing = [name for name in shards_named if not (directory / name).exists()]
    if missing:
        problem = f"{len(missing)} of {len(shards_named)} weight files are missing: {_listing(missing)}"
        return [], [Finding("checkpoint", where, problem, "download them again")]
    return [directory / name for name in shards_named], []


def _header(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of each tensor of a safetensors file. Raises ValueError for a broken or truncated file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _LARGEST_HEADER + 1
        if length > min(_LARGEST_HEADER, size - 8):
            raise ValueError(f"no safetensors file: {size} bytes, header of {length}")
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if 8 + length + end > size:
        raise ValueError(f"the file is truncated: its tensors need {8 + length + end} bytes, it has {size}")
    return {name: (tuple(entry["shape"]), entry["dtype"]) for name, entry in header.items()}


def _unknown(names: Sequence[str], spec: ModelSpec, *, value_head: bool) -> list[str]:
    present = flags(spec, value_head=value_head, pipelined=False)
    dropped = [rule.name for rule in family_named(spec.family).dropped if present.issuperset(rule.when)]
    known = canonical_shapes(spec, value_head=value_head)
    return [n for n in names if n not in known and not any(re.fullmatch(pattern, n) for pattern in dropped)]


def _token_ids(content: dict[str, Any]) -> dict[str, int]:
    """Ids of a ``tokenizer.json`` by token; a unigram model lists tokens in order."""
    model = content.get("model", {})
    vocabulary = model.get("vocab", {})
    ids = dict(vocabulary) if isinstance(vocabulary, dict) else {t[0]: i for i, t in enumerate(vocabulary)}
    return ids | {token["content"]: token["id"] for token in content.get("added_tokens", [])}


def _listing(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
