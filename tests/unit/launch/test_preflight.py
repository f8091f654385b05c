"""What nodes say about themselves, and which of them a run gets."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.errors import NodeError, SetupError
from megarl.launch import preflight, slurm
from megarl.launch.inspection import choose
from megarl.launch.preflight import GIB, TOKEN_FILE, Expected, Report, examine, judge, read_reports, xid_faults
from megarl.launch.verdict import Cause, Outcome

VERSIONS = {"torch": "2.14.0", "vllm": "0.33.0", "GPU driver": "580.1"}
EXPECTED = Expected(("n1", "n2", "n3"), "n1", 8, "secret", asked_at=100.0, answered_at=104.0)


def well(node: str) -> Report:
    free = {"temporary": 100 * GIB, "shared": 100 * GIB}
    return Report(node, 102.0, dict(VERSIONS), ["H100"] * 8, [], "secret", free, 400.0)


def found(**changes: object) -> dict[str, list[str]]:
    """Problems where n2 differs from a node that is well."""
    reports = {node: well(node) for node in EXPECTED.nodes}
    reports["n2"] = dataclasses.replace(reports["n2"], **changes)  # type: ignore[arg-type]
    return judge(reports, EXPECTED)


def test_nodes_that_are_well_are_not_mentioned():
    assert found() == {}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"gpus": ["H100"] * 7}, "7 of 8 GPUs"),
        ({"gpus": ["H100"] * 7 + ["A100"]}, "GPUs of several kinds: A100, H100"),
        ({"faults": ["Xid 79 of GPU PCI:0000:18:00"]}, "Xid 79 of GPU PCI:0000:18:00"),
        ({"versions": VERSIONS | {"GPU driver": "570.2"}}, "GPU driver 570.2, 580.1 elsewhere"),
        ({"versions": VERSIONS | {"vllm": None}}, "vllm is missing, 0.33.0 elsewhere"),
        ({"token": None}, "it does not see in the shared folder what was written there"),
        ({"token": "old"}, "it does not see in the shared folder what was written there"),
        ({"free_bytes": {"temporary": GIB, "shared": 9 * GIB}}, "1.0 GiB free for temporary files, 2 needed"),
        ({"time": 90.0}, "its clock is 10 s off"),
        ({"time": 124.0}, "its clock is 20 s off"),
        ({"bandwidth": 200.0}, "all-reduce at 200 GB/s, less than 280"),
    ],
)
def test_a_node_that_is_not_well_is_named_with_what_is_wrong(changes: dict[str, object], problem: str):
    assert found(**changes) == {"n2": [problem]}


@pytest.mark.parametrize("time", [95.5, 108.5])
def test_a_clock_is_not_blamed_for_the_time_that_answering_took(time: float):
    assert found(time=time) == {}


def test_a_node_without_a_report_is_named_and_between_two_versions_the_heads_counts():
    reports = {node: well(node) for node in ("n1", "n2")}
    reports["n2"].versions["torch"] = "2.13.0"
    wrong = judge(reports, EXPECTED)
    assert wrong["n2"] == ["torch 2.13.0, 2.14.0 elsewhere"]
    assert "no report" in wrong["n3"][0]


def test_errors_of_programs_in_the_kernels_log_are_no_faults_of_the_hardware():
    log = (
        "[1.0] NVRM: Xid (PCI:0000:18:00): 13, Graphics Exception\n"
        "[2.0] NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus.\n"
        "[3.0] NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus.\n"
    )
    assert xid_faults(log) == ["Xid 79 of GPU PCI:0000:18:00"]


def nvidia_smi(folder: Path, rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\ncat <<'E'\n{rows}E\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_a_node_reports_its_gpus_and_their_memory_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    nvidia_smi(tmp_path, "0, NVIDIA H100, 580.1, 0\n1, NVIDIA H100, 580.1, 3\n", monkeypatch)
    monkeypatch.setattr(preflight, "_bandwidth", lambda gpus: (390.0, None))
    monkeypatch.setattr(preflight, "_kernel_log", lambda: "")
    (tmp_path / TOKEN_FILE).write_text("secret")
    report = examine("n1", tmp_path, tmp_path, gpus=2)
    assert (report.gpus, report.versions["GPU driver"]) == (["NVIDIA H100"] * 2, "580.1")
    assert report.faults == ["GPU 1 has 3 uncorrected ECC errors"]
    assert (report.token, report.bandwidth) == ("secret", 390.0)


def test_a_node_without_nvidia_smi_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / TOKEN_FILE).write_text("secret")
    report = examine("n1", tmp_path, tmp_path, gpus=8)
    assert report.faults == ["there is no nvidia-smi"]
    assert judge({"n1": report}, dataclasses.replace(EXPECTED, nodes=("n1",)))["n1"][:2] == [
        "there is no nvidia-smi", "0 of 8 GPUs",
    ]  # fmt: skip


def test_the_command_leaves_a_report_that_the_launcher_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    monkeypatch.setattr(preflight, "_VISIBLE_S", 0.0)
    (tmp_path / TOKEN_FILE).write_text("secret")
    assert preflight.main([f"--folder={tmp_path}", f"--temporary={tmp_path}", "--gpus=0"]) == 0
    reports = read_reports(tmp_path, ["n7", "n8"])
    assert list(reports) == ["n7"]
    assert (reports["n7"].token, reports["n7"].bandwidth, reports["n7"].gpus) == ("secret", None, [])
    assert json.loads((tmp_path / "n7.json").read_text())["versions"]["ray"]


# -- who is put aside ------------------------------------------------------------------------------------------------

NODES = ("n1", "n2", "n3")


def test_a_bad_node_is_put_aside_where_there_is_a_spare():
    assert choose(NODES, 2, {"n2": ["7 of 8 GPUs"]}) == ("n1", "n3")
    assert choose(NODES, 3, {}) == NODES


@pytest.mark.parametrize(("wanted", "bad"), [(3, "n2"), (2, "n1")])
def test_without_a_spare_or_with_a_bad_batch_node_the_job_is_one_that_lost_a_node(wanted: int, bad: str):
    outcome = choose(NODES, wanted, {bad: ["7 of 8 GPUs", "vllm is missing"]})
    assert isinstance(outcome, Outcome)
    assert (outcome.code, outcome.cause, outcome.bad_nodes) == (NodeError.exit_code, Cause.NODE, (bad,))
    assert f"node {bad}: 7 of 8 GPUs; vllm is missing" in outcome.text


def test_a_node_that_slurm_cannot_reach_is_named_by_srun():
    log = (
        "srun: error: Task launch for StepId=1.0 failed on node n2: Communication connection failure\n"
        "srun: error: Application launch failed: Communication connection failure\nsrun: Job step aborted\n"
    )
    assert slurm.unreachable(log) == {"n2": ["Slurm cannot start a task there: Communication connection failure"]}


def test_where_every_node_is_bad_the_setup_is():
    outcome = choose(NODES, 3, {node: ["there is no nvidia-smi", "0 of 8 GPUs"] for node in NODES})
    assert isinstance(outcome, Outcome)
    assert (outcome.code, outcome.cause, outcome.bad_nodes) == (SetupError.exit_code, Cause.PREFLIGHT, ())
    assert "node n1: there is no nvidia-smi; 0 of 8 GPUs" in outcome.text


@pytest.mark.parametrize(
    ("line", "settings", "allocated", "wanted"),
    [
        ("--nodes=8", {}, 8, 8),
        ("--nodes=8-10", {}, 9, 8),
        ("--nodes=8-10", {}, 4, 4),
        ("--nodes=8", {"MEGARL_NODES": "6"}, 8, 6),
    ],
)
def test_spares_are_what_is_beyond_the_least_number_of_nodes(
    tmp_path: Path, line: str, settings: dict[str, str], allocated: int, wanted: int
):
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\n#SBATCH {line}\n")
    assert slurm.wanted_nodes(script, settings, allocated) == wanted


@pytest.mark.parametrize("given", ["0", "9", "many"])
def test_a_wrong_number_of_nodes_is_refused(tmp_path: Path, given: str):
    with pytest.raises(SetupError, match="MEGARL_NODES"):
        slurm.wanted_nodes(tmp_path / "job.sh", {"MEGARL_NODES": given}, 8)


# In a process of its own, as in test_ray_cluster.py; each node's task is a line of shell.
ASK = """
import json, os, sys
from pathlib import Path
from megarl.launch import preflight
from megarl.launch.inspection import inspect_nodes
from megarl.launch.plan import Plan
from megarl.launch.slurm import Allocation
folder = Path(sys.argv[1])
preflight._VISIBLE_S = 0.2
plan = Plan(Allocation(7, "try", ("n1", "n2", "n3"), cpus=1, gpus=0), "10.0.0.1:20000", folder,
            preflight=("bash", "-c", sys.argv[2]), head=(), workers=None, barrier=(), driver=())
found = inspect_nodes(plan, 2, dict(os.environ))
print(json.dumps(found if isinstance(found, tuple) else [found.code, found.cause.value, found.bad_nodes]))
"""

LOOK = f"{sys.executable} -m megarl.launch.preflight --folder={{0}}/preflight --temporary={{0}} --gpus=0"
DEAD = "echo 'srun: error: Task launch for StepId=1.0 failed on node n2: Communication connection failure' >&2"


@pytest.mark.parametrize(
    ("answering", "found"),
    [
        (("n1", "n2", "n3"), ["n1", "n2", "n3"]),
        (("n1", "n3", DEAD), ["n1", "n3"]),
        # n3 was still looking when Slurm gave the step up: it is not blamed.
        (("n1", DEAD), [NodeError.exit_code, "node", ["n2"]]),
    ],
)
def test_the_launcher_asks_all_nodes_and_goes_by_their_answers(tmp_path: Path, answering, found):
    look = LOOK.format(tmp_path)
    script = "; ".join(f"SLURMD_NODENAME={node} {look}" if node != DEAD else node for node in answering)
    result = subprocess.run(
        [sys.executable, "-c", ASK, str(tmp_path), script], capture_output=True, text=True, timeout=120
    )
    assert json.loads(result.stdout.splitlines()[-1]) == found, result.stderr


def test_a_job_that_is_cancelled_while_nodes_are_asked_has_no_bad_node(tmp_path: Path):
    """Slurm ends the nodes' tasks, and the launcher hears of it a moment later."""
    script = "(sleep 0.5; kill $PPID) & exit 1"
    result = subprocess.run(
        [sys.executable, "-c", ASK, str(tmp_path), script], capture_output=True, text=True, timeout=120
    )
    assert json.loads(result.stdout.splitlines()[-1]) == [143, "cancel", []], result.stderr
