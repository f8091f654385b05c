"""Packing, balancing and cutting batches: microbatches over the fewest possible, and times beside a plain copy.

Usage: python benchmarks/packing.py
The last line is one JSON object; ``value`` is the largest excess of microbatches over ``ceil(tokens / cap)``, whose
target is 0.02.
"""

from __future__ import annotations

import json
import math
import platform
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megarl.data.balance import balance
from megarl.data.batch import Batch, Ragged
from megarl.data.packing import pack


def fastest_s(function: Callable[[], object], times: int = 5) -> float:
    best = math.inf
    for _ in range(times):
        start = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    generator = random.Random(0)
    excess = []
    for rows, cap in ((256, 16_384), (1024, 32_768), (8192, 16_384), (8192, 65_536)):
        lengths = [min(8192, 64 + int(generator.lognormvariate(6.5, 0.9))) for _ in range(rows)]
        bins, fewest = pack(lengths, cap), math.ceil(sum(lengths) / cap)
        excess.append((len(bins) - fewest) / fewest)
        seconds = fastest_s(lambda lengths=lengths, cap=cap: pack(lengths, cap))
        fullest = max(sum(lengths[row] for row in part) for part in bins) / cap
        print(f"pack {rows:5} rows, cap {cap:6}: {len(bins):4} bins of at least {fewest:4}, "
              f"fullest {fullest:6.1%}, {1e3 * seconds:6.1f} ms")  # fmt: skip
    costs = [min(8192.0, 64 + generator.lognormvariate(6.5, 0.9)) for _ in range(8192)]
    spread = {}
    for parts in (8, 512):
        found = balance(costs, parts, equal_counts=True)
        totals = [sum(costs[row] for row in part) for part in found]
        spread[parts] = max(totals) * parts / sum(totals)
        seconds = fastest_s(lambda parts=parts: balance(costs, parts, equal_counts=True))
        print(f"balance 8192 rows, {parts:3} ranks: largest {spread[parts]:.4f} of the mean, {1e3 * seconds:.1f} ms")
    lengths_B = torch.tensor([int(cost) for cost in costs[:1024]])
    column = Ragged(torch.arange(int(lengths_B.sum())), lengths_B)
    batch = Batch.create(prompts=column, responses=column)
    parts = balance(lengths_B.tolist(), 4, equal_counts=True)
    split = fastest_s(lambda: batch.split(parts))
    copy = fastest_s(lambda: [column.values.clone(), column.values.clone()])
    print(f"split {len(column.values)} tokens x 2 in 4: {1e3 * split:.1f} ms, {split / copy:.1f} copies of the bytes")
    result = {"benchmark": "packing", "value": max(excess), "target": 0.02, "balance_largest": spread}
    print(json.dumps({**result, "split_copies": split / copy, "machine": platform.machine()}))


if __name__ == "__main__":
    main()
