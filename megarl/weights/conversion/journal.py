"""What an interrupted conversion had done: one line a tensor, beside the unfinished directory.

    .NAME.partial/    files of full size, being filled
    .NAME.journal     first line: what is being converted; then one line for each tensor whose bytes are in place

Invariants:
1. A line is appended after its tensor's bytes, in one write; a line cut short by a crash is not counted.
2. The journal outlives the rename that completes the directory, so that every moment of a crash can be told apart.
3. Two conversions never write one target: the journal is locked.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.errors import CheckpointError
from megarl.weights.conversion.copying import Done, Job


class Journal:
    """The journal of one target.

    Args:
        path: the file.
        identity: what is converted; JSON values.
        resume: continue an earlier one.

    Raises:
        CheckpointError: another process is converting into the target, or an earlier conversion was of something else.
    """

    def __init__(self, path: Path, identity: dict[str, Any], *, resume: bool) -> None:
        self.path = path
        self.done: dict[str, Done] = {}
        self._lock = threading.Lock()
        try:
            self._handle = self._locked()
            lines = self._lines() if resume else []
        except OSError as error:
            raise CheckpointError(f"cannot write the journal: {error.strerror}", where=str(path)) from error
        if lines and lines[0] != identity:
            changed = sorted(key for key in identity if lines[0].get(key) != identity[key])
            os.close(self._handle)
            raise CheckpointError(
                f"the unfinished conversion was another one: {', '.join(changed)} differ",
                where=str(path),
                fix="convert again without --resume, or with the options of the first time",
            )
        self.is_resumed = bool(lines)
        if lines:
            for line in lines[1:]:
                entry = Done(line["tensor"], int(line["source"], 16), int(line["checksum"], 16))
                self.done[entry.tensor] = entry
        else:
            os.ftruncate(self._handle, 0)
            self._append(identity)

    def record(self, done: Done) -> None:
        """Notes a tensor whose bytes are in place."""
        self._append({"tensor": done.tensor, "source": f"{done.source_checksum:x}", "checksum": f"{done.checksum:x}"})
        with self._lock:
            self.done[done.tensor] = done

    def is_complete(self, jobs: Sequence[Job]) -> bool:
        """Whether an earlier attempt had all tensors in place."""
        return self.is_resumed and all(job.tensor in self.done for job in jobs)

    def forget(self, tensor: str) -> None:
        """A noted tensor whose bytes are not what was noted; it is to be written again."""
        self.done.pop(tensor, None)

    def close(self) -> None:
        """Lets go of the target; the journal stays."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def remove(self) -> None:
        """The target is complete."""
        self.path.unlink(missing_ok=True)
        self.close()

    def _locked(self) -> int:
        while True:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(handle)
                raise CheckpointError(
                    "another process is converting into this directory",
                    where=str(self.path),
                    fix="wait for it, or choose another name",
                ) from None
            # The one that held it may have removed the file in between; a lock on that keeps nobody away.
            if self.path.exists() and os.path.samestat(os.fstat(handle), os.stat(self.path)):
                return handle
            os.close(handle)

    def _lines(self) -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = []
        end = 0
        with open(self.path, "rb") as file:
            for raw in file:
                try:
                    lines.append(json.loads(raw if raw.endswith(b"\n") else b""))
                except ValueError:
                    break
                end += len(raw)
        # What follows a broken line cannot be trusted, and new lines must not be glued to it.
        os.ftruncate(self._handle, end)
        return lines

    def _append(self, entry: dict[str, Any]) -> None:
        data = (json.dumps(entry) + "\n").encode()
        with self._lock:
            try:
                if os.write(self._handle, data) != len(data):
                    raise CheckpointError("cannot write the journal: the disk is full", where=str(self.path))
            except OSError as error:
                raise CheckpointError(f"cannot write the journal: {error.strerror}", where=str(self.path)) from error
