"""Whole runs of the command line in processes of their own, and what they leave in their directories.

Starting Ray, a trainer and an engine is most of what a short run costs: tests share a run where they can.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.models.tiny import main as write_tiny

ROOT = Path(__file__).parents[2]

REWARDS = Path(__file__).parent / "letters_reward.py"
"""``few_letters``, which a random model learns within some ten steps, and ``some_letter``, which it often gets."""


@dataclass(frozen=True)
class Run:
    """A finished run."""

    directory: Path
    exit_code: int
    output: str

    @property
    def steps(self) -> dict[int, dict[str, float]]:
        """Numbers of each training step."""
        lines = [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]
        return {line["step"]: line["metrics"] for line in lines if not _is_validation(line["metrics"])}

    @property
    def validations(self) -> dict[int, dict[str, float]]:
        """Numbers of each held-out evaluation, by the step before it."""
        lines = [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]
        return {line["step"]: line["metrics"] for line in lines if _is_validation(line["metrics"])}

    @property
    def summary(self) -> dict[str, Any]:
        """What the run wrote when it had ended well."""
        return json.loads((self.directory / "summary.json").read_text())

    @property
    def checkpoints(self) -> list[str]:
        """Names of the checkpoints kept."""
        return sorted(path.name for path in (self.directory / "checkpoints").glob("step_*"))


def _is_validation(metrics: dict[str, float]) -> bool:
    return any(name.startswith("val/") for name in metrics)


def megarl(command: str, preset: str, directory: Path, *overrides: str, timeout_s: float = 240.0) -> Run:
    """Run ``megarl COMMAND PRESET run.dir=DIRECTORY ...`` to its end, whatever that is."""
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / "console.txt"
    arguments = [sys.executable, "-m", "megarl", command, preset, f"run.dir={directory}", *overrides]
    with log.open("a") as stream:
        process = subprocess.Popen(
            arguments,
            cwd=ROOT,
            stdout=stream,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout_s)
        except BaseException:
            # The run cleans up after itself when it is asked to end; only then is its session killed.
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            raise
    return Run(directory, code, log.read_text())


def finished(command: str, preset: str, directory: Path, *overrides: str, timeout_s: float = 240.0) -> Run:
    """``megarl`` of a run that must end well."""
    run = megarl(command, preset, directory, *overrides, timeout_s=timeout_s)
    assert run.exit_code == 0, f"exit code {run.exit_code}\n{run.output[-4000:]}"
    return run


def write_model(directory: Path, *options: str) -> Path:
    """A directory of a tiny model that takes part in every layout: 2 layers, 4 heads, 2 key-value heads; no weights."""
    write_tiny([str(directory), "--layers", "2", *options])
    return directory


def write_prompts(path: Path, count: int = 64) -> Path:
    """Prompts of unequal lengths with answers, as JSONL, and as many held-out ones beside them."""
    for file, first in ((path, 0), (held_out(path), count)):
        numbers = range(first, first + count)
        rows = [{"prompt": f"{'say ' * (1 + number % 4)}{number}:", "answer": str(number)} for number in numbers]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def held_out(prompts: Path) -> Path:
    """The file of held-out prompts."""
    return prompts.with_name(f"held_out_{prompts.name}")


def sources(prompts: Path) -> list[str]:
    """Overrides that train on the prompts and evaluate on the held-out ones."""
    form = "[{{kind: file, path: {}, answer_column: answer, name: letters}}]"
    return [f"data.train={form.format(prompts)}", f"data.validation={form.format(held_out(prompts))}"]


def layout(role: str, degrees: Sequence[int]) -> list[str]:
    """Overrides that give a role the layout (tp, pp, dp)."""
    return [f"{role}.layout.{name}={degree}" for name, degree in zip(("tp", "pp", "dp"), degrees, strict=True)]


def small(model: Path, prompts: Path) -> list[str]:
    """Overrides for a run of seconds: random weights, 8 prompts, 4 short responses each, one held-out evaluation."""
    return [
        f"model.path={model}",
        "model.init=random",
        *sources(prompts),
        "data.prompts_per_step=8",
        "data.max_prompt_tokens=32",
        "rollout.samples_per_prompt=4",
        "rollout.sampling.max_tokens=12",
        "rollout.max_num_seqs=32",
        "algorithm.minibatch_size=16",
        "reward.kind=function",
        f"reward.path={REWARDS}:few_letters",
        "reward.workers=1",
        "validation.prompts=16",
        "validation.every_steps=null",
        "logging.console=plain",
    ]
