"""The one place that makes reasoning-gym datasets: prompts draw from them, rewards ask them for their scorer."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from megarl.errors import DataError


def make_dataset(task: str, options: Mapping[str, Any], *, size: int, seed: int) -> Any:
    """A procedural dataset; item i is a dict of ``question``, ``answer`` and ``metadata``, the same for the same seed.

    Raises:
        DataError: reasoning-gym is not installed, no such task, or options the task does not take.
    """
    where = f"reasoning_gym task {task}"
    try:
        # Imported here: it takes a second, and neither file sources nor other rewards need it.
        with warnings.catch_warnings():
            # A dependency of it compares strings with "is", which Python reports when it compiles that file.
            warnings.simplefilter("ignore", SyntaxWarning)
            gym = importlib.import_module("reasoning_gym")
            tasks = importlib.import_module("reasoning_gym.factory").DATASETS
    except ImportError as error:
        raise DataError(
            f"reasoning-gym cannot be imported: {error}", where=where, fix="pip install reasoning-gym"
        ) from error
    if task not in tasks:
        close = get_close_matches(task, tasks, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"one of: {', '.join(sorted(tasks))}"
        raise DataError(f"reasoning-gym has no task {task!r}", where=where, fix=hint)
    if clash := sorted({"size", "seed"} & options.keys()):
        raise DataError(f"options {clash} are keys of the source itself", where=where, fix="set them beside options")
    try:
        return gym.create_dataset(task, size=size, seed=seed, **options)
    except (TypeError, ValueError, AssertionError) as error:  # what its configuration classes raise for bad options
        raise DataError(f"reasoning-gym refuses the options {dict(options)}: {error}", where=where) from error
