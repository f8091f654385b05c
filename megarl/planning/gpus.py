"""GPU kinds as data: what a forecast needs to know of a device, each number with where it is from.

Peaks are dense bfloat16 without sparsity. Bandwidths are of one direction where a link has two: NVIDIA states both
directions of NVLink together, so its figure is halved here.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from megarl.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU in a node of eight.

    Args:
        name: as on the command line.
        memory_bytes: device memory.
        peak_flops: dense bfloat16 operations per second.
        memory_bytes_per_s: device memory bandwidth.
        link_bytes_per_s: to another GPU of the node, one direction.
        network_bytes_per_s: to another node, one direction, a GPU's share.
        host_bytes_per_s: to host memory, one direction.
        sources: where each number is from.
        fp8_recipes: of ``engine.fp8_recipe``, those it can: FP8 from compute capability 9.0, mxfp8 from 10.0
            (Transformer Engine 2.20.2, pytorch/quantization.py).
    """

    name: str
    memory_bytes: int
    peak_flops: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float
    host_bytes_per_s: float
    sources: tuple[str, ...]
    fp8_recipes: tuple[str, ...] = ("blockwise", "tensorwise")


_TABLE = (
    "peak and bandwidth: github.com/stas00/ml-engineering, compute/accelerator/README.md, after NVIDIA's data sheets"
)
_NDR = "network: one 400 Gb/s adapter a GPU, as in NVIDIA's DGX and HGX reference systems"
_PCIE5 = "host: PCIe 5.0 x16, 64 GB/s a direction"

GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            "h100", 80 * GIB, 989e12, 3.35e12, 450e9, 50e9, 64e9,
            ("NVIDIA H100 data sheet (SXM5: 80 GB, 3.35 TB/s, 989 TFLOPS, NVLink 900 GB/s)", _TABLE, _NDR, _PCIE5),
        ),
        Gpu(
            "h200", 141 * 10**9, 989e12, 4.8e12, 450e9, 50e9, 64e9,
            (
                "memory, NVLink, PCIe: github.com/mlcommons/inference_results_v4.1, "
                "closed/NVIDIA/systems/H200-SXM-141GBx8_TRT_MaxQ.json",
                _TABLE,
                _NDR,
            ),
        ),
        Gpu(
            "a100", 80 * GIB, 312e12, 2.039e12, 300e9, 25e9, 32e9,
            (
                "NVIDIA A100 data sheet (SXM4 80 GB: 2,039 GB/s, 312 TFLOPS dense, NVLink 600 GB/s, PCIe 4.0 x16)",
                "network: one 200 Gb/s adapter a GPU, as in DGX A100",
            ),
            fp8_recipes=(),
        ),
        Gpu(
            "b200", 180 * 10**9, 2250e12, 8.0e12, 900e9, 50e9, 64e9,
            (
                "memory, NVLink (14.4 TB/s for eight), network: github.com/mlcommons/inference_results_v6.0, "
                "closed/Nebius/systems/nebius_b200_n1.json",
                _TABLE,
                _PCIE5,
            ),
            fp8_recipes=("blockwise", "tensorwise", "mxfp8"),
        ),
        Gpu(
            "h20", 96 * 10**9, 148e12, 4.0e12, 450e9, 50e9, 64e9,
            ("willitrunai.com/gpus/h20-96gb (96 GB, 4.0 TB/s, 148 TFLOPS, NVLink 900 GB/s)", _NDR, _PCIE5),
        ),
    )
}  # fmt: skip


def gpu_named(name: str) -> Gpu:
    """A kind by name. Raises ConfigError with the names there are."""
    if name.lower() not in GPUS:
        close = difflib.get_close_matches(name.lower(), GPUS, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(f"no GPU kind {name!r}", fix=f"{hint}choose one of {', '.join(GPUS)}")
    return GPUS[name.lower()]
