"""Shared memory of a run's processes: files below /dev/shm, which stay there when their maker is killed.

vLLM makes some for its tensor-parallel ranks, hundreds of megabytes each, and leaves a part of them even after a good
end; NCCL makes some for the ranks of a node.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

PLACE = Path("/dev/shm")


def mapped_files(pids: Iterable[int]) -> set[Path]:
    """Files of shared memory that any of these processes has in its address space."""
    found = set()
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
        except OSError:  # it has ended, or belongs to another user
            continue
        for line in lines:
            name = line[line.find("/") :] if "/" in line else ""
            if name.startswith(f"{PLACE}/") and not name.endswith(" (deleted)"):
                found.add(Path(name))
    return found


def remove_unused(files: Iterable[Path], *, since_s: float) -> None:
    """Remove those of ``files`` that were made after ``since_s`` (wall clock) and that no process uses any more."""
    used = mapped_files(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    for file in files:
        try:
            if file not in used and file.stat().st_ctime >= since_s:
                file.unlink()
        except FileNotFoundError:
            continue
