"""Where the threads of this process are, as data that another process can read and compare.

A stack is read from the interpreter's own frames: it costs nothing until it is asked for, and works while the thread
waits in C, as in a collective, as long as that code has released the interpreter's lock.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

_DISTRIBUTED = "torch/distributed/distributed_c10d.py"
# Frames of the interpreter's and of a library's own machinery, under which nothing of ours is.
_PLUMBING = (
    "threading.py", "concurrent/futures/", "ray/_private/", "ray/_raylet", "ray/util/tracing/", "asyncio/",
    "selectors.py", "torch/nn/modules/module.py", "torch/distributed/c10d_logger.py",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Frame:
    """One call on a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        parts = Path(self.file).parts
        start = max((index for index, part in enumerate(parts) if part == "site-packages"), default=-1) + 1
        start = start or max((index for index, part in enumerate(parts) if part == "megarl"), default=0)
        return f"{'/'.join(parts[start:])}:{self.line} {self.function}"


@dataclass(frozen=True, slots=True)
class Stack:
    """One thread: its name and its calls, outermost first."""

    thread: str
    frames: tuple[Frame, ...]

    @property
    def collective(self) -> str | None:
        """The collective it waits in, such as ``all_reduce``; None if it is in none."""
        names = [frame.function for frame in self.frames if frame.file.endswith(_DISTRIBUTED)]
        return next((name for name in reversed(names) if not name.startswith("_")), None)

    @property
    def call(self) -> str:
        """The innermost call that is not plumbing, in one line."""
        own = [frame for frame in self.frames if not _is_plumbing(frame)]
        return str((own or list(self.frames))[-1])


def thread_stacks(ignore: Iterable[int] = ()) -> list[Stack]:
    """Stacks of the threads of this process that run Python, plumbing and the caller's own left out.

    Args:
        ignore: ids of threads that are of no interest.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = {threading.get_ident(), *ignore}
    stacks = []
    for ident, frame in sys._current_frames().items():
        if ident in own or names.get(ident) == "megarl-heartbeat":
            continue
        frames = frames_of(frame)
        if any(not _is_plumbing(entry) for entry in frames):
            stacks.append(Stack(names.get(ident, "unnamed"), frames))
    return stacks


def frames_of(frame: FrameType | None) -> tuple[Frame, ...]:
    """The calls from the outermost to this one."""
    frames = []
    while frame is not None:
        frames.append(Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(reversed(frames))


def stacks_of_process(pid: int, name: str, *, timeout_s: float = 5.0) -> list[Stack]:
    """Stacks of the threads of another process of this machine by py-spy; none where that is missing or not allowed.

    Args:
        pid: the process.
        name: what its threads are called here.
        timeout_s: for reading them; a stopped process is read as well.
    """
    program = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}")
    if program is None:
        return []
    command = [program, "dump", "--full-filenames", "--nonblocking", "--pid", str(pid)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return list(parse_py_spy(result.stdout, name))


def parse_py_spy(output: str, name: str) -> Iterator[Stack]:
    """What ``py-spy dump`` prints of the threads of a process, those of plumbing alone left out."""
    for block in output.split("\n\n"):
        lines = re.findall(r"^    (.+) \((.+):(\d+)\)$", block, flags=re.MULTILINE)
        frames = tuple(Frame(file, int(line), function) for function, file, line in reversed(lines))
        if any(not _is_plumbing(frame) for frame in frames):
            yield Stack(name, frames)


def text(stacks: Sequence[Stack]) -> str:
    """For a person, innermost call last."""
    lines = []
    for stack in stacks:
        lines.append(f"  thread {stack.thread}")
        lines += [f"    {frame}" for frame in stack.frames if not _is_plumbing(frame)]
    return "\n".join(lines)


def _is_plumbing(frame: Frame) -> bool:
    return any(part in frame.file for part in _PLUMBING)
