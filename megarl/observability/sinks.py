"""Where a step's numbers go: a JSONL file always, TensorBoard and Weights & Biases on request.

Invariants:
1. A resumed run leaves no number of a step it does again: entries beyond the resumed step are removed (JSONL) or
   purged (TensorBoard).
2. A line of the JSONL file is written whole and flushed; a broken last line of a killed run is removed on resume.
3. Only an asked-for tracker is imported; a missing one is a SetupError when the run starts.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from megarl.errors import SetupError


class Sink(Protocol):
    """Takes the numbers of a step."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of a step."""
        ...

    def close(self) -> None:
        """Flush and let go."""
        ...


class JsonlSink:
    """``{"step": 3, "time": 1764000000.0, "metrics": {"critic/score/mean": 0.5}}`` a line; NaN and infinities are null.

    Args:
        path: the file; appended to when it exists.
        resume_step: last step the resumed checkpoint holds; later entries go. 0 starts over. None keeps everything.
        resume_lines: lines there were when it was saved; further ones go too. None keeps those of ``resume_step``.
    """

    def __init__(self, path: Path, *, resume_step: int | None = None, resume_lines: int | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if resume_step is not None and path.exists():
            _truncate(path, resume_step, resume_lines)
        self.num_lines = len(list(read_metrics(path))) if path.exists() else 0
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append one line."""
        numbers = {name: float(value) if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, "time": time.time(), "metrics": numbers}) + "\n")
        self._file.flush()
        self.num_lines += 1

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardSink:
    """Event files through the writer of the ``tensorboard`` package: neither TensorFlow nor torch is imported.

    Args:
        directory: of the event files.
        resume_step: later steps of earlier event files are purged by TensorBoard.
    """

    def __init__(self, directory: Path, *, resume_step: int | None = None) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise SetupError(
                f"TensorBoard cannot be imported: {error}",
                fix="pip install tensorboard, or set logging.tensorboard=false",
            ) from error
        directory.mkdir(parents=True, exist_ok=True)
        self._events, self._summaries = event_pb2, summary_pb2
        self._writer: Any = EventFileWriter(str(directory))
        if resume_step is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._writer.add_event(event_pb2.Event(wall_time=time.time(), step=resume_step + 1, session_log=start))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add one scalar per metric."""
        entries = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        summary = self._summaries.Summary(value=entries)
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        """Write what is buffered."""
        self._writer.close()


class WandbSink:
    """A Weights & Biases run.

    Args:
        project: its project.
        name: its name; also its id, so that a resumed run continues it.
        directory: of its local files.
        config: the resolved configuration.
        timeout_s: longest wait for its server at the start, and for what is not uploaded at the end.

    Raises:
        SetupError: wandb is not installed or too old, or its server does not take the run within the time.
    """

    def __init__(self, project: str, name: str, directory: Path, config: Mapping[str, Any], timeout_s: float) -> None:
        try:
            import wandb
        except ImportError as error:
            raise SetupError(
                "logging.wandb_project is set, but wandb is not installed",
                fix="pip install wandb, or unset logging.wandb_project",
            ) from error
        directory.mkdir(parents=True, exist_ok=True)
        try:
            # Of its own accord it would wait for the last upload for ever.
            settings = wandb.Settings(init_timeout=timeout_s, finish_timeout=timeout_s)
        except (TypeError, ValueError, wandb.Error) as error:
            raise SetupError(
                f"wandb {wandb.__version__} does not take a time-out for the end of a run: {error}",
                where="logging.wandb_project",
                fix="pip install 'wandb>=0.27', or logging.wandb_project=null",
            ) from error
        try:
            self._run: Any = wandb.init(
                project=project,
                name=name,
                id=name,
                resume="allow",
                dir=str(directory),
                config=dict(config),
                settings=settings,
            )
        except wandb.Error as error:
            raise SetupError(
                f"Weights & Biases does not take the run: {error}",
                where="logging.wandb_project",
                fix="raise logging.wandb_timeout_s, set WANDB_MODE=offline, or logging.wandb_project=null",
            ) from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values under the step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class Sinks:
    """Several sinks as one.

    Args:
        file: the JSONL file.
        trackers: the others.
    """

    def __init__(self, file: JsonlSink, trackers: Sequence[Sink] = ()) -> None:
        self._file = file
        self._sinks = [*trackers, file]

    @property
    def num_lines(self) -> int:
        """Lines of the JSONL file: where a checkpoint stands in it."""
        return self._file.num_lines

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write to every sink."""
        for sink in self._sinks:
            sink.log(step, values)

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()


def open_sinks(
    directory: Path,
    *,
    tensorboard: bool,
    wandb_project: str | None,
    wandb_timeout_s: float,
    name: str,
    config: Mapping[str, Any],
    resume_step: int | None = None,
    resume_lines: int | None = None,
) -> Sinks:
    """``metrics.jsonl`` in the run directory and the trackers asked for.

    Raises:
        SetupError: a tracker that is asked for is not installed or does not take the run.
    """
    trackers: list[Sink] = []
    if tensorboard:
        trackers.append(TensorBoardSink(directory / "tensorboard", resume_step=resume_step))
    if wandb_project is not None:
        trackers.append(WandbSink(wandb_project, name, directory / "wandb", config, wandb_timeout_s))
    file = JsonlSink(directory / "metrics.jsonl", resume_step=resume_step, resume_lines=resume_lines)
    return Sinks(file, trackers)


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The entries of a JSONL file; a broken last line is left out."""
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n") and line.strip():
            yield json.loads(line)


def _truncate(path: Path, last_step: int, lines: int | None) -> None:
    kept = [json.dumps(entry) + "\n" for entry in read_metrics(path) if entry["step"] <= last_step][:lines]
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_text("".join(kept), encoding="utf-8")
    partial.replace(path)
