"""A checkpoint to be written: its files by size, what of them is known beforehand, and what completes it.

Invariants:
1. Files have their full size before the first tensor is written: a full disk fails there.
2. A target appears under its name complete, or not at all.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.errors import CheckpointError
from megarl.platform.durable import sync
from megarl.weights.conversion.store import Store


@dataclass
class Target:
    """A checkpoint laid out.

    Args:
        format: its name.
        directory: the temporary one it grows in.
        store: regions and arrays to fill.
        sizes: bytes of every data file, by its path in the directory.
        segments: bytes at offsets of data files that hold no tensor.
        closing: gives the small files that complete it, in the order they are written; called when all tensors are in
            their files.
    """

    format: str
    directory: Path
    store: Store
    sizes: Mapping[str, int]
    segments: Mapping[str, Sequence[tuple[int, bytes]]]
    closing: Callable[[], Sequence[tuple[str, bytes]]]

    @property
    def num_bytes(self) -> int:
        """Bytes of all data files."""
        return sum(self.sizes.values())

    def allocate(self) -> None:
        """Makes the data files.

        Raises:
            CheckpointError: no room, or files cannot be made; nothing is left behind.
        """
        try:
            shutil.rmtree(self.directory, ignore_errors=True)
            self.directory.mkdir(parents=True)
            for name, size in self.sizes.items():
                path = self.directory / name
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(path, "wb") as file:
                    if size:
                        os.posix_fallocate(file.fileno(), 0, size)
            self.write_segments()
        except OSError as error:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise CheckpointError(
                f"cannot reserve {self.num_bytes / 1e9:.2f} GB: {error.strerror}",
                where=str(self.directory.parent),
                fix="free space, or choose another place",
            ) from error

    def write_segments(self) -> None:
        """Writes what of the data files is no tensor. Raises OSError."""
        for name, parts in self.segments.items():
            with open(self.directory / name, "r+b") as file:
                for position, data in parts:
                    os.pwrite(file.fileno(), data, position)

    def is_allocated(self) -> bool:
        """Whether every data file is there with its full size."""
        return all(
            (self.directory / name).is_file() and (self.directory / name).stat().st_size == size
            for name, size in self.sizes.items()
        )

    def complete(self, companions: Mapping[str, bytes], *, durable: bool) -> None:
        """Writes what completes the checkpoint.

        Args:
            companions: further files (configuration, tokenizer, manifest).
            durable: wait until everything is on the disk, so that a power cut cannot undo it.

        Raises:
            CheckpointError: a file cannot be written.
        """
        try:
            if durable:
                for name in self.sizes:
                    sync(self.directory / name)
            for name, data in (*companions.items(), *self.closing()):
                path = self.directory / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
                if durable:
                    sync(path)
            if durable:
                sync(self.directory)
        except OSError as error:
            raise CheckpointError(f"cannot write: {error.strerror}", where=str(self.directory)) from error

    def put_in_place(self, final: Path) -> None:
        """Gives the directory its name; one that is there already makes way."""
        previous = final.with_name(f".{final.name}.previous")
        try:
            if final.exists():
                shutil.rmtree(previous, ignore_errors=True)
                os.rename(final, previous)
            os.rename(self.directory, final)
            sync(final.parent)
        except OSError as error:
            raise CheckpointError(f"cannot rename: {error.strerror}", where=str(final)) from error
        shutil.rmtree(previous, ignore_errors=True)
