"""Runs that are killed, interrupted or denied what they need: how they end, and what they leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.controller.checkpoints import problems
from megarl.observability.ending import read_ending
from tests.integration.live import LiveRun, traceback_lines
from tests.integration.runs import small, write_model, write_prompts

END_S = 30.0
"""The longest a run may take to end after a process of it was killed."""

QUICK_S = 15.0
"""The longest a run may take to close after its last step: some 3 s, with room for a loaded machine."""

FOREVER = "run.steps=1000000"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("failures") / "model")


@pytest.fixture(scope="session")
def train(model: Path) -> list[str]:
    """Overrides of a ``train`` run of seconds."""
    options = small(model, write_prompts(model.parent / "prompts.jsonl"))
    unused = ["data.validation=[]", "validation.at_start=false", "validation.at_end=false"]
    return [*options, *unused, "checkpoint.at_end=false", "checkpoint.export_hf=false"]


@pytest.fixture(scope="session")
def sft(model: Path) -> list[str]:
    """Overrides of an ``sft`` run of seconds on two ranks: no engine to wait for."""
    source = f"[{{kind: file, path: {write_prompts(model.parent / 'sft.jsonl')}, answer_column: answer}}]"
    return [
        f"model.path={model}",
        "model.init=random",
        f"data.train={source}",
        "data.validation=[]",
        "eval_every_steps=null",
        "data.sequences_per_step=8",
        "data.max_tokens=64",
        "actor.layout.tp=2",
        "checkpoint.at_end=false",
        "checkpoint.export_hf=false",
        "logging.console=plain",
    ]


def assert_ended(run: LiveRun, code: int, last_line: tuple[str, ...], within_s: float = END_S) -> None:
    """The run ends in time with a code and one last line that says all of ``last_line``, and nothing of it is left."""
    found, seconds = run.end(within_s)
    print(f"{run.directory.name}: exit code {found} after {seconds:.1f} s: {run.errors[-1] if run.errors else ''}")
    assert run.left() == []
    assert found == code, run.errors[-5:]
    assert all(text in run.errors[-1] for text in last_line), run.errors[-5:]
    assert not list(traceback_lines(run.errors + run.output.splitlines()))
    assert not (run.directory / "summary.json").exists()


# -- killed processes ------------------------------------------------------------------------------------------------


def test_a_killed_training_rank_ends_the_run(tmp_path: Path, sft: list[str]):
    with LiveRun("sft", "sft_tiny", tmp_path / "run", *sft, FOREVER) as run:
        run.wait_for("step 2/")
        run.worker("actor", 1).kill()
        assert_ended(run, 12, ("WorkerError: actor rank 1 failed in phase update", "killed or crashed"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("role", "title", "code", "last_line"),
    [
        ("rollout", "VLLM::Worker", 9, ("RolloutError: rollout replica 0 rank ", "died [phase ")),
        ("rollout", "VLLM::EngineCore", 9, ("RolloutError: rollout replica 0 scheduler", "died [phase ")),
        ("rollout", "ray::", 12, ("WorkerError: rollout rank 0 failed in phase ", "killed or crashed")),
    ],
)
def test_a_killed_process_of_an_engine_ends_the_run(
    tmp_path: Path, train: list[str], role: str, title: str, code: int, last_line: tuple[str, ...]
):
    with LiveRun("train", "grpo_tiny", tmp_path / "run", *train, FOREVER, "actor.layout.tp=1") as run:
        run.wait_for("step 1/")
        # The ranks of an engine talk through shared memory.
        assert run.note_shared_memory()
        run.worker(role, 0, title).kill()
        assert_ended(run, code, last_line)


@pytest.mark.slow
def test_a_killed_critic_ends_the_run_and_a_killed_scorer_does_not(tmp_path: Path, train: list[str]):
    options = ["rollout.tp=1", "critic.layout.tp=1", "actor.layout.tp=1"]
    with LiveRun("train", "ppo_tiny", tmp_path / "run", *train, FOREVER, *options) as run:
        run.wait_for("step 1/")
        scorers = [process for process in run.processes() if "megarl.rewards.worker" in process.cmdline()]
        for scorer in scorers:
            scorer.kill()
        assert scorers
        run.wait_for("step 4/")
        run.worker("critic", 0).kill()
        assert_ended(run, 12, ("WorkerError: critic rank 0 failed in phase ", "killed or crashed"))


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_ends_the_run(tmp_path: Path, sft: list[str]):
    """A stopped process answers nothing, and its peer waits for it in a collective."""
    with LiveRun("sft", "sft_tiny", tmp_path / "run", *sft, FOREVER, "cluster.hang.after_s=8") as run:
        run.wait_for("step 3/")
        run.worker("actor", 1).send_signal(signal.SIGSTOP)
        last_line = ("HangError: actor rank 1 failed in phase update: the phase did not end", "rank 1 does not answer")
        assert_ended(run, 14, last_line, within_s=90)
    report = (tmp_path / "run" / "logs" / "hang-1.txt").read_text()
    assert "actor rank 1 does not answer; last seen" in report
    assert "actor rank 0 waits in " in report
    assert "megarl/controller/workers.py" in report
    assert {"actor-0", "actor-1"} <= {
        path.name.removesuffix(".heartbeat.json") for path in (tmp_path / "run" / "logs").glob("*.heartbeat.json")
    }


@pytest.mark.slow
def test_a_rank_that_hangs_for_a_while_is_reported_and_the_run_goes_on_as_configured(tmp_path: Path, sft: list[str]):
    logs = tmp_path / "run" / "logs"
    options = [*sft, FOREVER, "cluster.hang.after_s=8", "cluster.hang.action=report"]
    with LiveRun("sft", "sft_tiny", tmp_path / "run", *options) as run:
        run.wait_for("step 3/")
        stopped = run.worker("actor", 1)
        stopped.send_signal(signal.SIGSTOP)
        run.wait_until((logs / "hang-1.txt").is_file, "a report")
        run.wait_until(lambda: "  thread " in (logs / "hang-1.txt").read_text(), "the stacks in it")
        done = run.output.count("\nstep ")
        time.sleep(3)  # it goes on waiting
        assert run.process.poll() is None and run.output.count("\nstep ") == done
        stopped.send_signal(signal.SIGCONT)
        run.wait_until(lambda: run.output.count("\nstep ") >= done + 3, "three steps more")
        run.process.send_signal(signal.SIGINT)
        assert_ended(run, 130, ("megarl: interrupted",))
    report = (logs / "hang-1.txt").read_text()
    assert report.startswith("phase ") and "actor rank 1 does not answer; last seen" in report
    assert "actor rank 0 waits in " in report and "megarl/controller/workers.py" in report
    assert not list(logs.glob("hang-2*"))  # a phase is reported once


# -- signals ---------------------------------------------------------------------------------------------------------


def test_ctrl_c_leaves_nothing_even_when_pressed_again(tmp_path: Path, sft: list[str]):
    """A terminal sends SIGINT to the whole group of processes; an impatient person more than once."""
    with LiveRun("sft", "sft_tiny", tmp_path / "run", *sft, FOREVER) as run:
        run.wait_for("step 2/")
        for _ in range(3):
            os.killpg(run.process.pid, signal.SIGINT)
            time.sleep(0.2)
        assert_ended(run, 130, ("megarl: interrupted",))


@pytest.mark.parametrize(
    ("number", "delay_s", "code"),
    [
        (signal.SIGINT, 0.0, 130),
        (signal.SIGTERM, 1.5, 143),
        pytest.param(signal.SIGTERM, 0.0, 143, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 3.0, 130, marks=pytest.mark.slow),
    ],
)
def test_a_signal_while_the_run_starts_leaves_nothing(
    tmp_path: Path, sft: list[str], number: signal.Signals, delay_s: float, code: int
):
    """From the start of the first process on: inside ray.init, while workers come up, while they build the model."""
    with LiveRun("sft", "sft_tiny", tmp_path / "run", *sft, FOREVER) as run:
        run.any_process()
        time.sleep(delay_s)
        assert "step 1/" not in run.output
        run.process.send_signal(number)
        assert_ended(run, code, ("megarl: ",))


@pytest.mark.slow
def test_ctrl_c_while_engines_start_leaves_nothing(tmp_path: Path, train: list[str]):
    with LiveRun("train", "grpo_tiny", tmp_path / "run", *train, FOREVER, "actor.layout.tp=1") as run:
        run.worker("rollout", 0, "VLLM::EngineCore")
        os.killpg(run.process.pid, signal.SIGINT)
        assert_ended(run, 130, ("megarl: interrupted",))


@pytest.mark.slow
def test_a_second_run_is_not_disturbed_by_the_end_of_the_first(tmp_path: Path, sft: list[str]):
    with (
        LiveRun("sft", "sft_tiny", tmp_path / "first", *sft, FOREVER) as first,
        LiveRun("sft", "sft_tiny", tmp_path / "second", *sft, "run.steps=60") as second,
    ):
        first.wait_for("step 1/")
        second.wait_for("step 1/")
        first.process.send_signal(signal.SIGTERM)
        assert_ended(first, 143, ("megarl: terminated by SIGTERM",))
        code, _ = second.end(120)
        assert code == 0, second.errors
        assert second.errors == []
        assert (second.directory / "summary.json").is_file()
        assert second.left() == []


@pytest.mark.slow
def test_the_death_of_the_driver_takes_every_process_with_it(tmp_path: Path, train: list[str]):
    with LiveRun("train", "grpo_tiny", tmp_path / "run", *train, FOREVER, "actor.layout.tp=1") as run:
        run.wait_for("step 1/")
        run.worker("rollout", 0, "VLLM::Worker")
        run.process.kill()
        seconds = run.vanished(END_S)
        print(f"all gone {seconds:.1f} s after the driver")
        assert run.process.wait() == -signal.SIGKILL


# -- told to stop ----------------------------------------------------------------------------------------------------


def weights_of(run: Path) -> dict[str, bytes]:
    """The exported files of weights."""
    return {path.name: path.read_bytes() for path in sorted((run / "hf").glob("*.safetensors"))}


@pytest.mark.slow
def test_a_run_saves_when_it_is_asked_to_and_stops_when_it_is_told_to(tmp_path: Path, sft: list[str]):
    with LiveRun("sft", "sft_tiny", tmp_path / "run", *sft, FOREVER) as run:
        run.wait_for("step 2/")
        run.process.send_signal(signal.SIGUSR2)
        latest = tmp_path / "run" / "checkpoints" / "latest"
        run.wait_until(lambda: latest.is_file(), "a checkpoint")
        first = json.loads(latest.read_text())
        run.wait_for(f"step {int(first.removeprefix('step_')) + 2}/")
        run.process.send_signal(signal.SIGUSR1)
        assert_ended(run, 75, ("megarl: StoppedError: told to stop; it goes on after step ", "start it again"))
    last = json.loads(latest.read_text())
    assert last > first
    assert problems(latest.parent / last) == []
    ending = read_ending(tmp_path / "run" / "ending.json")
    assert ending is not None and (ending.kind, ending.exit_code) == ("StoppedError", 75)


@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_weights_of_one_that_was_not_stopped(tmp_path: Path, sft: list[str]):
    options = [*sft, "run.steps=60", "checkpoint.export_hf=true"]
    with LiveRun("sft", "sft_tiny", tmp_path / "whole", *options) as run:
        assert run.end(240)[0] == 0, run.errors
    with LiveRun("sft", "sft_tiny", tmp_path / "run", *options) as run:
        run.wait_for("step 3/")
        run.process.send_signal(signal.SIGUSR1)
        assert_ended(run, 75, ("StoppedError",))
    with LiveRun("sft", "sft_tiny", tmp_path / "run", *options) as run:
        assert run.end(240)[0] == 0, run.errors
    assert weights_of(tmp_path / "whole")
    assert weights_of(tmp_path / "run") == weights_of(tmp_path / "whole")
    assert (tmp_path / "run" / "logs" / "attempt-1" / "actor-0.log").is_file()


@pytest.mark.slow
def test_a_step_that_does_not_fit_is_given_up_and_done_again_from_its_start(tmp_path: Path, train: list[str]):
    """The reward takes so long that no step fits into the time to stop; the engines sample when the signal comes."""
    (tmp_path / "reward.py").write_text(
        "import time\ndef score(response, **sample):\n    time.sleep(0.2)\n    return float(len(set(response)))\n"
    )
    options = [*train, "run.steps=3", "checkpoint.export_hf=true", "actor.layout.tp=1", "rollout.tp=1"]
    options += [f"reward.path={tmp_path / 'reward.py'}:score", "run.stop_within_s=5"]
    with LiveRun("train", "grpo_tiny", tmp_path / "whole", *options) as run:
        assert run.end(300)[0] == 0, run.errors
    with LiveRun("train", "grpo_tiny", tmp_path / "run", *options) as run:
        run.wait_for("step 1/")
        run.process.send_signal(signal.SIGUSR1)
        assert_ended(run, 75, ("StoppedError: told to stop; it goes on after step 1 of 3",))
        assert "what comes after step 1 is given up" in run.output
    with LiveRun("train", "grpo_tiny", tmp_path / "run", *options) as run:
        run.wait_for("step 2/")
        assert run.end(300)[0] == 0, run.errors
    assert weights_of(tmp_path / "run") == weights_of(tmp_path / "whole")


# -- a run that ends well --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_ends_quietly_and_soon_with_relative_paths_and_a_reward_that_raises(
    tmp_path: Path, train: list[str], model: Path
):
    (tmp_path / "reward.py").write_text("def score(**sample):\n    raise ValueError('no score')\n")
    os.symlink(model, tmp_path / "model")
    options = ["run.steps=1", "model.path=model", "reward.path=reward.py:score", "reward.failure_score=-2"]
    with LiveRun("train", "grpo_tiny", tmp_path / "run", *train, *options, cwd=tmp_path) as run:
        run.wait_for("step 1/1", 180)
        run.note_shared_memory()
        code, seconds = run.end(60)
        print(f"ended {seconds:.1f} s after its last step")
        assert code == 0, run.errors
        assert run.left() == []
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])["metrics"]
    assert metrics["reward/failed"] == 1
    assert metrics["critic/score/mean"] == -2
    assert not list(traceback_lines(run.errors))
    for file in (tmp_path / "run" / "logs").iterdir():
        lines = file.read_text().splitlines()
        assert not list(traceback_lines(lines)), file
        assert not [line for line in lines if "is deprecated" in line and "tensor" in line], file
    assert seconds < QUICK_S


# -- what a run is denied --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_engine_that_cannot_start_ends_the_run_with_its_own_error(tmp_path: Path, train: list[str]):
    """Although the actor is ready and would wait for it."""
    options = [FOREVER, "actor.layout.tp=1", "rollout.tp=1", "rollout.kv_cache_gib=0.000001"]
    with LiveRun("train", "grpo_tiny", tmp_path / "run", *train, *options) as run:
        assert_ended(
            run, 9, ("RolloutError: the engine did not start: ValueError: ", "cache", "rollout replica 0"), within_s=120
        )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(place)], capture_output=True
        ).returncode
    ):
        pytest.skip("only root may mount a small file system")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.slow
def test_a_full_disk_ends_the_run_and_leaves_the_previous_checkpoint(small_disk: Path, sft: list[str]):
    options = [FOREVER, "checkpoint.every_steps=5", "checkpoint.keep=1"]
    with LiveRun("sft", "sft_tiny", small_disk / "run", *sft, *options) as run:
        run.wait_for("step 6/")
        # Other files grow until less than another checkpoint fits.
        with (small_disk / "filler").open("wb") as filler:
            free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
            filler.write(bytes(max(0, free - 2 * 2**20)))
        assert_ended(run, 8, ("CheckpointError: ", "step_"))
    (checkpoint,) = (small_disk / "run" / "checkpoints").glob("step_*")
    assert problems(checkpoint) == []
    assert not list((small_disk / "run" / "checkpoints").glob(".*"))
    assert json.loads((small_disk / "run" / "checkpoints" / "latest").read_text()) == checkpoint.name
