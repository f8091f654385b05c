"""The error tree: messages, exit codes, and survival of the trip through a Ray worker."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from megarl import errors
from megarl.errors import ConfigError, HangError, LayoutError, MegarlError, ModelError, NodeError, WorkerError

CLASSES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, MegarlError) and not issubclass(cls, WorkerError)
]


def an_error(cls: type[MegarlError]) -> MegarlError:
    return cls("expected 8, found 6", where="actor.layout.tp", fix="make it 2")


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize(
    "trip", [lambda error: pickle.loads(pickle.dumps(error)), copy.deepcopy], ids=["pickle", "copy"]
)
def test_every_class_survives_the_trip_with_its_fields(cls, trip):
    error = an_error(cls)
    back = trip(error)
    assert type(back) is cls
    assert str(back) == str(error)
    assert vars(back) == vars(error)
    assert back.args == error.args


def test_the_message_is_problem_where_fix_on_one_line():
    assert str(an_error(MegarlError)) == "expected 8, found 6 [actor.layout.tp] Fix: make it 2"
    assert str(MegarlError("broken")) == "broken"


def test_a_configuration_error_lists_every_violation():
    error = ConfigError("2 violations", violations=["a: not an integer", "b: unknown key"])
    assert str(error).splitlines() == ["2 violations", "  - a: not an integer", "  - b: unknown key"]
    assert pickle.loads(pickle.dumps(error)).violations == ("a: not an integer", "b: unknown key")


def test_a_worker_error_names_role_rank_phase_and_cause():
    error = WorkerError(role="actor", rank=3, phase="update_actor", cause="killed by signal 9", fix="look at its log")
    assert str(error) == "actor rank 3 failed in phase update_actor: killed by signal 9 Fix: look at its log"
    back = pickle.loads(pickle.dumps(error))
    assert (back.role, back.rank, back.phase, back.cause) == ("actor", 3, "update_actor", "killed by signal 9")
    assert "rank ?" in str(WorkerError(role="rollout", rank=None, phase="rollout", cause="gone"))


@pytest.mark.parametrize("cls", [NodeError, HangError])
def test_kinds_of_worker_errors_name_the_node_and_have_their_own_code(cls):
    error = pickle.loads(pickle.dumps(cls(role="actor", rank=3, phase="values", cause="gone", node="n2")))
    assert str(error) == "actor rank 3 on n2 failed in phase values: gone"
    assert type(error) is cls and error.node == "n2"
    assert error.exit_code not in (WorkerError.exit_code, 0, 1)


def test_the_class_decides_the_exit_code():
    codes = {cls: cls.exit_code for cls in [*CLASSES, WorkerError]}
    assert codes[LayoutError] == codes[ModelError]
    own = [code for cls, code in codes.items() if cls is not LayoutError]
    assert len(set(own)) == len(own)
    # 0 is success; from 126 on the shell and signals have their meanings.
    assert all(0 < code < 126 for code in own)


def test_the_tree_in_the_docstring_is_the_tree():
    for cls in [*CLASSES, WorkerError]:
        line = next(line for line in errors.__doc__.splitlines() if f" {cls.__name__} " in f" {line.strip(' ├└─│')} ")
        assert str(cls.exit_code) in line.split()
