"""Rows of raw data: JSONL and Parquet files, reasoning-gym tasks.

Invariants:
1. A file is read and checked in full when it is opened: a broken row is found before the first step, not in it.
2. ``fingerprint`` changes when the rows or their order do: a resumed run refuses changed data.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeAlias

import numpy as np

from megarl.data.gym import make_dataset
from megarl.errors import DataError

Messages: TypeAlias = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Row:
    """One raw example.

    Args:
        prompt: text, or chat messages (dicts with ``role`` and ``content``).
        answer: reference answer, or None.
        metadata: what else the reward needs, picklable.
        where: file and line, or task and item, for error messages.
    """

    prompt: str | Messages
    answer: Any
    metadata: dict[str, Any] = field(default_factory=dict)
    where: str = ""


class Source(Protocol):
    """Rows that can be read in any order."""

    name: str
    weight: float

    def __len__(self) -> int: ...

    def row(self, index: int) -> Row:
        """Row ``index``, the same at every call."""
        ...

    def fingerprint(self) -> str:
        """Digest of the rows and their order."""
        ...


def open_source(values: Mapping[str, Any]) -> Source:
    """A source from its description: ``kind`` (``file`` or ``reasoning_gym``) and the arguments of its class.

    Raises:
        DataError: the source cannot be read or lacks what the description names.
    """
    arguments = dict(values)
    kind = arguments.pop("kind")
    if kind == "reasoning_gym":
        return GymSource(**arguments)
    if kind == "file":
        return open_file(**arguments)
    raise DataError(f"no source is of kind {kind!r}", fix="file or reasoning_gym")


def open_file(
    path: str,
    prompt_column: str = "prompt",
    answer_column: str | None = None,
    name: str | None = None,
    weight: float = 1.0,
) -> Source:
    """Rows of a .jsonl or .parquet file; columns beside prompt and answer become ``metadata``.

    Raises:
        DataError: unreadable, empty, broken, or a column is missing; names file, row, column and what there is.
    """
    file = Path(path)
    columns = _Columns(str(file), prompt_column, answer_column)
    source: Source
    try:
        if file.suffix == ".jsonl":
            source = JsonlSource(file, columns, name or file.stem, weight)
        elif file.suffix == ".parquet":
            source = ParquetSource(file, columns, name or file.stem, weight)
        else:
            raise DataError(f"cannot read files of kind {file.suffix!r}", where=path, fix="use .jsonl or .parquet")
    except OSError as error:
        raise DataError(f"cannot read the dataset: {error.strerror or error}", where=str(file)) from error
    if not len(source):
        raise DataError("the dataset is empty", where=str(file))
    return source


@dataclass(frozen=True, slots=True)
class _Columns:
    """Which columns of a file are what, and how a row of them is checked."""

    file: str
    prompt: str
    answer: str | None

    def require(self, available: Sequence[str], where: str) -> None:
        for column, key in ((self.prompt, "prompt_column"), (self.answer, "answer_column")):
            if column is not None and column not in available:
                raise DataError(
                    f"column {column!r} is missing; there are {sorted(available)}",
                    where=where,
                    fix=f"set {key} of this source to one of them",
                )

    def row(self, record: dict[str, Any], where: str) -> Row:
        prompt = record.pop(self.prompt)
        answer = record.pop(self.answer) if self.answer is not None else None
        if not isinstance(prompt, str) and not _are_messages(prompt):
            self._refuse(self.prompt, "text or a list of {role, content} messages", prompt, where)
        if self.answer is not None and answer is None:
            self._refuse(self.answer, "an answer", answer, where)
        return Row(prompt, answer, record, where)

    def check_table(self, table: Any) -> None:
        """What ``row`` checks, for a whole Arrow table by its types and null counts."""
        from pyarrow import types

        kind = table.schema.field(self.prompt).type
        element = kind.value_type if types.is_list(kind) or types.is_large_list(kind) else None
        is_text = types.is_string(kind) or types.is_large_string(kind)
        keys = {element.field(number).name for number in range(element.num_fields)} if element is not None else set()
        if not is_text and not {"role", "content"} <= keys:
            self._refuse(self.prompt, "text or a list of {role, content} messages", kind, self.file)
        for column in filter(None, (self.prompt, self.answer)):
            if nulls := table.column(column).null_count:
                self._refuse(column, "a value in every row", f"{nulls} rows without one", self.file)

    def _refuse(self, column: str, expected: str, found: Any, where: str) -> NoReturn:
        raise DataError(f"column {column!r} must hold {expected}, found {str(found)[:80]}", where=where)


class JsonlSource:
    """A memory-mapped file with one JSON object a line; blank lines are skipped."""

    def __init__(self, file: Path, columns: _Columns, name: str, weight: float) -> None:
        self.name = name
        self.weight = weight
        self._columns = columns
        with file.open("rb") as handle:
            size = handle.seek(0, 2)
            self._data: mmap.mmap | bytes = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        digest = hashlib.blake2b(f"{columns.prompt}\0{columns.answer}\0".encode(), digest_size=16)
        spans: list[tuple[int, int, int]] = []
        for number, (start, stop) in enumerate(_lines(self._data), start=1):
            line = self._data[start:stop]
            digest.update(line)
            if line.strip():
                self._parse(line, number)
                spans.append((start, stop, number))
        self._spans = np.array(spans, dtype=np.int64).reshape(-1, 3)
        self._digest = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._spans)

    def row(self, index: int) -> Row:
        """Row ``index``, parsed now."""
        start, stop, number = (int(value) for value in self._spans[index])
        return self._parse(self._data[start:stop], number)

    def fingerprint(self) -> str:
        """Digest of the file's bytes and the column names."""
        return self._digest

    def _parse(self, line: bytes, number: int) -> Row:
        where = f"{self._columns.file}:{number}"
        try:
            record = json.loads(line)
        except ValueError as error:  # also what is not UTF-8
            raise DataError(f"not a JSON object: {error}", where=where) from error
        if not isinstance(record, dict):
            raise DataError(f"expected a JSON object, found {type(record).__name__}", where=where)
        self._columns.require(list(record), where)
        return self._columns.row(record, where)


class ParquetSource:
    """A Parquet file, held as one Arrow table."""

    def __init__(self, file: Path, columns: _Columns, name: str, weight: float) -> None:
        import pyarrow
        import pyarrow.parquet

        self.name = name
        self.weight = weight
        self._columns = columns
        with file.open("rb") as handle:
            content = hashlib.file_digest(handle, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        try:
            self._table: Any = pyarrow.parquet.read_table(file, memory_map=True)
        except pyarrow.ArrowException as error:
            raise DataError(f"not a readable Parquet file: {error}", where=str(file)) from error
        columns.require(self._table.column_names, str(file))
        columns.check_table(self._table)
        self._digest = f"{content}:{columns.prompt}:{columns.answer}"

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def row(self, index: int) -> Row:
        """Row ``index`` as Python objects."""
        record = {name: self._table.column(name)[index].as_py() for name in self._table.column_names}
        return self._columns.row(record, f"{self._columns.file} row {index}")

    def fingerprint(self) -> str:
        """Digest of the file's bytes and the column names."""
        return self._digest


class GymSource:
    """Items of a reasoning-gym task. ``metadata`` holds what the task's own scorer needs (``rewards/gym.py``)."""

    def __init__(
        self,
        task: str,
        options: Mapping[str, Any] | None = None,
        size: int = 10_000,
        seed: int = 0,
        weight: float = 1.0,
    ) -> None:
        self.name = task
        self.weight = weight
        self._task = task
        self._options = dict(options or {})
        self._dataset = make_dataset(task, self._options, size=size, seed=seed)
        self._size = size
        self._seed = seed

    def __len__(self) -> int:
        return self._size

    def row(self, index: int) -> Row:
        """Item ``index``, generated now."""
        entry = self._dataset[index]
        metadata = {"task": self._task, "options": self._options, "entry": entry}
        return Row(entry["question"], entry["answer"], metadata, f"reasoning_gym task {self._task} item {index}")

    def fingerprint(self) -> str:
        """Digest of the description and of a few items, which another release may generate differently."""
        sample = [self._dataset[index] for index in range(min(3, self._size))]
        text = repr((self._task, sorted(self._options.items()), self._size, self._seed, sample))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _lines(data: mmap.mmap | bytes) -> list[tuple[int, int]]:
    found, start = [], 0
    while start < len(data):
        stop = data.find(b"\n", start) + 1 or len(data)
        found.append((start, stop))
        start = stop
    return found


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in value)
    )
