"""The plan of a job, before anything runs."""

from __future__ import annotations

import importlib.util
import mmap
import os
import subprocess
from pathlib import Path

import pytest

from megarl.config.load import load_sft, load_train
from megarl.errors import ConfigError, SetupError
from megarl.launch.__main__ import main, program, resumed
from megarl.launch.plan import CLUSTER_SETTINGS, Plan, Program, plan
from megarl.launch.slurm import Allocation, from_script, signal_lead_s
from tests.architecture.source import ROOT

ALLOCATION = Allocation(4711, "grpo_70b", ("n1", "n2", "n3"), cpus=96, gpus=8)
SCRIPTS = sorted(path for path in (ROOT / "scripts/slurm").glob("*.sh") if path.name != "ray_cluster.sh")


def planned(
    settings: dict[str, str] | None = None, driver: tuple[str, ...] = ("megarl", "train", "grpo_70b", "a=1")
) -> Plan:
    return plan(ALLOCATION, Program(driver), settings=settings or {}, is_dry_run=True)


def test_the_driver_is_told_its_cluster_and_the_users_keys_come_last():
    driver = planned().driver
    assert driver[1:] == (
        "-m", "megarl", "train", "grpo_70b", f"cluster.ray_address={planned().address}", "cluster.num_nodes=3", "a=1",
    )  # fmt: skip


def test_any_other_command_is_run_as_it_is():
    assert planned(driver=("nvidia-smi", "-L")).driver == ("nvidia-smi", "-L")


def test_the_barrier_waits_for_every_node():
    assert planned().barrier[-3:] == ("slurm:n1", "slurm:n2", "slurm:n3")


def test_one_node_needs_no_workers():
    one = Allocation(1, "x", ("n1",), cpus=1, gpus=0)
    assert plan(one, Program(("true",)), settings={}, is_dry_run=True).workers is None


def test_apptainer_wraps_every_command_and_pyxis_every_step():
    apptainer = planned({"MEGARL_ENV": "apptainer:img.sif"})
    for command in (apptainer.head, apptainer.barrier, apptainer.driver):
        assert command[:4] == ("apptainer", "exec", "--nv", "img.sif")
    assert "apptainer" in apptainer.workers
    pyxis = planned({"MEGARL_ENV": "pyxis:img.sqsh"})
    for command in (pyxis.head, pyxis.workers, pyxis.barrier, pyxis.driver):
        assert command[0] == "srun"
        assert "--container-image=img.sqsh" in command


@pytest.mark.parametrize("value", ["docker:x", "apptainer", "apptainer:"])
def test_an_unknown_environment_is_an_error(value):
    with pytest.raises(SetupError, match="MEGARL_ENV"):
        planned({"MEGARL_ENV": value})


def test_ray_knows_every_setting_of_the_cluster():
    """A name it does not know has no effect, and no message says so."""
    package = Path(importlib.util.find_spec("ray").origin).parent
    sources = "".join(path.read_text(encoding="utf-8") for path in (package / "_common").rglob("*.py"))
    sources += "".join(path.read_text(encoding="utf-8") for path in (package / "_private").rglob("*.py"))
    with (package / "core/src/ray/raylet/raylet").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=1) as binary:
        for name in CLUSTER_SETTINGS:
            # The settings of Ray's own processes lack the prefix there.
            known = binary.find(b"\0" + name.removeprefix("RAY_").encode() + b"\0") >= 0
            assert name in sources or known, name
        assert binary.find(b"\0no_such_setting\0") < 0


def test_the_token_is_on_no_command_line():
    text = planned().text()
    assert "RAY_AUTH_TOKEN=(made here)" in text
    assert text.count("RAY_AUTH_TOKEN") == 1


def test_the_sockets_of_ray_fit_into_their_path_limit():
    temporary = next(word for word in planned().head if word.startswith("--temporary=")).partition("=")[2]
    session = "/session_2026-11-29_18-31-58_123456_1234567/sockets/plasma_store.1234567"
    assert len(temporary + "ffff" + session) <= 107


def test_jobs_of_two_clusters_do_not_share_a_folder_for_ray(tmp_path):
    def temporary(logs: Path) -> str:
        words = planned({"MEGARL_LOG_DIR": str(logs)}).head
        return next(word for word in words if word.startswith("--temporary="))

    assert temporary(tmp_path / "a") == temporary(tmp_path / "a") != temporary(tmp_path / "b")


def test_slots_of_a_cpu_run_come_from_its_placement():
    assert program(["train", "grpo_tiny"], 1).slots == 2
    assert program(["train", "grpo_7b"], 1).slots is None


def test_a_wrong_configuration_is_found_before_anything_else():
    with pytest.raises(ConfigError, match=r"run\.steps"):
        program(["train", "grpo_tiny", "run.stepz=1"], 1)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_script_renders_without_slurm(script):
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "MEGARL"))}
    result = subprocess.run(
        ["bash", str(script), "run.steps=30"],
        env=variables | {"DRY_RUN": "1"}, cwd="/", capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[-4:]] == ["1", "2", "3", "4"]
    assert lines[-1].endswith("run.steps=30")


# grpo_tiny is for trying out a cluster: its script asks for two nodes, its preset runs on one.
@pytest.mark.parametrize("script", [path for path in SCRIPTS if path.stem != "grpo_tiny"], ids=lambda path: path.stem)
def test_every_script_asks_for_the_nodes_and_gpus_of_its_preset(script):
    load = load_sft if script.stem.startswith("sft") else load_train
    cluster, allocation = load(script.stem).config.cluster, from_script(script)
    assert (len(allocation.nodes), allocation.gpus) == (cluster.num_nodes, cluster.gpus_per_node)
    assert f"PRESET={script.stem}\n" in script.read_text()
    assert allocation.job_name == script.stem


def test_a_wrong_key_has_the_exit_code_of_the_configuration(capsys):
    assert main(["--script", str(SCRIPTS[0]), "--dry-run", "train", "grpo_tiny", "run.stepz=3"]) == 2
    assert "did you mean run.steps" in capsys.readouterr().err


def test_outside_of_slurm_it_says_what_to_do(monkeypatch, capsys):
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    assert main(["--script", "x.sh", "exec", "true"]) == SetupError.exit_code
    assert "DRY_RUN=1" in capsys.readouterr().err


def test_the_shell_part_is_thin():
    assert all(len(Path(script).read_text().splitlines()) <= 25 for script in SCRIPTS)


def test_the_driver_is_told_its_time_before_the_users_keys():
    what = program(["train", "grpo_tiny"], 1, lead_s=600)
    driver = plan(ALLOCATION, what, settings={}, is_dry_run=True).driver
    assert driver[-1] == "run.stop_within_s=540"
    assert program(["train", "grpo_tiny"], 1).stop_within_s is None


def test_a_requeued_job_goes_on_in_its_run_directory_wherever_it_started_from(tmp_path):
    words = ["train", "grpo_tiny", f"run.dir={tmp_path}", "run.resume=never"]
    assert resumed(words, 1) == words
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text('"step_000001"')
    assert resumed(words, 1) == [*words, "run.resume=auto"]
    assert program(resumed(words, 1), 1).driver[-1] == "run.resume=auto"
    assert program(words, 1).driver[-1] == "run.resume=never"
    wrong = [*words, "run.stepz=1"]
    assert resumed(wrong, 1) == wrong
    assert resumed(["exec", "true"], 1) == ["exec", "true"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_script_wants_to_be_told_before_its_time_limit_and_may_be_requeued(script):
    assert (signal_lead_s(script) or 0) >= 120
    assert "#SBATCH --requeue\n" in script.read_text()
    assert "#SBATCH --open-mode=append\n" in script.read_text()
