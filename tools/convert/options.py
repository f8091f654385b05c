"""What the conversion commands share: options, the progress line, and how they end."""

from __future__ import annotations

import argparse
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from math import lcm
from typing import Any

from megarl.errors import CheckpointError, MegarlError
from megarl.parallel.grid import VOCAB_ROWS_MULTIPLE, ParallelLayout
from megarl.weights.conversion.session import Progress, Settings

DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def command(description: str | None) -> argparse.ArgumentParser:
    """A command's parser, with its module's docstring as the help text."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Options of every command that writes a checkpoint."""
    group = parser.add_argument_group("how")
    group.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1), help="threads (default %(default)s)")
    group.add_argument("--max-memory", type=num_bytes, default=1 << 30, help="for buffers, e.g. 512M (default 1G)")
    group.add_argument("--resume", action="store_true", help="continue an interrupted conversion, or start one")
    group.add_argument("--overwrite", action="store_true", help="replace an existing target in the end")
    group.add_argument("--no-fsync", action="store_true", help="leave the writing to disk to the operating system")
    group.add_argument("--quiet", action="store_true", help="no progress line")
    group.add_argument("--dtype", choices=("keep", *DTYPES), default="keep", help="of the weights (default keep)")


def add_layout_options(parser: argparse.ArgumentParser) -> None:
    """The layout of a target."""
    group = parser.add_argument_group("layout of the target")
    for name, what in (("tp", "tensor"), ("pp", "pipeline"), ("vpp", "virtual pipeline"), ("ep", "expert")):
        group.add_argument(f"--{name}", type=int, default=1, help=f"{what} parallelism")
    group.add_argument("--etp", type=int, default=None, help="tensor parallelism of experts (default: as tp)")
    group.add_argument("--first-stage-layers", type=int, default=None)
    group.add_argument("--last-stage-layers", type=int, default=None)
    group.add_argument("--pipeline", default=None, help="stages spelled out, as Megatron-Core's 'Ett|ttL'")
    group.add_argument(
        "--vocab-rows-multiple",
        type=int,
        default=VOCAB_ROWS_MULTIPLE,
        help="Megatron-LM's --make-vocab-size-divisible-by (default %(default)s; Megatron-LM's own is 128)",
    )
    group.add_argument("--naming", choices=("local", "te"), default=None, help="whose layers load it (default: te)")
    group.add_argument("--grouped-experts", action="store_true", help="experts of a rank in one module (legacy format)")


def layout_options_given(given: argparse.Namespace) -> list[str]:
    """Options of a layout that are not what they are by default."""
    parser = argparse.ArgumentParser()
    add_layout_options(parser)
    defaults = vars(parser.parse_args([]))
    return ["--" + name.replace("_", "-") for name, value in defaults.items() if getattr(given, name) != value]


def layout_of(given: argparse.Namespace, *, has_experts: bool) -> ParallelLayout:
    """The layout that the options describe."""
    etp = given.etp if given.etp is not None else given.tp if has_experts else 1
    degrees = (given.tp, given.ep, etp)
    # Replicas such that the experts' degrees fit into the ranks of a stage; what is no degree the layout refuses.
    dp = lcm(given.tp, given.ep * etp) // given.tp if min(degrees) > 0 else 1
    return ParallelLayout(
        tp=given.tp,
        pp=given.pp,
        vpp=given.vpp,
        ep=given.ep,
        etp=etp,
        dp=dp,
        first_stage_layers=given.first_stage_layers,
        last_stage_layers=given.last_stage_layers,
        pipeline=given.pipeline,
        vocab_rows_multiple=given.vocab_rows_multiple,
    )


def settings_of(given: argparse.Namespace) -> Settings:
    """How to run."""
    return Settings(given.workers, given.max_memory, given.resume, given.overwrite, not given.no_fsync)


def num_bytes(text: str) -> int:
    """A size such as 512M."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write for example 512M or 8G")
    return int(float(match[1]) * _UNITS[match[2].upper()])


class ProgressLine(Progress):
    """Bytes, rate and remaining time on standard error: one line on a terminal, a line every ten seconds elsewhere."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._total = self._done = self._start_bytes = 0
        self._started = self._shown = time.monotonic()
        self._lock = threading.Lock()
        self._every_s = 0.2 if sys.stderr.isatty() else 10.0
        self.work_s = 0.0
        self.is_kept = False
        self._phases: list[str] = []
        self._phase_started = time.monotonic()

    def start(self, total_bytes: int, done_bytes: int) -> None:
        self._total, self._done, self._start_bytes = total_bytes, done_bytes, done_bytes
        self._started = time.monotonic()

    def moved(self, count: int) -> None:
        with self._lock:
            self._done += count
            now = time.monotonic()
            if self._quiet or now - self._shown < self._every_s:
                return
            self._shown = now
            rate = (self._done - self._start_bytes) / max(now - self._started, 1e-9)
            left = (self._total - self._done) / rate if rate else 0.0
            text = f"{self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB, {rate / 1e9:.2f} GB/s, {left:.0f} s left"
            sys.stderr.write(f"\r{text:<60}" if sys.stderr.isatty() else f"{text}\n")

    def phase(self, name: str) -> None:
        self.is_kept = name == "kept"
        if not self._phases:
            self._phase_started = time.monotonic()
        self._phases.append(name)

    def end(self) -> None:
        """Ends the line."""
        self.work_s = time.monotonic() - self._phase_started
        if sys.stderr.isatty() and not self._quiet:
            sys.stderr.write("\r" + " " * 60 + "\r")


def report(receipt: dict[str, Any], target: str, progress: ProgressLine) -> None:
    """What was done, for people."""
    if progress.is_kept:
        sys.stdout.write(f"{target} is complete already, digest {receipt['target']['digest'][:16]}\n")
        return
    size = sum(receipt["target"]["files"].values())
    sys.stdout.write(f"wrote {target}: {len(receipt['tensors'])} tensors, {size / 1e9:.2f} GB")
    sys.stdout.write(f", copied in {progress.work_s:.2f} s, digest {receipt['target']['digest'][:16]}\n")
    for entry in receipt["dropped"][:10]:
        count = f" ({entry['elements']} elements)" if "elements" in entry else ""
        sys.stdout.write(f"  left out: {entry['name']}{count}: {entry['reason']}\n")
    if len(receipt["dropped"]) > 10:
        sys.stdout.write(f"  and {len(receipt['dropped']) - 10} more, in conversion_manifest.json\n")


def run(main: Callable[[Sequence[str] | None], int], arguments: Sequence[str] | None = None) -> int:
    """Runs a command; megarl's errors become a line and an exit code."""
    try:
        return main(arguments)
    except BrokenPipeError:
        return CheckpointError.exit_code
    except MegarlError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except OSError as error:  # of a name or a place that nothing more special was met at
        sys.stderr.write(f"{error.strerror or error} [{error.filename or 'no file'}]\n")
        return CheckpointError.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; --resume continues\n")
        return 130
