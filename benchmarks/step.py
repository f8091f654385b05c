"""Seconds of a GRPO step, through ``megarl train``, beside TRL on the same model, prompts, reward and hyperparameters.

Usage: python benchmarks/step.py [--model qwen2_2m|smollm2] [--steps N] [--trl-python PATH] [--set key=value ...]

``qwen2_2m`` is a Qwen2 of 2.4 M parameters in float32 (made here, random weights), 16 prompts x 8 responses of up to 32
tokens, one optimizer update; ``smollm2`` is the preset grpo_smollm2. A step is measured from the end of one to the end
of the next, by both; the first two steps are left out. TRL runs from an environment of its own that shares megarl's:

    python -m venv --without-pip .venv-trl
    echo "$PWD/.venv/lib/python3.11/site-packages" > .venv-trl/lib/python3.11/site-packages/_shared.pth
    .venv/bin/python -m pip --python .venv-trl/bin/python install --no-deps 'trl==1.16.*' \
        accelerate datasets multiprocess xxhash pandas

The last line is one JSON object; ``value`` is megarl's median step over TRL's faster one (vLLM or transformers
generation), whose target is below 1; ``controller_share`` is the driver's own part of megarl's step, target 0.1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / "benchmarks" / "peers"
WARM_UP_STEPS = 2
CONTROLLER_TARGET = 0.1
ENVIRONMENT = {
    "OMP_WAIT_POLICY": "passive",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # What vLLM needs inside TRL on two cores; megarl sets its own.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
PEER_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Case:
    """One model and the hyperparameters both trainers are given."""

    name: str
    preset: str
    model: Path
    dtype: str
    prompts: int
    group: int
    max_tokens: int
    prompt_tokens: int
    microbatch_rows: int
    lr: float
    overrides: tuple[str, ...] = ()


class Footprint(threading.Thread):
    """Memory (proportional set size) and processor time of a process and all it started, sampled each second."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._root = psutil.Process(pid)
        self._done = threading.Event()
        self.peak_bytes = 0
        self._cpu: list[tuple[float, float]] = []

    def run(self) -> None:
        while not self._done.wait(1.0):
            total, cpu_s = 0, 0.0
            try:
                members = [self._root, *self._root.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            for process in members:
                try:
                    total += process.memory_full_info().pss
                    cpu_s += sum(process.cpu_times()[:2])
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
            self.peak_bytes = max(self.peak_bytes, total)
            self._cpu.append((time.time(), cpu_s))

    def stop(self) -> None:
        self._done.set()
        self.join()

    def cpu_s(self, start: float, stop: float) -> float:
        """Processor seconds used between two times of the wall clock, interpolated."""
        return self._cpu_until(stop) - self._cpu_until(start)

    def _cpu_until(self, moment: float) -> float:
        for (before, low), (after, high) in itertools.pairwise(self._cpu):
            if before <= moment <= after:
                return low + (high - low) * (moment - before) / (after - before)
        return self._cpu[-1][1] if self._cpu else 0.0


@dataclass
class Result:
    """Seconds of each measured step and what else was seen."""

    seconds: list[float]
    cpu_s: float
    tokens_per_step: float
    peak_gib: float
    metrics: list[dict[str, float]] = field(default_factory=list)
    version: str = ""

    @classmethod
    def of(cls, ends: list[float], tokens: list[float], footprint: Footprint, **more: Any) -> Result:
        """From the wall clock at the end of every step and the tokens of every step."""
        measured = ends[WARM_UP_STEPS - 1 :]
        seconds = [after - before for before, after in itertools.pairwise(measured)]
        return cls(
            seconds=seconds,
            cpu_s=footprint.cpu_s(measured[0], measured[-1]) / len(seconds),
            tokens_per_step=statistics.fmean(tokens[WARM_UP_STEPS:]),
            peak_gib=footprint.peak_bytes / 2**30,
            **more,
        )

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


def run(command: list[str], log: Path, timeout_s: float | None = None) -> tuple[str, Footprint]:
    """Standard output of a command and what it used. Raises RuntimeError with the end of its log."""
    environment = {**os.environ, **ENVIRONMENT}
    environment.pop("OMP_NUM_THREADS", None)
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, cwd=ROOT, env=environment, text=True)
        footprint = Footprint(process.pid)
        footprint.start()
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{command[0]} did not end within {timeout_s:.0f} s") from None
        finally:
            # Whatever ended the wait: nothing that was started stays behind.
            if process.poll() is None:
                process.terminate()
                process.wait()
            footprint.stop()
    if process.returncode:
        raise RuntimeError(f"{command[0]} ended with {process.returncode}:\n{output[-2000:]}{log.read_text()[-2000:]}")
    return output, footprint


# -- the cases ---------------------------------------------------------------------------------------------------------


def qwen2_2m(directory: Path) -> Case:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from megarl.models.tiny import tiny_config, write_tiny

    model = directory / "qwen2_2m"
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
    write_tiny(model, tiny_config(**sizes))
    torch.manual_seed(1)
    network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=torch.float32)
    network.save_pretrained(model)
    print(f"qwen2_2m: {sum(weight.numel() for weight in network.parameters()):,} parameters, float32")
    overrides = (
        "algorithm.minibatch_size=null",
        # One update a step: TRL leaves the pass out as well.
        "algorithm.old_log_probs=current",
        "actor.layout.tp=1",
        f"actor.layout.dp={os.cpu_count()}",
        "actor.engine.microbatch_tokens=16384",
        "rollout.tp=1",
        f"rollout.threads_per_rank={os.cpu_count()}",
    )
    return Case("qwen2_2m", "grpo_tiny", model, "float32", 16, 8, 32, 96, 128, 3e-4, overrides)


def smollm2(_: Path) -> Case:
    model = ROOT / ".cache" / "models" / "smollm2-135m"
    if not model.is_dir():
        sys.exit(f"needs the model at {model}: tools/convert has the script that makes it")
    return Case("smollm2", "grpo_smollm2", model, "bfloat16", 4, 4, 48, 256, 16, 1e-6)


def write_prompts(path: Path, count: int) -> Path:
    from megarl.data.sources import GymSource

    sums = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    source = GymSource("chain_sum", size=count, seed=1, options=sums)
    rows = [source.row(index) for index in range(count)]
    path.write_text("".join(json.dumps({"prompt": row.prompt, "answer": str(row.answer)}) + "\n" for row in rows))
    return path


# -- the two trainers --------------------------------------------------------------------------------------------------


def run_megarl(case: Case, prompts: Path, steps: int, directory: Path, settings: list[str]) -> Result:
    run_dir = directory / "megarl"
    command = [
        *(sys.executable, "-m", "megarl", "train", case.preset, f"run.dir={run_dir}", f"run.steps={steps}"),
        f"model.path={case.model}",
        "model.init=checkpoint",
        f"data.train=[{{path: {prompts}, answer_column: answer}}]",
        "data.validation=[]",
        *("validation.at_start=false", "validation.at_end=false", "validation.every_steps=null"),
        f"data.prompts_per_step={case.prompts}",
        f"data.max_prompt_tokens={case.prompt_tokens}",
        "reward.kind=function",
        f"reward.path={PEERS / 'digits.py'}:score",
        f"rollout.samples_per_prompt={case.group}",
        f"rollout.sampling.max_tokens={case.max_tokens}",
        f"actor.optimizer.lr={case.lr}",
        "checkpoint.at_end=false",
        "checkpoint.export_hf=false",
        *case.overrides,
        *settings,
    ]
    _, footprint = run(command, directory / "megarl.log")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    metrics = [line["metrics"] for line in lines]
    tokens = [step["perf/total_num_tokens"] for step in metrics]
    return Result.of([line["time"] for line in lines], tokens, footprint, metrics=metrics)


def run_trl(case: Case, prompts: Path, steps: int, directory: Path, python: Path, *, vllm: bool) -> Result:
    arguments = {
        "model": case.model,
        "prompts": prompts,
        "output": directory / "trl",
        "steps": steps,
        "rows": case.prompts * case.group,
        "group": case.group,
        "max-tokens": case.max_tokens,
        "prompt-tokens": case.prompt_tokens,
        "microbatch-rows": case.microbatch_rows,
        "dtype": case.dtype,
        "threads": os.cpu_count(),
        "lr": case.lr,
    }
    command = [str(python), str(PEERS / "trl_grpo.py"), *(f"--{name}={value}" for name, value in arguments.items())]
    command += ["--vllm"] if vllm else []
    output, footprint = run(command, directory / "trl.log", PEER_TIMEOUT_S)
    report = json.loads(output.splitlines()[-1])
    return Result.of(report["ends"], report["tokens"], footprint, version=report["version"])


# -- what is printed ---------------------------------------------------------------------------------------------------


def show(name: str, result: Result) -> None:
    spread = f"{min(result.seconds):.2f} to {max(result.seconds):.2f}"
    rate = result.tokens_per_step / result.median_s
    print(f"{name:24} {result.median_s:6.2f} s a step ({spread}), {result.cpu_s:.2f} processor seconds a step")
    print(f"  {rate:,.0f} tokens/s, peak {result.peak_gib:.2f} GiB")


def show_phases(steps: list[dict[str, float]]) -> float:
    """Prints seconds per phase, median over steps; returns the controller's own share of a step."""
    whole = statistics.median(step["timing_s/step"] for step in steps)
    for name in steps[0]:
        if name.startswith("timing_s/"):
            seconds = statistics.median(step[name] for step in steps)
            print(f"  {name.removeprefix('timing_s/'):20} {seconds:6.3f} s  {seconds / whole:6.1%}")
    share = statistics.median(step["perf/controller_share"] for step in steps)
    print(f"  controller's own share {share:.1%} of the step (target {CONTROLLER_TARGET:.0%})")
    return share


def main() -> None:
    sys.path.insert(0, str(ROOT))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("qwen2_2m", "smollm2"), default="qwen2_2m")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--trl-python", type=Path, default=ROOT / ".venv-trl" / "bin" / "python")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further overrides of megarl's run")
    parser.add_argument("--no-peer", action="store_true", help="measure megarl alone")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    steps = options.steps + WARM_UP_STEPS
    peers: dict[str, float] = {}
    peers_cpu: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="megarl-step-") as name:
        directory = Path(name)
        case = {"qwen2_2m": qwen2_2m, "smollm2": smollm2}[options.model](directory)
        prompts = write_prompts(directory / "prompts.jsonl", 4096)
        print(
            f"{case.prompts} prompts x {case.group} responses of up to {case.max_tokens} tokens, {os.cpu_count()} cores"
        )
        ours = run_megarl(case, prompts, steps, directory, options.set)
        show("megarl", ours)
        share = show_phases(ours.metrics[WARM_UP_STEPS:])
        mismatch = ours.metrics[0]["training/rollout_log_probs_diff/mean"]
        print(f"  mean |rollout - old log-prob| {mismatch:.2e} at step 1")
        if options.no_peer or not options.trl_python.exists():
            print(f"TRL is not measured: {'asked for' if options.no_peer else f'{options.trl_python} does not exist'}")
        else:
            for generation in ("transformers", "vllm"):
                label = f"TRL, {generation}"
                try:
                    peer = run_trl(case, prompts, steps, directory, options.trl_python, vllm=generation == "vllm")
                except RuntimeError as error:
                    print(f"{label:22} does not run here: {str(error).strip().splitlines()[-1]}")
                    continue
                show(f"{label} {peer.version}", peer)
                peers[label], peers_cpu[label] = peer.median_s, peer.cpu_s
    fastest = min(peers, key=peers.__getitem__) if peers else None
    ratio = ours.median_s / peers[fastest] if fastest else None
    result = {
        "name": f"step_{case.name}",
        "value": ratio,
        "unit": "megarl's seconds a step / the fastest peer's",
        "target": 1.0,
        "holds": None if ratio is None else ratio < 1.0 and share <= CONTROLLER_TARGET,
        "peer": fastest,
        "peers_s": peers,
        "cpu_s": ours.cpu_s,
        "peers_cpu_s": peers_cpu,
        "step_s": ours.median_s,
        "tokens_per_s": ours.tokens_per_step / ours.median_s,
        "controller_share": share,
        "peak_gib": ours.peak_gib,
        "rollout_log_probs_diff": mismatch,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
