"""Pickles read without running them, and written without the classes they name. Loads no torch.

Checkpoints of torch and Megatron are pickles, and unpickling calls whatever the file names. Here a name becomes an
``Opaque`` that remembers what was asked of it and does nothing, save for the few types below.

Invariants:
1. Reading imports nothing and calls nothing that a file names.
2. ``dumps`` writes names of classes and functions as text, so that neither has to be importable.
"""

from __future__ import annotations

import argparse
import io
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar

from megarl.errors import CheckpointError

_Pickler: Any = pickle._Pickler
_Unpickler: Any = pickle._Unpickler


class Opaque:
    """Stands for an object of a class that is not loaded.

    Attributes:
        name: ``module.Class``.
        arguments: what it was made from.
        state: what was set on it.
    """

    name = ""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.arguments = arguments
        self.state: Any = named or None
        self.items: list[Any] = []

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def __hash__(self) -> int:
        return id(self)

    def append(self, value: Any) -> None:
        """One more element of a list-like object."""
        self.items.append(value)

    def extend(self, values: Any) -> None:
        """More elements of a list-like object."""
        self.items.extend(values)

    def field(self, name: str, default: Any = None) -> Any:
        """A value of its state."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default

    def __repr__(self) -> str:
        return f"<{self.name}>"


def opaque_class(module: str, name: str) -> type[Opaque]:
    """The stand-in of a class or function."""
    return type("Opaque", (Opaque,), {"name": f"{module}.{name}"})


def _bytearray(*arguments: Any) -> bytearray:
    """From bytes or text: given a number, it would take that much memory."""
    if any(isinstance(argument, int) for argument in arguments):
        raise pickle.UnpicklingError("a bytearray of a number")
    return bytearray(*arguments)


_HARMLESS: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("argparse", "Namespace"): argparse.Namespace,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "complex"): complex,
    ("builtins", "bytearray"): _bytearray,
    ("builtins", "slice"): slice,
    ("torch", "Size"): tuple,
    # How bytes are spelled in protocol 2.
    ("_codecs", "encode"): lambda text, encoding="latin1": text.encode("latin1"),
    # How ``instance`` spells an object made without its constructor.
    ("copyreg", "__newobj__"): lambda kind, *arguments: kind(*arguments),
}


_NO_PICKLE = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
    struct.error,
)
"""What reading a damaged pickle raises."""


class _Reader(_Unpickler):
    """The reader in Python: the one in C takes memory for whatever number of entries a damaged file claims to have.

    It takes 0.6 s for the metadata of 100,000 chunks, nine times what the one in C would.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(_Unpickler.dispatch)

    def __init__(
        self,
        data: bytes,
        known: dict[tuple[str, str], Any],
        persistent: Callable[[Any], Any] | None,
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._known = {**_HARMLESS, **known}
        self._persistent = persistent

    def find_class(self, module: str, name: str) -> Any:
        # Up to protocol 2, which torch writes, builtins have the name of their module in Python 2.
        key = ("builtins" if module == "__builtin__" else module, name)
        if key not in self._known:
            self._known[key] = opaque_class(module, name)
        return self._known[key]

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise pickle.UnpicklingError("a reference to something outside the pickle")
        return self._persistent(pid)

    def load_build(self) -> None:
        if isinstance(self.stack[-2], type):
            raise pickle.UnpicklingError("it sets attributes of a class")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build

    def load_bytearray8(self) -> None:
        # It would take the memory before it reads; torch writes protocol 2, which does not know it.
        raise pickle.UnpicklingError("a bytearray of a claimed size")

    dispatch[pickle.BYTEARRAY8[0]] = load_bytearray8


def loads(
    data: bytes,
    *,
    known: dict[tuple[str, str], Any] | None = None,
    persistent: Callable[[Any], Any] | None = None,
    where: str = "",
) -> Any:
    """What a pickle describes.

    Args:
        data: the pickle.
        known: stand-ins by (module, name), called with the pickled arguments.
        persistent: resolves references to what lies outside the pickle (torch's storages).
        where: the file, for errors.

    Raises:
        CheckpointError: no pickle, or a broken one.
    """
    try:
        return _Reader(data, known or {}, persistent).load()
    except _NO_PICKLE as error:
        what = str(error) or "it ends too early"
        raise CheckpointError(f"broken pickle: {what}", where=where or None, fix="copy the file again") from error


def is_plain(value: Any) -> bool:
    """Whether ``dumps`` can write a value that ``loads`` gave: nothing in it stands for a class or a tensor."""
    if isinstance(value, dict):
        return all(is_plain(key) and is_plain(entry) for key, entry in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return all(is_plain(entry) for entry in value)
    if isinstance(value, argparse.Namespace):
        return is_plain(vars(value))
    return value is None or isinstance(value, bool | int | float | complex | str | bytes | bytearray)


class Global:
    """A class or function by name."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def __call__(self) -> None:
        """Never called: the pickler wants what it reduces with to be callable."""


class Call:
    """The result of calling a ``Global``, with a state set on it.

    Args:
        function: what is called.
        arguments: with what.
        state: for ``__setstate__``, or to update the object's attributes; None sets nothing.
    """

    def __init__(self, function: Global, *arguments: Any, state: Any = None) -> None:
        self._reduced = (function, arguments) if state is None else (function, arguments, state)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._reduced


class Reference:
    """Something outside the pickle."""

    def __init__(self, pid: tuple[Any, ...]) -> None:
        self.pid = pid


_NEW = Global("copyreg", "__newobj__")


def instance(kind: Global, state: Any) -> Call:
    """An object made without its constructor, with its state, as pickled dataclasses are."""
    return Call(_NEW, kind, state=state)


class _Writer(_Pickler):
    """The pickler in Python: the one in C checks that names can be imported."""

    dispatch: ClassVar[dict[type, Any]] = dict(_Pickler.dispatch)

    def persistent_id(self, obj: Any) -> Any:
        return obj.pid if isinstance(obj, Reference) else None

    def save_name(self, obj: Global) -> None:
        self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())
        self.memoize(obj)

    dispatch[Global] = save_name


def dumps(value: Any) -> bytes:
    """A pickle (protocol 2, which torch writes too) of plain values, ``Global``, ``Call`` and ``Reference``."""
    out = io.BytesIO()
    _Writer(out, protocol=2).dump(value)
    return out.getvalue()
