"""``python -m megarl.launch``: what the scripts in scripts/slurm run inside a job.

python -m megarl.launch --script SCRIPT [--dry-run] train PRESET key=value ...
python -m megarl.launch --script SCRIPT [--dry-run] exec COMMAND ...         any command, for trying out a cluster
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megarl.config.load import load_sft, load_train
from megarl.config.schema import SftConfig, TrainConfig
from megarl.controller.placement import plan_placement
from megarl.errors import ConfigError, MegarlError, NodeError, SetupError
from megarl.launch import ray_cluster, slurm
from megarl.launch.inspection import inspect_nodes
from megarl.launch.plan import Program, plan
from megarl.launch.verdict import Cause, Outcome, Requeue, last_line, limits, requeue
from megarl.observability.ending import ending_of
from megarl.planning.doctor import Diagnosis, Surroundings, diagnose
from megarl.planning.finding import errors, exit_code
from megarl.planning.placement import Nodes, memory_of_slurm
from megarl.platform import env

LEAD_SHARE = 0.9
"""Of the time between SIGUSR1 and the time limit, what the driver has to save and end."""


def program(words: Sequence[str], num_nodes: int, *, lead_s: int | None = None) -> Program:
    """Check the configuration and derive what the driver runs.

    Args:
        words: command, preset, key=value.
        num_nodes: of the allocation.
        lead_s: how long before the time limit Slurm sends SIGUSR1.

    Raises:
        ConfigError: the preset or the overrides are wrong.
    """
    command, *rest = words
    if command == "exec":
        return Program(tuple(rest))
    preset, *keys = rest
    config = _load(words, num_nodes)
    slots = plan_placement(config).slots_per_node if config.cluster.device == "cpu" else None
    # The rest is for the driver to end in, and for Slurm to notice.
    within_s = None if lead_s is None else LEAD_SHARE * lead_s
    return Program(("megarl", command, preset, *keys), slots, within_s)


def resumed(words: Sequence[str], num_nodes: int) -> list[str]:
    """The words of a requeued job: it goes on in its run directory, wherever its first attempt started from.

    Without a checkpoint there, or where the configuration is wrong, which the doctor reports, they stay as they are.
    """
    if words[0] != "exec":
        try:
            config = _load(words, num_nodes)
        except ConfigError:
            return list(words)
        if (Path(config.run.dir) / "checkpoints" / "latest").is_file():
            return [*words, "run.resume=auto"]
    return list(words)


def _load(words: Sequence[str], num_nodes: int) -> TrainConfig | SftConfig:
    command, preset, *keys = words
    overrides = [f"cluster.num_nodes={num_nodes}", *keys]
    return load_sft(preset, overrides).config if command == "sft" else load_train(preset, overrides).config


def examine(command: str, words: Sequence[str], allocation: slurm.Allocation, is_dry_run: bool) -> Diagnosis:
    """Print what the doctor finds before anything starts, and return it."""
    preset, *keys = words
    nodes = Nodes(
        len(allocation.nodes), allocation.gpus, f"job {allocation.job_id}" if allocation.job_id else "the script"
    )
    around = Surroundings(
        nodes,
        env.with_prefix("MEGARL_"),
        in_job=not is_dry_run,
        host_bytes=None if is_dry_run else memory_of_slurm(env.with_prefix("SLURM_")),
    )
    overrides = [f"cluster.num_nodes={nodes.count}", *keys]
    diagnosis = diagnose(preset, overrides, sft=command == "sft", around=around)
    sys.stderr.write(diagnosis.text() + "\n")
    return diagnosis


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code of the job."""
    parser = argparse.ArgumentParser(prog="megarl.launch", description=__doc__)
    parser.add_argument("--script", type=Path, required=True, help="batch script, whose #SBATCH lines a dry run reads")
    parser.add_argument("--dry-run", action="store_true", help="print what would run; needs no Slurm")
    parser.add_argument("command", choices=["train", "sft", "exec"])
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="PRESET key=value ...")
    args = parser.parse_args(argv)
    if not args.words:
        parser.error(f"{args.command} needs {'a command' if args.command == 'exec' else 'a preset'}")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s launch: %(message)s", stream=sys.stderr)
    try:
        if args.dry_run:
            return _dry_run(args)
        allocation = slurm.from_environment(env.with_prefix("SLURM"))
    except MegarlError as error:
        sys.stderr.write(f"launch failed: {type(error).__name__}: {error}\n")
        return error.exit_code
    return _job(args, allocation)


def _dry_run(args: argparse.Namespace) -> int:
    """It goes on whatever the doctor finds: it may be made where the nodes' file systems are not."""
    allocation, settings = slurm.from_script(args.script), env.with_prefix("MEGARL_")
    if args.command != "exec":
        examine(args.command, args.words, allocation, is_dry_run=True)
    limits(settings)
    what = program([args.command, *args.words], len(allocation.nodes), lead_s=slurm.signal_lead_s(args.script))
    sys.stdout.write(plan(allocation, what, settings=settings, is_dry_run=True).text() + "\n")
    return 0


def _job(args: argparse.Namespace, allocation: slurm.Allocation) -> int:
    """One attempt of a job, whatever it comes to; the last line of its output says what."""
    settings = env.with_prefix("MEGARL_")
    try:
        budget, _ = limits(settings)
        if allocation.restarts > budget:  # Slurm requeues by itself where it gives a node up
            outcome = Outcome(NodeError.exit_code, Cause.NODE, "Slurm has queued the job again by itself")
        else:
            outcome = _attempt(args, allocation, settings)
        after = requeue(outcome, allocation.restarts, settings)
    except MegarlError as error:
        ending = ending_of(error, error.exit_code)
        cause = Cause.CONFIG if isinstance(error, ConfigError) else Cause.RUN
        outcome, after = Outcome(error.exit_code, cause, ending.line()), Requeue(False, "")
    say(last_line(allocation.described, outcome, after))
    if after.wanted:
        try:
            slurm.requeue(allocation.job_id, without=outcome.bad_nodes)
        except SetupError as error:
            say(last_line(allocation.described, outcome, Requeue(False, f"not requeued: {error}")))
    return outcome.code


def say(line: str) -> None:
    """Write a line into the job's output, now."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _attempt(args: argparse.Namespace, allocation: slurm.Allocation, settings: Mapping[str, str]) -> Outcome:
    words = [args.command, *args.words]
    wanted = slurm.wanted_nodes(args.script, settings, len(allocation.nodes))
    if allocation.restarts > 0:
        words = resumed(words, wanted)
    first = allocation.only(allocation.nodes[:wanted])
    if args.command != "exec" and (found := errors(examine(args.command, words[1:], first, False).findings)):
        text = f"{found[0].key}: {found[0].problem} | do: {found[0].fix}"
        more = f" | and {len(found) - 1} more errors above" if len(found) > 1 else ""
        return Outcome(exit_code(found), Cause.CONFIG, text + more)
    lead_s = slurm.signal_lead_s(args.script)
    what = program(words, wanted, lead_s=lead_s)
    everywhere = plan(allocation, what, settings=settings, is_dry_run=False)
    nodes = allocation.nodes
    if settings.get("MEGARL_PREFLIGHT", "on") != "off":
        found_well = inspect_nodes(everywhere, wanted, env.copy())
        if isinstance(found_well, Outcome):
            return found_well
        nodes = found_well
    chosen = allocation.only(nodes[:wanted])
    return ray_cluster.run(plan(chosen, what, settings=settings, is_dry_run=False), env.copy())


if __name__ == "__main__":
    sys.exit(main())
