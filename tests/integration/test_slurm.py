"""Ray on a real Slurm of several nodes: it comes up over two nodes, serves one driver, and leaves nothing behind.

A job that its configuration ends is the one that runs on Slurm in the short suite: from sbatch to the last line.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import psutil
import pytest

from tests.architecture.source import ROOT

pytestmark = pytest.mark.timeout(400)

SCRIPT = """#!/usr/bin/env bash
#SBATCH --job-name=try
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --output={folder}/%x-%j.log
#SBATCH --open-mode=append
export MEGARL_HOME={home} MEGARL_LOG_DIR={folder}/logs MEGARL_VENV={venv}
COMMAND=exec PRESET=
source "$MEGARL_HOME/scripts/slurm/ray_cluster.sh"
"""

# The driver: sees both nodes, runs a task on each, and reports where they ran.
DRIVER = """
import os, sys, ray
ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
@ray.remote(num_cpus=0)
def where():
    return os.environ["SLURMD_NODENAME"]
names = [name for node in ray.nodes() for name in node["Resources"] if name.startswith("slurm:")]
found = sorted(ray.get([where.options(resources={name: 1}).remote() for name in names]))
print("RAN ON", *found, flush=True)
if "wait" in sys.argv:
    import time
    time.sleep(300)
sys.exit(7 if "fail" in sys.argv else 0)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "try.sh"
    path.write_text(SCRIPT.format(folder=tmp_path, home=ROOT, venv=Path(sys.prefix)))
    (tmp_path / "driver.py").write_text(DRIVER)
    return path


def output_of(script: Path, job: int) -> str:
    path = script.with_name(f"try-{job}.log")
    return path.read_text() if path.is_file() else ""


def leftovers(marker: Path) -> list[str]:
    """Processes whose environment still names the test's folder, beside this one's own children."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        try:
            if process.environ().get("MEGARL_LOG_DIR", "").startswith(str(marker)):
                found.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


@pytest.mark.slow
def test_a_driver_runs_on_two_nodes_and_nothing_stays(slurm, script, tmp_path):
    job = slurm.sbatch(script, "python", str(tmp_path / "driver.py"), cwd=tmp_path)
    state = slurm.finished(job, 180)
    output = output_of(script, job)
    assert "RAN ON n1 n2" in output, output
    assert "2 nodes joined" in output
    assert state["JobState"] == "COMPLETED"
    slurm.wait_for(lambda: not leftovers(tmp_path), 10)
    (temporary,) = set(re.findall(r"--temporary=(\S+/mr\S+)", output))
    assert not Path(temporary).exists()


@pytest.mark.slow
def test_the_drivers_exit_code_is_the_jobs(slurm, script, tmp_path):
    job = slurm.sbatch(script, "python", str(tmp_path / "driver.py"), "fail", cwd=tmp_path)
    state = slurm.finished(job, 180)
    assert (state["JobState"], state["ExitCode"]) == ("FAILED", "7:0")


@pytest.mark.slow
def test_a_cancelled_job_leaves_no_process(slurm, script, tmp_path):
    job = slurm.sbatch(script, "python", str(tmp_path / "driver.py"), "wait", cwd=tmp_path)
    slurm.wait_for(lambda: "RAN ON n1 n2" in output_of(script, job), 180)
    slurm.cancel(job)
    slurm.finished(job, 60)
    slurm.wait_for(lambda: not leftovers(tmp_path), 20)


@pytest.mark.slow
def test_a_node_that_does_not_join_is_named(slurm, script, tmp_path):
    # The pre-flight would find the node first.
    lines = f"export MEGARL_JOIN_TIMEOUT_S=8 MEGARL_PREFLIGHT=off\nPATH={tmp_path}:$PATH\nsource "
    script.write_text(script.read_text().replace("source ", lines))
    # A worker step that starts nothing, as on a node whose file system hangs.
    (tmp_path / "srun").write_text("#!/bin/sh\nexec sleep 120\n")
    (tmp_path / "srun").chmod(0o755)
    job = slurm.sbatch(script, "true", cwd=tmp_path)
    state = slurm.finished(job, 120)
    assert "1 of 2 nodes did not join within 8 s: n2" in output_of(script, job)
    assert state["ExitCode"] == "3:0"
    slurm.wait_for(lambda: not leftovers(tmp_path), 20)


def test_a_wrong_configuration_starts_no_ray(slurm, script, tmp_path):
    script.write_text(script.read_text().replace("COMMAND=exec PRESET=", "COMMAND=train PRESET=grpo_tiny"))
    job = slurm.sbatch(script, "run.stepz=3", cwd=tmp_path)
    state = slurm.finished(job, 60)
    output = output_of(script, job)
    assert "did you mean run.steps" in output
    assert state["ExitCode"] == "2:0"
    assert not (tmp_path / "logs").exists()
