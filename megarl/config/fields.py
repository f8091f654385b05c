"""The schema as a tree of keys: what loading, violations and ``explain`` need to know about a field.

Invariants:
1. Nothing here is written twice: types, defaults, constraints and documentation come from the pydantic models.
2. A key is written as on the command line: ``actor.layout.tp``, ``data.train.0.path``; a pattern has ``*`` for 0.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from megarl.config.schema.base import StrictModel

NO_DEFAULT = object()
"""Default of a key that has to be given."""


@dataclass(frozen=True, slots=True)
class SchemaField:
    """One key of the schema; a union of sources gives one entry per member that has the key."""

    pattern: str
    model: type[StrictModel]
    name: str
    info: FieldInfo
    default: Any

    @property
    def is_section(self) -> bool:
        return bool(submodels(self.info.annotation))


def submodels(annotation: Any) -> list[type[StrictModel]]:
    """Models named anywhere in an annotation: ``list[A | B] | None`` gives A and B."""
    if isinstance(annotation, type) and issubclass(annotation, StrictModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in submodels(argument)]


def is_list(annotation: Any) -> bool:
    """Whether a value of this annotation is a list."""
    return _bare(annotation)[0] is list


def walk(root: type[StrictModel], prefix: str = "", base: Any = None) -> Iterator[SchemaField]:
    """Every key below a model, sections first, in schema order."""
    for name, info in root.model_fields.items():
        pattern = f"{prefix}{name}"
        default = getattr(base, name) if base is not None else default_of(info)
        yield SchemaField(pattern, root, name, info, default)
        for model in submodels(info.annotation):
            if is_list(info.annotation):
                yield from walk(model, f"{pattern}.*.")
            else:
                yield from walk(model, f"{pattern}.", default if isinstance(default, model) else None)


def default_of(info: FieldInfo) -> Any:
    """The field's default, or ``NO_DEFAULT``."""
    return NO_DEFAULT if info.is_required() else info.get_default(call_default_factory=True)


def filled(
    model: type[StrictModel],
    given: Mapping[str, Any],
    base: StrictModel | None = None,
    *,
    prefix: str = "",
    implied: dict[str, str] | None = None,
) -> dict[str, Any]:
    """``given`` over what its keys imply over the schema's defaults, keys that the schema does not know included.

    A section's default is the *instance* its parent declares (``critic.optimizer`` starts from lr 1e-5), also where
    only some of its keys are given; pydantic alone would fall back to the defaults of the section's class.

    Args:
        model: the section.
        given: plain values that something other than the schema set.
        base: instance that holds the defaults, if its parent declares one.
        prefix: key of the section with a dot behind it.
        implied: receives each key whose value another key stands for, and that other key.
    """
    stands_for, by = model.implied(dict(given))
    if stands_for:
        if implied is not None:
            implied.update({f"{prefix}{key}": f"{prefix}{by}" for key in _leaves(stands_for) if not _has(given, key)})
        given = _over(given, stands_for)
    result: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        default = getattr(base, name) if base is not None else default_of(info)
        if name in given:
            result[name] = _filled_value(info, given[name], default, f"{prefix}{name}.", implied)
        elif default is not NO_DEFAULT:
            result[name] = plain(default)
    result.update({name: value for name, value in given.items() if name not in result})
    return result


def _filled_value(info: FieldInfo, value: Any, default: Any, prefix: str, implied: dict[str, str] | None) -> Any:
    models = submodels(info.annotation)
    if models and isinstance(value, Mapping) and not is_list(info.annotation):
        base = default if isinstance(default, models[0]) else None
        return filled(models[0], value, base, prefix=prefix, implied=implied)
    if models and isinstance(value, list):
        return [filled(member(models, item), item) if isinstance(item, Mapping) else item for item in value]
    return value


def _over(above: Mapping[str, Any], below: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for name, value in above.items():
        under = result.get(name)
        result[name] = _over(value, under) if isinstance(value, Mapping) and isinstance(under, Mapping) else value
    return result


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _has(values: Any, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(values, Mapping) or part not in values:
            return False
        values = values[part]
    return True


def member(models: Sequence[type[StrictModel]], value: Mapping[str, Any]) -> type[StrictModel]:
    """The member of a union that a plain value is meant for, by its ``kind``; the first where it names none."""
    for model in models:
        if "kind" in model.model_fields and value.get("kind") in choices(model.model_fields["kind"].annotation):
            return model
    return models[0]


def placeholder(annotation: Any) -> Any:
    """A value of the right shape for a required key that was not given, so that rules on other keys can still run."""
    models = submodels(annotation)
    if is_list(annotation):
        return [placeholder(models[0])] if models else []
    if models:
        required = {n: i for n, i in models[0].model_fields.items() if i.is_required()}
        return filled(models[0], {name: placeholder(info.annotation) for name, info in required.items()})
    return "unset" if annotation is str else 1


def plain(value: Any) -> Any:
    """Models to dictionaries, everything else as it is."""
    if isinstance(value, StrictModel):
        return value.model_dump()
    return [plain(item) for item in value] if isinstance(value, list) else value


def choices(annotation: Any) -> tuple[Any, ...]:
    """Allowed values of a ``Literal``, else nothing."""
    origin, arguments = _bare(annotation)
    return arguments if origin is Literal else ()


def describe_type(annotation: Any) -> str:
    """An annotation in words: ``integer or null``."""
    if annotation is type(None):
        return "null"
    if get_origin(annotation) is Annotated:
        return describe_type(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(describe_type(argument) for argument in get_args(annotation))
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(str(value) for value in get_args(annotation))
    if get_origin(annotation) is list:
        return f"list of {describe_type(get_args(annotation)[0])}"
    if get_origin(annotation) is dict or annotation is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, StrictModel):
        return _shape(annotation)
    words = {int: "integer", float: "number", str: "string", bool: "true or false", Any: "anything"}
    return words.get(annotation, str(annotation))


def _shape(model: type[StrictModel]) -> str:
    """A section as one would write it: ``{kind: file, path: ...}``, with its kind and what it needs, else its start."""
    needed = [n for n, info in model.model_fields.items() if info.is_required() or (n == "kind" and _tag(info))]
    shown = needed or [*list(model.model_fields)[:2], ""]
    tags = {name: _tag(model.model_fields[name]) for name in shown if name}
    return "{" + ", ".join(f"{name}: {tags[name] or '...'}" if name else "..." for name in shown) + "}"


def _tag(info: FieldInfo) -> str:
    """The only value that a field takes, if there is one."""
    allowed = choices(info.annotation)
    return str(allowed[0]) if len(allowed) == 1 else ""


def constraints(info: FieldInfo) -> list[str]:
    """Bounds of a field in words, such as ``>= 1``."""
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "min_length": "length >=", "max_length": "length <="}
    found = [
        f"{sign} {getattr(bound, attribute)}"
        for bound in _bounds(info)
        for attribute, sign in signs.items()
        if getattr(bound, attribute, None) is not None
    ]
    return list(dict.fromkeys(found))


def expectation(info: FieldInfo) -> str:
    """Type and bounds of a field in one phrase."""
    return " ".join([describe_type(info.annotation), " and ".join(constraints(info))]).strip()


def locate(root: type[StrictModel], location: Sequence[str | int]) -> tuple[str, FieldInfo | None, type[StrictModel]]:
    """Translate pydantic's error location: the key, the innermost field on it, and the model of its last level.

    pydantic puts a union's tag into the location (``data.train.0.file.path``); a key has none.
    """
    parts: list[str] = []
    model, info = root, None
    members: list[type[StrictModel]] = []
    for part in location:
        tagged = [m for m in members if len(members) > 1 and part in choices(m.model_fields["kind"].annotation)]
        if tagged:
            model, members = tagged[0], []
        elif isinstance(part, int):
            parts.append(str(part))
        elif info is not None and not submodels(info.annotation):
            if _bare(info.annotation)[0] is dict:
                parts.append(part)
        else:
            parts.append(part)
            if (found := model.model_fields.get(part)) is None:
                return ".".join(parts), None, model
            info, members = found, submodels(found.annotation)
            model = members[0] if len(members) == 1 else model
    return ".".join(parts), info, model


def _bare(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """Origin and arguments of an annotation without ``Annotated`` and ``None``."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _bare(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        rest = [argument for argument in get_args(annotation) if argument is not type(None)]
        return _bare(rest[0]) if len(rest) == 1 else (origin, get_args(annotation))
    return origin if origin is not None else annotation, get_args(annotation)


def _bounds(info: FieldInfo) -> list[Any]:
    """Constraint objects of a field; pydantic keeps those of ``X | None`` on the union or on its member."""
    inner = [
        bound
        for argument in get_args(info.annotation)
        if get_origin(argument) is Annotated
        for bound in get_args(argument)[1:]
    ]
    return [*info.metadata, *inner]
