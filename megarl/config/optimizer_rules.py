"""Rules of the optimizer of each role: its schedule, and where and in which dtypes its state is.

A rule yields a ``Breach`` for each way it is broken, as in ``rules.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megarl.config.breach import AnyConfig, Breach
from megarl.config.schema import TrainConfig
from megarl.config.schema.roles import ActorConfig, CriticConfig


def trained(config: AnyConfig) -> Iterator[tuple[str, ActorConfig | CriticConfig]]:
    """The roles that are trained, by name."""
    yield "actor", config.actor
    if isinstance(config, TrainConfig) and config.critic is not None:
        yield "critic", config.critic


def decay_has_an_end(config: AnyConfig) -> Iterator[Breach]:
    """A decay ends after the warm-up, at a rate not above the peak; a cooldown fits between the two."""
    for role, part in trained(config):
        schedule, prefix = part.optimizer.schedule, f"{role}.optimizer.schedule"
        if schedule.kind == "constant":
            continue
        if schedule.min_lr > part.optimizer.lr:
            yield Breach((f"{prefix}.min_lr", f"{role}.optimizer.lr"), "min_lr <= lr")
        if schedule.kind == "inverse_sqrt" or schedule.decay_steps is None:
            continue
        left = schedule.decay_steps - schedule.warmup_steps
        if left <= 0:
            keys = (f"{prefix}.decay_steps", f"{prefix}.kind", f"{prefix}.warmup_steps")
            yield Breach(keys, f"decay_steps > warmup_steps for a {schedule.kind} schedule")
        elif schedule.kind == "wsd" and schedule.cooldown_steps is not None and schedule.cooldown_steps > left:
            keys = (f"{prefix}.cooldown_steps", f"{prefix}.decay_steps", f"{prefix}.warmup_steps")
            yield Breach(keys, "cooldown_steps <= decay_steps - warmup_steps")


def only_adam_is_sharded(config: AnyConfig) -> Iterator[Breach]:
    """Megatron's distributed optimizer shards Adam's state; SGD and Muon have theirs on every data-parallel rank."""
    for role, part in trained(config):
        if part.optimizer.kind != "adam" and part.optimizer.distributed:
            keys = (f"{role}.optimizer.distributed", f"{role}.optimizer.kind")
            yield Breach(keys, f"distributed=false with kind {part.optimizer.kind}")


def gather_overlaps_in_buckets(config: AnyConfig) -> Iterator[Breach]:
    """Weights are gathered where the distributed optimizer left parts of them, in overlapped reduction's buckets."""
    for role, part in trained(config):
        optimizer, prefix = part.optimizer, f"{role}.optimizer"
        if optimizer.overlap_param_gather and not (optimizer.distributed and optimizer.overlap_grad_reduce):
            keys = tuple(f"{prefix}.{name}" for name in ("overlap_param_gather", "distributed", "overlap_grad_reduce"))
            yield Breach(keys, "distributed and overlap_grad_reduce with overlap_param_gather")


def host_updates_adams_shards(config: AnyConfig) -> Iterator[Breach]:
    """The optimizer on the host is Megatron's of sharded Adam state, in float32."""
    for role, part in trained(config):
        optimizer, prefix = part.optimizer, f"{role}.optimizer"
        if optimizer.cpu_offload_fraction == 0:
            continue
        key = f"{prefix}.cpu_offload_fraction"
        if optimizer.kind != "adam" or not optimizer.distributed:
            keys = (key, f"{prefix}.kind", f"{prefix}.distributed")
            yield Breach(keys, "kind adam and distributed=true with an optimizer on the host")
        if optimizer.precision_aware:
            yield Breach((key, f"{prefix}.precision_aware"), "either state on the host, in float32, or precision_aware")


def precision_is_transformer_engines(config: AnyConfig) -> Iterator[Breach]:
    """State of lower precision is that of Transformer Engine's Adam, on GPUs, of bfloat16 weights."""
    for role, part in trained(config):
        optimizer, prefix = part.optimizer, f"{role}.optimizer"
        key = f"{prefix}.precision_aware"
        if optimizer.precision_aware:
            if config.cluster.device == "cpu":
                yield Breach((key, "cluster.device"), "false on device cpu, where there is no Transformer Engine")
            if part.engine.dtype != "bfloat16":
                yield Breach((key, f"{role}.engine.dtype"), "dtype bfloat16 with precision_aware")
            if optimizer.kind != "adam" or not optimizer.distributed:
                keys = (key, f"{prefix}.kind", f"{prefix}.distributed")
                yield Breach(keys, "kind adam and distributed=true with precision_aware")
        if optimizer.main_grads_dtype != "float32":
            grads = f"{prefix}.main_grads_dtype"
            if not optimizer.precision_aware and optimizer.cpu_offload_fraction == 0:
                keys = (grads, key, f"{prefix}.cpu_offload_fraction")
                yield Breach(keys, "float32, or precision_aware or a cpu_offload_fraction above 0")
            if part.engine.dtype != "bfloat16":
                yield Breach((grads, f"{role}.engine.dtype"), "dtype bfloat16 with gradients in it")


OPTIMIZER_RULES: tuple[Callable[[AnyConfig], Iterator[Breach]], ...] = (
    decay_has_an_end,
    only_adam_is_sharded,
    gather_overlaps_in_buckets,
    host_updates_adams_shards,
    precision_is_transformer_engines,
)
