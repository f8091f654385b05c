"""The ordered list of what moves in a weight update: one object, the same at both ends. Loads no torch.

A round is a few whole tensors; in a round each sender that holds a part of them broadcasts one bucket. Receivers take
the rounds in order and each round's buckets in order, senders their own buckets in the same order.

Invariants:
1. The pieces of a tensor lie in one round and tile it without gap or overlap.
2. A bucket holds at most ``bucket_bytes``, or one tensor's pieces.
3. Pieces start at multiples of ``ALIGNMENT`` in their bucket, so that every dtype can be viewed in place.
4. Two ends hold the same manifest if and only if the digests agree; they compare them before the first byte.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megarl.errors import PlanError
from megarl.weights.plan import loading_order
from megarl.weights.region import Box, Region, Shape, overlapping_pairs, volume, whole

ALIGNMENT = 16

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Piece:
    """One box of a tensor inside a bucket.

    Args:
        tensor: canonical name.
        box: the part of it.
        start: first byte in the bucket.
    """

    tensor: str
    box: Box
    start: int

    @property
    def shape(self) -> Shape:
        return tuple(stop - start for start, stop in self.box)


@dataclass(frozen=True, slots=True)
class Bucket:
    """What one sender broadcasts at once."""

    sender: int
    num_bytes: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Round:
    """Tensors that are complete when all its buckets have arrived."""

    tensors: tuple[str, ...]
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True)
class Manifest:
    """Everything that moves in an update.

    Args:
        dtype: of every piece on the wire, as torch spells it.
        shapes: whole tensors, by canonical name, in the order of the rounds.
        rounds: see the module's docstring.
    """

    dtype: str
    shapes: Mapping[str, Shape]
    rounds: tuple[Round, ...]

    @property
    def senders(self) -> tuple[int, ...]:
        """Ranks that send something."""
        return tuple(sorted({bucket.sender for item in self.rounds for bucket in item.buckets}))

    @property
    def num_bytes(self) -> int:
        """Bytes all senders broadcast, alignment included."""
        return sum(bucket.num_bytes for item in self.rounds for bucket in item.buckets)

    def buckets_of(self, sender: int) -> Iterator[Bucket]:
        """One sender's buckets in the order of sending."""
        return (bucket for item in self.rounds for bucket in item.buckets if bucket.sender == sender)

    @cached_property
    def digest(self) -> str:
        """Of the canonical JSON."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """Text that ``from_json`` reads."""
        rounds = [
            [
                [bucket.sender, bucket.num_bytes, [[p.tensor, p.box, p.start] for p in bucket.pieces]]
                for bucket in item.buckets
            ]
            for item in self.rounds
        ]
        content = {"dtype": self.dtype, "shapes": {k: list(v) for k, v in self.shapes.items()}, "rounds": rounds}
        return json.dumps(content, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """What ``to_json`` wrote."""
        content = json.loads(text)
        rounds = []
        for buckets in content["rounds"]:
            parsed = tuple(
                Bucket(
                    sender,
                    num_bytes,
                    tuple(Piece(name, tuple((a, b) for a, b in box), start) for name, box, start in pieces),
                )
                for sender, num_bytes, pieces in buckets
            )
            names = {piece.tensor: None for bucket in parsed for piece in bucket.pieces}
            rounds.append(Round(tuple(sorted(names, key=loading_order)), parsed))
        return cls(content["dtype"], {k: tuple(v) for k, v in content["shapes"].items()}, tuple(rounds))


def build_manifest(offers: Mapping[int, Iterable[Region]], *, dtype: str, bucket_bytes: int) -> Manifest:
    """The manifest of all senders' offers.

    Args:
        offers: regions each rank holds and owns (``replica`` 0), by rank.
        dtype: wire dtype: float32, bfloat16 or float16.
        bucket_bytes: most bytes of a bucket.

    Raises:
        PlanError: listing tensors whose pieces leave a gap, overlap, or disagree about the shape.
    """
    if dtype not in DTYPE_BYTES:
        raise PlanError(f"dtype {dtype!r} does not travel", fix="use one of " + ", ".join(DTYPE_BYTES))
    shapes: dict[str, Shape] = {}
    held: dict[str, list[tuple[int, Box]]] = {}
    problems: list[str] = []
    for sender, regions in sorted(offers.items()):
        for region in regions:
            if shapes.setdefault(region.tensor, region.tensor_shape) != region.tensor_shape:
                problems.append(f"{region.tensor} has two shapes")
            held.setdefault(region.tensor, []).append((sender, region.box))
    names = sorted(shapes, key=loading_order)
    for name in names:
        problems += _tiling_problems(name, shapes[name], [box for _, box in held[name]])
    if problems:
        raise PlanError("the senders' pieces do not make up the model: " + "; ".join(problems[:20]))
    rounds = [_round(group, held, DTYPE_BYTES[dtype]) for group in _groups(names, held, dtype, bucket_bytes)]
    return Manifest(dtype, {name: shapes[name] for name in names}, tuple(rounds))


def _groups(
    names: Sequence[str], held: Mapping[str, list[tuple[int, Box]]], dtype: str, bucket_bytes: int
) -> Iterator[list[str]]:
    """Consecutive tensors of which no sender holds more than a bucket."""
    group: list[str] = []
    fill: dict[int, int] = {}
    for name in names:
        added: dict[int, int] = {}
        for sender, box in held[name]:
            added[sender] = added.get(sender, 0) + _padded(volume(box) * DTYPE_BYTES[dtype])
        if group and any(fill.get(sender, 0) + size > bucket_bytes for sender, size in added.items()):
            yield group
            group, fill = [], {}
        group.append(name)
        for sender, size in added.items():
            fill[sender] = fill.get(sender, 0) + size
    if group:
        yield group


def _round(group: Sequence[str], held: Mapping[str, list[tuple[int, Box]]], itemsize: int) -> Round:
    pieces: dict[int, list[Piece]] = {}
    ends: dict[int, int] = {}
    for name in group:
        for sender, box in held[name]:
            start = ends.get(sender, 0)
            pieces.setdefault(sender, []).append(Piece(name, box, start))
            ends[sender] = start + _padded(volume(box) * itemsize)
    return Round(tuple(group), tuple(Bucket(sender, ends[sender], tuple(pieces[sender])) for sender in sorted(pieces)))


def _tiling_problems(name: str, shape: Shape, boxes: Sequence[Box]) -> list[str]:
    problems = [f"{name}: {boxes[one]} and {boxes[other]} overlap" for one, other in overlapping_pairs(boxes)]
    missing = volume(whole(shape)) - sum(map(volume, boxes))
    if missing and not problems:
        problems.append(f"{name}: {missing} of {volume(whole(shape))} elements are sent by nobody")
    return problems


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
