"""The pre-flight of a job: every node is asked about itself, and those that are not well are put aside.

A bad node is replaced by a spare where the job has one. Without, the job ends as one that lost a node: it is requeued,
and Slurm keeps it away from the node. Where every node is bad, the setup is, and another attempt would not help.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import signal
import time
from collections.abc import Mapping, Sequence

from megarl.errors import NodeError, SetupError, StoppedError
from megarl.launch.plan import Plan
from megarl.launch.preflight import TOKEN_FILE, Expected, judge, read_reports
from megarl.launch.slurm import unreachable
from megarl.launch.supervise import POLL_S, Children
from megarl.launch.verdict import Cause, Outcome

logger = logging.getLogger(__name__)

DEADLINE_S = 240.0
"""For all nodes to report: starting Python from a slow file system, and an all-reduce over the GPUs."""

CANCEL_S = 2.0
"""How long after failed steps the signal may come that ended them."""

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def inspect_nodes(plan: Plan, wanted: int, environment: Mapping[str, str]) -> tuple[str, ...] | Outcome:
    """The nodes that are well, the batch node first, or the outcome of a job that has too few of them.

    Args:
        plan: of all nodes of the job.
        wanted: nodes the run needs.
        environment: of this process.
    """
    folder = plan.logs / "preflight"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    token = secrets.token_hex(8)
    (folder / TOKEN_FILE).write_text(token)
    children = Children()
    children.forward(ENDING, None)
    asked_at = time.time()
    try:
        asking = children.start("preflight", plan.preflight, environment=environment, log=plan.logs / "srun.log")
        end = time.monotonic() + DEADLINE_S
        while children.received is None and time.monotonic() < end:
            if children.first_exit([asking], deadline_s=0.2) is not None:
                break
        if asking.process.poll():  # Slurm ends a job on all its nodes; whether this process is told first is chance
            until = time.monotonic() + CANCEL_S
            while children.received is None and time.monotonic() < until:
                time.sleep(POLL_S)
        if children.received is not None:
            return _ended_by(children.received)
        reports = read_reports(folder, plan.allocation.nodes)
    finally:
        children.end_all(grace_s=2.0)
    nodes, head = plan.allocation.nodes, plan.allocation.head
    dead = unreachable((plan.logs / "srun.log").read_text(errors="replace"))
    if any(node not in reports and node not in dead for node in nodes) and dead:
        # Slurm gives up a step that one node does not start, so nothing is known of those that were still looking.
        return choose(nodes, len(nodes), dead)
    expected = Expected(nodes, head, plan.allocation.gpus, token, asked_at, time.time())
    return choose(nodes, wanted, judge(reports, expected) | dead)


def choose(nodes: Sequence[str], wanted: int, wrong: Mapping[str, Sequence[str]]) -> tuple[str, ...] | Outcome:
    """The nodes that are well, or the outcome where they are too few.

    Args:
        nodes: all of them, the batch node first.
        wanted: how many the run needs.
        wrong: what is wrong with which.
    """
    for node, problems in wrong.items():
        logger.warning("pre-flight: node %s: %s", node, "; ".join(problems))
    well = tuple(node for node in nodes if node not in wrong)
    if not wrong:
        logger.info("pre-flight: %d nodes are well", len(nodes))
        return well
    # The launcher and the head run on the batch node: it cannot be put aside.
    if len(well) >= wanted and nodes[0] not in wrong:
        logger.info("pre-flight: %s put aside, %d nodes are well", ", ".join(wrong), len(well))
        return well
    said = [f"node {node}: {'; '.join(problems)}" for node, problems in wrong.items()]
    text = f"pre-flight: {' | '.join(said[:4])}" + (f" | and {len(said) - 4} more" if len(said) > 4 else "")
    if not well:
        fix = "every node is like this: ask for other nodes, or correct the script's request"
        return Outcome(SetupError.exit_code, Cause.PREFLIGHT, f"{text} | do: {fix}")
    fix = f"exclude {', '.join(wrong)}, or ask for spares (--nodes=MIN-MAX)"
    return Outcome(NodeError.exit_code, Cause.NODE, f"{text} | do: {fix}", bad_nodes=tuple(wrong))


def _ended_by(number: signal.Signals) -> Outcome:
    if number is signal.SIGUSR1:
        return Outcome(StoppedError.exit_code, Cause.STOP, "told to stop before Ray started")
    return Outcome(128 + number, Cause.CANCEL, f"{number.name} before Ray started")
