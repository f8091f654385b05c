"""Names of estimators and losses: built-in, registered by a user, or an import path ``package.module:attribute``."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from megarl.errors import ConfigError

Entry = TypeVar("Entry")


class Registry(Generic[Entry]):
    """Entries of one kind by name.

    Args:
        noun: what an entry is, for messages, such as ``policy loss``.
        adopt: makes an entry of the object an import path leads to; raises ConfigError when it cannot.
    """

    def __init__(self, noun: str, adopt: Callable[[str, object], Entry]) -> None:
        self._noun = noun
        self._adopt = adopt
        self._entries: dict[str, Entry] = {}

    def add(self, name: str, entry: Entry) -> Entry:
        """Register an entry under a name that is still free.

        Raises:
            ConfigError: the name is taken.
        """
        if name in self._entries:
            raise ConfigError(f"{self._noun} {name!r} is registered already", fix="choose another name")
        self._entries[name] = entry
        return entry

    def names(self) -> tuple[str, ...]:
        """All registered names, sorted."""
        return tuple(sorted(self._entries))

    def get(self, kind: str) -> Entry:
        """The entry of a name or import path.

        Raises:
            ConfigError: unknown name, or an import path that leads nowhere.
        """
        if kind in self._entries:
            return self._entries[kind]
        if ":" in kind:
            return self._adopt(kind, import_object(kind, self._noun))
        close = difflib.get_close_matches(kind, self._entries, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(
            f"unknown {self._noun} {kind!r}",
            fix=f"{hint}known: {', '.join(self.names())}; or an import path package.module:function",
        )


def import_object(path: str, noun: str) -> object:
    """The object at ``package.module:attribute``.

    Raises:
        ConfigError: no such module or attribute, or the module's own imports fail.
    """
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{noun} {path!r}: cannot import {module_name!r} ({error})") from error
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        raise ConfigError(f"{noun} {path!r}: module {module_name!r} has no {attribute!r}") from error


def keywords_of(function: Callable[..., object]) -> dict[str, bool]:
    """Keyword-only parameters of a function and whether each has a default."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default is not p.empty for p in parameters if p.kind is p.KEYWORD_ONLY}


def bind_options(
    noun: str, kind: str, taken: Mapping[str, bool], shared: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Keyword arguments for a function: the shared ones it takes and all options.

    Args:
        noun: what the function is, for messages.
        kind: its name or path, for messages.
        taken: what the function takes, and whether it has a default for it (``keywords_of``).
        shared: settings offered to all functions of this noun; those the function does not take are left out.
        options: settings meant for this function alone.

    Raises:
        ConfigError: an option the function does not take, one that repeats a shared setting, or a required one missing.
    """
    own: Iterable[str] = [name for name in taken if name not in shared]
    unknown = [name for name in options if name not in taken or name in shared]
    if unknown:
        raise ConfigError(
            f"{noun} {kind!r} does not take {', '.join(map(repr, unknown))}",
            fix=f"its options are: {', '.join(own) or 'none'}",
        )
    missing = [name for name, has_default in taken.items() if not has_default and name not in {*shared, *options}]
    if missing:
        raise ConfigError(f"{noun} {kind!r} needs the option {', '.join(map(repr, missing))}")
    return {name: value for name, value in shared.items() if name in taken} | dict(options)
