"""Balancing over ranks, packing under a token cap and cutting batches: beside the best possible, and a plain copy.

Lengths are log-normal with mean 1,800 and at most 16,384. A heaviest part is divided by the least it can be,
``max(mean, longest row)``; targets are 1.02 over ranks and 1.1 over microbatches, a fill of 0.99 (or the fewest
microbatches there can be), 0.1 s, and never a token over the cap.

Usage: python benchmarks/packing.py
The last line is one JSON object; ``value`` counts the cases that miss a target.
"""

from __future__ import annotations

import json
import math
import platform
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megarl.data.balance import SequenceCost, balance
from megarl.data.batch import Batch, Ragged
from megarl.data.packing import pack
from megarl.models.registry import spec_from_config

ROWS = (1024, 4096, 32_768)
RANKS = (8, 64, 512)
CAPS = (16_384, 32_768, 65_536)
LIMIT_S = 0.1
MODELS = {
    "7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
}


def cost_of(model: str) -> SequenceCost:
    """Cost of a sequence from the model's configuration: Qwen2.5's sizes."""
    config = {
        "model_type": "qwen2",
        "vocab_size": 152_064,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        **MODELS[model],
    }
    return SequenceCost(*spec_from_config(config).sequence_cost())


def realistic_lengths(rows: int, seed: int = 0) -> list[int]:
    generator, sigma = random.Random(seed), 0.9
    mu = math.log(1800) - sigma**2 / 2
    return [min(16_384, max(1, int(generator.lognormvariate(mu, sigma)))) for _ in range(rows)]


def fastest_s(function: Callable[[], object], times: int = 3) -> float:
    best = math.inf
    for _ in range(times):
        start = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - start)
    return best


def heaviest(parts: Sequence[Sequence[int]], costs: Sequence[float]) -> tuple[float, float]:
    """Heaviest part over the mean, and over the least that it can be."""
    work = [sum(costs[row] for row in rows) for rows in parts]
    mean = sum(work) / len(work)
    return max(work) / mean, max(work) / max(mean, max(costs))


def over_ranks() -> list[dict[str, float | str | bool]]:
    results = []
    for rows in ROWS:
        lengths = realistic_lengths(rows)
        for unit, costs in {"tokens": [float(x) for x in lengths], "work": cost_of("7b").of(lengths)}.items():
            for ranks in RANKS:
                to_mean, to_least = heaviest(balance(costs, ranks, equal_counts=False), costs)
                seconds = fastest_s(lambda c=costs, r=ranks: balance(c, r, equal_counts=False))
                ok = to_least <= 1.02 and seconds <= LIMIT_S
                results.append({"unit": unit, "rows": rows, "ranks": ranks, "to_mean": to_mean, "to_least": to_least,
                                "s": seconds, "ok": ok})  # fmt: skip
                print(f"balance {unit:6} {rows:6} rows over {ranks:3} ranks: heaviest {to_mean:6.4f} of the mean, "
                      f"{to_least:6.4f} of the least possible, {1e3 * seconds:5.1f} ms")  # fmt: skip
    return results


def under_a_cap() -> list[dict[str, float | str | bool]]:
    results = []
    for model in MODELS:
        for rows in ROWS:
            lengths = realistic_lengths(rows)
            costs = cost_of(model).of(lengths)
            for cap in CAPS:
                bins = pack(lengths, cap, costs=costs)
                to_mean, to_least = heaviest(bins, costs)
                seconds = fastest_s(lambda x=lengths, cap=cap, costs=costs: pack(x, cap, costs=costs))
                fill, fewest = sum(lengths) / (cap * len(bins)), math.ceil(sum(lengths) / cap)
                over = any(sum(lengths[row] for row in members) > cap for members in bins)
                ok = not over and to_least <= 1.1 and (fill >= 0.99 or len(bins) == fewest)
                case = {"model": model, "rows": rows, "cap": cap, "bins": len(bins), "fewest": fewest, "fill": fill}
                results.append({**case, "to_mean": to_mean, "to_least": to_least, "s": seconds, "ok": ok})
                print(f"pack {model:4} {rows:6} rows, cap {cap:6}: {len(bins):4} microbatches of at least {fewest:4}, "
                      f"fill {fill:.4f}, work {to_mean:6.4f} of the mean, {to_least:6.4f} of the least possible, "
                      f"{1e3 * seconds:5.1f} ms")  # fmt: skip
    return results


def split_copies() -> float:
    lengths_B = torch.tensor(realistic_lengths(1024))
    column = Ragged(torch.arange(int(lengths_B.sum())), lengths_B)
    batch = Batch.create(prompts=column, responses=column)
    parts = balance(lengths_B.tolist(), 4, equal_counts=True)
    split = fastest_s(lambda: batch.split(parts))
    copy = fastest_s(lambda: [column.values.clone(), column.values.clone()])
    print(f"split {len(column.values)} tokens x 2 in 4: {1e3 * split:.1f} ms, {split / copy:.1f} copies of the bytes")
    return split / copy


def main() -> None:
    ranks, caps = over_ranks(), under_a_cap()
    missed = sum(not case["ok"] for case in ranks + caps)
    result = {
        "name": "packing", "value": missed, "unit": "cases missed", "target": 0, "holds": missed == 0,
        "balance": ranks, "pack": caps,
    }  # fmt: skip
    print(json.dumps({**result, "split_copies": split_copies(), "machine": platform.machine()}))


if __name__ == "__main__":
    main()
