"""Megatron-Core's optimizer under our learning-rate schedule: one update, clipped, or skipped if it is not finite.

Invariants:
1. An update with a non-finite gradient changes no weight, no moment and no schedule position; it is counted.
2. The gradient norm is the global one before clipping, of the whole model over all ranks, replicas counted once.
3. Weight decay leaves out norms and biases (every one-dimensional parameter).
4. More than ``max_skipped_steps`` skips in a row are an error on every rank, with the tensors they were found in.
"""

from __future__ import annotations

import inspect
import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megarl.config.schema.train import OptimizerConfig
from megarl.errors import SetupError, TrainError
from megarl.train.megatron import host_optimizer, precision
from megarl.train.megatron.learning_rate import learning_rate
from megarl.train.megatron.model import named_parameters
from megarl.train.megatron.optimizer_state import is_precision_aware, sharded_state, take_loaded

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NAMED_TENSORS = 20
"""Tensors an error lists before it only counts them."""


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
        tensors: canonical tensors in each parameter, by the parameter's name, for messages; the name itself if None.

    Raises:
        SetupError: Muon or state of lower precision without its package.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        config: OptimizerConfig,
        *,
        dtype: torch.dtype,
        total_updates: int | None,
        tensors: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.chunks = list(chunks)
        self.config = config
        self.total_updates = total_updates
        self.num_updates = 0
        self.num_skipped = 0
        self.num_skipped_in_a_row = 0
        self._tensors = {} if tensors is None else tensors
        self._not_finite: dict[str, int] = {}
        self.has_parts_only = False
        """Whether weights of the last update lie on the ranks that computed them (``overlap_param_gather``)."""
        self.next_learning_rate()  # an impossible schedule fails here, not at the end of a warm-up
        if config.kind == "muon":
            _require_muon()
        if config.precision_aware:
            _require_fused_adam()
        on_gpu = next(self.chunks[0].parameters()).is_cuda
        self.megatron: Any = _build(_megatron_config(config, dtype, on_gpu=on_gpu), self.chunks)
        for part in self._parts():
            if getattr(part, "init_state_fn", 0) is None:
                # SGD's, which Megatron calls all the same before it loads; materialise_state makes the state.
                part.init_state_fn = lambda *_: None

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
        """Apply one update from the reduced gradients, unless they are not finite.

        Raises:
            TrainError: it would be skipped, like ``max_skipped_steps`` before it; on every rank.
        """
        rate = self.next_learning_rate()
        overflow = self.megatron.prepare_grads()
        # All-reduced over the ranks that share the model, so every rank takes the same branch below. Replicas of
        # one shard hold the same reduced gradients and agree too.
        grad_norm = float(self.megatron.get_grad_norm() or 0.0)
        if overflow or not math.isfinite(grad_norm):
            self._skip()
            return UpdateResult(grad_norm, rate, applied=False)
        if self.config.clip_grad > 0:
            self._scale_gradients(self.config.clip_grad / (grad_norm + 1e-6))
        for group in self.megatron.param_groups:
            # Megatron leaves both to its own scheduler, which is not used here.
            group["lr"] = rate * group.get("lr_mult", 1.0)
            group["weight_decay"] = self.config.weight_decay * group.get("wd_mult", 1.0)
        for part in self._parts():
            if host_optimizer.is_hybrid(part.optimizer):
                host_optimizer.hand_over_gradients(part.optimizer)
        self.megatron.step_with_ready_grads()
        for part in self._parts():
            if host_optimizer.is_hybrid(part.optimizer):
                host_optimizer.drop_gradients(part.optimizer)
        self.has_parts_only = self.config.overlap_param_gather
        self.num_updates += 1
        self.num_skipped_in_a_row = 0
        self._not_finite.clear()
        return UpdateResult(grad_norm, rate, applied=True)

    def gather_weights(self) -> None:
        """Make all of a rank's weights those of the last update, if that left them to the next pass; else nothing.

        Collective over data-parallel ranks (``overlap_param_gather``).
        """
        if self.has_parts_only:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)
            self.has_parts_only = False

    def _skip(self) -> None:
        self.num_skipped += 1
        self.num_skipped_in_a_row += 1
        found = self._not_finite_tensors()
        for name in found:
            self._not_finite[name] = self._not_finite.get(name, 0) + 1
        logger.warning(
            "update skipped, the %d. in a row: its gradient is not finite in %s",
            self.num_skipped_in_a_row,
            _listed(found),
        )
        if self.num_skipped_in_a_row > self.config.max_skipped_steps:
            often = sorted(self._not_finite, key=lambda name: (-self._not_finite[name], name))
            raise TrainError(
                f"{self.num_skipped_in_a_row} updates in a row had a gradient that is not finite: "
                + _listed([f"{name} ({self._not_finite[name]} times)" for name in often]),
                where=f"update {self.num_updates}",
                fix="lower optimizer.lr or optimizer.clip_grad, look at the samples of this step, or allow more with "
                "optimizer.max_skipped_steps",
            )

    def _not_finite_tensors(self) -> list[str]:
        """Canonical tensors whose gradient is not finite on any rank, sorted; collective.

        A rank looks at its whole gradient buffers: at what it has reduced, and at its own contribution elsewhere.
        """
        names: set[str] = set()
        for name, parameter in named_parameters([chunk.module for chunk in self.chunks]).items():
            gradient = getattr(parameter, "main_grad", None)
            if gradient is not None and not bool(torch.isfinite(gradient).all()):
                names.update(self._tensors.get(name, [name]))
        everywhere: list[set[str]] = [set()] * dist.get_world_size()
        dist.all_gather_object(everywhere, names)
        return sorted(set().union(*everywhere))

    def _scale_gradients(self, factor: float) -> None:
        if factor >= 1:
            return
        # Gradients of another dtype than their parameter's are kept apart from it.
        found = (
            getattr(p, "decoupled_grad", None) if part.config.use_precision_aware_optimizer else p.grad
            for part in self._parts()
            for p in part.get_parameters()
        )
        gradients = [gradient for gradient in found if gradient is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def torch_optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers inside Megatron's that hold parameters of this rank."""
        return [part.optimizer for part in self._parts() if part.optimizer is not None]

    def _parts(self) -> list[Any]:
        """Megatron's optimizer of dense parameters, and that of experts if there are any."""
        parts: list[Any] = getattr(self.megatron, "chained_optimizers", [self.megatron])
        return parts

    def sharded_state(
        self, model_state: Mapping[str, Any], metadata: Mapping[str, Any], *, is_loading: bool
    ) -> dict[Any, Any]:
        """What Megatron's ``sharded_state_dict`` describes, without its gathering; collective."""
        parts = self._parts()
        if len(parts) > 1:
            self.megatron._synchronize_steps()
        states = [
            sharded_state(part, model_state, is_loading=is_loading, metadata=metadata)
            if isinstance(part, DistributedOptimizer)
            else part.sharded_state_dict(model_state, is_loading=is_loading, metadata=metadata)
            for part in parts
        ]
        return states[0] if len(states) == 1 else dict(enumerate(states))

    def load_state(self, state: dict[Any, Any]) -> None:
        """Load what ``sharded_state`` described, after it was read from a checkpoint.

        With torch's Adam, Megatron-Core's own ``load_state_dict`` of the distributed optimizer stops at ``step``, which
        it keeps apart from the moments but looks for beside them, and leaves one step tensor shared by all parameters,
        which Adam would then advance once for each of them (optimizer/distrib_optimizer.py:825,938,2090 in 0.16.1).
        """
        parts = self._parts()
        states = [state] if len(parts) == 1 else [state[index] for index in range(len(parts))]
        for part, part_state in zip(parts, states, strict=True):
            moments = part_state.pop("param_state", None)
            groups = part_state.get("optimizer", part_state)["param_groups"]
            if host_optimizer.is_hybrid(part.optimizer):
                host_optimizer.continue_from(part.optimizer, groups)
            else:
                for group in groups:
                    # What this inner optimizer reads and the one that wrote the checkpoint had no use for.
                    group.update({name: value for name, value in part.optimizer.defaults.items() if name not in group})
                part.load_state_dict(part_state)
                for values in part.optimizer.state.values():
                    if isinstance(values.get("step"), torch.Tensor):
                        values["step"] = values["step"].clone()
            if moments is not None:
                take_loaded(part, moments)
        if self.config.precision_aware:
            # A weight may have become another nearest one of its main parameter, on the rank that updates it.
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)

    def reload_weights(self) -> None:
        """Update from the model's weights as they are now, where the optimizer keeps copies of them."""
        for part in self._parts():
            if host_optimizer.is_hybrid(part.optimizer):
                host_optimizer.take_weights(part.optimizer)
            elif is_precision_aware(part):
                precision.take_weights(part.optimizer)
            else:
                part.reload_model_params()

    def counters(self) -> dict[str, int]:
        """Position in the schedule, for checkpoints."""
        return {
            "num_updates": self.num_updates,
            "num_skipped": self.num_skipped,
            "num_skipped_in_a_row": self.num_skipped_in_a_row,
        }

    def load_counters(self, counters: dict[str, int]) -> None:
        """Continue from ``counters()``."""
        self.num_updates = int(counters["num_updates"])
        self.num_skipped = int(counters["num_skipped"])
        self.num_skipped_in_a_row = int(counters["num_skipped_in_a_row"])

    def materialise_state(self) -> None:
        """Create zero state where torch's optimizers would do so at their first step, which makes no difference there.

        Megatron's checkpoint code reads ``step`` from state that torch's Adam has not made yet (KeyError 'step');
        Transformer Engine's and Apex's Adam are handled there.
        """
        for part in self._parts():
            inner = part.optimizer
            if inner is None:
                continue
            if host_optimizer.is_hybrid(inner):
                host_optimizer.materialise(inner)
                continue
            if is_precision_aware(part):
                precision.materialise(inner)
                continue
            for group in inner.param_groups:
                for parameter in group["params"]:
                    if parameter not in inner.state or not inner.state[parameter]:
                        inner.state[parameter] = _first_state(inner, group, parameter)


def _first_state(inner: torch.optim.Optimizer, group: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    if isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
        return {
            "step": torch.zeros((), dtype=torch.float32),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    if group.get("momentum", 0.0) > 0:  # torch's SGD, and Muon
        return {"momentum_buffer": torch.zeros_like(parameter)}
    return {}


def _build(config: MegatronOptimizerConfig, chunks: list[Any]) -> Any:
    """Megatron's optimizer of the chunks."""
    # The optimizer on the host takes leaves only, which shards of float32 parameters are where no graph is recorded.
    with torch.set_grad_enabled(not config.optimizer_cpu_offload), warnings.catch_warnings():
        # It compares torch's version with 2.3 as text.
        warnings.filterwarnings("ignore", message="CPU offload is recommended for PyTorch >= 2.3.0")
        # The gloo groups are for checkpoint formats that gather on the host; ours does not.
        return get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)


def _megatron_config(config: OptimizerConfig, dtype: torch.dtype, *, on_gpu: bool) -> MegatronOptimizerConfig:
    muon = {"muon_momentum": config.momentum} if config.kind == "muon" else {}
    on_host = config.cpu_offload_fraction > 0
    return MegatronOptimizerConfig(
        optimizer=config.kind,
        lr=config.lr,
        min_lr=config.schedule.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.eps,
        sgd_momentum=config.momentum,
        decoupled_weight_decay=True,
        clip_grad=config.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=config.distributed,
        # Megatron's arguments ask for it with state on the host too: weights then have no float32 copy on the device.
        use_precision_aware_optimizer=config.precision_aware or on_host,
        main_grads_dtype=_DTYPES[config.main_grads_dtype],
        main_params_dtype=_DTYPES[config.main_params_dtype],
        exp_avg_dtype=_DTYPES[config.exp_avg_dtype],
        exp_avg_sq_dtype=_DTYPES[config.exp_avg_sq_dtype],
        optimizer_cpu_offload=on_host,
        optimizer_offload_fraction=config.cpu_offload_fraction,
        overlap_cpu_optimizer_d2h_h2d=config.overlap_cpu_offload,
        pin_cpu_grads=on_gpu,
        pin_cpu_params=on_gpu,
        **muon,
    )


def _require_muon() -> None:
    """Raise unless Megatron-Core makes Muon by its name and finds the package with it."""
    try:
        from megatron.core.optimizer import emerging_optimizers
    except ImportError:
        raise SetupError(
            "this release of Megatron-Core has no Muon that megarl can use",
            where="optimizer.kind=muon",
            fix="use megatron-core 0.19 (Python 3.12), or optimizer.kind=adam",
        ) from None
    if not emerging_optimizers.HAVE_EMERGING_OPTIMIZERS:
        raise SetupError(
            "Megatron-Core's Muon needs the package emerging-optimizers",
            where="optimizer.kind=muon",
            fix="pip install emerging-optimizers (Python 3.12), or optimizer.kind=adam",
        )


def _require_fused_adam() -> None:
    """Raise unless Transformer Engine's Adam is there, with state of dtypes of its own."""
    try:
        from transformer_engine.pytorch.optimizers import FusedAdam
    except ImportError:
        problem = "is not installed"
    else:
        found = inspect.signature(FusedAdam).parameters
        missing = [
            name for name in ("exp_avg_dtype", "use_decoupled_grad", "store_param_remainders") if name not in found
        ]
        if not missing:
            return
        problem = f"has no {missing[0]}"
    raise SetupError(
        f"state of lower precision is that of Transformer Engine's FusedAdam, which {problem}",
        where="optimizer.precision_aware=true",
        fix="pip install 'megarl[gpu]', or optimizer.precision_aware=false",
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED_TENSORS} more" if len(names) > _NAMED_TENSORS else ""
    return ", ".join(names[:_NAMED_TENSORS]) + more
