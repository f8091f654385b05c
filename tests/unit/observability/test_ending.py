"""What is written about a run that did not end well."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from megarl.errors import ConfigError, NodeError, StoppedError
from megarl.observability.ending import ending_of, read_ending, write_ending
from megarl.observability.logs import set_context
from megarl.observability.trace import span
from megarl.platform.signals import Terminated


@pytest.fixture(autouse=True)
def step():
    set_context(step=7)
    yield
    set_context(step=None)


def test_a_lost_node_is_told_with_role_rank_node_phase_step_and_what_to_do(tmp_path: Path):
    with pytest.raises(NodeError) as caught, span("step"), span("update_actor"):
        raise NodeError(role="actor", rank=3, node="n2", phase="update_actor", cause="died with its node", fix="see X")
    write_ending(tmp_path / "ending.json", ending_of(caught.value, 13))
    ending = read_ending(tmp_path / "ending.json")
    assert ending is not None
    assert ending.line() == (
        "NodeError: died with its node (actor rank 3 on n2, phase step/update_actor, step 7) | do: see X | exit code 13"
    )


def test_all_violations_of_a_configuration_are_on_the_line():
    error = ConfigError("2 violations", where="x.yaml", violations=["a: no integer", "b: unknown"])
    assert ending_of(error, 2).problem == "2 violations [x.yaml] a: no integer b: unknown"


@pytest.mark.parametrize(
    ("error", "kind", "problem"),
    [
        (KeyboardInterrupt(), "SIGINT", "interrupted"),
        (Terminated(signal.SIGTERM), "SIGTERM", "terminated by SIGTERM"),
        (ZeroDivisionError("division\nby zero"), "ZeroDivisionError", "division"),
        (StoppedError("told to stop"), "StoppedError", "told to stop"),
    ],
)
def test_every_kind_of_end_has_a_name_and_one_line(error: BaseException, kind: str, problem: str):
    ending = ending_of(error, 9)
    assert (ending.kind, ending.problem, ending.role) == (kind, problem, None)
    assert len(ending.line().splitlines()) == 1


def test_nothing_written_is_nothing_read(tmp_path: Path):
    assert read_ending(tmp_path / "ending.json") is None
