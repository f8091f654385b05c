"""``python -m megarl.launch``: what the scripts in scripts/slurm run inside a job.

python -m megarl.launch --script SCRIPT [--dry-run] train PRESET key=value ...
python -m megarl.launch --script SCRIPT [--dry-run] exec COMMAND ...         any command, for trying out a cluster
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from megarl.config.load import load_sft, load_train
from megarl.controller.placement import plan_placement
from megarl.errors import MegarlError
from megarl.launch import ray_cluster, slurm
from megarl.launch.ray_cluster import Program
from megarl.planning.doctor import Surroundings, diagnose
from megarl.planning.placement import Nodes
from megarl.platform import env


def program(words: Sequence[str], num_nodes: int) -> Program:
    """Check the configuration and derive what the driver runs.

    Raises:
        ConfigError: the preset or the overrides are wrong.
    """
    command, *rest = words
    if command == "exec":
        return Program(tuple(rest))
    preset, *keys = rest
    overrides = [f"cluster.num_nodes={num_nodes}", *keys]
    config = load_sft(preset, overrides).config if command == "sft" else load_train(preset, overrides).config
    slots = plan_placement(config).slots_per_node if config.cluster.device == "cpu" else None
    return Program(("megarl", command, preset, *keys), slots)


def examine(command: str, words: Sequence[str], allocation: slurm.Allocation, is_dry_run: bool) -> int:
    """Print what the doctor finds before anything starts; the code to end with, 0 to go on.

    A dry run goes on whatever is found: it may be made where the nodes' file systems are not.
    """
    preset, *keys = words
    nodes = Nodes(
        len(allocation.nodes), allocation.gpus, f"job {allocation.job_id}" if allocation.job_id else "the script"
    )
    around = Surroundings(nodes, env.with_prefix("MEGARL_"), in_job=not is_dry_run)
    overrides = [f"cluster.num_nodes={nodes.count}", *keys]
    diagnosis = diagnose(preset, overrides, sft=command == "sft", around=around)
    sys.stderr.write(diagnosis.text() + "\n")
    return 0 if is_dry_run else diagnosis.exit_code


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
            allocation = slurm.from_script(args.script)
        else:
            allocation = slurm.from_environment(env.with_prefix("SLURM"))
        if args.command != "exec" and (code := examine(args.command, args.words, allocation, args.dry_run)):
            return code
        what = program([args.command, *args.words], len(allocation.nodes))
        plan = ray_cluster.plan(allocation, what, settings=env.with_prefix("MEGARL_"), is_dry_run=args.dry_run)
        if args.dry_run:
            sys.stdout.write(plan.text() + "\n")
            return 0
        return ray_cluster.run(plan, env.copy())
    except MegarlError as error:
        sys.stderr.write(f"launch failed: {type(error).__name__}: {error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
