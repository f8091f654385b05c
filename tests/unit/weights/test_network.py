"""Transfers that will never complete are left behind without harm."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.architecture.source import ROOT

SCRIPT = """
import threading, torch
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
    end.receive(torch.empty(8, dtype=torch.uint8), 1 - rank, 7)
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
