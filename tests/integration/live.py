"""A run of the command line that a test interferes with while it goes on: signals, kills, and what they leave."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import psutil

from megarl.controller.shared_memory import mapped_files
from tests.integration.runs import ROOT

MARK = "MEGARL_RUN_ID"

T = TypeVar("T")


class LiveRun:
    """``megarl COMMAND PRESET run.dir=DIRECTORY ...``, started. As a context it leaves no process behind.

    Args:
        command: train or sft.
        preset: name of the preset.
        directory: the run directory; the terminal's two streams are kept beside it.
        overrides: key=value.
        cwd: working directory of the command; if given, the run directory lies below it and is passed relative to it.
    """

    def __init__(self, command: str, preset: str, directory: Path, *overrides: str, cwd: Path | None = None) -> None:
        self.directory = directory
        self._output = directory.with_name(directory.name + ".out")
        self._errors = directory.with_name(directory.name + ".err")
        # A short path: Ray's sockets lie below it.
        self.temporary = Path(tempfile.mkdtemp(prefix="mt-", dir="/tmp"))
        self._mark: str | None = None
        self._shared: set[Path] = set()
        given = directory if cwd is None else directory.relative_to(cwd)
        arguments = [sys.executable, "-m", "megarl", command, preset, f"run.dir={given}", *overrides]
        with self._output.open("w") as output, self._errors.open("w") as errors:
            self.process = subprocess.Popen(
                arguments,
                cwd=ROOT if cwd is None else cwd,
                env={**os.environ, "TMPDIR": str(self.temporary), "PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                process_group=0,
                # Where the tests themselves run in the background of a shell, SIGINT would be ignored.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    # -- what it says --

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def errors(self) -> list[str]:
        """Lines of standard error."""
        return self._errors.read_text().splitlines()

    def wait_for(self, text: str, timeout_s: float = 120.0) -> None:
        """Wait until the run has printed ``text`` on standard output."""
        self._until(lambda: text in self.output or None, f"{text!r} in its output", timeout_s)

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float = 120.0) -> None:
        """Wait until a condition holds."""
        self._until(lambda: condition() or None, what, timeout_s)

    # -- its processes --

    def worker(self, role: str, rank: int, title: str = "ray::") -> psutil.Process:
        """The process of a role's rank: it writes into that rank's file; ``title`` tells it from its children."""

        def find() -> psutil.Process | None:
            for process in self.processes():
                with suppress(psutil.Error, OSError):
                    output = os.readlink(f"/proc/{process.pid}/fd/1")
                    if output.endswith(f"/{role}-{rank}.out") and title in " ".join(process.cmdline()):
                        return process
            return None

        return self._until(find, f"a process {title!r} of {role} rank {rank}", 60.0)

    def note_shared_memory(self) -> set[Path]:
        """Files of shared memory that processes of the run use now."""
        self._shared |= mapped_files(process.pid for process in self.processes())
        return self._shared

    def any_process(self) -> psutil.Process:
        """One that the run has started."""
        return self._until(lambda: next(iter(self.processes()), None), "a process of the run", 60.0)

    def processes(self) -> list[psutil.Process]:
        """All that carry the run's mark."""
        if self._mark is None:
            with suppress(psutil.Error):
                for child in psutil.Process(self.process.pid).children(recursive=True):
                    with suppress(psutil.Error):
                        self._mark = self._mark or child.environ().get(MARK)
        if self._mark is None:
            return []
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self._mark:
                    found.append(process)
        return found

    # -- its end --

    def left(self) -> list[str]:
        """What should not be there once the run has ended: processes, Ray's directory, shared memory."""
        return [
            *(f"process {process.pid} {' '.join(process.cmdline())[:80]}" for process in self.processes()),
            *(str(path) for path in self.temporary.glob("megarl-*")),
            *(str(path) for path in self._shared if path.exists()),
        ]

    def end(self, timeout_s: float) -> tuple[int, float]:
        """Exit code, and seconds until the run had ended."""
        start = time.monotonic()
        code = self.process.wait(timeout_s)
        return code, time.monotonic() - start

    def vanished(self, timeout_s: float) -> float:
        """Seconds until no process of the run was left."""
        start = time.monotonic()
        self._until(lambda: None if self.processes() else True, "no process left", timeout_s)
        return time.monotonic() - start

    def _until(self, probe: Callable[[], T | None], what: str, timeout_s: float) -> T:
        deadline = time.monotonic() + timeout_s
        while (found := probe()) is None:
            if time.monotonic() > deadline or (self.process.poll() is not None and what != "no process left"):
                left = [(process.pid, " ".join(process.cmdline())[:80]) for process in self.processes()]
                raise AssertionError(
                    f"waited {timeout_s:.0f} s for {what}; exit code {self.process.poll()}, processes {left}\n"
                    + "\n".join([self.output[-2000:], *self.errors[-20:]])
                )
            time.sleep(0.05)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = self.processes()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for process in [*left, *self.processes()]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(self.temporary, ignore_errors=True)


def traceback_lines(lines: list[str]) -> Iterator[str]:
    """Lines that belong to a traceback or to Ray's own reports."""
    return (line for line in lines if "Traceback" in line or "(raylet)" in line or line.startswith("  File"))
