"""``python -m megarl.platform.bandwidth``: bus bandwidth of an all-reduce over the devices of this machine, in GB/s.

Bus bandwidth is 2 (n - 1) / n of the bytes of the tensor over the time, which does not depend on n where links are the
limit (as nccl-tests count it).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from megarl.platform.device import get_device

WARM_UP, MEASURED = 3, 10
TIMEOUT = timedelta(seconds=60)
"""Of the ranks meeting and of an all-reduce; who asks for a measurement waits longer."""


def measure(rank: int, ranks: int, device_name: Literal["cpu", "cuda"], mib: int, folder: str) -> None:
    """One rank of the measurement; rank 0 leaves GB/s in ``folder/result``."""
    device = get_device(device_name)
    device.bind(rank)
    store = dist.FileStore(f"{folder}/store", ranks)
    store.set_timeout(TIMEOUT)
    dist.init_process_group(device.collective_backend, store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    values = torch.ones(mib * 2**20 // 4, dtype=torch.float32, device=device.torch_device)
    seconds = []
    for _ in range(WARM_UP + MEASURED):
        started = time.monotonic()
        dist.all_reduce(values)
        device.synchronize()
        seconds.append(time.monotonic() - started)
        values.fill_(1.0)
    dist.destroy_process_group()
    if rank == 0:
        bus = 2 * (ranks - 1) / ranks * values.numel() * values.element_size()
        (Path(folder) / "result").write_text(f"{bus / statistics.median(seconds[WARM_UP:]) / 1e9:.3f}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Print GB/s; returns 0."""
    parser = argparse.ArgumentParser(prog="megarl.platform.bandwidth")
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--mib", type=int, default=256, help="size of the tensor")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(measure, (args.ranks, args.device, args.mib, folder), nprocs=args.ranks)
        sys.stdout.write((Path(folder) / "result").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
