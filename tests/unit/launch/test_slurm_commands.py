"""What Slurm is asked and told, as data."""

from __future__ import annotations

import os

import pytest

from megarl.errors import SetupError
from megarl.launch import slurm
from megarl.launch.slurm import Allocation, from_environment, from_script, srun

VARIABLES = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NAME": "grpo_70b",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURMD_NODENAME": "n2",
    "SLURM_CPUS_ON_NODE": "96",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_RESTART_COUNT": "2",
}


@pytest.fixture(autouse=True)
def three_nodes(monkeypatch):
    monkeypatch.setattr(slurm, "hostnames", lambda nodelist: ("n1", "n2", "n3"))


def test_the_batch_node_is_the_head():
    allocation = from_environment(VARIABLES)
    assert allocation == Allocation(4711, "grpo_70b", ("n2", "n1", "n3"), cpus=96, gpus=8, restarts=2)
    assert (allocation.head, allocation.workers) == ("n2", ("n1", "n3"))


@pytest.mark.parametrize(("value", "gpus"), [("8", 8), ("h100:4", 4), (None, 0)])
def test_gpus_without_slurms_count_come_from_the_request(value, gpus):
    variables = {k: v for k, v in VARIABLES.items() if k != "SLURM_GPUS_ON_NODE"}
    assert from_environment(variables | ({"SLURM_GPUS_PER_NODE": value} if value else {})).gpus == gpus


def test_outside_a_job_the_fix_is_named():
    with pytest.raises(SetupError, match="DRY_RUN=1"):
        from_environment({})


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("--job-name=a --nodes=2 --cpus-per-task=4 --gpus-per-node=8", (2, 4, 8)),
        ("--nodes=2-4 --gres=gpu:h100:4", (2, 1, 4)),
        ("--nodes 3", (3, 1, 0)),
    ],
)
def test_a_dry_run_reads_the_scripts_own_lines(tmp_path, lines, expected):
    script = tmp_path / "job.sh"
    words = lines.replace("--nodes 3", "--nodes=3").split() if "=" in lines else [lines]
    script.write_text("#!/bin/bash\n" + "".join(f"#SBATCH {word}\n" for word in words))
    allocation = from_script(script)
    assert (len(allocation.nodes), allocation.cpus, allocation.gpus) == expected


def test_one_srun_covers_all_workers():
    command = srun(["n1", "n3"], ["hostname"], cpus=4, log="x-%N.log")
    assert command[0] == "srun"
    assert command[-1] == "hostname"
    assert {"--nodes=2", "--ntasks=2", "--nodelist=n1,n3", "--overlap", "--kill-on-bad-exit=1"} <= set(command)


def test_pyxis_enters_its_container():
    assert "--container-image=img.sqsh" in srun(["n1"], ["hostname"], cpus=1, log="x", container="img.sqsh")


@pytest.mark.parametrize(
    ("line", "lead"),
    [("--signal=B:USR1@600", 600), ("--signal B:SIGUSR1@30", 30), ("--signal=USR1@600", None), ("", None)],
)
def test_the_lead_of_the_signal_is_the_scripts_own(tmp_path, line, lead):
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\n#SBATCH {line}\n")
    assert slurm.signal_lead_s(script) == lead


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """A controller that fails so many times before it answers."""

    def make(failures: int) -> None:
        (tmp_path / "left").write_text(str(failures))
        text = f"""#!/bin/bash
left=$(<{tmp_path}/left)
echo $((left - 1)) > {tmp_path}/left
(( left > 0 )) && {{ echo 'Unable to contact slurm controller' >&2; exit 1; }}
echo "NodeName=$4 NodeAddr=10.0.0.9"
"""
        (tmp_path / "scontrol").write_text(text)
        (tmp_path / "scontrol").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.setattr(slurm, "AGAIN_S", 0.0)

    return make


def test_a_controller_that_does_not_answer_is_asked_again(scontrol):
    scontrol(2)
    assert slurm.address("n1") == "10.0.0.9"


def test_a_controller_that_never_answers_is_named_with_what_it_says(scontrol):
    scontrol(99)
    with pytest.raises(SetupError, match="scontrol show node -o n1 fails: Unable to contact slurm controller"):
        slurm.address("n1")


@pytest.mark.parametrize(
    ("state", "is_down"),
    [
        ("DOWN", True),
        ("DOWN*", True),
        ("DOWN*+CLOUD", True),
        ("IDLE+DRAIN+DOWN$", True),
        ("IDLE*", False),
        ("IDLE+POWERED_DOWN", False),
        ("MIXED+CLOUD+POWERING_DOWN%", False),
        ("ALLOCATED", False),
    ],
)
def test_a_node_is_down_by_its_own_state_not_by_its_power(tmp_path, state, is_down):
    """A stand-in for scontrol answers as Slurm's would, a line a node."""
    script = tmp_path / "scontrol"
    script.write_text(f"#!/bin/sh\necho 'NodeName=n1 Arch=x86_64 State={state} ThreadsPerCore=1'\n")
    script.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert slurm.called_down(["n1"], environment) == (["n1"] if is_down else [])
