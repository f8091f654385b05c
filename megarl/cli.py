"""The command line: load, call one function, print, exit with the error's code. The only module that prints.

    megarl train PRESET [key=value ...] [--show]
    megarl sft PRESET [key=value ...] [--show]
    megarl doctor PRESET [key=value ...] [--json]
    megarl report RUN
    megarl status RUN [--errors N]
    megarl attach RUN
    megarl plan PRESET [key=value ...] [--gpus N,N,...] [--gpu KIND] [--plot FILE] [--published]
    megarl plan sync PRESET [key=value ...] [--bandwidth GB/s] [--local-bandwidth GB/s] [--ep N] [--json]
    megarl presets
    megarl explain [KEY]

Exit codes: 0 done, 2 bad command line or configuration, 3-14 and 75 the class of the error (megarl/errors.py), 130
interrupted (SIGINT), 143 terminated (SIGTERM), 1 anything unforeseen. Commands that need torch import it when they run:
the others work without it.
"""

from __future__ import annotations

import argparse
import errno
import logging
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import megarl
from megarl.errors import ConfigError, MegarlError, SetupError
from megarl.observability.ending import ENDING_VARIABLE, UNFORESEEN, ending_of, write_ending
from megarl.platform import env, signals

if TYPE_CHECKING:
    from megarl.config.schema import SftConfig, TrainConfig

logger = logging.getLogger(__name__)

PLAN_FORMS = ("layout", "sync")
_BY_NAME = "{} is not here: the numbers are those of the model of that name"
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; a foreseen failure is one message without a traceback."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if flags := [text for text in rest if text.startswith("-")]:
        parser.error(f"unknown option {flags[0]}")
    if rest and not hasattr(options, "overrides"):
        parser.error(f"unexpected argument {rest[0]}")
    if hasattr(options, "overrides"):
        options.overrides = [*options.overrides, *rest]
    with signals.handled():
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    run_dir: list[str] = []
    try:
        return int(options.command(options, run_dir))
    except KeyboardInterrupt as error:
        print("megarl: interrupted", file=sys.stderr)
        return _told(error, signals.INTERRUPTED)
    except signals.Terminated as error:
        print(f"megarl: terminated by {error.signal.name}", file=sys.stderr)
        return _told(error, int(str(error.code)))
    except MegarlError as error:
        print(f"megarl: {type(error).__name__}: {error}", file=sys.stderr)
        return _told(error, error.exit_code)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone; Python would complain while closing stdout
        return 0
    except OSError as error:
        if error.errno not in FULL_DISK:
            return _unforeseen(error, run_dir)
        full = SetupError(
            f"no space is left to write on: {error.strerror}",
            where=error.filename or "".join(run_dir) or None,
            fix="free space there; the same command goes on from the last checkpoint",
        )
        print(f"megarl: SetupError: {full}", file=sys.stderr)
        return _told(full, full.exit_code)
    except Exception as error:  # the process entry point: the last line must name the cause
        return _unforeseen(error, run_dir)


class _Parser(argparse.ArgumentParser):
    """``megarl plan PRESET`` is ``megarl plan layout PRESET``."""

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def,override]
        words = list(sys.argv[1:] if args is None else args)
        if words[:1] == ["plan"] and len(words) > 1 and words[1] not in (*PLAN_FORMS, "-h", "--help"):
            words.insert(1, PLAN_FORMS[0])
        return super().parse_known_args(words, namespace)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="megarl", description=(megarl.__doc__ or "").partition("\n")[0])
    parser.add_argument("--version", action="version", version=f"megarl {megarl.__version__}")
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=argparse.ArgumentParser
    )
    for name, command, text in (
        ("train", _train, "reinforcement learning from a preset"),
        ("sft", _sft, "supervised fine-tuning from a preset"),
    ):
        sub = commands.add_parser(
            name, help=text, description=f"{text}; key=value overrides any key of `megarl explain`"
        )
        sub.add_argument("preset", metavar="PRESET", help="a name from `megarl presets`, or a path to a YAML file")
        sub.add_argument(
            "overrides", metavar="key=value", nargs="*", help="Hydra's grammar; ~key goes back to the default"
        )
        sub.add_argument("--show", action="store_true", help="print the configuration with origins and run nothing")
        sub.set_defaults(command=command)
    sub = commands.add_parser("doctor", help="all that would end or slow a run, with what to change; runs nothing")
    sub.add_argument("preset", metavar="PRESET", help="a name from `megarl presets`, or a path to a YAML file")
    sub.add_argument("overrides", metavar="key=value", nargs="*", help="as for train and sft")
    sub.add_argument("--sft", action="store_true", help="PRESET is a path and belongs to `megarl sft`")
    sub.add_argument("--json", action="store_true", help="the findings for a script")
    sub.add_argument("--gpu", default="h100", metavar="KIND", help="a100, b200, h100 (default), h200 or h20")
    sub.add_argument("--node-memory-gib", type=float, metavar="GIB", help="host memory of a node; in a job the job's")
    sub.set_defaults(command=_doctor)
    forms = commands.add_parser("plan", help="what a run will do, by arithmetic; runs nothing").add_subparsers(
        title="forms", metavar="FORM", required=True
    )
    _add_layout_form(forms.add_parser(PLAN_FORMS[0], help="layouts that fit and their step time (the form of itself)"))
    sub = forms.add_parser("sync", help="what a weight update moves, over which links, and how long it takes at best")
    sub.add_argument("preset", metavar="PRESET", help="a name from `megarl presets`, or a path to a YAML file")
    sub.add_argument("overrides", metavar="key=value", nargs="*", help="as for train and sft")
    sub.add_argument("--bandwidth", type=float, default=50.0, metavar="GB/s", help="of a rank between hosts (50)")
    sub.add_argument("--local-bandwidth", type=float, default=150.0, metavar="GB/s", help="inside a host (150)")
    sub.add_argument("--expert-parallel", action="store_true", help="engines deal experts out instead of cutting them")
    sub.add_argument("--json", action="store_true", help="all of it for a script")
    sub.set_defaults(command=_plan_sync)
    sub = commands.add_parser("status", help="a run now: its state, what each process does, the latest errors of all")
    sub.add_argument("run", type=Path, metavar="RUN", help="the run's directory")
    sub.add_argument("--errors", type=int, default=10, metavar="N", help="warnings and errors shown (10)")
    sub.set_defaults(command=_status)
    sub = commands.add_parser("attach", help="the console of a run, from anywhere that sees its directory, to its end")
    sub.add_argument("run", type=Path, metavar="RUN", help="the run's directory")
    sub.set_defaults(command=_attach)
    sub = commands.add_parser("report", help="a run's seconds by phase and its memory, beside what was forecast")
    sub.add_argument("run", metavar="RUN", type=Path, help="directory of the run")
    sub.set_defaults(command=_report)
    sub = commands.add_parser("explain", help="what a configuration key means, takes and who reads it")
    sub.add_argument("key", metavar="KEY", nargs="?", help="such as actor.layout.tp; without it all keys are listed")
    sub.set_defaults(command=_explain)
    sub = commands.add_parser("presets", help="the presets and what each needs")
    sub.set_defaults(command=_presets)
    return parser


def _train(options: argparse.Namespace, run_dir: list[str]) -> int:
    from megarl.config.load import load_train
    from megarl.config.origin import resolved_yaml

    loaded = load_train(options.preset, options.overrides)
    if options.show:
        print(resolved_yaml(loaded), end="")
        return 0
    run_dir.append(loaded.config.run.dir)
    _check_model(loaded.config)
    # A user's own estimator, loss or reward may lie where the run is started, as it may under ``python -m megarl``.
    if not {"", str(Path.cwd())} & set(sys.path):
        sys.path.append(str(Path.cwd()))

    from megarl.controller.loop import train  # needs torch and ray

    return train(loaded, _forecast(loaded.config))


def _sft(options: argparse.Namespace, run_dir: list[str]) -> int:
    from megarl.config.load import load_sft
    from megarl.config.origin import resolved_yaml

    loaded = load_sft(options.preset, options.overrides)
    if options.show:
        print(resolved_yaml(loaded), end="")
        return 0
    run_dir.append(loaded.config.run.dir)
    _check_model(loaded.config)

    from megarl.controller.sft import sft  # needs torch and ray

    return sft(loaded, _forecast(loaded.config))


def _doctor(options: argparse.Namespace, run_dir: list[str]) -> int:
    from megarl.planning.doctor import Surroundings, diagnose
    from megarl.planning.placement import memory_of_slurm, nodes_of_slurm

    slurm = env.with_prefix("SLURM_")
    given = options.node_memory_gib
    if given is not None and not given > 0:
        raise ConfigError(f"--node-memory-gib is {given:g}, expected more than 0")
    around = Surroundings(
        nodes_of_slurm(slurm),
        env.with_prefix("MEGARL_"),
        in_job="SLURM_JOB_ID" in slurm,
        gpu=options.gpu,
        host_bytes=memory_of_slurm(slurm) if given is None else int(given * 2**30),
    )
    is_sft = options.sft or Path(options.preset).name.startswith("sft")
    diagnosis = diagnose(options.preset, options.overrides, sft=is_sft, around=around)
    print(diagnosis.json() if options.json else diagnosis.text())
    return diagnosis.exit_code


def _add_layout_form(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("preset", metavar="PRESET", nargs="?", help="a name from `megarl presets`, or a path")
    sub.add_argument("overrides", metavar="key=value", nargs="*", help="as for train")
    sub.add_argument(
        "--gpus", metavar="N,N,...", help="a scaling table over these sizes; default the preset's own size"
    )
    sub.add_argument("--gpu", default="h100", metavar="KIND", help="a100, b200, h100 (default), h200 or h20")
    sub.add_argument("--mean-prompt", type=float, metavar="TOKENS", help="mean prompt length (half the limit)")
    sub.add_argument("--mean-response", type=float, metavar="TOKENS", help="mean response length (half the limit)")
    sub.add_argument("--weak", action="store_true", help="prompts of a step grow with the GPUs")
    sub.add_argument(
        "--one-step-off", action="store_true", help="also rollout a step ahead, which megarl cannot run yet"
    )
    sub.add_argument("--top", type=int, default=10, metavar="N", help="placements shown (10)")
    sub.add_argument("--plot", type=Path, metavar="FILE", help="draw the scaling table as FILE.png and FILE.svg")
    sub.add_argument("--published", action="store_true", help="the model's error on published runs, and nothing else")
    sub.set_defaults(command=_plan_layout)


def _plan_layout(options: argparse.Namespace, run_dir: list[str]) -> int:
    from megarl.config.load import load_train
    from megarl.planning import published, scaling
    from megarl.planning.gpus import gpu_named
    from megarl.planning.known_models import spec_of
    from megarl.planning.search import report, workload

    if options.published:
        print(published.table())
        return 0
    if options.preset is None:
        raise ConfigError("no preset", fix="megarl plan PRESET, or megarl plan --published")
    config, gpu = load_train(options.preset, options.overrides).config, gpu_named(options.gpu)
    spec, is_known = spec_of(config.model.path)
    if is_known:
        print(_BY_NAME.format(config.model.path))
    work = workload(config, mean_prompt=options.mean_prompt, mean_response=options.mean_response)
    sizes = _sizes(options.gpus, config.cluster.gpus_per_node)
    if not sizes:
        print(report(config, spec, gpu, work, one_step_off=options.one_step_off, top=options.top))
        return 0
    points = scaling.scale(config, spec, gpu, sizes, work, weak=options.weak, one_step_off=options.one_step_off)
    print(scaling.table(points))
    if options.plot is not None:
        title = f"{options.preset} on {gpu.name.upper()}, predicted"
        print("drawn:", *scaling.draw(points, options.plot, title))
    return 0


def _sizes(text: str | None, per_node: int) -> list[int]:
    """Numbers of GPUs from ``64,128``. Raises ConfigError for what is no number of whole nodes."""
    words = [] if text is None else text.split(",")
    for word in words:
        if not word.isdigit() or int(word) == 0 or (int(word) > per_node and int(word) % max(per_node, 1)):
            raise ConfigError(f"--gpus {text}: {word!r} is no number of GPUs in nodes of {per_node}")
    return [int(word) for word in words]


def _plan_sync(options: argparse.Namespace, run_dir: list[str]) -> int:
    from megarl.config.load import load_train
    from megarl.controller.placement import plan_placement
    from megarl.planning.known_models import spec_of
    from megarl.planning.sync_plan import plan_sync

    for name in ("bandwidth", "local_bandwidth"):
        if not getattr(options, name) > 0:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(options, name):g}, expected more than 0")
    config = load_train(options.preset, options.overrides).config
    placement = plan_placement(config)
    made = plan_sync(
        config,
        actor_hosts=[f"node{placement.node(slot)}" for slot in placement.actor],
        engine_hosts=[f"node{placement.node(slot)}" for engine in placement.rollout for slot in engine],
        bandwidth=options.bandwidth * 1e9,
        local_bandwidth=options.local_bandwidth * 1e9,
        expert_parallel=options.expert_parallel,
    )
    if options.json:
        print(made.json())
        return 0
    if spec_of(config.model.path)[1]:
        print(_BY_NAME.format(config.model.path))
    print(made.text())
    return 0


def _report(options: argparse.Namespace, run_dir: list[str]) -> int:
    from megarl.observability.report import report

    print(report(options.run))
    return 0


def _status(options: argparse.Namespace, run_dir: list[str]) -> int:
    from megarl.observability.status import status

    print(status(options.run, options.errors))
    return 0


def _attach(options: argparse.Namespace, run_dir: list[str]) -> int:
    from megarl.observability.status import attach

    last = attach(options.run)
    print(last.line)
    if last.ending is not None:
        return last.ending.exit_code
    return 0 if last.state == "finished" else UNFORESEEN


def _forecast(config: TrainConfig | SftConfig) -> dict[str, object]:
    """What was to be expected of the run, for its directory: memory, and on GPUs of the presets' kind seconds."""
    from megarl.config.schema import TrainConfig
    from megarl.models import load_spec
    from megarl.planning.forecast import forecast
    from megarl.planning.gpus import gpu_named
    from megarl.planning.search import placement_of, workload
    from megarl.planning.step_time import step_time

    spec = load_spec(config.model.path)
    critic = getattr(config, "critic", None)
    critic_spec = spec if critic is None or critic.path is None else load_spec(critic.path)
    if config.cluster.device == "cpu":
        return forecast(config, spec, critic_spec, None).as_dict()
    gpu = gpu_named("h100")
    expected = forecast(config, spec, critic_spec, gpu).as_dict()
    if isinstance(config, TrainConfig):
        seconds = step_time(spec, gpu, workload(config), placement_of(config))
        expected["seconds"] = {**seconds.phases, "step": seconds.step_s}
    return expected


def _check_model(config: object) -> None:
    """Refuse a layout that the model does not divide into before anything starts."""
    from megarl.config.schema import SftConfig, TrainConfig
    from megarl.planning.finding import errors
    from megarl.planning.model_fit import check_model

    assert isinstance(config, TrainConfig | SftConfig)
    if problems := errors(check_model(config)):
        raise ConfigError(
            "the model does not fit the configuration",
            where=config.model.path,
            fix="change the layout or the model",
            violations=[problem.line() for problem in problems],
        )


def _explain(options: argparse.Namespace, run_dir: list[str]) -> int:
    from megarl.config.explain import all_keys, explain

    print(explain(options.key) if options.key else all_keys())
    return 0


def _presets(options: argparse.Namespace, run_dir: list[str]) -> int:
    from megarl.config.load import GROUPS, group_presets, presets

    for preset in presets():
        print(f"megarl {preset.command:<5} {preset.name:<14} {preset.description}")
    for group in GROUPS:
        print(f"\nmegarl train PRESET {group}=NAME")
        for part in group_presets(group):
            print(f"  {group}={part.name:<28} {part.description}")
    return 0


def _unforeseen(error: Exception, run_dir: Sequence[str]) -> int:
    """Keep the traceback in the run directory (or show it where there is none) and name the cause last."""
    text = "".join(traceback.format_exception(error))
    kept = "above"
    if run_dir:
        path = Path(run_dir[0]) / "crash.log"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(f"--- {time.strftime('%Y-%m-%dT%H:%M:%S%z')}\n{text}")
            kept = str(path)
        except OSError as unwritable:
            logger.warning("cannot write %s: %s", path, unwritable)
    if kept == "above":
        print(text, file=sys.stderr, end="")
    cause = (str(error).splitlines() or [""])[0]
    print(f"megarl: {type(error).__name__}: {cause} (unforeseen; traceback: {kept})", file=sys.stderr)
    return _told(error, UNFORESEEN)


def _told(error: BaseException, code: int) -> int:
    """Tell a launcher that asked for it, by MEGARL_ENDING, how the command ended; returns the exit code."""
    path = env.path(ENDING_VARIABLE)
    if path is not None:
        try:
            write_ending(path, ending_of(error, code))
        except OSError as unwritable:
            logger.warning("cannot write %s: %s", path, unwritable)
    return code


if __name__ == "__main__":
    sys.exit(main())
