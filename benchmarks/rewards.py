"""Scoring in the pool beside scoring the same samples in one process.

Usage: python benchmarks/rewards.py
The last line is one JSON object; ``value`` is seconds for 128 short answers of chain_sum with two processes, whose
target is 0.1; ``ratio`` is that over the bare loop in one process.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megarl.data.sources import GymSource
from megarl.rewards.base import RewardInput, as_result
from megarl.rewards.pool import RewardPool
from megarl.rewards.registry import RewardSpec, build


def main() -> None:
    source = GymSource("chain_sum", size=128)
    rows = [source.row(index) for index in range(128)]
    samples = [RewardInput(row.prompt, str(row.answer), row.answer, source.name, row.metadata) for row in rows]
    scorer = build(RewardSpec("reasoning_gym"))
    alone, pooled = [], []
    started = time.perf_counter()
    with RewardPool("reasoning_gym", workers=2) as pool:
        pool.ready()
        start_s = time.perf_counter() - started
        for _ in range(20):
            started = time.perf_counter()
            expected = [as_result(scorer(sample)) for sample in samples]
            middle = time.perf_counter()
            assert pool.score(samples) == expected
            alone.append(middle - started)
            pooled.append(time.perf_counter() - middle)
    value, bare = sorted(pooled)[10], sorted(alone)[10]
    print(f"start {start_s:.2f} s; 128 samples: pool {1e3 * value:.1f} ms, bare loop {1e3 * bare:.1f} ms")
    result = {
        "name": "rewards", "value": value, "unit": "s for 128 samples", "target": 0.1, "holds": value <= 0.1,
        "ratio": value / bare, "start_s": start_s,
    }  # fmt: skip
    print(json.dumps({**result, "machine": platform.machine()}))


if __name__ == "__main__":
    main()
