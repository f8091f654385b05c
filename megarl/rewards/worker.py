"""A scoring process: ``python -m megarl.rewards.worker FD``.

Invariants:
1. The main thread scores, for code that needs signals; a second thread reads the connection and ends the process group
   when the pool is gone, also in the middle of a sample.
2. What the scored code prints goes to the error stream; the connection is a descriptor of its own.
3. Every sample is answered on its own as soon as it is done: the pool knows which one is running.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, TypeAlias

from megarl.errors import MegarlError, RewardError
from megarl.rewards.base import RewardResult, Scorer, as_result
from megarl.rewards.registry import RewardSpec, build

Numbered: TypeAlias = tuple[int, bytes]
"""A sample's number in its batch and its pickled ``RewardInput``."""
Answer: TypeAlias = Callable[[int, "RewardResult | str"], None]


def serve(connection: Connection) -> None:
    """Receive a ``RewardSpec``, say whether it can be built, then answer chunks of numbered samples for ever."""
    spec: RewardSpec = connection.recv()
    chunks: SimpleQueue[list[Numbered]] = SimpleQueue()
    threading.Thread(target=_read, args=(connection, chunks), daemon=True).start()
    try:
        scorer = build(spec)
    except MegarlError as error:
        connection.send(("broken", error))
        return
    except Exception as error:  # the entry point of a process: the pool must hear of whatever a library raised
        connection.send(("broken", RewardError(f"the reward cannot be built: {_describe(error)}")))
        return
    is_async = bool(getattr(scorer, "is_async", False))
    connection.send(("ready", is_async))

    def answer(number: int, result: RewardResult | str) -> None:
        connection.send((number, result))

    while True:
        chunk = chunks.get()
        if is_async:
            asyncio.run(_score_together(scorer, chunk, spec.timeout_s, answer))
        else:
            for number, pickled in chunk:
                answer(number, _score(scorer, pickled))


def _score(scorer: Scorer, pickled: bytes) -> RewardResult | str:
    """The result, or why there is none."""
    try:
        return as_result(scorer(pickle.loads(pickled)))
    except BaseException as error:  # the code may raise anything, math-verify a BaseException; it is a failed sample
        return _describe(error)


async def _score_together(scorer: Scorer, chunk: list[Numbered], timeout_s: float, answer: Answer) -> None:
    """All samples of the chunk at once, for functions that wait for something."""

    async def one(number: int, pickled: bytes) -> None:
        try:
            scored = await asyncio.wait_for(scorer(pickle.loads(pickled)), timeout_s)
            result: RewardResult | str = as_result(scored)
        except TimeoutError:
            result = f"TimeoutError: no score within {timeout_s:g} s"
        except BaseException as error:  # as above
            result = _describe(error)
        answer(number, result)

    await asyncio.gather(*(one(number, pickled) for number, pickled in chunk))


def _describe(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"[:500]


def _read(connection: Connection, chunks: SimpleQueue[list[Numbered]]) -> None:
    while True:
        try:
            chunks.put(connection.recv())
        except (EOFError, OSError):
            # The pool closed or died. The group holds what the scored code started; nobody else will end it.
            os.killpg(os.getpgrp(), signal.SIGKILL)


def main(arguments: list[str]) -> None:
    """Entry point."""
    connection: Any = Connection(int(arguments[0]))
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(connection)


if __name__ == "__main__":
    main(sys.argv[1:])
