"""The run directory, one run at a time in it, and what the controller continues from (``checkpoints.py`` stores it).

    run directory/
      resolved.yaml, resolved.json    configuration with the origin of each value
      metrics.jsonl, tensorboard/     numbers
      logs/ROLE-RANK.log              output of each worker process; of earlier attempts in logs/attempt-1/ ...
      checkpoints/step_000010/        actor/, critic/, state.json, manifest.json (written last)
      checkpoints/latest              name of the newest complete checkpoint
      exports/step_000010/            the model under training as a Hugging Face directory
      hf/                             the trained model as a Hugging Face directory
      summary.json                    written when the run ends well
      ending.json                     written when it does not: what ended it

Invariant: one run at a time holds a directory, by a lock that ends with its process.
"""

from __future__ import annotations

import fcntl
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from megarl.errors import ConfigError
from megarl.platform.durable import write_text


@dataclass(frozen=True, slots=True)
class RunState:
    """What the controller needs to continue, beside the roles' own state.

    Args:
        step: controller steps completed.
        version: weight version published after them.
        prompts: cursor of the prompt source.
        kl: state of the KL controller.
        results: held-out numbers so far that the run's summary repeats.
        metrics_lines: lines of ``metrics.jsonl`` written before.
    """

    step: int
    version: int
    prompts: dict[str, Any] = field(default_factory=dict)
    kl: dict[str, Any] = field(default_factory=dict)
    results: dict[str, float] = field(default_factory=dict)
    metrics_lines: int = 0


class RunDirectory:
    """Paths of a run, held under an exclusive lock while the run lives."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock: IO[str] | None = None
        self.attempt = 1
        """How many times the run has been started, this time included."""

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def exports(self) -> Path:
        return self.root / "exports"

    @property
    def hf(self) -> Path:
        return self.root / "hf"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def ending(self) -> Path:
        return self.root / "ending.json"

    def open(self) -> None:
        """Create the directory, take its lock, and set the logs of an earlier attempt aside.

        Raises:
            ConfigError: another run holds it.
        """
        self.logs.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.root / ".lock", "a+")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            self._lock = None
            raise ConfigError(
                "another run is using this run directory",
                where=str(self.root),
                fix="choose another run.dir or run.name",
            ) from None
        self._set_logs_aside()

    def _set_logs_aside(self) -> None:
        earlier = [path for path in (*self.logs.iterdir(), self.ending) if path.is_file()]
        self.attempt = 1 + len(list(self.logs.glob("attempt-*")))
        if earlier:
            aside = self.logs / f"attempt-{self.attempt}"
            aside.mkdir()
            for path in earlier:
                path.rename(aside / path.name)
            self.attempt += 1

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def write_json(path: Path, value: Any) -> None:
    """Write durably and atomically (``write_text``)."""
    write_text(path, json.dumps(value, indent=1) + "\n")
