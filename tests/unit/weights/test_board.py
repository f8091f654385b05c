"""Who is named when a session's time is over."""

from __future__ import annotations

import time

import pytest

from megarl.weights.transport import board as module
from megarl.weights.transport.board import Board, TransportError


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> dict[str, Board]:
    """Four ends of one session."""
    monkeypatch.setattr(module, "_LONG_S", 0.01)
    host = Board.host("127.0.0.1")
    found = {"a": host} | {name: Board.join(host.address, 10.0) for name in "bcd"}
    for name, board in found.items():
        board.name = name
    return found


def wait_long(board: Board, *whom: str) -> None:
    for _ in range(3):
        board.check(time.monotonic() + 10, whom)
        time.sleep(module.CHECK_S)


def late(board: Board, *whom: str) -> str:
    with pytest.raises(TransportError) as caught:
        board.check(time.monotonic() - 1, whom)
    assert not caught.value.from_peer
    return caught.value.cause


def test_the_end_of_a_chain_of_waits_is_named(ends):
    wait_long(ends["b"], "c")
    assert late(ends["a"], "b") == "no answer from c within the time-out"
    assert late(ends["a"], "b", "d") == "no answer from c, d within the time-out"


def test_who_waits_no_longer_is_late_itself(ends):
    wait_long(ends["b"], "c")
    ends["b"].arrived()
    assert late(ends["a"], "b") == "no answer from b within the time-out"


def test_ends_that_wait_for_each_other_name_each_other(ends):
    wait_long(ends["b"], "c")
    wait_long(ends["c"], "b")
    assert late(ends["a"], "b") == "no answer from b within the time-out"


def test_a_reported_failure_goes_before_the_time_out(ends):
    ends["d"].fail("d broke")
    with pytest.raises(TransportError, match="d broke") as caught:
        ends["a"].check(time.monotonic() - 1, ["b"])
    assert caught.value.from_peer
