"""How fast passes compute: the model's own operations of a phase over its seconds and ranks.

Model operations (the M of MFU, arXiv:2204.02311, appendix B): what ``ModelSpec.sequence_cost`` counts of a forward
pass, three times in an update. What is computed again (recompute), computed for padding, or spared (a prompt shared by
its group) makes no difference to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from torch import Tensor

from megarl.config.schema import SftConfig, TrainConfig
from megarl.models import ModelSpec, load_spec

UPDATE_FACTOR = 3
"""Operations of forward and backward pass over those of the forward pass."""


@dataclass(frozen=True, slots=True)
class PhaseWork:
    """Operations of a phase, and the ranks they are spread over."""

    flops: float
    num_ranks: int


def forward_flops(spec: ModelSpec, lengths: Tensor, *, value_head: bool = False) -> float:
    """Operations of a forward pass over sequences of these lengths [B] int64, prompts included."""
    per_token, per_token_squared = spec.sequence_cost(value_head=value_head)
    exact = lengths.double()
    return per_token * float(exact.sum()) + per_token_squared * float(exact.square().sum())


def update_flops(spec: ModelSpec, lengths: Tensor, *, value_head: bool = False, is_frozen: bool = False) -> float:
    """Operations of forward and backward pass.

    Gradients of frozen weights, as many matrix products as a forward pass has, are not computed.
    """
    per_token, _ = spec.sequence_cost(value_head=value_head)
    spared = per_token * float(lengths.double().sum()) if is_frozen else 0.0
    return UPDATE_FACTOR * forward_flops(spec, lengths, value_head=value_head) - spared


@cache
def _spec(path: Path) -> ModelSpec:
    """Read once: every step asks, and the file system may be far away."""
    return load_spec(path)


def step_work(config: TrainConfig, lengths: Tensor) -> dict[str, PhaseWork]:
    """Work of the phases of ``controller/step.py`` that a step of sequences of these lengths may have."""
    actor, critic = config.actor.layout.world_size, config.critic
    spec = _spec(Path(config.model.path))
    forward = forward_flops(spec, lengths)
    update = update_flops(spec, lengths, is_frozen=config.actor.lora is not None)
    work = {
        "old_log_probs": PhaseWork(forward, actor),
        "ref_log_probs": PhaseWork(forward, actor),
        "update_actor": PhaseWork(config.algorithm.epochs * update, actor),
    }
    if critic is not None:
        spec, ranks = _spec(Path(config.model.path if critic.path is None else critic.path)), critic.layout.world_size
        update = update_flops(spec, lengths, value_head=True, is_frozen=critic.lora is not None)
        work["values"] = PhaseWork(forward_flops(spec, lengths, value_head=True), ranks)
        work["update_critic"] = PhaseWork(critic.epochs * update, ranks)
    return work


def sft_work(config: SftConfig, lengths: Tensor) -> dict[str, PhaseWork]:
    """Work of a supervised step."""
    flops = update_flops(_spec(Path(config.model.path)), lengths, is_frozen=config.actor.lora is not None)
    return {"update": PhaseWork(flops, config.actor.layout.world_size)}


def speed(work: Mapping[str, PhaseWork], seconds: Mapping[str, float], peak_flops: float | None) -> dict[str, float]:
    """``perf/tflops/PHASE``: 1e12 operations per second and rank; ``perf/mfu/PHASE``: the share of the peak that is.

    Args:
        work: by phase.
        seconds: of the phases that there were.
        peak_flops: operations per second of a rank's GPU; None where it is not known, as on CPU.
    """
    numbers: dict[str, float] = {}
    for phase, done in work.items():
        if seconds.get(phase, 0.0) > 0:
            rate = done.flops / done.num_ranks / seconds[phase]
            numbers[f"perf/tflops/{phase}"] = rate / 1e12
            if peak_flops is not None:
                numbers[f"perf/mfu/{phase}"] = rate / peak_flops
    return numbers


def peak_of(device: str, peaks: Mapping[str, float]) -> float | None:
    """Peak of the kind of GPU whose name is a word of the device's (NVIDIA H100 80GB HBM3); None for another."""
    words = device.lower().replace("-", " ").split()
    return next((peak for kind, peak in peaks.items() if kind in words), None)
