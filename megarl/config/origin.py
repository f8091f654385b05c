"""Where each value of a configuration came from, and the resolved configuration written with it.

Invariants:
1. A later layer replaces an earlier one as Hydra merges them: mappings merge, everything else (lists too) replaces.
2. Levels order layers: 0 the schema's default, 1..n YAML files in Hydra's order, ``FLAG_LEVEL`` the command line.
3. ``resolved.json`` loads back into an equal configuration; ``resolved.yaml`` is itself a configuration megarl runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml

import megarl
from megarl.config.schema import SftConfig, TrainConfig
from megarl.errors import ConfigError, SetupError
from megarl.platform.durable import write_text

FLAG_LEVEL = 1_000_000

Config = TypeVar("Config", TrainConfig, SftConfig)


@dataclass(frozen=True, slots=True)
class Origin:
    """One layer that set a key: ``default``, ``configs/grpo_tiny.yaml:12`` or ``command line: run.steps=5``."""

    text: str = "default"
    level: int = 0

    def __str__(self) -> str:
        return self.text


@dataclass(slots=True)
class Origins:
    """Origin of every key that something other than the schema set."""

    entries: dict[str, Origin] = field(default_factory=dict)
    mappings: set[str] = field(default_factory=set)

    def of(self, key: str) -> Origin:
        """Who set this value. A list or scalar set as a whole also set what lies inside it."""
        return self._find(key, through_mappings=False)

    def near(self, key: str) -> Origin:
        """Who set the key or something inside it, else who wrote the innermost section around it."""
        inside = (origin for known, origin in self.entries.items() if known.startswith(f"{key}."))
        return self.entries.get(key) or next(inside, None) or self._find(key, through_mappings=True)

    def _find(self, key: str, *, through_mappings: bool) -> Origin:
        if key in self.entries:
            return self.entries[key]
        while "." in key:
            key = key.rpartition(".")[0]
            if key in self.entries:
                return self.entries[key] if through_mappings or key not in self.mappings else Origin()
        return Origin()

    def remove(self, key: str) -> None:
        """Forget a key and everything below it (``~key``)."""
        for known in [k for k in self.entries if k == key or k.startswith(f"{key}.")]:
            del self.entries[known]
            self.mappings.discard(known)

    def put(self, key: str, origin: Origin, *, mapping: bool = False) -> None:
        """Record one key; a value that is no mapping replaces what was below it."""
        if not mapping or key not in self.mappings:
            self.remove(key)
        self.entries[key] = origin
        if mapping:
            self.mappings.add(key)

    def put_value(self, key: str, value: Any, origin: Origin) -> None:
        """Record a plain value and what it contains, all set by one flag."""
        self.put(key, origin, mapping=isinstance(value, Mapping))
        items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
        for name, item in items:
            self.put_value(f"{key}.{name}", item, origin)

    def put_file(self, path: Path, package: str, level: int) -> None:
        """Record every key of a YAML file, by line, below a package (``""`` is the root)."""
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        if isinstance(root, yaml.MappingNode):
            hidden = {"defaults", "hydra"} if not package else {"defaults"}
            root.value = [pair for pair in root.value if pair[0].value not in hidden]
            self._put_node(package, root, shown_path(path), level)

    def _put_node(self, prefix: str, node: yaml.Node, file: str, level: int) -> None:
        for name, line, child in _children(node):
            key = f"{prefix}.{name}" if prefix else name
            self.put(key, Origin(f"{file}:{line}", level), mapping=isinstance(child, yaml.MappingNode))
            self._put_node(key, child, file, level)


def _children(node: yaml.Node) -> Iterator[tuple[str, int, yaml.Node]]:
    """Name, line and value of what a YAML node contains; merge keys (``<<``) come first, since others win."""
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield str(index), item.start_mark.line + 1, item
    if isinstance(node, yaml.MappingNode):
        for name, merged in node.value:
            if name.value == "<<":
                for source in merged.value if isinstance(merged, yaml.SequenceNode) else [merged]:
                    yield from _children(source)
        for name, child in node.value:
            if name.value != "<<":
                yield str(name.value), name.start_mark.line + 1, child


@dataclass(frozen=True, slots=True)
class Loaded(Generic[Config]):
    """A checked configuration, how it was asked for, and where its values came from."""

    config: Config
    preset: str
    overrides: tuple[str, ...]
    origins: Origins


def shown_path(path: Path) -> str:
    """A path as a user would type it: relative where it lies below the working directory."""
    path = path.resolve()
    cwd = Path.cwd().resolve()
    return str(path.relative_to(cwd)) if path.is_relative_to(cwd) else str(path)


def resolved_yaml(loaded: Loaded[Any]) -> str:
    """The whole configuration as YAML, each value with its origin as a comment."""
    asked = " ".join([loaded.preset, *loaded.overrides])
    lines = [f"# megarl {megarl.__version__}: {asked}", "# Each value is followed by what set it."]
    lines += _yaml_lines(loaded.config.model_dump(), "", loaded.origins, 0)
    return "\n".join(lines) + "\n"


def _yaml_lines(section: Mapping[str, Any], prefix: str, origins: Origins, depth: int) -> Iterator[str]:
    indent = "  " * depth
    for name, value in section.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield f"{indent}{name}:"
            yield from _yaml_lines(value, f"{key}.", origins, depth + 1)
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            yield f"{indent}{name}:"
            for index, item in enumerate(value):
                first, *rest = _yaml_lines(item, f"{key}.{index}.", origins, depth + 2)
                yield f"{indent}  - {first.lstrip()}"
                yield from rest
        else:
            yield f"{indent}{_scalar(str(name))}: {_scalar(value)}  # {origins.of(key)}"


def _scalar(value: Any) -> str:
    """One-line YAML of a value; strings that could be read as anything else are quoted, ``${`` is escaped."""
    if isinstance(value, str):
        if re.fullmatch(r"[A-Za-z_./][\w./-]*", value) and yaml.safe_load(value) == value:
            return value
        return json.dumps(value.replace("${", "\\${"), ensure_ascii=False)
    if isinstance(value, list):
        return "[" + ", ".join(_scalar(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_scalar(str(name))}: {_scalar(item)}" for name, item in value.items()) + "}"
    return yaml.safe_dump(value).splitlines()[0]


def resolved_json(loaded: Loaded[Any]) -> str:
    """The same for programs: configuration, origins by key, preset and overrides."""
    document = {
        "megarl": megarl.__version__,
        "command": "sft" if isinstance(loaded.config, SftConfig) else "train",
        "preset": loaded.preset,
        "overrides": list(loaded.overrides),
        "config": loaded.config.model_dump(),
        "origins": {key: [origin.text, origin.level] for key, origin in loaded.origins.entries.items()},
        "mappings": sorted(loaded.origins.mappings),
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def write_resolved(loaded: Loaded[Any], run_dir: str | Path) -> None:
    """Write ``resolved.yaml`` and ``resolved.json`` into the run directory; a reader never sees half a file.

    Raises:
        SetupError: the directory cannot be written.
    """
    directory = Path(run_dir)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in (("resolved.yaml", resolved_yaml(loaded)), ("resolved.json", resolved_json(loaded))):
            write_text(directory / name, text)
    except OSError as error:
        raise SetupError(
            f"cannot write the resolved configuration: {error}", where=str(directory), fix="choose another run.dir"
        ) from error


def load_resolved(path: str | Path) -> Loaded[TrainConfig] | Loaded[SftConfig]:
    """Read ``resolved.json`` of a run.

    Raises:
        ConfigError: the file is missing, is no such file, or holds a configuration this version refuses.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        origins = Origins(
            {key: Origin(text, level) for key, (text, level) in document["origins"].items()}, set(document["mappings"])
        )
        asked: tuple[str, Sequence[str]] = document["preset"], document["overrides"]
        if document["command"] == "sft":
            return Loaded(SftConfig.model_validate(document["config"]), asked[0], tuple(asked[1]), origins)
        return Loaded(TrainConfig.model_validate(document["config"]), asked[0], tuple(asked[1]), origins)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"not a resolved configuration of this version: {error}", where=str(path), fix="pass a run's resolved.json"
        ) from error
