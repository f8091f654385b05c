"""``python -m megarl.controller.membership ADDRESS RESOURCE ...``: wait until every expected node is in the cluster.

Each node announces itself by a custom resource of its own. It is a process of its own, so that the launcher neither
becomes a Ray driver nor hangs with one.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence

import ray

POLL_S = 0.5
# Ray may wait for minutes inside one call for a head that took the connection and says nothing.
MARGIN_S = 1.0
NODE_RESOURCE = "slurm:"
"""What the name of a node's own resource begins with; Slurm's name of the node follows."""


def present() -> set[str]:
    """Custom resources of the nodes that are alive."""
    return {name for node in ray.nodes() if node["Alive"] for name in node["Resources"]}


def connect(address: str, end: float) -> str | None:
    """Connect to the cluster, trying until ``end`` (monotonic seconds); the last refusal, or None when connected."""
    while True:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            return None
        except (ConnectionError, RuntimeError, ValueError) as error:  # what Ray raises while the head is coming up
            refusal = (str(error).splitlines() or [type(error).__name__])[0]
        if time.monotonic() > end:
            return refusal
        time.sleep(POLL_S)


def _give_up(reason: str) -> None:
    """From another thread: the main one is inside a call of Ray's."""
    sys.stderr.write(reason)
    sys.stderr.flush()
    os._exit(3)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 when all are there, 3 at the deadline; the reason goes to standard error."""
    parser = argparse.ArgumentParser(prog="megarl.controller.membership")
    parser.add_argument("address")
    parser.add_argument("--deadline-s", type=float, required=True)
    parser.add_argument("expected", nargs="+")
    args = parser.parse_args(argv)
    begin = time.monotonic()
    end = begin + args.deadline_s
    silent = f"no Ray head answered at {args.address} within {args.deadline_s:.0f} s: it is there and says nothing\n"
    watchdog = threading.Timer(args.deadline_s + MARGIN_S, _give_up, [silent])
    watchdog.daemon = True
    watchdog.start()
    refusal = connect(args.address, end)
    watchdog.cancel()
    if refusal is not None:
        sys.stderr.write(f"no Ray head answered at {args.address} within {args.deadline_s:.0f} s: {refusal}\n")
        return 3
    expected = set(args.expected)
    while missing := expected - present():
        if time.monotonic() > end:
            names = ", ".join(sorted(name.partition(":")[2] or name for name in missing))
            sys.stderr.write(
                f"{len(missing)} of {len(expected)} nodes did not join within {args.deadline_s:.0f} s: {names}\n"
            )
            return 3
        time.sleep(POLL_S)
    sys.stderr.write(f"{len(expected)} nodes joined after {time.monotonic() - begin:.1f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
