"""A checkpoint from Hugging Face to torch_dist and back, beside ``cp`` and beside safetensors reading and writing it.

Usage: python benchmarks/convert.py [--gigabytes 2.7] [--repeats 5] [--directory DIR] [--tp N] [--pp N]

The model is synthetic: bfloat16, five shards. All runs of a repeat follow each other with the source in the page cache
and nothing left to be written, and each writes to pages that another file has just given back; none waits for the disk,
as ``cp`` does not either (``--fsync`` makes ours wait).
Two workers. For each direction:

- work: from the first phase of the conversion to the rename, as the command itself says;
- whole: the process from start to end;
- anonymous memory: the highest RssAnon of the process;
- processor time, start-up included, which another load on the machine changes least.

The last line is one JSON object of the best of all repeats: what another run takes beyond it is the machine's, which
hands out pages of memory at very different speeds. ``value`` is the slower direction's work over safetensors' read-all
and write-all, whose target is 1; ``of_cp`` is cp's time over ours, goal 0.7; ``beyond_work_s`` whole minus work, target
2; ``anonymous_mb`` target 1000.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megarl.models.registry import spec_from_config
from megarl.weights.files.safetensors_target import index_of, lay_out_safetensors
from megarl.weights.layout import canonical_shapes

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ROOT / "tools" / "convert"
NUM_SHARDS = 5
OURS = ("to_megatron", "to_hf")
READ_WRITE = """
import sys, time
from pathlib import Path
from safetensors.torch import load_file, save_file
source, target = Path(sys.argv[1]), Path(sys.argv[2])
target.mkdir()
start = time.perf_counter()
for shard in sorted(source.glob("*.safetensors")):
    save_file(load_file(shard), target / shard.name, metadata={"format": "pt"})
print(time.perf_counter() - start)
"""


def config_of(gigabytes: float) -> dict[str, Any]:
    """A Llama of about this size in bfloat16."""
    hidden, ffn, vocab = 2048, 5632, 32_000
    per_layer = hidden * (2048 + 2 * 512 + 2048) + 3 * hidden * ffn + 2 * hidden
    layers = max(1, round((gigabytes * 1e9 / 2 - 2 * vocab * hidden) / per_layer))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def make_model(directory: Path, gigabytes: float) -> int:
    """Writes the synthetic checkpoint; returns its bytes."""
    config = config_of(gigabytes)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    tensors = {name: ("BF16", shape) for name, shape in canonical_shapes(spec_from_config(config)).items()}
    total = sum(2 * math.prod(shape) for _, shape in tensors.values())
    layout = lay_out_safetensors(tensors, max_shard_bytes=total // NUM_SHARDS + 60_000_000)
    noise = os.urandom(1 << 20)
    for name, size in layout.sizes.items():
        with (directory / name).open("wb") as file:
            file.write(layout.headers[name])
            left = size - len(layout.headers[name])
            while left:
                left -= file.write(noise[:left])
    index = index_of(directory, layout.sizes)
    assert index is not None
    (directory / index[0]).write_bytes(index[1])
    return sum(layout.sizes.values())


def timed(words: list[str]) -> dict[str, float]:
    """Runs a command: whole seconds, its own statement of its work, highest anonymous memory."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        peak = [0]
        watcher = threading.Thread(target=watch, args=(process, peak))
        watcher.start()
        output, _ = process.communicate()
        whole_s = time.perf_counter() - start
        watcher.join()
    if process.returncode:
        raise SystemExit(f"{words[1]} failed with {process.returncode}")
    match = re.search(r"copied in ([\d.]+) s", output) or re.search(r"([\d.]+)", output)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "whole_s": whole_s,
        "work_s": float(match[1]) if match else whole_s,
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "anonymous_mb": peak[0] / 1e6,
    }


def watch(process: subprocess.Popen[str], peak: list[int]) -> None:
    """Follows a process's RssAnon."""
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            return
        if match := re.search(r"RssAnon:\s+(\d+) kB", status):
            peak[0] = max(peak[0], int(match[1]) << 10)
        time.sleep(0.02)


def repeat(model: Path, folder: Path, given: argparse.Namespace) -> dict[str, dict[str, float]]:
    """One run of everything; targets are removed before the next so that all of them write fresh files."""
    python = sys.executable
    common = ["--workers", "2", "--quiet"] + ([] if given.fsync else ["--no-fsync"])
    layout = ["--tp", str(given.tp), "--pp", str(given.pp)]
    found = {}
    for name, words in (
        ("cp", ["cp", "-r", str(model), str(folder / "cp")]),
        ("safetensors", [python, "-c", READ_WRITE, str(model), str(folder / "rw")]),
        ("to_megatron", [python, str(TOOLS / "hf_to_megatron.py"), str(model), str(folder / "dist"), *layout, *common]),
        ("to_hf", [python, str(TOOLS / "megatron_to_hf.py"), str(folder / "dist"), str(folder / "hf"), *common]),
    ):
        # What earlier runs left to be written would throttle this one's writes.
        os.sync()
        # A virtual machine's first touch of a page costs several times the copy: each writes to pages just given back,
        # at once, before the machine takes back free ones.
        shutil.copytree(model, folder / "pages")
        shutil.rmtree(folder / "pages")
        found[name] = timed(words)
        print(f"{name:12} " + "  ".join(f"{key} {value:8.2f}" for key, value in found[name].items()), flush=True)
        for done in {"cp": ["cp"], "safetensors": ["rw"], "to_hf": ["dist", "hf"]}.get(name, []):
            shutil.rmtree(folder / done)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.7)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--directory", default=None, help="where to work (default: a temporary directory)")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--fsync", action="store_true", help="let the conversions wait for the disk")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.directory, prefix="convert-") as place:
        folder = Path(place)
        size = make_model(folder / "model", given.gigabytes)
        runs = [repeat(folder / "model", folder, given) for _ in range(given.repeats)]
    best = {
        name: {key: (max if key == "anonymous_mb" else min)(run[name][key] for run in runs) for key in runs[0][name]}
        for name in runs[0]
    }
    ours = [best[name] for name in OURS]
    slower = max(run["work_s"] for run in ours)
    value = slower / best["safetensors"]["work_s"]
    result = {
        "name": "convert",
        "value": round(value, 3),
        "unit": "work seconds / those of reading and writing by safetensors",
        "target": 1.0,
        "of_cp": round(best["cp"]["whole_s"] / slower, 3),
        "of_cp_goal": 0.7,
        "beyond_work_s": round(max(run[name]["whole_s"] - run[name]["work_s"] for run in runs for name in OURS), 2),
        "anonymous_mb": round(max(run["anonymous_mb"] for run in ours), 1),
        "gigabytes": round(size / 1e9, 2),
        "repeats": given.repeats,
        "layout": {"tp": given.tp, "pp": given.pp},
        "fsync": given.fsync,
        "peers": {"cp_s": best["cp"]["whole_s"], "safetensors_s": best["safetensors"]["work_s"]},
        "work_s": {"to_megatron": ours[0]["work_s"], "to_hf": ours[1]["work_s"]},
        "whole_s": {"to_megatron": ours[0]["whole_s"], "to_hf": ours[1]["whole_s"]},
        "cpu_s": {name: round(run["cpu_s"], 2) for name, run in best.items()},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
    }
    result["holds"] = bool(value <= 1.0 and result["beyond_work_s"] <= 2 and result["anonymous_mb"] <= 1000)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
