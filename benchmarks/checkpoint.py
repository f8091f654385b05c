"""Save and load of a training state of 2.7 GB by two ranks, beside Megatron's own calls and beside plain safetensors.

Usage: python benchmarks/checkpoint.py [--layers 14] [--rounds 3] [--dir DIR]
Two processes of one thread at TP 2: a bfloat16 model with Adam's state, as a run saves it. ``megarl`` is a save the
run waits for, every file synced and read back with its checksum; ``blocked`` is what a run waits for when the ranks
write behind its steps, and ``copy``, its limit, copying the same bytes into memory that was used before. ``megatron``
calls ``dist_checkpointing`` with its own strategies, its files neither synced nor
read back. ``safetensors`` writes and reads one plain file of the same bytes a rank, synced or not. Files are read while
the system still holds them in memory. The last line is one JSON object; ``value`` is megarl's bytes per second of
writing over those of synced safetensors.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

RANKS, GB = 2, 1e9


def engine_of(rank: int, port: int, layers: int) -> Any:
    """A rank's engine with Adam's state."""
    from torch.distributed import TCPStore

    from megarl.config.schema.train import EngineConfig, OptimizerConfig
    from megarl.models.spec import ModelSpec
    from megarl.parallel.grid import ParallelLayout
    from megarl.platform.device import get_device
    from megarl.train.megatron import bootstrap
    from megarl.train.megatron.engine import MegatronEngine

    spec = ModelSpec(
        family="llama", vocab_size=32_000, hidden_size=1024, ffn_hidden_size=2816, num_layers=layers, num_heads=16,
        num_kv_heads=8, head_dim=64, max_position=4096, rms_norm_eps=1e-5, rope_theta=5e5, tied_embeddings=True,
    )  # fmt: skip
    device = get_device("cpu")
    store = TCPStore("127.0.0.1", port, is_master=rank == 0)
    groups = bootstrap.start(ParallelLayout(tp=RANKS), device=device, rank=rank, seed=1, store=store, timeout_s=600)
    engine = MegatronEngine("actor", spec, None, groups, device, EngineConfig(), OptimizerConfig())
    assert engine.optimizer is not None
    engine.optimizer.materialise_state()
    return engine


def timed(function: Callable[[], Any]) -> float:
    """Seconds of the slower rank."""
    import torch.distributed as dist

    dist.barrier()
    started = time.perf_counter()
    function()
    dist.barrier()
    return time.perf_counter() - started


def megarl_round(engine: Any, root: Path) -> dict[str, float]:
    parts: dict[str, float] = {}
    found = {"save": timed(lambda: parts.update(engine.save(root / "waited")))}
    found["write"], found["verify"] = parts["plan"] + parts["copy"] + parts["write"], parts["verify"]
    found["load"] = timed(lambda: engine.load(root / "waited"))
    found["blocked"] = timed(lambda: engine.save(root / "behind", background=True))
    engine.finish_save()
    return found


def megatron_round(engine: Any, root: Path) -> dict[str, float]:
    import torch.distributed as dist
    from megatron.core import dist_checkpointing

    from megarl.train.megatron import checkpoint

    metadata = checkpoint._metadata(engine.groups.dp_cp)
    directory = root / "megatron"
    if dist.get_rank() == 0:
        directory.mkdir()

    def described(*, is_loading: bool) -> dict[str, Any]:
        (model,) = engine._modules
        state = {"model": model.sharded_state_dict(metadata=metadata)}
        optimizer = engine.optimizer.megatron
        state["optimizer"] = optimizer.sharded_state_dict(state["model"], is_loading=is_loading, metadata=metadata)
        return state

    def save() -> None:
        state = described(is_loading=False)
        dist_checkpointing.save(state, str(directory), content_metadata=checkpoint._storable(metadata))

    def load() -> None:
        dist_checkpointing.load(described(is_loading=True), str(directory))

    return {"save": timed(save), "load": timed(load)}


def safetensors_round(engine: Any, root: Path, num_bytes: int) -> dict[str, float]:
    """The rank's share of the bytes as 64 tensors; targets of the copy and the load exist, as a model's do."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    path = root / f"{engine.groups.rank}.safetensors"
    size = num_bytes // RANKS // 64 // 2
    tensors = {str(i): torch.zeros(size, dtype=torch.bfloat16) + i for i in range(64)}

    def synced() -> None:
        save_file(tensors, path)
        with open(path, "rb+") as file:
            os.fsync(file.fileno())

    def load() -> None:
        with safe_open(path, "pt") as file:
            for name, tensor in tensors.items():
                tensor.copy_(file.get_tensor(name))

    copies = {name: tensor.clone() for name, tensor in tensors.items()}

    def copy() -> None:
        for name, tensor in tensors.items():
            copies[name].copy_(tensor)

    took = {"copy": timed(copy)}
    copies.clear()
    return took | {"save": timed(lambda: save_file(tensors, path)), "synced": timed(synced), "load": timed(load)}


def run_rank(rank: int, port: int, layers: int, rounds: int, root: Path, results: Any) -> None:
    import logging
    import warnings

    import torch.distributed as dist

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    engine = engine_of(rank, port, layers)
    found = []
    for _ in range(rounds + 1):
        one = {"megarl": megarl_round(engine, root)}
        num_bytes = sum(path.stat().st_size for path in (root / "waited").glob("*.distcp"))
        one["megatron"] = megatron_round(engine, root)
        one["safetensors"] = safetensors_round(engine, root, num_bytes)
        found.append(one)
        if rank == 0:
            took = {who: {what: round(seconds, 2) for what, seconds in parts.items()} for who, parts in one.items()}
            print(f"round {len(found)}, {num_bytes / GB:.2f} GB, seconds: {took}", flush=True)
        dist.barrier()
        if rank == 0:
            for path in root.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        dist.barrier()
    if rank == 0:
        results.put((num_bytes, found))
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=None, help="where to write; default a temporary directory")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="megarl-checkpoint-", dir=options.dir))
    results = multiprocessing.get_context("spawn").SimpleQueue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = (port, options.layers, options.rounds, root, results)
    try:
        # Megatron's writer starts a process of its own, which a daemon may not.
        torch.multiprocessing.start_processes(run_rank, arguments, nprocs=RANKS, daemon=False, start_method="spawn")
        num_bytes, rounds = results.get()
    finally:
        shutil.rmtree(root, ignore_errors=True)
    first, later = rounds[0], rounds[1:]
    seconds = {who: {what: statistics.median(one[who][what] for one in later) for what in first[who]} for who in first}
    print(f"{num_bytes / GB:.2f} GB by {RANKS} ranks, median of {len(later)} rounds after a first one")
    for who, parts in seconds.items():
        for what, took in parts.items():
            print(
                f"{who:11} {what:10} {took:6.2f} s  {num_bytes / took / GB:6.2f} GB/s   first {first[who][what]:6.2f} s"
            )
    speed = seconds["safetensors"]["synced"] / seconds["megarl"]["write"]
    blocked = seconds["megarl"]["blocked"] / seconds["safetensors"]["copy"]
    waited = seconds["megarl"]["save"] / (seconds["safetensors"]["synced"] + seconds["megarl"]["verify"])
    print(f"a background save blocks {blocked:.2f} copies of the bytes; one waited for takes {waited:.2f} times "
          "synced safetensors and reading back")  # fmt: skip
    print(json.dumps({"name": "checkpoint", "value": speed, "unit": "share of safetensors' speed, both synced",
                      "target": 1.0, "holds": speed >= 1.0, "bytes": num_bytes, "blocked_copies": blocked,
                      "waited_over_synced_and_verified": waited, "seconds": seconds,
                      "first": first, "machine": platform.machine()}))  # fmt: skip


if __name__ == "__main__":
    main()
