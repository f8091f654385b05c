"""Runs on a real Slurm of two nodes: signals, a lost node, a bad node, and two jobs at once.

A node daemon is this machine, so a node is lost by killing what runs there. The run is a fine-tuning on two ranks, one
a node: it has no engine to wait for.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import psutil
import pytest

from megarl.observability.heartbeat import read_beats
from tests.architecture.source import ROOT
from tests.integration import slurm_cluster
from tests.integration.runs import finished, small, write_model, write_prompts
from tests.integration.slurm_cluster import SlurmCluster
from tests.integration.test_slurm import DRIVER, leftovers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# A busy machine needs minutes for what an idle one does in ten seconds.
START_S = 600
LEAD_MINUTES = 10
"""Of the script's ``--signal``."""

SCRIPT = """#!/usr/bin/env bash
#SBATCH --job-name=try
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --time=01:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --output={folder}/%x-%j.log
#SBATCH --open-mode=append
{lines}
export MEGARL_HOME={home} MEGARL_LOG_DIR={folder}/logs MEGARL_VENV={venv}
source "$MEGARL_HOME/scripts/slurm/ray_cluster.sh"
"""

SFT = "COMMAND=sft PRESET=sft_tiny"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("inputs")
    model = write_model(folder / "model")
    source = f"[{{kind: file, path: {write_prompts(folder / 'sft.jsonl')}, answer_column: answer}}]"
    return [
        f"model.path={model}", "model.init=random", f"data.train={source}", "data.validation=[]",
        "eval_every_steps=null", "data.sequences_per_step=8", "data.max_tokens=64", "actor.layout.dp=2",
        "cluster.collective_timeout_s=600", "cluster.start_timeout_s=600", "logging.console=plain",
    ]  # fmt: skip


class Job:
    """A submitted script and its output."""

    def __init__(self, slurm: SlurmCluster, folder: Path, *arguments: str, lines: str = SFT, options=()) -> None:
        self.slurm, self.folder = slurm, folder
        script = folder / "try.sh"
        script.write_text(SCRIPT.format(folder=folder, home=ROOT, venv=Path(sys.prefix), lines=lines))
        self.id = slurm.sbatch(script, *arguments, cwd=folder, options=options)

    @property
    def output(self) -> str:
        path = self.folder / f"try-{self.id}.log"
        return path.read_text() if path.is_file() else ""

    def wait_for(self, text: str, timeout_s: float = START_S) -> None:
        def is_there() -> bool:
            state = self.slurm.state(self.id)["JobState"]
            is_over = state in ("FAILED", "CANCELLED", "TIMEOUT") or "not requeued" in self.output
            assert not is_over or text in self.output, self.output[-4000:]
            return text in self.output

        self.slurm.wait_for(is_there, timeout_s)

    def end(self, timeout_s: float = START_S) -> dict[str, str]:
        """The job's fields once it has ended and nothing of it is left."""
        state = self.slurm.finished(self.id, timeout_s)
        self.slurm.wait_for(lambda: not leftovers(self.folder), 30)
        return state

    @property
    def last_line(self) -> str:
        """The last line that is not Slurm's own."""
        return [line for line in self.output.splitlines() if line and not line.startswith("slurmstepd")][-1]


def weights(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((run / "hf").glob("*.safetensors"))}


def test_a_job_saves_on_usr2_stops_on_usr1_is_requeued_and_ends_with_the_weights_of_an_uninterrupted_run(
    slurm: SlurmCluster, keys: list[str], tmp_path: Path
):
    # A step takes less than a tenth of a second where nothing else runs, and a signal through Slurm may take seconds.
    options = [*keys, "run.steps=200", "checkpoint.keep=9"]
    job = Job(slurm, tmp_path, f"run.dir={tmp_path / 'run'}", *options)
    latest = tmp_path / "run" / "checkpoints" / "latest"
    job.wait_for("step 2/200")
    slurm.signal(job.id, "USR2")
    slurm.wait_for(latest.is_file, START_S)
    saved = json.loads(latest.read_text())
    job.wait_for(f"step {int(saved.removeprefix('step_')) + 2}/200")
    slurm.signal(job.id, "USR1")
    job.wait_for("requeued: restart 1 of 10")
    assert "StoppedError: told to stop; it goes on after step " in job.last_line
    assert "| exit code 75 | requeued" in job.last_line
    stopped = json.loads(latest.read_text())
    assert stopped > saved
    slurm.wait_for(lambda: slurm.state(job.id)["JobState"] == "PENDING", 60)
    slurm.wait_for(lambda: not leftovers(tmp_path), 30)
    slurm.start_now(job.id)
    job.wait_for("continuing")
    assert job.end()["JobState"] == "COMPLETED"
    assert job.last_line == f"megarl: try ({job.id}), attempt 2 | finished | exit code 0"
    assert f"after step {int(stopped.removeprefix('step_'))} from" in job.output
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [f"try-{job.id}.0", f"try-{job.id}.1"]
    assert (tmp_path / "run" / "logs" / "attempt-1" / "actor-1.log").is_file()
    whole = finished("sft", "sft_tiny", tmp_path / "whole", *options, timeout_s=START_S)
    assert weights(whole.directory) and weights(tmp_path / "run") == weights(whole.directory)


def test_slurm_announces_the_time_limit_and_the_run_saves_and_is_requeued_before_it(
    slurm: SlurmCluster, keys: list[str], tmp_path: Path
):
    """The signal is Slurm's own, by the script's ``--signal``, and the limit stands until the next attempt as well."""
    job = Job(slurm, tmp_path, f"run.dir={tmp_path / 'run'}", *keys, "run.steps=100000")
    job.wait_for("step 2/100000")
    slurm.announce_limit(job.id, LEAD_MINUTES)
    job.wait_for("requeued: restart 1 of 10")
    assert "StoppedError: told to stop; it goes on after step " in job.last_line
    assert "| exit code 75 | requeued" in job.last_line
    saved = json.loads((tmp_path / "run" / "checkpoints" / "latest").read_text())
    assert f"after step {int(saved.removeprefix('step_'))}" in job.last_line
    slurm.wait_for(lambda: slurm.state(job.id)["JobState"] == "PENDING", 60)
    slurm.cancel(job.id)
    assert job.end()["JobState"] == "CANCELLED"


# A driver that does with signals what a run does, without one: what is tested is who gets them, and what follows.
SIGNALLED = """
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
signal.signal(signal.SIGUSR2, lambda *_: print("SAVED", flush=True))
print("READY", sys.argv[1:], flush=True)
while True:
    time.sleep(0.1)
"""


def signalled(slurm: SlurmCluster, folder: Path, lines: str = "") -> Job:
    """A job whose driver waits for signals; returns once it does."""
    (folder / "driver.py").write_text(SIGNALLED)
    job = Job(slurm, folder, "python", str(folder / "driver.py"), lines=f"{lines}\nCOMMAND=exec PRESET=")
    job.wait_for("READY")
    return job


def test_usr2_reaches_the_driver_and_int_ends_the_job_without_another_attempt(slurm: SlurmCluster, tmp_path: Path):
    job = signalled(slurm, tmp_path)
    slurm.signal(job.id, "USR2")
    job.wait_for("SAVED", 30)
    slurm.signal(job.id, "INT")
    found = job.end(120)
    assert (found["JobState"], found["ExitCode"]) == ("FAILED", "130:0")
    assert job.last_line == f"megarl: try ({job.id}), attempt 1 | the driver ended with exit code 130"


def test_a_cancelled_job_ends_cleanly_and_is_not_requeued(slurm: SlurmCluster, tmp_path: Path):
    job = signalled(slurm, tmp_path)
    slurm.cancel(job.id)
    assert job.end(120)["JobState"] == "CANCELLED"
    assert job.last_line == f"megarl: try ({job.id}), attempt 1 | the driver ended with exit code 143"


def test_a_job_that_is_told_to_stop_is_requeued_under_its_id_until_its_budget_is_spent(
    slurm: SlurmCluster, tmp_path: Path
):
    job = signalled(slurm, tmp_path, "export MEGARL_REQUEUES=1")
    slurm.signal(job.id, "USR1")
    job.wait_for("attempt 1 | the driver ended with exit code 75 | requeued: restart 1 of 1")
    slurm.wait_for(lambda: slurm.state(job.id)["JobState"] == "PENDING", 60)
    slurm.wait_for(lambda: not leftovers(tmp_path), 30)
    slurm.start_now(job.id)
    slurm.wait_for(lambda: job.output.count("READY") == 2, START_S)
    slurm.signal(job.id, "USR1")
    assert job.end(120)["ExitCode"] == "75:0"
    assert job.last_line.endswith("not requeued: 1 of 1 restarts are used (MEGARL_REQUEUES)")
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [f"try-{job.id}.0", f"try-{job.id}.1"]


def test_a_lost_node_is_named_and_the_job_ends_as_configured(slurm: SlurmCluster, tmp_path: Path):
    job = signalled(slurm, tmp_path, "export MEGARL_REQUEUES=0")
    for process in psutil.process_iter():
        try:
            if process.name() == "raylet" and process.environ().get("MEGARL_LOG_DIR", "").startswith(str(tmp_path)):
                if process.environ().get("SLURMD_NODENAME") != slurm.state(job.id)["BatchHost"]:
                    process.send_signal(signal.SIGKILL)
        except psutil.Error:
            continue
    assert job.end(300)["ExitCode"] == "13:0"
    assert "| lost node n2: its Ray ended (exit code " in job.last_line
    assert job.last_line.endswith("not requeued: 0 of 0 restarts are used (MEGARL_REQUEUES)")


def test_nodes_without_gpus_fail_the_pre_flight_before_ray_starts(slurm: SlurmCluster, tmp_path: Path):
    job = Job(slurm, tmp_path, "true", lines="COMMAND=exec PRESET=", options=("--gpus-per-node=8",))
    assert job.end()["ExitCode"] == "3:0"
    assert "pre-flight: node n1: there is no nvidia-smi; 0 of 8 GPUs | node n2: there is no" in job.last_line
    assert not list((tmp_path / "logs").rglob("ray-*.log"))


def bad_node(folder: Path) -> str:
    """Lines of a script after which n2 has another version of a package."""
    place = folder / "bad" / "ray-0.0.1.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_text("Name: ray\nVersion: 0.0.1\n")
    (folder / "bad" / "srun").write_text(
        '#!/bin/bash\nexec /usr/bin/srun "${@/megarl.launch.preflight/tests.integration.slurm_bad_node}"\n'
    )
    (folder / "bad" / "srun").chmod(0o755)
    return f"export BAD={folder}/bad PATH={folder}/bad:$PATH\nCOMMAND=exec PRESET="


def test_a_bad_node_is_put_aside_where_there_is_a_spare(slurm: SlurmCluster, tmp_path: Path):
    (tmp_path / "driver.py").write_text(DRIVER)
    lines = f"export MEGARL_NODES=1\n{bad_node(tmp_path)}"
    job = Job(slurm, tmp_path, "python", str(tmp_path / "driver.py"), lines=lines)
    assert job.end()["JobState"] == "COMPLETED", job.output
    assert "pre-flight: node n2: ray 0.0.1, " in job.output
    assert "pre-flight: n2 put aside, 1 nodes are well" in job.output
    assert "RAN ON n1\n" in job.output


def test_without_a_spare_the_job_is_requeued_and_kept_away_from_the_bad_node(slurm: SlurmCluster, tmp_path: Path):
    job = Job(slurm, tmp_path, "true", lines=bad_node(tmp_path))
    job.wait_for("requeued: restart 1 of 10")
    slurm.wait_for(lambda: slurm.state(job.id)["JobState"] == "PENDING", 60)
    slurm.wait_for(lambda: not leftovers(tmp_path), 30)
    assert "pre-flight: node n2: ray 0.0.1, " in job.last_line and "| exit code 13 | requeued" in job.last_line
    slurm.wait_for(lambda: slurm.state(job.id)["ExcNodeList"] == "n2", 10)
    slurm.cancel(job.id)


def test_a_node_whose_daemon_was_killed_is_named_before_ray_starts(tmp_path: Path):
    """Its job is allocated already; the daemon goes before the launcher asks the nodes."""
    if reason := slurm_cluster.why_not():
        pytest.skip(reason)
    wait = f"touch {tmp_path}/ready; while [[ ! -e {tmp_path}/go ]]; do sleep 0.1; done"
    with SlurmCluster(tmp_path / "slurm", nodes=2) as cluster:
        job = Job(cluster, tmp_path, "true", lines=f"export MEGARL_REQUEUES=0\n{wait}\nCOMMAND=exec PRESET=")
        cluster.wait_for((tmp_path / "ready").is_file, 60)
        cluster.kill_daemon("n2")
        (tmp_path / "go").touch()
        cluster.wait_for(lambda: "not requeued: 0 of 0" in job.output, 120)
        cluster.wait_for(lambda: not leftovers(tmp_path), 60)
    assert "pre-flight: node n2: Slurm cannot start a task there: Communication connection failure" in job.last_line
    assert "| exit code 13 | not requeued: 0 of 0 restarts are used (MEGARL_REQUEUES)" in job.last_line


def test_a_node_lost_in_mid_step_is_named_and_the_job_goes_on_until_its_budget_is_spent(
    keys: list[str], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
):
    """Twice: the first time the job is requeued and goes on from its checkpoint, the second time it ends."""
    if reason := slurm_cluster.why_not():
        pytest.skip(reason)
    options = [f"run.dir={tmp_path / 'run'}", *keys, "run.steps=100000", "checkpoint.every_steps=2"]
    with SlurmCluster(tmp_path_factory.mktemp("slurm"), nodes=2) as cluster:
        job = Job(cluster, tmp_path, *options, lines=f"export MEGARL_REQUEUES=1\n{SFT}")
        saved = 3
        for attempt, follows in ((1, "requeued: restart 1 of 1"), (2, "not requeued: 1 of 1 restarts are used")):
            job.wait_for(f"step {saved + 2}/100000")
            lost = "n1" if cluster.state(job.id)["BatchHost"] == "n2" else "n2"
            cluster.lose(lost)
            job.wait_for(f"| exit code 13 | {follows}")
            assert job.last_line.startswith(f"megarl: try ({job.id}), attempt {attempt} | ")
            assert f"lost node {lost}" in job.last_line or "NodeError: " in job.last_line
            assert f" on {lost}" in job.last_line and ", phase " in job.last_line
            assert job.last_line.count("exit code") == 1
            cluster.wait_for(lambda: not leftovers(tmp_path), 60)
            cluster.bring_back(lost)
            saved = int(json.loads((tmp_path / "run" / "checkpoints" / "latest").read_text()).removeprefix("step_"))
            if attempt == 1:
                cluster.wait_for(lambda: cluster.state(job.id)["JobState"] == "PENDING", 300)
                cluster.start_now(job.id)
                job.wait_for("continuing")
                assert f"after step {saved} from" in job.output
        state = job.end()
        assert (state["JobState"], state["ExitCode"]) == ("FAILED", "13:0")


def test_a_job_outlives_a_daemon_that_dies_alone_and_ends_everywhere(tmp_path: Path):
    """No signal of Slurm's reaches that node any more: its Ray ends because the head has gone."""
    if reason := slurm_cluster.why_not():
        pytest.skip(reason)
    with SlurmCluster(tmp_path / "slurm", nodes=2) as cluster:
        job = signalled(cluster, tmp_path)
        cluster.kill_daemon("n2")
        cluster.signal(job.id, "USR2")
        job.wait_for("SAVED", 30)
        cluster.signal(job.id, "INT")
        job.wait_for("the driver ended with exit code 130", 60)
        cluster.wait_for(lambda: not leftovers(tmp_path), 30)
    assert job.last_line == f"megarl: try ({job.id}), attempt 1 | the driver ended with exit code 130"


def test_a_node_that_slurm_gives_up_is_named(tmp_path: Path):
    """Slurm ends such a job itself and, with --requeue, queues it again: the launcher does not."""
    if reason := slurm_cluster.why_not():
        pytest.skip(reason)
    with SlurmCluster(tmp_path / "slurm", nodes=2, daemon_timeout_s=15) as cluster:
        job = signalled(cluster, tmp_path)
        lost = "n1" if cluster.state(job.id)["BatchHost"] == "n2" else "n2"
        cluster.kill_daemon(lost)
        job.wait_for(f"attempt 1 | lost node {lost}: Slurm calls it down", 120)
        assert job.last_line.endswith("| exit code 13") and "SIGTERM" in job.last_line
        cluster.wait_for(lambda: not leftovers(tmp_path), 60)
        cluster.cancel(job.id)


def test_two_jobs_on_the_same_nodes_do_not_meet(slurm: SlurmCluster, tmp_path: Path):
    jobs = []
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "driver.py").write_text(DRIVER)
        jobs.append(Job(slurm, folder, "python", str(folder / "driver.py"), lines="COMMAND=exec PRESET="))
    for job in jobs:
        job.wait_for("RAN ON n1 n2")
        assert job.end()["JobState"] == "COMPLETED", job.output


def numbers(run: Path) -> dict[int, dict[str, float]]:
    """Metrics of each step without those of time, memory and transport."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    others = ("timing_s/", "perf/", "memory/", "weight_sync/", "rollout/tokens_per_s")
    return {
        line["step"]: {name: x for name, x in line["metrics"].items() if not name.startswith(others)} for line in lines
    }


def test_the_tiny_script_trains_across_nodes_with_the_numbers_of_one_machine(slurm: SlurmCluster, tmp_path: Path):
    """The actor on one node, the engine on the other."""
    options = small(write_model(tmp_path / "model"), write_prompts(tmp_path / "prompts.jsonl"))
    options += ["run.steps=3", "actor.layout.tp=1", "rollout.tp=1", "cluster.placement=split", "data.validation=[]"]
    options += ["validation.at_start=false", "validation.at_end=false", "cluster.start_timeout_s=600"]
    variables = {"MEGARL_HOME": ROOT, "MEGARL_LOG_DIR": tmp_path / "logs", "MEGARL_VENV": Path(sys.prefix)}
    exported = ",".join(["ALL", *(f"{name}={value}" for name, value in variables.items())])
    job = slurm.sbatch(
        ROOT / "scripts/slurm/grpo_tiny.sh", f"run.dir={tmp_path / 'run'}", *options,
        options=(f"--export={exported}", f"--output={tmp_path}/job.log", "--cpus-per-task=1"), cwd=tmp_path,
    )  # fmt: skip
    state = slurm.finished(job, 2 * START_S)
    output = (tmp_path / "job.log").read_text()
    assert state["JobState"] == "COMPLETED", output[-4000:]
    assert output.splitlines()[-1] == f"megarl: grpo_tiny ({job}), attempt 1 | finished | exit code 0"
    beats = {(beat["role"], beat["node"]) for beat in read_beats(tmp_path / "run" / "logs")}
    assert {("actor", "n1"), ("rollout", "n2")} <= beats or {("actor", "n2"), ("rollout", "n1")} <= beats
    slurm.wait_for(lambda: not leftovers(tmp_path), 30)
    local = finished("train", "grpo_tiny", tmp_path / "local", *options, timeout_s=START_S)
    assert numbers(tmp_path / "run") == numbers(local.directory)
