"""What is wrong with a configuration, all of it, in lines a person can act on.

Every line has the key, what was expected, what was found and what set it. Structural violations (pydantic) and
cross-field rules are reported together: a broken value is replaced by its default while the rules run, and a rule that
touches a broken key says nothing, since its input is not known.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from megarl.config import fields
from megarl.config.breach import Breach
from megarl.config.origin import Config, Origins
from megarl.config.schema.base import StrictModel

_REPAIR_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Checked(Generic[Config]):
    """What came of a check.

    Attributes:
        config: the model, with defaults in place of what is broken; None where that cannot be made.
        lines: the violations in the order of the schema.
        broken: keys whose value in ``config`` is not the one given.
    """

    config: Config | None
    lines: tuple[str, ...]
    broken: frozenset[str]


def check(
    root: type[Config],
    values: dict[str, Any],
    origins: Origins,
    rules: Callable[[Config, Origins], Iterable[Breach]],
    *,
    broken: Iterable[str] = (),
) -> Checked[Config]:
    """Validate a filled plain dictionary.

    Args:
        root: the model of the whole configuration.
        values: plain values, defaults included; repaired in place.
        origins: what set each key.
        rules: yields the breaches of the cross-field rules of a model.
        broken: keys already reported, such as interpolations that do not resolve.
    """
    lines: dict[str, str] = {}
    bad = set(broken)
    config: Config | None = None
    for _ in range(_REPAIR_ROUNDS):
        try:
            config = root.model_validate(values)
            break
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                key, _, _ = fields.locate(root, detail["loc"])
                if not touches(key, bad):
                    lines.setdefault(key, _line(root, detail, origins))
                bad.add(key)
                _repair(values, root, detail)
    found = list(lines.values())
    if config is not None:
        found += [
            breach.line(config, origins)
            for breach in rules(config, origins)
            if not any(touches(key, bad) for key in breach.keys)
        ]
    return Checked(config, tuple(found), frozenset(bad))


def touches(key: str, bad: Iterable[str]) -> bool:
    """Whether a key is one of the broken ones, or lies above or below one."""
    return any(key == b or key.startswith(f"{b}.") or b.startswith(f"{key}.") for b in bad)


def _line(root: type[StrictModel], detail: ErrorDetails, origins: Origins) -> str:
    key, info, model = fields.locate(root, detail["loc"])
    kind, value = detail["type"], detail["input"]
    if kind == "extra_forbidden":
        return f"{key}: unknown key{_suggestion(root, model, key)} ({origins.near(key)})"
    if kind == "missing":
        expected = fields.expectation(info) if info is not None else "a value"
        section = origins.near(key)
        place = f" ({section})" if section.level else ""
        return f"{key}: required ({expected}) but not set{place}{_did_you_mean_sibling(value, key)}"
    if kind in ("value_error", "assertion_error"):  # a validator of the section
        return f"{key}: {detail['msg'].partition(', ')[2]} ({origins.near(key)})"
    expected = fields.expectation(info) if info is not None else detail["msg"]
    if kind == "union_tag_invalid":
        key, expected = f"{key}.kind", f"one of {detail['ctx']['expected_tags']}".replace("'", "")
        value = value["kind"]
    elif info is not None and fields.is_list(info.annotation) and isinstance(detail["loc"][-1], int):
        expected = "an item of a " + fields.describe_type(info.annotation)
    return f"{key}: expected {expected}, found {show(value)}{_hint(kind, value)} ({origins.near(key)})"


def show(value: Any) -> str:
    """A value with its type where that helps to see why it was refused."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, dict)):
        text = repr(value)
        return text if len(text) <= 60 else f"a {'list' if isinstance(value, list) else 'mapping'} of {len(value)}"
    return repr(value)


def _hint(kind: str, value: Any) -> str:
    if kind == "string_type" and isinstance(value, (int, float)):
        return f"; for the text quote it twice: '\"{value}\"'"
    if kind in ("int_type", "float_type", "bool_type") and isinstance(value, str):
        return "; remove the quotes" if value.strip().lower().lstrip("-").replace(".", "").isdigit() else ""
    return ""


def _suggestion(root: type[StrictModel], model: type[StrictModel], key: str) -> str:
    """Close names on the same level, or keys elsewhere with the same last name, which faint likeness does not hide."""
    prefix, _, name = key.rpartition(".")
    elsewhere = [f.pattern for f in fields.walk(root) if f.name == name]
    close = difflib.get_close_matches(name, model.model_fields, n=2, cutoff=0.8 if elsewhere else 0.6)
    if close:
        return "; did you mean " + " or ".join(f"{prefix}.{match}" if prefix else match for match in close) + "?"
    if elsewhere:
        return "; did you mean " + " or ".join(dict.fromkeys(elsewhere)) + "?"
    return "; known here: " + ", ".join(model.model_fields)


def _did_you_mean_sibling(siblings: Any, key: str) -> str:
    """Point a missing key at a misspelt one beside it; the unknown key itself is another line."""
    name = key.rpartition(".")[2]
    close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.7) if isinstance(siblings, dict) else []
    return f"; is {close[0]} meant for it?" if close else ""


def _repair(values: dict[str, Any], root: type[StrictModel], detail: ErrorDetails) -> None:
    """Replace the offending value by its default, or by a placeholder where there is none."""
    key, info, model = fields.locate(root, detail["loc"])
    parents: Sequence[str] = key.split(".")[:-1]
    holder: Any = values
    for part in parents:
        if not isinstance(holder, (dict, list)):
            return
        holder = holder[int(part)] if isinstance(holder, list) else holder.get(part)
    name = key.rpartition(".")[2]
    if isinstance(holder, list):
        annotation = info.annotation if info is not None else None
        items = fields.placeholder(annotation)
        holder[int(name)] = items[0] if items else 1
    elif isinstance(holder, dict):
        if info is None or name not in model.model_fields:
            holder.pop(name, None)
        else:
            default = fields.default_of(info)
            missing = default is fields.NO_DEFAULT
            holder[name] = fields.placeholder(info.annotation) if missing else fields.plain(default)
