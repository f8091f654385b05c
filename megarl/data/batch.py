"""The ``Batch``: rows are samples, columns are the fields of the table, per-token columns are ragged.

Invariants:
1. Every column is declared in ``fields.FIELDS`` and was checked when it entered: type, dtype, number of rows,
   alignment with prompts and responses, finite numbers where the policy generated.
2. A ``Batch`` never changes: ``add``, ``replace``, ``select`` return new ones that share the untouched columns.
3. ``select``, ``concat`` and ``split`` are exact; sample ids are unique in what ``create``, ``add``, ``concat`` and
   ``join`` return.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from megarl.data.fields import Field, lookup
from megarl.data.ragged import Index, Ragged, from_buffer, row_indices, to_buffer
from megarl.errors import DataError

__all__ = ["Batch", "Column", "Ragged"]

Column: TypeAlias = "Ragged | Tensor | list[Any]"


class Batch:
    """Samples as columns. Make one with ``Batch.create(prompts=..., responses=...)``."""

    __slots__ = ("_columns", "_size")

    def __init__(self, columns: dict[str, Column], size: int) -> None:
        """For this module only: takes checked columns as they are."""
        self._columns = columns
        self._size = size

    # -- making ------------------------------------------------------------------------------------------------------

    @classmethod
    def create(cls, **columns: Column) -> Batch:
        """A batch of the given columns.

        Raises:
            DataError: no column, or one that contradicts its declaration or the others.
        """
        if not columns:
            raise DataError("a batch needs at least one column")
        return cls({}, len(next(iter(columns.values())))).add(**columns)

    @classmethod
    def output(cls, **columns: Column) -> Batch:
        """A stage's output on its way to ``join``: types and rows are checked now, alignment and needs there.

        Raises:
            DataError: no column, or one of the wrong type, dtype or number of rows.
        """
        if not columns:
            raise DataError("a batch needs at least one column")
        size = len(next(iter(columns.values())))
        for name, column in columns.items():
            _check_type(lookup(name), column, size)
        return cls(columns, size)

    @classmethod
    def concat(cls, batches: Sequence[Batch]) -> Batch:
        """All rows of all batches in order.

        Raises:
            DataError: no batch, different columns, or a sample id twice.
        """
        if not batches:
            raise DataError("cannot concatenate no batches: their columns are unknown")
        names = list(batches[0])
        for number, batch in enumerate(batches):
            if odd := set(names) ^ set(batch):
                raise DataError(f"batch {number} differs from batch 0 in the columns {sorted(odd)}")
        joined = {name: _concat([batch[name] for batch in batches]) for name in names}
        _check_unique(joined.get("sample_id"))
        return cls(joined, sum(map(len, batches)))

    def add(self, **columns: Column) -> Batch:
        """This batch with further columns.

        Raises:
            DataError: a column exists already, is not declared, has the wrong type, dtype or rows, is not aligned,
                lacks a field it needs, or is not finite where ``response_mask`` is true.
        """
        if taken := sorted(columns.keys() & self._columns.keys()):
            raise DataError(f"columns {taken} are in the batch already", fix="use replace to change them on purpose")
        return self._with(columns, check=columns)

    def replace(self, **columns: Column) -> Batch:
        """This batch with other values in existing columns; every column is checked again.

        Raises:
            DataError: as ``add``, or a column that is not in the batch.
        """
        self.require(*columns)
        return self._with(columns, check={**self._columns, **columns})

    def join(self, other: Batch) -> Batch:
        """This batch with the columns of a stage's output, matched by ``sample_id`` whatever their order.

        Raises:
            DataError: ``sample_id`` missing or different samples; and as ``add``.
        """
        mine, theirs = self._sample_ids(), other._sample_ids()
        if torch.equal(mine, theirs):
            return self.add(**other.without("sample_id").columns())
        order_mine, order_theirs = torch.argsort(mine), torch.argsort(theirs)
        if len(mine) != len(theirs) or not torch.equal(mine[order_mine], theirs[order_theirs]):
            lost = sorted(set(mine.tolist()) - set(theirs.tolist()))[:5]
            extra = sorted(set(theirs.tolist()) - set(mine.tolist()))[:5]
            raise DataError(f"a stage returned other samples: missing {lost}, unexpected {extra}")
        order = torch.empty_like(order_mine)
        order[order_mine] = order_theirs
        return self.add(**other.select(order).without("sample_id").columns())

    # -- reading -----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._size

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __iter__(self) -> Iterator[str]:
        """Names of the columns, in the order they were added."""
        return iter(self._columns)

    def __getitem__(self, name: str) -> Any:
        """A column; see ``ragged`` and ``tensor`` for typed access."""
        self.require(name)
        return self._columns[name]

    def __repr__(self) -> str:
        return f"Batch(rows={self._size}, columns={list(self._columns)})"

    def ragged(self, name: str) -> Ragged:
        """A per-token column."""
        column = self[name]
        if not isinstance(column, Ragged):
            raise DataError(f"field {name!r} has no tokens: it is aligned to the sample")
        return column

    def tensor(self, name: str) -> Tensor:
        """A per-sample tensor column [B]."""
        column = self[name]
        if not isinstance(column, Tensor):
            raise DataError(f"field {name!r} is no per-sample tensor but {type(column).__name__}")
        return column

    def columns(self) -> dict[str, Column]:
        """A new dictionary of the columns."""
        return dict(self._columns)

    def require(self, *names: str) -> Batch:
        """This batch, if it has the columns.

        Raises:
            DataError: names the missing fields and the stages that write them.
        """
        if missing := [name for name in names if name not in self._columns]:
            wanted = ", ".join(f"{name} (written by stage {lookup(name).stage})" for name in missing)
            raise DataError(f"the batch lacks {wanted}", where=f"columns {list(self._columns)}")
        return self

    @property
    def prompt_lengths(self) -> Tensor:
        """Tokens of each prompt, [B] int64 on the CPU."""
        return self.ragged("prompts").lengths

    @property
    def response_lengths(self) -> Tensor:
        """Tokens of each response, [B] int64 on the CPU."""
        return self.ragged("responses").lengths

    @property
    def sequence_lengths(self) -> Tensor:
        """Tokens of each prompt with its response, [B] int64 on the CPU."""
        return self.prompt_lengths + self.response_lengths

    def sequences(self) -> Ragged:
        """Token ids of each prompt followed by its response."""
        return Ragged.join_rows(self.ragged("prompts"), self.ragged("responses"))

    def equal(self, other: Batch) -> bool:
        """Whether both hold the same columns with the same values."""
        return (
            len(self) == len(other)
            and set(self) == set(other)
            and all(_equal(column, other._columns[name]) for name, column in self._columns.items())
        )

    # -- selecting ---------------------------------------------------------------------------------------------------

    def select(self, index: Index) -> Batch:
        """The rows of ``index`` (row numbers, a range or slice, or a bool mask) in its order."""
        rows = row_indices(index, self._size)
        return Batch({name: _select(column, rows) for name, column in self._columns.items()}, len(rows))

    def split(self, parts: Sequence[Index]) -> list[Batch]:
        """One batch per part."""
        return [self.select(part) for part in parts]

    def only(self, *names: str) -> Batch:
        """The named columns alone: what a stage is sent."""
        self.require(*names)
        return Batch({name: self._columns[name] for name in names}, self._size)

    def without(self, *names: str) -> Batch:
        """All columns but the named ones; names that are not there are ignored."""
        return Batch({name: column for name, column in self._columns.items() if name not in names}, self._size)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """Tensors on another device; lengths of ragged columns stay on the CPU."""
        moved: dict[str, Column] = {}
        for name, column in self._columns.items():
            moved[name] = column if isinstance(column, list) else column.to(device, non_blocking=non_blocking)
        return Batch(moved, self._size)

    def __reduce__(self) -> tuple[Any, ...]:
        packed = {name: to_buffer(c) if isinstance(c, Tensor) else c for name, c in self._columns.items()}
        return (_rebuild, (packed, {name for name, c in self._columns.items() if isinstance(c, Tensor)}, self._size))

    # -- checking ----------------------------------------------------------------------------------------------------

    def _with(self, columns: Mapping[str, Column], check: Mapping[str, Column]) -> Batch:
        merged = {**self._columns, **columns}
        batch = Batch(merged, self._size)
        for name, column in check.items():
            field = lookup(name)
            if missing := [needed for needed in field.needs if needed not in merged]:
                raise DataError(f"field {name!r} needs {', '.join(missing)} in the batch first")
            _check_type(field, column, self._size)
        # Alignment and finiteness read other columns, whose types are known to be right only now.
        for name, column in check.items():
            if isinstance(column, Ragged):
                batch._check_alignment(lookup(name), column)
            batch._check_finite(lookup(name), column)
        if "sample_id" in check:
            _check_unique(merged["sample_id"])
        return batch

    def _check_alignment(self, field: Field, column: Ragged) -> None:
        expected = {
            "prompt": lambda: self.prompt_lengths,
            "response": lambda: self.response_lengths,
            "sequence": lambda: self.sequence_lengths,
        }[field.aligned_to]()
        if not torch.equal(expected, column.lengths):
            row = int((expected != column.lengths).nonzero()[0])
            raise DataError(
                f"field {field.name!r} has {int(column.lengths[row])} tokens in row {row}, "
                f"its {field.aligned_to} has {int(expected[row])}"
            )

    def _check_finite(self, field: Field, column: Column) -> None:
        if not field.finite or isinstance(column, list):
            return
        values = column.values if isinstance(column, Ragged) else column
        if bool(torch.isfinite(values.sum())):  # so is every addend, at a fraction of the time of a look at each
            return
        bad = ~torch.isfinite(values)
        if isinstance(column, Ragged) and field.aligned_to == "response":
            bad &= self.ragged("response_mask").values.to(bad.device)
        if bool(bad.any()):
            position = int(bad.nonzero()[0])
            row = int(column.row_index()[position]) if isinstance(column, Ragged) else position
            raise DataError(
                f"field {field.name!r} is {float(values[position])} in row {row}; {int(bad.sum())} such values",
                where=f"stage {field.stage}",
            )

    def _sample_ids(self) -> Tensor:
        return self.tensor("sample_id")


def _check_type(field: Field, column: Column, size: int) -> None:
    where = f"stage {field.stage}"
    if not field.is_tensor:
        if not isinstance(column, list):
            raise DataError(f"field {field.name!r} must be a list, found {type(column).__name__}", where=where)
        wanted = field.dtype
        if wanted is not object and (odd := [x for x in column if not isinstance(x, wanted)]):
            raise DataError(f"field {field.name!r} holds {wanted}, found {type(odd[0]).__name__}", where=where)
        if field.choices and (odd := [x for x in column if x not in field.choices]):
            raise DataError(f"field {field.name!r} must be one of {field.choices}, found {odd[0]!r}", where=where)
    elif field.aligned_to == "sample":
        if not isinstance(column, Tensor) or column.ndim != 1:
            raise DataError(f"field {field.name!r} must be a tensor [B], found {_describe(column)}", where=where)
    elif not isinstance(column, Ragged):
        raise DataError(f"field {field.name!r} must be Ragged, found {_describe(column)}", where=where)
    if field.is_tensor and column.dtype != field.dtype:  # type: ignore[union-attr]
        raise DataError(f"field {field.name!r} must be {field.dtype}, found {_describe(column)}", where=where)
    if len(column) != size:
        raise DataError(f"field {field.name!r} has {len(column)} rows, the batch has {size}", where=where)


def _check_unique(sample_ids: Column | None) -> None:
    if isinstance(sample_ids, Tensor) and len(sample_ids) != len(torch.unique(sample_ids)):
        ids, counts = torch.unique(sample_ids, return_counts=True)
        raise DataError(f"sample ids occur more than once: {ids[counts > 1][:5].tolist()}")


def _describe(column: Column) -> str:
    if isinstance(column, list):
        return f"a list of {len(column)}"
    if isinstance(column, Tensor):
        return f"Tensor {tuple(column.shape)} {column.dtype}"
    return repr(column)


def _select(column: Column, rows: range | Tensor) -> Column:
    if isinstance(column, Ragged):
        return column.select(rows)
    if isinstance(rows, range):
        return column[rows.start : rows.stop]
    if isinstance(column, Tensor):
        return column.index_select(0, rows.to(column.device))
    return [column[row] for row in rows.tolist()]


def _concat(parts: list[Column]) -> Column:
    if isinstance(parts[0], Ragged):
        return Ragged.concat(parts)  # type: ignore[arg-type]
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    return [item for part in parts for item in part]  # type: ignore[union-attr]


def _equal(left: Column, right: Column) -> bool:
    if isinstance(left, Ragged):
        return isinstance(right, Ragged) and left.equal(right)
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    return left == right


def _rebuild(packed: dict[str, Any], tensors: set[str], size: int) -> Batch:
    return Batch({name: from_buffer(c) if name in tensors else c for name, c in packed.items()}, size)
