"""From a preset and overrides to a checked configuration: Hydra composes, pydantic checks. The only door to Hydra.

Invariants:
1. Defaults live in the schema; YAML holds departures. ``key=value`` therefore sets any key of the schema, whether the
   YAML mentions it or not; whether the key exists is decided by the schema, with a suggestion, not by Hydra.
2. All violations are reported at once, each with what set the key.
3. Nothing is read but YAML: no model, no torch, so a login node can check a run.
"""

from __future__ import annotations

import difflib
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megarl.config import fields
from megarl.config.breach import Breach
from megarl.config.effect import keys_without_effect
from megarl.config.origin import FLAG_LEVEL, Config, Loaded, Origin, Origins, shown_path
from megarl.config.rules import check_rules
from megarl.config.schema import SftConfig, TrainConfig
from megarl.config.violations import Checked, check
from megarl.errors import ConfigError, SetupError

_PACKAGE = Path(__file__).resolve().parents[1]


GROUPS = ("algorithm",)
"""Directories of ``configs/`` whose files set a part of a configuration: ``algorithm=dapo``."""


@dataclass(frozen=True, slots=True)
class Preset:
    """One YAML file of ``configs/`` or of a group in it: its name, first comment line and path."""

    name: str
    description: str
    path: Path

    @property
    def command(self) -> str:
        """``train`` or ``sft``; presets of the latter start with ``sft``."""
        return "sft" if self.name.startswith("sft") else "train"


def load_train(preset: str, overrides: Sequence[str] = ()) -> Loaded[TrainConfig]:
    """Compose and check the configuration of ``megarl train``.

    Args:
        preset: name of a file in ``configs/`` or path to a YAML file (``.yaml``).
        overrides: Hydra's override grammar: ``key=value``, ``+key=value``, ``~key``, ``group=option``.

    Raises:
        ConfigError: anything is wrong; ``violations`` has a line for each.
    """
    return _load(TrainConfig, preset, overrides)


def load_sft(preset: str, overrides: Sequence[str] = ()) -> Loaded[SftConfig]:
    """The same for ``megarl sft``."""
    return _load(SftConfig, preset, overrides)


def presets() -> list[Preset]:
    """The presets of this installation, by name."""
    return [Preset(path.stem, _first_comment(path), path) for path in sorted(configs_dir().glob("*.yaml"))]


def group_presets(group: str) -> list[Preset]:
    """The presets of one of ``GROUPS``, by name; chosen with ``group=NAME``."""
    paths = sorted((configs_dir() / group).glob("*.yaml"))
    return [Preset(path.stem, _first_comment(path), path) for path in paths]


def configs_dir() -> Path:
    """``configs/`` inside an installed package, else beside the package in a checkout.

    Raises:
        SetupError: neither exists.
    """
    for candidate in (_PACKAGE / "configs", _PACKAGE.parent / "configs"):
        if (candidate / "grpo_tiny.yaml").is_file():
            return candidate
    raise SetupError(
        "the presets are missing: no configs/ with grpo_tiny.yaml",
        where=f"{_PACKAGE}, {_PACKAGE.parent}",
        fix="install megarl again, or pass a path to your own YAML file",
    )


def _first_comment(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    first = next((line for line in lines if not line.startswith("# @package")), "")
    return first.removeprefix("#").strip() if first.startswith("#") else ""


@dataclass(frozen=True, slots=True)
class Inspected(Generic[Config]):
    """A configuration as far as it can be read: for a report that goes on where loading would stop.

    Attributes:
        config: with defaults in place of what is broken; None where it cannot be repaired.
        violations: a line for each.
        broken: keys whose value in ``config`` is not the one given.
    """

    config: Config | None
    violations: tuple[str, ...]
    broken: frozenset[str]
    origins: Origins


def inspect_train(preset: str, overrides: Sequence[str] = ()) -> Inspected[TrainConfig]:
    """What ``load_train`` reads, with its violations returned.

    Raises:
        ConfigError: no such preset, or YAML or an override that cannot be read.
    """
    return _inspect(TrainConfig, preset, overrides)


def inspect_sft(preset: str, overrides: Sequence[str] = ()) -> Inspected[SftConfig]:
    """The same for ``load_sft``."""
    return _inspect(SftConfig, preset, overrides)


def _load(root: type[Config], preset: str, overrides: Sequence[str]) -> Loaded[Config]:
    found = _inspect(root, preset, overrides)
    if found.config is None or found.violations:
        plural = "" if len(found.violations) == 1 else "s"
        raise ConfigError(
            f"the configuration has {len(found.violations)} violation{plural}",
            where=preset,
            fix="`megarl explain KEY` says what a key means and takes",
            violations=found.violations,
        )
    return Loaded(found.config, preset, tuple(overrides), found.origins)


def _inspect(root: type[Config], preset: str, overrides: Sequence[str]) -> Inspected[Config]:
    given, origins = _compose(preset, overrides)
    implied: dict[str, str] = {}
    complete = fields.filled(root, given, implied=implied)
    for key, by in implied.items():
        origins.put(key, Origin(f"{by}, {origins.of(by)}", origins.of(by).level))
    values, broken, unresolved = _resolve(complete, origins)
    checked: Checked[Config] = check(root, values, origins, _breaches, broken=broken)
    violations: list[str] = unresolved + list(checked.lines)
    return Inspected(checked.config, tuple(violations), checked.broken, origins)


def _breaches(config: TrainConfig | SftConfig, origins: Origins) -> Iterator[Breach]:
    yield from check_rules(config)
    yield from keys_without_effect(config, origins)


def _compose(preset: str, overrides: Sequence[str]) -> tuple[dict[str, Any], Origins]:
    """What YAML and flags say, unresolved and without defaults, and the origin of each key."""
    path = _preset_path(preset)
    parsed = _parse(overrides)
    try:
        with initialize_config_dir(str(path.parent.resolve()), job_name="megarl", version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()
            # A user's file may build on a preset.
            is_own = path.parent.resolve() != configs_dir()
            searched = [f"hydra.searchpath=['file://{configs_dir()}']"] if is_own else []
            _check_groups(parsed, loader)
            chosen = loader.compute_defaults_list(path.stem, searched, RunMode.RUN).overrides.known_choices
            flags = [_as_hydra_flag(flag, loader, chosen) for flag in parsed] + searched
            composed = compose(path.stem, flags)
            origins = _origins(loader, path.stem, flags, parsed)
            given = OmegaConf.to_container(composed, resolve=False)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{shown_path(Path(mark.name))}:{mark.line + 1}" if mark is not None else shown_path(path)
        raise ConfigError(f"not valid YAML: {error.problem}", where=where, fix="correct the file") from error
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
        problem = next((line for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
        raise ConfigError(
            f"cannot compose the configuration: {problem}",
            where=shown_path(path),
            fix="write overrides as key=value, +key=value or ~key",
        ) from error
    if not isinstance(given, dict):
        raise ConfigError(
            "a configuration is a mapping of sections", where=shown_path(path), fix="see `megarl explain`"
        )
    return {str(name): value for name, value in given.items()}, origins


def _preset_path(preset: str) -> Path:
    path = Path(preset).expanduser()
    if path.suffix == ".yaml" or "/" in preset:
        if path.suffix == ".yaml" and path.is_file():
            return path.resolve()
        raise ConfigError(
            f"no configuration file {preset}",
            where=str(Path.cwd()),
            fix="pass the path of a file that ends in .yaml, or the name of a preset (`megarl presets`)",
        )
    known = {found.name: found.path for found in presets()}
    if preset in known:
        return known[preset]
    close = difflib.get_close_matches(preset, known, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise ConfigError(
        f"no preset {preset!r}", fix=f"{hint}Choose one of {', '.join(known)}, or pass a path to a .yaml file"
    )


def _parse(overrides: Sequence[str]) -> list[Override]:
    """Parse each override by itself, so that one error does not hide another."""
    parser = OverridesParser.create()
    parsed, violations = [], []
    for text in overrides:
        try:
            flag = parser.parse_override(text)
        except HydraException as error:
            detail = next((line for line in str(error).splitlines() if "Error parsing" not in line), "")
            violations.append(f"command line: {text}: not an override ({detail.strip() or 'expected key=value'})")
            continue
        if flag.is_sweep_override():
            violations.append(f"command line: {text}: several values; for a list write {flag.key_or_group}=[a,b]")
        elif (flag.key_or_group or "").partition(".")[0] == "hydra":
            violations.append(f"command line: {text}: Hydra's own settings are not used; a run is placed by run.dir")
        elif flag.is_delete() and (flag.key_or_group or "").rpartition(".")[2].isdigit():
            violations.append(f"command line: {text}: no item can be taken out of a list; give the whole list")
        else:
            parsed.append(flag)
    if violations:
        raise ConfigError(
            "the command line cannot be read",
            fix="write key=value, key=[a,b], key={a: 1}, +key=value or ~key, quoted for the shell",
            violations=violations,
        )
    return parsed


def _as_hydra_flag(flag: Override, loader: ConfigLoader, chosen: Container[str]) -> str:
    """``key=value`` as ``++key=value`` (invariant 1); a group goes behind the file's keys if the file chose none."""
    text = str(flag.input_line)
    if flag.is_add() or flag.is_force_add() or flag.is_delete():
        return text
    if _names_a_group(flag):
        return text if flag.key_or_group in chosen else f"+{text}"
    is_group = flag.key_or_group in loader.list_groups("") or "/" in str(flag.key_or_group) or flag.package is not None
    return text if is_group and flag.key_or_group not in GROUPS else f"++{text}"


def _check_groups(parsed: Sequence[Override], loader: ConfigLoader) -> None:
    for flag in filter(_names_a_group, parsed):
        group, name = str(flag.key_or_group), str(flag.value())
        known = sorted({preset.name for preset in group_presets(group)} | set(loader.get_group_options(group)))
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise ConfigError(f"no preset {group}={name}", fix=f"{hint}Choose one of {', '.join(known)}")


def _names_a_group(flag: Override) -> bool:
    """``algorithm=dapo``, and not ``algorithm={...}``, which is a section given whole."""
    return flag.key_or_group in GROUPS and isinstance(flag.value(), str)


def _origins(loader: ConfigLoader, name: str, flags: list[str], parsed: list[Override]) -> Origins:
    """Replay Hydra's merge order over the files it loaded, then over the flags."""
    origins = Origins()
    layers = loader.compute_defaults_list(name, flags, RunMode.RUN).defaults
    directories = [Path(s.path) for s in _sources(loader) if s.provider == "main"] + [configs_dir()]
    level = 0
    for layer in layers:
        files = [directory / f"{layer.config_path}.yaml" for directory in directories]
        found = next((file for file in files if file.is_file()), None)
        if found is not None:
            level += 1
            origins.put_file(found, (layer.package or "").removeprefix("_global_").strip("."), level)
    groups = set(loader.list_groups(""))
    for flag in parsed:
        key = str(flag.key_or_group)
        if flag.is_delete():
            origins.remove(key)
        elif _names_a_group(flag) or (key in groups and key not in GROUPS) or "/" in key:
            continue  # its file is a layer of its own
        else:
            origins.put_value(key, _plain(flag.value()), Origin(f"command line: {flag.input_line}", FLAG_LEVEL))
    return origins


def _sources(loader: ConfigLoader) -> list[Any]:
    return list(loader.get_sources())


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _resolve(values: dict[str, Any], origins: Origins) -> tuple[dict[str, Any], list[str], list[str]]:
    """Resolve ``${...}`` everywhere: the values, the keys that did not resolve, and a violation for each of them."""
    broken: list[str] = []
    lines: list[str] = []

    def resolved(node: DictConfig | ListConfig, prefix: str) -> Any:
        result: dict[str, Any] = {}
        for name in range(len(node)) if isinstance(node, ListConfig) else list(node):
            key = f"{prefix}{name}"
            try:
                if OmegaConf.is_missing(node, name):
                    broken.append(key)
                    lines.append(f"{key}: required (marked ??? in the file) but not set ({origins.near(key)})")
                    continue
                value = node[name]
            except OmegaConfBaseException as error:
                broken.append(key)
                lines.append(f"{key}: {str(error).splitlines()[0]} ({origins.near(key)})")
                continue
            result[str(name)] = resolved(value, f"{key}.") if isinstance(value, (DictConfig, ListConfig)) else value
        return list(result.values()) if isinstance(node, ListConfig) else result

    return resolved(OmegaConf.create(values), ""), broken, lines
