"""From an allocation to a finished run: the cluster's commands, the order they start in, and their end.

Order: configuration checked, head, workers (one srun), barrier, driver. Whatever ends first ends the rest.

Invariants:
1. A wrong configuration starts no process.
2. Nothing sleeps a fixed time: the barrier ends when the last node has joined, or names the missing at its deadline.
3. The token that lets processes into the cluster is made for this attempt and travels in the environment, never on a
   command line, where other users of a node could read it.
4. When ``run`` returns, no process it started is left on any node.
5. However it ends, there is one outcome that says why: what the driver wrote about its end, else what was seen here.
"""

from __future__ import annotations

import logging
import re
import secrets
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from megarl.errors import NodeError, SetupError, StoppedError, WorkerError
from megarl.launch import slurm
from megarl.launch.plan import CLUSTER_SETTINGS, Plan
from megarl.launch.supervise import POLL_S, Child, Children
from megarl.launch.verdict import Cause, Outcome, of_driver
from megarl.observability.ending import ENDING_VARIABLE, Ending, read_ending

logger = logging.getLogger(__name__)

ENDING = (signal.SIGTERM, signal.SIGINT)
SIGNALS = (*ENDING, signal.SIGUSR1, signal.SIGUSR2)

END_S = 6.0
"""How long processes have to end when they are asked to, before they are killed."""
SILENCE_S = 10.0
"""How long after its time a driver that was told to stop is killed."""
LOSS_S = 3.0
"""The usual ``loss_s`` of ``run``."""


def run(plan: Plan, environment: Mapping[str, str], *, grace_s: float = 15.0, loss_s: float = LOSS_S) -> Outcome:
    """Start the cluster and the driver in it, and end both.

    Args:
        plan: commands.
        environment: of this process; children get it with Ray's settings and the token.
        grace_s: time the driver has after a signal that ends it, and after the loss of a node, to end by itself.
        loss_s: time after a failed driver in which the loss of a node may be noticed that caused it.

    Returns:
        The driver's own exit code and cause, or: 3 where the cluster did not come up, 13 where it lost a node, 75 where
        it was told to stop, 128 + N after signal N.
    """
    plan.logs.mkdir(parents=True, exist_ok=True)
    children = Children()
    # Until the driver runs, a signal that ends has nobody to go to: it ends the launch. There is nothing to save then;
    # the driver inherits being deaf to SIGUSR2 until it can answer.
    children.forward((*ENDING, signal.SIGUSR1), None)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    ending = (plan.logs / "ending.json").absolute()
    variables = {
        **environment,
        **CLUSTER_SETTINGS,
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ADDRESS": plan.address,
        ENDING_VARIABLE: str(ending),
    }
    try:
        head_log = plan.logs / f"ray-{plan.allocation.head}.log"
        nodes = [children.start("head", plan.head, environment=variables, log=head_log)]
        if plan.workers:
            # srun answers SIGTERM by killing its tasks at once; SIGUSR1 it hands on, and node.py ends on it.
            nodes.append(
                children.start(
                    "workers", plan.workers, environment=variables, log=plan.logs / "srun.log",
                    end_signal=signal.SIGUSR1,
                )
            )  # fmt: skip
        barrier = children.start("barrier", plan.barrier, environment=variables, log=plan.logs / "barrier.log")
        first = _wait(children, [barrier, *nodes], plan, ends_at_once=(signal.SIGUSR1,))
        if first is not barrier or barrier.process.returncode:
            return _no_cluster(first, plan, children)
        logger.info("%s", _last_line_of(plan.logs / "barrier.log"))
        if signal.SIGUSR1 in children.first_s:
            return _no_cluster(None, plan, children)
        driver = children.start("driver", plan.driver, environment=variables)
        children.forward(SIGNALS, driver)
        outcome = _attend(children, driver, nodes, plan, ending, variables, grace_s, loss_s)
        if outcome.cause is Cause.CANCEL and signal.SIGTERM in children.first_s:
            return _given_up(outcome, slurm.called_down(plan.allocation.workers, variables))
        return outcome
    finally:
        # Together with the grace less than the 30 s after which Slurm kills a cancelled job.
        children.end_all(grace_s=min(grace_s, END_S))


def _attend(
    children: Children,
    driver: Child,
    nodes: Sequence[Child],
    plan: Plan,
    ending: Path,
    variables: Mapping[str, str],
    grace_s: float,
    loss_s: float,
) -> Outcome:
    """Wait for the first of the driver and the nodes to end; the outcome of the run."""
    first = _wait(children, [driver, *nodes], plan, grace_s=grace_s)
    if first is not None and first is not driver:
        began = time.monotonic()
        lost = _lost(first, plan)
        # The driver notices by itself, and knows which of its processes was there.
        children.first_exit([driver], deadline_s=grace_s)
        code = driver.process.poll()
        # Slurm ends a job on all its nodes; whether this process or another node's is told first is chance.
        if code != 0 and (cancelled := _cancelled(children, code, ending, until=began + loss_s)):
            return cancelled
        logger.error("%s", lost)
        return _after_loss(lost, code, read_ending(ending))
    code = driver.process.poll()
    if code is None:
        return _overdue(children)
    outcome = of_driver(code, read_ending(ending))
    if outcome.cause is not Cause.RUN:
        return outcome
    gone = children.first_exit(nodes, deadline_s=loss_s)
    # What a run that is being ended, or is out of time, was doing may fail in any way.
    if cancelled := _cancelled(children, code, ending, until=time.monotonic()):
        return cancelled
    if gone is not None:
        return _after_loss(_lost(gone, plan), code, read_ending(ending))
    if (node := _node_of(read_ending(ending), plan)) is not None and slurm.is_lost(node, variables):
        return _after_loss(f"lost node {node}: Slurm cannot start a task there", code, read_ending(ending))
    asked = children.first_s.get(signal.SIGUSR1)
    if asked is not None and _is_over(asked, plan):
        return Outcome(StoppedError.exit_code, Cause.STOP, f"told to stop and out of time | {outcome.text}")
    return outcome


def _node_of(ending: Ending | None, plan: Plan) -> str | None:
    """The node on which a process of the run died, if it is not the one that this process is on."""
    died = ending is not None and ending.exit_code == WorkerError.exit_code
    return ending.node if died and ending is not None and ending.node in plan.allocation.workers else None


def _cancelled(children: Children, code: int | None, ending: Path, *, until: float) -> Outcome | None:
    """The outcome of a run that was told to end, by a signal that comes until then (monotonic seconds) at the latest.

    Args:
        children: know the signals.
        code: exit code of the driver; None if it has not ended.
        ending: what the driver wrote about its end.
        until: when to stop waiting for the signal.
    """
    while (number := _ended_by(children)) is None:
        if time.monotonic() >= until:
            return None
        time.sleep(POLL_S)
    if code is None:
        return _overdue(children)
    own = of_driver(code, read_ending(ending))
    return own if own.cause is Cause.CANCEL else Outcome(128 + number, Cause.CANCEL, f"{number.name} | {own.text}")


def _ended_by(children: Children) -> signal.Signals | None:
    """The signal that ends the job, if one has come."""
    return next((number for number in ENDING if number in children.first_s), None)


def _wait(
    children: Children,
    group: Sequence[Child],
    plan: Plan,
    *,
    grace_s: float = 0.0,
    ends_at_once: Sequence[signal.Signals] = (),
) -> Child | None:
    """The first of a group to end; None when a signal to end came and its time has passed.

    Args:
        children: all of them, and the signals received.
        group: those to wait for; the first has ``grace_s`` after SIGTERM or SIGINT.
        plan: knows how long the driver may take after SIGUSR1.
        grace_s: see there.
        ends_at_once: further signals that end the wait.
    """
    while True:
        ended = children.first_exit(group, deadline_s=0.2)
        if ended is not None or any(number in children.first_s for number in ends_at_once):
            return ended
        if _ended_by(children) is not None:
            return children.first_exit(group[:1], deadline_s=grace_s)
        asked = children.first_s.get(signal.SIGUSR1)
        # A driver that does not answer at all is ended in time for the job to be requeued.
        if asked is not None and _is_over(asked + SILENCE_S, plan):
            return None


def _is_over(asked: float, plan: Plan) -> bool:
    """Whether the time has passed that a driver has to end after it was told to, at ``asked`` (monotonic seconds)."""
    return plan.stop_within_s is not None and time.monotonic() > asked + plan.stop_within_s


def _lost(child: Child, plan: Plan) -> str:
    """Which node was lost, by what srun says about its tasks."""
    if child.name == "head":
        where = f"the head node {plan.allocation.head}"
    else:
        log = plan.logs / "srun.log"
        said = log.read_text(errors="replace") if log.is_file() else ""
        named = re.findall(r"^srun: error: (?:Node failure on )?(\S+?)(?:: task|$)", said, re.M)
        where = f"node {named[0]}" if named else f"a node among {', '.join(plan.allocation.workers)}"
    return f"lost {where}: its Ray ended (exit code {child.process.returncode})"


def _after_loss(lost: str, code: int | None, ending: Ending | None) -> Outcome:
    """A run that finished nevertheless has finished; else the node is the cause, with what the driver saw of it."""
    if code == 0:
        return of_driver(code, ending)
    text = f"{lost}; see its log" + (f" | first seen as {ending.account}" if ending is not None else "")
    return Outcome(NodeError.exit_code, Cause.NODE, text)


def _given_up(outcome: Outcome, down: Sequence[str]) -> Outcome:
    """The outcome of a run that SIGTERM ended, with the nodes that Slurm calls down, if it is because of them.

    Slurm ends a job itself once it has not heard a node's daemon for its SlurmdTimeout, and it decides what follows.
    """
    if not down:
        return outcome
    text = f"lost node {', '.join(down)}: Slurm calls it down, ends the job and, with --requeue, queues it again"
    return Outcome(NodeError.exit_code, Cause.CANCEL, f"{text} | {outcome.text}")


def _overdue(children: Children) -> Outcome:
    """A driver that had to be killed."""
    number = _ended_by(children)
    if number is not None:
        return Outcome(128 + number, Cause.CANCEL, f"{number.name}: the driver did not end in time and was killed")
    text = "told to stop; the driver did not end in time and was killed: the next attempt goes on from its checkpoint"
    return Outcome(StoppedError.exit_code, Cause.STOP, text)


def _no_cluster(first: Child | None, plan: Plan, children: Children) -> Outcome:
    number = _ended_by(children)
    if number is not None:
        return Outcome(128 + number, Cause.CANCEL, f"{number.name} before the driver started")
    if first is None:
        return Outcome(StoppedError.exit_code, Cause.STOP, "told to stop before the driver started")
    if first.name == "barrier":
        said = _last_line_of(plan.logs / "barrier.log")
        text = (
            f"{said} | do: look into their logs in {plan.logs}; a slow file system wants a longer MEGARL_JOIN_TIMEOUT_S"
        )
    else:
        where = "the head node" if first.name == "head" else "worker nodes"
        text = (
            f"{where}: Ray ended before the cluster was up (exit code {first.process.returncode}) | do: see {plan.logs}"
        )
    return Outcome(SetupError.exit_code, Cause.JOIN, text)


def _last_line_of(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n") if log.is_file() else []
    return next((line for line in reversed(lines) if line.strip()), f"nothing in {log}")
