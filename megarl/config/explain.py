"""What a configuration key means, takes and does: text made from the schema, the presets and the source."""

from __future__ import annotations

import difflib
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from megarl.config import fields
from megarl.config.breach import lookup
from megarl.config.load import GROUPS, Preset, group_presets, load_sft, load_train, presets
from megarl.config.origin import Origin, Origins
from megarl.config.readers import Read, find_reads
from megarl.config.rules import COMMON_RULES, SFT_RULES, TRAIN_RULES
from megarl.config.schema import SftConfig, TrainConfig
from megarl.config.schema.correction_presets import CORRECTION_PRESETS
from megarl.errors import ConfigError, MegarlError

_ROOTS: dict[str, type[TrainConfig] | type[SftConfig]] = {"train": TrainConfig, "sft": SftConfig}
_PACKAGE = Path(__file__).resolve().parents[1]


def explain(key: str) -> str:
    """Meaning, type, bounds, default, presets that set it, and the code that reads it.

    Args:
        key: a key of ``megarl train`` or ``megarl sft``: ``actor.layout.tp``, ``data.train.0.path``, or a section.

    Raises:
        ConfigError: there is no such key; close names are suggested.
    """
    pattern = re.sub(r"\.\d+|\[\d*\]", ".*", key.strip("."))
    wanted = {pattern.replace(".*", "")}
    matches = [
        (command, entry)
        for command, root in _ROOTS.items()
        for entry in fields.walk(root)
        if entry.pattern == pattern or entry.pattern.replace(".*", "") in wanted
    ]
    if not matches:
        raise _unknown(key)
    texts: dict[str, list[str]] = {}
    for command, entry in matches:
        texts.setdefault(_describe(entry), []).append(command)
    return "\n\n".join(
        f"{matches[0][1].pattern}  (megarl {', megarl '.join(dict.fromkeys(commands))})\n{text}"
        for text, commands in texts.items()
    )


def all_keys() -> str:
    """Every key of ``megarl train`` and ``megarl sft``, one a line, with the first sentence of its meaning."""
    lines = []
    for command, root in _ROOTS.items():
        lines.append(f"megarl {command}:")
        for pattern, entry in {e.pattern: e for e in fields.walk(root)}.items():
            meaning = (entry.info.description or "").replace("\n", " ")
            lines.append(f"  {pattern:<46} {meaning.partition('. ')[0]}")
    return "\n".join(lines)


def _unknown(key: str) -> ConfigError:
    known = list(dict.fromkeys(e.pattern for root in _ROOTS.values() for e in fields.walk(root)))
    last = key.rpartition(".")[2]
    names = {k.rpartition(".")[2] for k in known}
    wanted = [last] if last in names else difflib.get_close_matches(last, names, n=2, cutoff=0.7)
    close = [k for k in known if k.rpartition(".")[2] in wanted] or difflib.get_close_matches(key, known, n=3)
    close.sort(key=lambda k: -difflib.SequenceMatcher(None, k, key).ratio())
    hint = f"did you mean {' or '.join(close[:4])}? " if close else ""
    return ConfigError(f"there is no key {key!r}", fix=f"{hint}`megarl explain` lists all keys")


def _describe(entry: fields.SchemaField) -> str:
    meaning = " ".join((entry.info.description or "").split())
    lines = [textwrap.fill(meaning, 100, initial_indent="  ", subsequent_indent="  "), ""]
    lines.append(f"  type      {fields.describe_type(entry.info.annotation)}")
    if bounds := fields.constraints(entry.info):
        lines.append(f"  bounds    {' and '.join(bounds)}")
    if entry.is_section:
        inside = dict.fromkeys(n for m in fields.submodels(entry.info.annotation) for n in m.model_fields)
        lines.append(f"  keys      {', '.join(inside)}")
    elif entry.default is fields.NO_DEFAULT:
        lines.append("  default   none: it has to be given")
    else:
        lines.append(f"  default   {_short(entry.default)}")
    lines += _listed("values", _named_values(entry.pattern))
    lines += _listed("rules", [f"{name}: {doc}" for name, doc in _rules_about(entry.pattern)])
    lines += _listed("presets", _preset_values(entry.pattern))
    reads = [str(read) for read in reads_of(entry)]
    lines += _listed("read by", reads or ["nothing that could be found by following annotated names"])
    return "\n".join(lines)


def _named_values(pattern: str) -> list[str]:
    """Values that stand for other keys, and for which."""
    if pattern != "algorithm.correction.preset":
        return []
    return [f"{name}: {', '.join(_settings(keys))}" for name, keys in CORRECTION_PRESETS.items()]


def _settings(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, Mapping) and name != "options":
            yield from _settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={_short(value)}"


def _listed(title: str, items: list[str]) -> list[str]:
    return [f"  {title if index == 0 else '':<9} {item}" for index, item in enumerate(items)]


def _short(value: Any) -> str:
    text = json.dumps(fields.plain(value))
    return text if len(text) <= 100 else f"{text[:97]}..."


def _rules_about(pattern: str) -> list[tuple[str, str]]:
    """Rules whose code mentions a key's last name and the section it stands in."""
    section, name = ["", *pattern.replace(".*", "").split(".")][-2:]
    found = []
    for rule in (*COMMON_RULES, *TRAIN_RULES, *SFT_RULES):
        constants = [str(c) for c in rule.__code__.co_names + _strings(rule.__code__.co_consts)]
        words = {word for text in constants for word in re.split(r"[^\w]+", text)}
        if name in words and (not section or section in words):
            found.append((rule.__name__, (rule.__doc__ or "").strip()))
    return found


def _strings(constants: tuple[Any, ...]) -> tuple[str, ...]:
    flat: list[str] = []
    for constant in constants[1:]:  # the first is the docstring
        flat += [c for c in (constant if isinstance(constant, tuple) else (constant,)) if isinstance(c, str)]
    return tuple(flat)


@lru_cache(maxsize=1)
def _loaded_presets() -> list[tuple[str, Any]]:
    loaded: list[tuple[str, Any]] = []
    for preset in presets():
        try:
            loaded.append((preset.name, load_sft(preset.name) if preset.command == "sft" else load_train(preset.name)))
        except MegarlError:
            continue  # a broken preset has its own test; a key can be explained without it
    return loaded


def _preset_values(pattern: str) -> list[str]:
    """Presets that set a key: name, value, file and line."""
    if "*" in pattern:
        return []
    found = []
    for name, loaded in _loaded_presets():
        origin = loaded.origins.of(pattern)
        if origin.level > 0 and pattern not in loaded.origins.mappings:
            found.append(f"{name}: {_short(lookup(loaded.config, pattern))} ({origin})")
    for group, preset in ((name, preset) for name in GROUPS for preset in group_presets(name)):
        value, where = _group_value(group, preset, pattern)
        if where is not None:
            found.append(f"{group}={preset.name}: {_short(value)} ({where})")
    return found


def _group_value(group: str, preset: Preset, pattern: str) -> tuple[Any, Origin | None]:
    """What a group's file sets a key to, and where; read from the file, since it stands for no whole configuration."""
    text = preset.path.read_text(encoding="utf-8")
    package = "" if text.startswith("# @package _global_") else group
    origins = Origins()
    origins.put_file(preset.path, package, 1)
    if pattern not in origins.entries or pattern in origins.mappings:
        return None, None
    value = yaml.safe_load(text)
    for part in pattern.removeprefix(f"{package}.").split("."):
        value = value[part]
    return value, origins.entries[pattern]


def reads_of(entry: fields.SchemaField) -> list[Read]:
    """Places outside the configuration package that read a key's field (of any role that has the section)."""
    return all_reads().get((entry.model.__name__, entry.name), [])


@lru_cache(maxsize=1)
def all_reads() -> dict[tuple[str, str], list[Read]]:
    """Reads of every field, by class and field name."""
    return find_reads(_ROOTS.values(), _PACKAGE, exclude="config")
