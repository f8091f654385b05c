"""Saves of a run: the roles' parts by their ranks, while the run waits or behind its next steps; and exports between.

Invariant: at most one save is under way, and the run ends with none.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from megarl.config.schema.run import CheckpointConfig
from megarl.controller.checkpoints import CheckpointStore, Partial, step_name
from megarl.controller.dispatch import WorkerGroup
from megarl.controller.state import RunState
from megarl.observability.trace import span


class Saver:
    """Saves when it is told to.

    Args:
        store: the run's checkpoints.
        groups: roles by name; the actor's model is exported.
        config: how to save.
        exports: directory of Hugging Face directories written between the saves.
        note_seconds: told how long a save took from its beginning until it was a checkpoint.
    """

    def __init__(
        self,
        store: CheckpointStore,
        groups: Mapping[str, WorkerGroup],
        config: CheckpointConfig,
        exports: Path,
        *,
        note_seconds: Callable[[float], None],
    ) -> None:
        self._store = store
        self._note_seconds = note_seconds
        self._started = 0.0
        self._groups = groups
        self._config = config
        self._exports = exports
        self._under_way: Partial | None = None

    def is_due(self, step: int, last_step: int) -> bool:
        """Whether a checkpoint of this step is asked for."""
        every = self._config.every_steps
        return (every is not None and step % every == 0) or (step == last_step and self._config.at_end)

    def save(self, state: RunState) -> None:
        """Save; with ``checkpoint.background`` return when the ranks have copied what they write.

        Raises:
            CheckpointError: this save or the one before it failed; earlier checkpoints are untouched.
        """
        self.finish()
        self._started = time.monotonic()
        with span("save"):
            partial = self._store.begin(state)
            with self._store.writing(partial):
                for role, group in self._groups.items():
                    (partial.directory / role).mkdir()
                    group.save(partial.directory / role, self._config.background)
            if self._config.background:
                self._under_way = partial
            else:
                self._commit(partial)
        every, export_every = self._config.every_steps, self._config.export_hf_every
        if every is not None and export_every is not None and state.step % (every * export_every) == 0:
            directory = self._exports / step_name(state.step)
            with span("export"):
                shutil.rmtree(directory, ignore_errors=True)  # of a run that was resumed from an earlier step
                self._groups["actor"].export_hf(directory)

    def look(self) -> None:
        """Complete a save whose ranks are done with writing.

        Raises:
            CheckpointError: it failed.
        """
        if self._under_way is not None and all(all(group.save_is_written()) for group in self._groups.values()):
            self.finish()

    def finish(self) -> None:
        """Wait for the save under way, if there is one, and make it a checkpoint.

        Raises:
            CheckpointError: it failed.
        """
        if self._under_way is None:
            return
        partial, self._under_way = self._under_way, None
        with span("save"):
            with self._store.writing(partial):
                for group in self._groups.values():
                    group.finish_save()
            self._commit(partial)

    def _commit(self, partial: Partial) -> None:
        self._store.commit(partial)
        self._note_seconds(time.monotonic() - self._started)
