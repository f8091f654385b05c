"""``megarl status`` and ``megarl attach`` from other processes while a run goes on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.live import LiveRun
from tests.integration.runs import ROOT, write_model, write_prompts

pytestmark = pytest.mark.slow

QUICK_S = 20.0
"""The longest until one who is attached has noticed the end: a second's pause, with room for a loaded machine."""


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of a fine-tuning on two ranks."""
    folder = tmp_path_factory.mktemp("watching")
    source = f"[{{kind: file, path: {write_prompts(folder / 'sft.jsonl')}, answer_column: answer}}]"
    return [
        f"model.path={write_model(folder / 'model')}", "model.init=random", f"data.train={source}",
        "data.validation=[]", "eval_every_steps=null", "data.sequences_per_step=8", "data.max_tokens=64",
        "actor.layout.tp=2", "checkpoint.at_end=false", "checkpoint.export_hf=false", "logging.console=plain",
    ]  # fmt: skip


def megarl(*words: str) -> subprocess.Popen[str]:
    """The command line in a process of its own, as a person starts it in another terminal."""
    return subprocess.Popen(
        [sys.executable, "-m", "megarl", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def shown_steps(output: str) -> list[int]:
    return [int(number) for number in re.findall(r"^step (\d+)/", output, flags=re.M)]


def test_status_says_what_runs_and_the_attached_see_the_failure_but_ctrl_c_leaves_the_run_alone(
    tmp_path: Path, options: list[str]
):
    directory = tmp_path / "run"
    with LiveRun("sft", "sft_tiny", directory, *options, "run.steps=1000000") as run:
        run.wait_for("step 2/")
        attached, impatient = megarl("attach", str(directory)), megarl("attach", str(directory))
        said, wrong = megarl("status", str(directory)).communicate(timeout=60)
        assert wrong == ""
        lines = said.splitlines()
        assert re.fullmatch(rf"run {directory}: running, attempt 1, step \d+ of 1000000", lines[0])
        assert [line.split()[:2] for line in lines if line.startswith("  ")][1:4] == [
            ["controller", "0"], ["actor", "0"], ["actor", "1"],
        ]  # fmt: skip
        assert impatient.stdout is not None
        while not shown_steps(impatient.stdout.readline()):
            assert impatient.poll() is None
        impatient.send_signal(signal.SIGINT)
        _, wrong = impatient.communicate(timeout=60)
        assert (impatient.returncode, wrong) == (130, "megarl: interrupted\n")
        done = max(shown_steps(run.output))
        run.wait_for(f"step {done + 2}/")
        assert not (directory / "ending.json").exists()
        run.worker("actor", 1).kill()
        assert run.end(60)[0] == 12
        ended = time.monotonic()
        output, wrong = attached.communicate(timeout=60)
        assert time.monotonic() - ended < QUICK_S
        assert (attached.returncode, wrong) == (12, "")
        steps = shown_steps(output)
        assert steps == list(range(1, steps[-1] + 1)) and steps[-1] >= done
        assert "ended: WorkerError: " in output and output.endswith(f"run {directory}: ended\n")
        assert run.left() == []
    said, _ = megarl("status", str(directory)).communicate(timeout=60)
    assert said.startswith(f"run {directory}: ended") and "ended: WorkerError: " in said


def test_one_who_is_attached_sees_every_step_and_the_end_of_a_run_that_finishes(tmp_path: Path, options: list[str]):
    directory = tmp_path / "run"
    with LiveRun("sft", "sft_tiny", directory, *options, "run.steps=15") as run:
        run.wait_until((directory / "resolved.json").is_file, "its configuration")
        attached = megarl("attach", str(directory))
        assert run.end(120)[0] == 0
        ended = time.monotonic()
        output, wrong = attached.communicate(timeout=90)
        assert time.monotonic() - ended < QUICK_S
    assert (attached.returncode, wrong) == (0, "")
    assert shown_steps(output) == list(range(1, 16))
    assert output.endswith(f"run {directory}: finished\n")
