"""Megatron-Core's optimizer under our learning-rate schedule: one update, clipped, or skipped if it is not finite.

Invariants:
1. An update with a non-finite gradient changes no weight, no moment and no schedule position; it is counted.
2. The gradient norm is the global one before clipping, of the whole model over all ranks, replicas counted once.
3. Weight decay is decoupled and leaves out norms and biases (every one-dimensional parameter).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer

from megarl.config.schema.train import OptimizerConfig, ScheduleConfig
from megarl.errors import ConfigError


def learning_rate(update: int, peak: float, schedule: ScheduleConfig, total_updates: int | None = None) -> float:
    """Learning rate of an optimizer update.

    Warm-up: ``peak * (update + 1) / warmup_steps``, so that the first update is not a no-op. Then ``peak``, or from
    there to ``min_lr`` linearly or along half a cosine (arXiv:1608.03983, eq. 5, without restarts), reached at
    ``decay_steps`` and kept.

    Args:
        update: number of updates applied before it.
        peak: highest rate.
        schedule: shape of the schedule.
        total_updates: planned updates of the run; stands in for ``decay_steps`` where the schedule gives none.

    Raises:
        ConfigError: a decaying schedule without any number of steps.
    """
    if update < schedule.warmup_steps:
        return peak * (update + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return peak
    end = schedule.decay_steps if schedule.decay_steps is not None else total_updates
    if end is None:
        raise ConfigError(f"a {schedule.kind} schedule needs decay_steps", where="optimizer.schedule.decay_steps")
    progress = min(1.0, (update - schedule.warmup_steps) / max(1, end - schedule.warmup_steps))
    left = 1 - progress if schedule.kind == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return schedule.min_lr + (peak - schedule.min_lr) * left


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What one optimizer update did.

    Args:
        grad_norm: global gradient norm before clipping; not finite when skipped.
        learning_rate: rate it used or would have used.
        applied: False if it was skipped.
    """

    grad_norm: float
    learning_rate: float
    applied: bool


class Optimizer:
    """Megatron's optimizer of one model with schedule, clipping and the check for finite gradients.

    Args:
        chunks: the model's chunks, wrapped in Megatron's DistributedDataParallel.
        config: settings; ``distributed`` must be what the chunks were wrapped with.
        dtype: dtype of the weights; with bfloat16 the optimizer keeps float32 copies.
        total_updates: planned updates, for decaying schedules without ``decay_steps``.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        config: OptimizerConfig,
        *,
        dtype: torch.dtype,
        total_updates: int | None,
    ) -> None:
        self.chunks = list(chunks)
        self.config = config
        self.total_updates = total_updates
        self.num_updates = 0
        self.num_skipped = 0
        self.next_learning_rate()  # an impossible schedule fails here, not at the end of a warm-up
        self.megatron: Any = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=config.lr,
                min_lr=config.schedule.min_lr,
                weight_decay=config.weight_decay,
                adam_beta1=config.beta1,
                adam_beta2=config.beta2,
                adam_eps=config.eps,
                decoupled_weight_decay=True,
                clip_grad=config.clip_grad,
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=config.distributed,
            ),
            self.chunks,
            # They are for checkpoint formats that gather on the host; ours does not.
            use_gloo_process_groups=False,
        )

    def next_learning_rate(self) -> float:
        """Learning rate of the next update."""
        return learning_rate(self.num_updates, self.config.lr, self.config.schedule, self.total_updates)

    def zero_grad(self) -> None:
        """Clear accumulated gradients before the first microbatch of an update."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        with warnings.catch_warnings():
            # Shards of float32 parameters are views, whose gradient Megatron sets and reads by hand.
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
            self.megatron.zero_grad()

    @torch.no_grad()
    def step(self) -> UpdateResult:
        """Apply one update from the reduced gradients, unless they are not finite."""
        rate = self.next_learning_rate()
        overflow = self.megatron.prepare_grads()
        # All-reduced over the ranks that share the model, so every rank takes the same branch below. Replicas of
        # one shard hold the same reduced gradients and agree too.
        grad_norm = float(self.megatron.get_grad_norm() or 0.0)
        if overflow or not math.isfinite(grad_norm):
            self.num_skipped += 1
            return UpdateResult(grad_norm, rate, applied=False)
        if self.config.clip_grad > 0:
            self._scale_gradients(self.config.clip_grad / (grad_norm + 1e-6))
        for group in self.megatron.param_groups:
            group["lr"] = rate * group.get("lr_mult", 1.0)
        self.megatron.step_with_ready_grads()
        self.num_updates += 1
        return UpdateResult(grad_norm, rate, applied=True)

    def _scale_gradients(self, factor: float) -> None:
        if factor >= 1:
            return
        gradients = [p.grad for part in self._parts() for p in part.get_parameters() if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def torch_optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers inside Megatron's that hold parameters of this rank."""
        return [part.optimizer for part in self._parts() if part.optimizer is not None]

    def _parts(self) -> list[Any]:
        """Megatron's optimizer of dense parameters, and that of experts if there are any."""
        parts: list[Any] = getattr(self.megatron, "chained_optimizers", [self.megatron])
        return parts

    def load_state(self, state: dict[Any, Any]) -> None:
        """Load what Megatron's ``sharded_state_dict`` described, after it was read from a checkpoint.

        With torch's Adam, Megatron-Core's own ``load_state_dict`` of the distributed optimizer stops at ``step``, which
        it keeps apart from the moments but looks for beside them, and leaves one step tensor shared by all parameters,
        which Adam would then advance once for each of them (optimizer/distrib_optimizer.py:825,938,2090 in 0.16.1).
        """
        parts = self._parts()
        states = [state] if len(parts) == 1 else [state[index] for index in range(len(parts))]
        for part, part_state in zip(parts, states, strict=True):
            moments = part_state.pop("param_state", None)
            part.load_state_dict(part_state)
            steps = {
                param: values.pop("step").clone()
                for param, values in part.optimizer.state.items()
                if isinstance(values.get("step"), torch.Tensor)
            }
            if moments is not None:
                part.load_parameter_state_from_fully_reshardable(moments)
            for param, step in steps.items():
                part.optimizer.state[param]["step"] = step

    def counters(self) -> dict[str, int]:
        """Position in the schedule, for checkpoints."""
        return {"num_updates": self.num_updates, "num_skipped": self.num_skipped}

    def load_counters(self, counters: dict[str, int]) -> None:
        """Continue from ``counters()``."""
        self.num_updates = int(counters["num_updates"])
        self.num_skipped = int(counters["num_skipped"])

    def materialise_state(self) -> None:
        """Create zero Adam moments where torch's Adam would do so at its first step.

        Megatron's checkpoint code reads ``step`` from state that torch's Adam has not made yet (KeyError 'step');
        Transformer Engine's and Apex's Adam are handled there.
        """
        for inner in self.torch_optimizers():
            if not isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
                continue
            for group in inner.param_groups:
                for param in group["params"]:
                    if param not in inner.state or not inner.state[param]:
                        inner.state[param] = {
                            "step": torch.zeros((), dtype=torch.float32),
                            "exp_avg": torch.zeros_like(param),
                            "exp_avg_sq": torch.zeros_like(param),
                        }
