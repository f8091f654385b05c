"""Time of every estimator and loss, in passes over the batch, beside verl 0.9.1's functions in the same run.

A pass reads a [B, T] float32 tensor and writes it to memory the process has not touched yet, as a function does that
returns a new tensor: ``fresh.copy_(source)`` with ``fresh`` just mapped. The time of the same copy into memory already
in use is printed beside it. Functions of both take turns; passes are by the fastest call and by the median one.
Usage: python benchmarks/algorithms.py [--quick] [--threads N] [--cpu-time] [--only "remax,loss gpg"]
The last line is one JSON object; ``value`` is the worst ratio of a measured time to its target.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import importlib.util
import json
import mmap
import platform
import statistics
import subprocess
import sys
import time
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megarl.algorithms.advantages import ESTIMATORS, build_estimator
from megarl.algorithms.aggregate import aggregate, aggregate_rows, count
from megarl.algorithms.kl import kl_penalty
from megarl.algorithms.policy_losses import POLICY_LOSSES, PolicyInputs, build_policy_loss
from megarl.algorithms.value_losses import value_loss

SHAPES = ((1024, 2048), (8192, 512))
GROUP_SIZE = 8
VERL = "verl==0.9.1"
CACHE = Path.home() / ".cache" / "megarl" / "verl-0.9.1"
TARGET_PASSES = {
    "grpo": 2.0, "rloo": 2.0, "opo": 2.0, "gpg": 2.0, "grpo_passk": 2.0, "reinforce_plus_plus_baseline": 2.0,
    "gae": 8.0, "reinforce_plus_plus": 8.0, "loss ppo": 15.0,
}  # fmt: skip
WHO = ("megarl", "verl")
OPTIONS: dict[str, dict[str, Any]] = {"dro": {"dro_beta": 0.5}}


class Times:
    """Times of calls that take turns, so that a busy machine is busy for all of them."""

    def __init__(self, functions: dict[str, Callable[[], object]], clock: Callable[[], float]) -> None:
        self._functions = functions
        self._clock = clock
        self.seconds: dict[str, list[float]] = {name: [] for name in functions}

    def measure(self, seconds: float) -> None:
        """Calls each once to warm up, then in turn for so long, and three times at least."""
        for function in self._functions.values():
            function()
        end, rounds = time.perf_counter() + seconds, 0
        while rounds < 3 or time.perf_counter() < end:
            for name, function in self._functions.items():
                start = self._clock()
                function()
                self.seconds[name].append(self._clock() - start)
            rounds += 1


def keep_freed_memory() -> None:
    """Tells glibc not to give freed memory back, as training processes do with a caching allocator.

    Otherwise it depends on a heap's history whether a result lies in memory in use or in fresh pages, which cost more
    than most functions here, ours and verl's.
    """
    trim_threshold, mmap_threshold = -1, -3
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(trim_threshold, 1 << 30)
        libc.mallopt(mmap_threshold, 1 << 25)


def copy_to_fresh_memory(source: Tensor) -> Tensor:
    fresh = torch.frombuffer(mmap.mmap(-1, source.numel() * 4), dtype=torch.float32).view(source.shape)
    return fresh.copy_(source)


def make_batch(rows: int, tokens: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(scale: float = 1.0) -> Tensor:
        return torch.randn(rows, tokens, generator=generator) * scale

    lengths = torch.randint(1, tokens + 1, (rows,), generator=generator)
    mask = torch.arange(tokens) < lengths[:, None]
    rewards = torch.zeros(rows, tokens)
    rewards[torch.arange(rows), lengths - 1] = torch.randint(0, 2, (rows,), generator=generator).float()
    old = -normal().abs()
    advantages = torch.where(mask, torch.randn(rows, 1, generator=generator), 0.0)
    return {
        "mask": mask, "rewards": rewards, "values": normal(0.1), "old": old, "new": old + normal(0.1),
        "advantages": advantages, "group": torch.arange(rows) // GROUP_SIZE, "ref": old + normal(0.1),
        "returns": normal(0.1), "greedy": torch.zeros(rows), "pi2": old.exp().square(),
    }  # fmt: skip


def ours(b: dict[str, Tensor]) -> dict[str, Callable[[], object]]:
    cases: dict[str, Callable[[], object]] = {}
    for kind in ESTIMATORS.names():
        estimate = build_estimator(kind, gamma=1.0, lam=0.95, norm_by_std=True, bootstrap_truncated=False)
        components = {"a": b["rewards"].sum(-1), "b": b["rewards"].sum(-1).neg()}
        cases[kind] = lambda estimate=estimate, components=components: estimate(
            b["rewards"], b["mask"], b["group"], values=b["values"], greedy_scores=b["greedy"],
            reward_components=components, old_log_probs=b["old"], sum_pi_squared=b["pi2"],
        )  # fmt: skip
    denominators = count(b["mask"])
    new = b["new"].clone().requires_grad_()

    def loss_case(kind: str) -> Callable[[], object]:
        loss = build_policy_loss(kind, clip_low=0.2, clip_high=0.28, dual_clip=3.0, options=OPTIONS.get(kind))

        def run() -> None:
            new.grad = None
            inputs = PolicyInputs(new, b["old"], b["advantages"], b["mask"])
            if loss.needs_first_pass:
                chosen = loss.first_pass(inputs, row_id=torch.arange(len(new)), seed=0)
                inputs = PolicyInputs(new, b["old"], b["advantages"], b["mask"], selected=chosen)
            mode = loss.aggregation or "token-mean"
            sums = loss.row_sums(inputs).sums
            aggregate_rows(sums, b["mask"], mode, denominators=denominators).backward()

        return run

    for kind in POLICY_LOSSES.names():
        cases[f"loss {kind}"] = loss_case(kind)

    def value() -> None:
        new.grad = None
        token = value_loss(new, b["values"], b["returns"], b["mask"], clip=0.2).loss
        aggregate(token, b["mask"], "token-mean", denominators=denominators, is_masked=True).backward()

    def kl() -> None:
        new.grad = None
        token = kl_penalty(new, b["ref"], b["mask"], "k3")
        aggregate(token, b["mask"], "token-mean", denominators=denominators, is_masked=True).backward()

    return cases | {"loss value": value, "loss kl k3": kl}


def peers(b: dict[str, Tensor], core: types.ModuleType) -> dict[str, Callable[[], object]]:
    mask, index = b["mask"].float(), b["group"].numpy()
    config = core.AlgoConfig()
    config.gamma = 1.0
    outcome = {
        "grpo": core.compute_grpo_outcome_advantage,
        "rloo": core.compute_rloo_outcome_advantage,
        "opo": core.compute_opo_outcome_advantage,
        "gpg": core.compute_gpg_outcome_advantage,
        "grpo_passk": core.compute_grpo_passk_outcome_advantage,
        "gdpo": core.compute_gdpo_outcome_advantage,
        "reinforce_plus_plus_baseline": core.compute_reinforce_plus_plus_baseline_outcome_advantage,
    }
    cases: dict[str, Callable[[], object]] = {
        name: lambda function=function: function(b["rewards"].clone(), mask, index, config=config)
        for name, function in outcome.items()
    }
    cases["gdpo"] = lambda: core.compute_gdpo_outcome_advantage(b["rewards"].clone(), mask, index)
    cases["gae"] = lambda: core.compute_gae_advantage_return(b["rewards"], b["values"], mask, 1.0, 0.95)
    cases["reinforce_plus_plus"] = lambda: core.compute_reinforce_plus_plus_outcome_advantage(
        b["rewards"], mask, config=config
    )
    cases["remax"] = lambda: core.compute_remax_outcome_advantage(b["rewards"], b["greedy"], mask)
    cases["optimal_token_baseline"] = lambda: core.compute_optimal_token_baseline_advantage(
        b["rewards"], mask, index, b["old"], b["pi2"]
    )
    new = b["new"].clone().requires_grad_()
    actor = core.ActorConfig()

    def loss_case(name: str) -> Callable[[], object]:
        function = core.get_policy_loss_fn(name)

        def run() -> None:
            new.grad = None
            loss, _ = function(b["old"], new, b["advantages"], mask, "token-mean", actor)
            loss.backward()

        return run

    for kind in ("gspo", "cispo", "sapo", "gpg", "geo_mean", "dppo_tv", "dppo_kl", "dro", "clip_cov", "kl_cov"):
        cases[f"loss {kind}"] = loss_case(kind)
    cases["loss ppo"] = cases["loss vanilla"] = loss_case("vanilla")

    def value() -> None:
        new.grad = None
        core.compute_value_loss(new, b["returns"], b["values"], mask, 0.2)[0].backward()

    def kl() -> None:
        new.grad = None
        core.agg_loss(core.kl_penalty(new, b["ref"], "k3"), mask, "token-mean").backward()

    return cases | {"loss value": value, "loss kl k3": kl}


def load_verl() -> types.ModuleType:
    """verl's core_algos by path, what it imports from the rest of verl replaced by stubs or taken from its source.

    Raises:
        OSError or subprocess.CalledProcessError: the wheel cannot be had.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    wheels = list(CACHE.glob("verl-*.whl"))
    if not wheels:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(CACHE), VERL]
        subprocess.run(command, check=True, timeout=300)
        wheels = list(CACHE.glob("verl-*.whl"))
    with zipfile.ZipFile(wheels[0]) as wheel:
        wanted = ("verl/trainer/ppo/core_algos.py", "verl/utils/torch_functional.py", "verl/utils/groupwise.py")
        wheel.extractall(CACHE, [name for name in wheel.namelist() if name in wanted])

    class Config:
        gamma = 1.0
        clip_ratio = 0.2
        clip_ratio_low, clip_ratio_high, clip_ratio_c = 0.2, 0.28, 3.0
        tau_pos, tau_neg = 1.0, 1.05
        global_batch_info: dict[str, Any] = {}  # noqa: RUF012
        policy_loss = types.SimpleNamespace(
            clip_cov_ratio=0.0002, clip_cov_lb=1.0, clip_cov_ub=5.0, kl_cov_ratio=0.0002, ppo_kl_coef=0.1, dro_beta=0.5
        )

        def get(self, key: str, default: object = None) -> object:
            return getattr(self, key, default)

    def stub(name: str, **attributes: Any) -> types.ModuleType:
        module = types.ModuleType(name)
        module.__dict__.update(attributes, __path__=[])
        sys.modules[name] = module
        return module

    class ActorConfig(Config):
        pass

    class AlgoConfig(Config):
        pass

    functional = _functions(
        CACHE / "verl/utils/torch_functional.py",
        ("masked_sum", "masked_mean", "masked_var", "masked_whiten", "clip_by_value"),
    )
    for package in ("verl", "verl.utils", "verl.trainer", "verl.workers", "verl.trainer.ppo"):
        stub(package)
    stub("verl.utils.device", get_device_name=lambda: "cpu")
    groupwise = _load("verl_groupwise", CACHE / "verl/utils/groupwise.py")
    utils = stub("verl.utils", as_torch_index=groupwise.as_torch_index, group_mean_std=groupwise.group_mean_std)
    utils.torch_functional = stub("verl.utils.torch_functional", **functional)  # type: ignore[attr-defined]
    stub("verl.utils.import_utils", deprecated=lambda _: lambda function: function)
    stub("verl.trainer.config", AlgoConfig=AlgoConfig)
    stub("verl.workers.config", ActorConfig=ActorConfig)
    if importlib.util.find_spec("omegaconf") is None:
        stub("omegaconf", DictConfig=dict)
    return _load("verl_core_algos", CACHE / "verl/trainer/ppo/core_algos.py")


def _load(name: str, path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise OSError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _functions(path: Path, names: tuple[str, ...]) -> dict[str, Any]:
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    for node in tree.body:
        node.returns = None  # type: ignore[attr-defined]
    space: dict[str, Any] = {"torch": torch}
    exec(compile(tree, str(path), "exec", flags=0x1000000), space)
    return {name: space[name] for name in names if name in space}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a quarter of the time per case")
    parser.add_argument("--threads", type=int, help="threads of torch; default: its own choice")
    parser.add_argument("--cpu-time", action="store_true", help="CPU time of one thread: right on a busy machine too")
    parser.add_argument("--only", help="names of cases, comma-separated")
    arguments = parser.parse_args()
    seconds = 0.3 if arguments.quick else 1.2
    if arguments.threads or arguments.cpu_time:
        torch.set_num_threads(1 if arguments.cpu_time else arguments.threads)
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    keep_freed_memory()
    try:
        core: types.ModuleType | None = load_verl()
    except (OSError, subprocess.SubprocessError, KeyError, ImportError) as error:
        print(f"verl is not available, its column stays empty: {error}")
        core = None
    worst, slower, details = 0.0, [], {}
    for rows, tokens in SHAPES:
        for name, best, median in measure_shape(rows, tokens, core, seconds, clock, arguments.only):
            details[f"{name} {rows}x{tokens}"] = {"fastest": best, "median": median}
            worst = max(worst, best["megarl"] / TARGET_PASSES.get(name, float("inf")))
            if best.get("verl", float("inf")) < best["megarl"]:
                slower.append(f"{name} {rows}x{tokens}")
    result = {
        "name": "algorithms",
        "value": round(worst, 3),
        "unit": "worst measured passes / target passes",
        "target": 1.0,
        "holds": worst <= 1.0 and not slower,
        "slower_than_verl": slower,
        "peer": VERL if core else None,
        "passes": details,
        "machine": f"{platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads",
        "clock": "CPU time of one thread" if arguments.cpu_time else "wall time",
    }
    print(json.dumps(result))


def measure_shape(
    rows: int,
    tokens: int,
    core: types.ModuleType | None,
    seconds: float,
    clock: Callable[[], float],
    only: str | None,
) -> list[tuple[str, dict[str, float], dict[str, float]]]:
    """Name, fastest and median passes of megarl and verl for each case."""
    batch, source = make_batch(rows, tokens), torch.randn(rows, tokens)
    used = torch.empty_like(source)
    passes = Times({"fresh": lambda: copy_to_fresh_memory(source), "in use": lambda: used.copy_(source)}, clock)
    theirs = {} if core is None else peers(batch, core)
    cases: list[tuple[str, Times]] = []
    for name, function in ours(batch).items():
        if only is None or name in only.split(","):
            both = {"megarl": function} | ({"verl": theirs[name]} if name in theirs else {})
            cases.append((name, Times(both, clock)))
            cases[-1][1].measure(seconds)
            passes.measure(0.02)
    best_pass, median_pass = (how(passes.seconds["fresh"]) for how in (min, statistics.median))
    in_use = min(passes.seconds["in use"])
    print(f"\n{rows} x {tokens}: one pass {best_pass * 1e3:.3f} ms, median {median_pass * 1e3:.3f} ms", end="")
    print(f" ({in_use * 1e3:.3f} ms into memory in use)\n{'':30}{'fastest':>18}{'median':>18}")
    print(f"{'':30}" + f"{'megarl':>9}{'verl':>9}" * 2 + f"{'target':>9}")
    results = []
    for name, times in cases:
        best = {who: round(min(all_of) / best_pass, 2) for who, all_of in times.seconds.items()}
        median = {who: round(statistics.median(all_of) / median_pass, 2) for who, all_of in times.seconds.items()}
        columns = (f"{column[who]:9.2f}" if who in column else f"{'':9}" for column in (best, median) for who in WHO)
        print(f"{name:30}{''.join(columns)}{TARGET_PASSES.get(name, ''):>9}")
        results.append((name, best, median))
    return results


if __name__ == "__main__":
    main()
