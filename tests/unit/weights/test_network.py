"""Transfers between two ends of a group: late ones, and ones that will never complete."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megarl.weights.transport.board import Board, TransportError
from megarl.weights.transport.network import Network
from tests.architecture.source import ROOT

SCRIPT = """
import threading, time, torch
from megarl.weights.transport.board import Board
from megarl.weights.transport.network import Network

board, ends = Board.host("127.0.0.1"), [None, None]

def join(rank):
    own = board if rank == 0 else Board.join(board.address, 60.0)
    ends[rank] = Network(own, rank, 2, backend="gloo", timeout_s=60.0)

threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for rank, end in enumerate(ends):
    end.receive(torch.empty(8, dtype=torch.uint8), 1 - rank, 7, name="the other", deadline=time.monotonic() + 60)
for end in ends:
    end.close()
print("closed")
"""


def test_a_process_with_abandoned_transfers_ends_as_it_should():
    """Each end waits for the other; the interpreter's end must not drop one group under the other's waiting thread."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "closed\n" and "terminate" not in result.stderr


def test_a_transfer_may_take_longer_than_the_group_waited_for_its_members():
    """And one that is too late says whom it waited for."""
    board = Board.host("127.0.0.1")
    boards = [board, Board.join(board.address, 10.0)]
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(
            lambda rank: Network(boards[rank], rank, 2, backend="gloo", timeout_s=1.0), range(2)
        )  # fmt: skip
    deadline = time.monotonic() + 20
    found = torch.zeros(8, dtype=torch.uint8)
    coming = other.receive(found, 0, 1, name="the first", deadline=deadline)
    time.sleep(1.5)
    one.wait(one.send(torch.arange(8, dtype=torch.uint8), 1, 1, name="the second", deadline=deadline))
    other.wait(coming)
    assert found.tolist() == list(range(8))
    never = other.receive(found, 0, 2, name="the first", deadline=time.monotonic() + 0.2)
    with pytest.raises(TransportError, match="no answer from the first within the time-out"):
        other.wait(never)
    one.close()
    other.close()
