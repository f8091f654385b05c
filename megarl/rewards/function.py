"""A user's reward function, by import path or file path."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarl.errors import RewardError
from megarl.rewards.base import RewardInput

ARGUMENTS = ("prompt", "response", "answer", "data_source", "metadata")
_FIX = "reward.path is package.module:function or path/to/file.py:function"


class FunctionReward:
    """Calls the function with ``prompt, response, answer, data_source, metadata`` by keyword.

    Raises:
        RewardError: the module, file or function cannot be loaded, or does not take these keywords.
    """

    def __init__(self, path: str) -> None:
        self._function = load_function(path)
        try:
            inspect.signature(self._function).bind(**dict.fromkeys(ARGUMENTS))
        except TypeError as error:
            raise RewardError(
                f"the reward function is called with the keywords {', '.join(ARGUMENTS)}: {error}",
                where=path,
                fix="take them all, or the rest with **kwargs",
            ) from error
        self.is_async = inspect.iscoroutinefunction(self._function) or inspect.iscoroutinefunction(
            getattr(self._function, "__call__", None)  # noqa: B004  # the bound method, not whether there is one
        )

    def __call__(self, sample: RewardInput) -> Any:
        return self._function(
            prompt=sample.prompt,
            response=sample.response,
            answer=sample.answer,
            data_source=sample.data_source,
            metadata=sample.metadata,
        )


def load_function(path: str) -> Callable[..., Any]:
    """The function of ``module:function`` or ``file.py:function``.

    Raises:
        RewardError: no such module, file or function, or the code raises when it is loaded.
    """
    place, _, name = path.rpartition(":")
    if not place or not name:
        raise RewardError(f"{path!r} names no function", fix=_FIX)
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except RewardError:
        raise
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        raise RewardError(
            f"loading the reward failed: {type(error).__name__}: {error}", where=path, fix=_FIX
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise RewardError(
            f"{place} has no function {name!r}; it has {', '.join(names) or 'none'}", where=path, fix=_FIX
        )
    return function


def _load_file(file: Path) -> Any:
    if not file.is_file():
        raise RewardError("the reward's file does not exist", where=str(file.absolute()), fix=_FIX)
    # As for a script: modules beside the file can be imported.
    sys.path.insert(0, str(file.absolute().parent))
    spec = importlib.util.spec_from_file_location(f"megarl_reward_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise RewardError("the reward's file is no Python module", where=str(file), fix=_FIX)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
