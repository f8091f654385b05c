"""Memory of a run by phase and device, and of a node's host: what ``megarl doctor`` refuses and ``report`` compares.

Roles that share devices either take turns (``engine.offload``: training state lies in host memory while engines sample,
engines sleep while training runs) or all stay; split roles have devices of their own.

Invariants:
1. A phase lists everything that is on the device then, each part with its role.
2. The fullest device stands for all; the first node, which no node exceeds, for all nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megarl.config.schema import SftConfig, TrainConfig
from megarl.config.schema.roles import ActorConfig, CriticConfig
from megarl.models import ModelSpec
from megarl.planning.finding import Finding, Level
from megarl.planning.gpus import GIB, GPUS, Gpu
from megarl.planning.memory import Layers, RankMemory, engine_bytes, worst_stage
from megarl.planning.model_fit import longest_sequence, trained
from megarl.planning.placement import update_rows
from megarl.planning.state import WEIGHT_BYTES, StateBytes

# Assumed, not measured by this project: CUDA context with NCCL's buffers, and resident memory of one process.
CONTEXT_BYTES = 1 * GIB
HOST_PROCESS_BYTES = {"cuda": 4 * GIB, "cpu": 1 * GIB}
# vLLM profiles with as many tokens; its default on CUDA.
_ENGINE_STEP_TOKENS = 8192
_TIGHT = 0.95
_MIB = 2**20


@dataclass(slots=True)
class Forecast:
    """Bytes by phase and part.

    Args:
        capacity: bytes of a device; on CPU of nothing, since processes share the host.
        phases: for each phase the parts on the fullest device.
        host: parts on a node's host.
        kv_tokens: tokens that an engine's key-value cache holds.
        ranks: per role, the parts of its fullest rank.
        peak_flops: by kind of GPU, for the share of it that a run reaches.
    """

    capacity: int | None
    phases: dict[str, dict[str, int]] = field(default_factory=dict)
    host: dict[str, int] = field(default_factory=dict)
    kv_tokens: int | None = None
    ranks: dict[str, dict[str, int]] = field(default_factory=dict)
    peak_flops: dict[str, float] = field(default_factory=lambda: {name: gpu.peak_flops for name, gpu in GPUS.items()})

    def as_dict(self) -> dict[str, Any]:
        """For ``forecast.json``."""
        return asdict(self)

    def table(self) -> str:
        """For a person, in GiB."""
        lines = []
        for phase, parts in self.phases.items():
            total = sum(parts.values())
            share = f" of {self.capacity / GIB:.0f} GiB" if self.capacity is not None else ""
            shown = ", ".join(f"{name} {value / GIB:.2f}" for name, value in parts.items() if value)
            lines.append(f"{phase:<14} {total / GIB:8.2f} GiB{share}: {shown}")
        shown = ", ".join(f"{name} {value / GIB:.2f}" for name, value in self.host.items() if value)
        lines.append(f"{'host':<14} {sum(self.host.values()) / GIB:8.2f} GiB a node: {shown}")
        if self.kv_tokens is not None:
            lines.append(f"{'kv cache':<14} {self.kv_tokens:,} tokens an engine")
        return "\n".join(lines)


def forecast(config: TrainConfig | SftConfig, spec: ModelSpec, critic_spec: ModelSpec, gpu: Gpu | None) -> Forecast:
    """The forecast of a configuration whose model divides into its layouts.

    Args:
        config: the run's configuration.
        spec: the policy's model.
        critic_spec: the critic's.
        gpu: kind of GPU; None on CPU.

    Raises:
        LayoutError: the model does not divide into a layout.
    """
    layers: Layers = "local" if gpu is None else "transformer_engine"
    ranks = {
        role: _rank(config, role, critic_spec if role == "critic" else spec, layers) for role, _ in trained(config)
    }
    # With adapters the reference policy is the actor without them.
    if isinstance(config, TrainConfig) and config.algorithm.kl.where != "none" and config.actor.lora is None:
        ranks["reference"] = _rank(config, "reference", spec, layers)
    result = Forecast(gpu.memory_bytes if gpu is not None else None)
    result.ranks = {
        role: {
            "weights": memory.state.weights,
            "gradients": memory.state.gradients,
            "optimizer": memory.state.optimizer,
            "optimizer_on_host": memory.state.host,
            "training": memory.training,
            "inference": memory.inference,
        }
        for role, memory in ranks.items()
    }
    if isinstance(config, SftConfig):
        state = _states(ranks)
        context = {"context": CONTEXT_BYTES} if gpu is not None else {}
        result.phases["update"] = {**state, "actor pass": ranks["actor"].training, **context}
        if config.data.validation:
            result.phases["evaluation"] = {**state, "actor pass": ranks["actor"].inference, **context}
    else:
        _phases(result, config, spec, ranks, gpu)
    _host(result, config, {"actor": spec, "critic": critic_spec}, ranks, gpu)
    return result


def leaving_roles(config: TrainConfig) -> list[str]:
    """Roles that leave devices shared with engines (``controller/roles.py`` decides by the same keys)."""
    cluster = config.cluster
    if cluster.device != "cuda" or cluster.placement != "colocated":
        return []
    return [role for role, part in trained(config) if part.engine.offload]


def _rank(config: TrainConfig | SftConfig, role: str, spec: ModelSpec, layers: Layers) -> RankMemory:
    part = dict(trained(config))[_owner(role)]
    layout = part.layout.grid()
    training, inference = _microbatch_tokens(config, role, part)
    return worst_stage(
        spec, layout, part.engine,
        num_microbatches=2 * layout.pp, layers=layers, value_head=role == "critic", trained=role != "reference",
        optimizer=part.optimizer, lora=part.lora,
        training_tokens=training, inference_tokens=inference,
    )  # fmt: skip


def _microbatch_tokens(config: TrainConfig | SftConfig, role: str, part: ActorConfig | CriticConfig) -> tuple[int, int]:
    """Most tokens of a microbatch, in training and without: the cap, or a rank's rows where all of them are less."""
    engine, dp = part.engine, part.layout.dp
    _, longest = longest_sequence(config)
    _, updated = update_rows(config, _owner(role))
    passed = updated
    if isinstance(config, TrainConfig):
        passed = config.data.prompts_per_step * config.rollout.samples_per_prompt
    cap = engine.microbatch_tokens
    inference_cap = cap if engine.inference_microbatch_tokens is None else engine.inference_microbatch_tokens
    training = min(cap, -(-updated // dp) * longest)
    if isinstance(config, SftConfig) and config.data.validation:
        # The held-out sequences are evaluated together, however many a step has.
        return training, inference_cap
    return training, min(inference_cap, -(-passed // dp) * longest)


def _saved_state(config: TrainConfig | SftConfig, role: str, spec: ModelSpec) -> StateBytes:
    """What a checkpoint takes of a rank's state: float32, wherever and in however little it is held."""
    part = dict(trained(config))[role]
    whole = {"cpu_offload_fraction": 0.0, "precision_aware": False, "main_grads_dtype": "float32"}
    part = part.model_copy(update={"optimizer": part.optimizer.model_copy(update=whole)})
    return _rank(config.model_copy(update={role: part}), role, spec, "local").state


def _states(ranks: dict[str, RankMemory]) -> dict[str, int]:
    return {f"{role} state": memory.state.total for role, memory in ranks.items()}


def _owner(role: str) -> str:
    """The role in whose processes one lives."""
    return "actor" if role == "reference" else role


def _phases(
    result: Forecast, config: TrainConfig, spec: ModelSpec, ranks: dict[str, RankMemory], gpu: Gpu | None
) -> None:
    states, rollout = _states(ranks), config.rollout
    weights, kv_token_bytes = engine_bytes(spec, rollout.tp, rollout.dtype)
    shares = config.cluster.placement == "colocated"
    num_training = len([role for role in ranks if role != "reference"])
    if gpu is None:
        kv = int(rollout.kv_cache_gib * GIB) // rollout.tp
        engine = {"engine weights": weights, "kv cache": kv}
        contexts = 0
    else:
        step = _ENGINE_STEP_TOKENS * (4 * spec.hidden_size + 3 * spec.ffn_hidden_size // rollout.tp) * 2
        step += rollout.max_num_seqs * spec.vocab_size // rollout.tp * 8
        budget = int(rollout.gpu_memory_utilization * gpu.memory_bytes)
        kv = budget - weights - step - CONTEXT_BYTES
        engine = {"engine weights": weights, "kv cache": max(kv, 0), "engine pass": step}
        contexts = CONTEXT_BYTES * (num_training + 1 if shares else 1)
    result.kv_tokens = max(kv, 0) // kv_token_bytes
    bucket = {"buckets": 2 * config.sync.bucket_mib * _MIB}
    leaving = leaving_roles(config)
    beside = {} if leaving or not shares or gpu is None else engine  # on CPU each process has memory of its own
    held = {} if not shares or gpu is None else _states({r: m for r, m in ranks.items() if _owner(r) not in leaving})
    context = {"contexts": contexts} if contexts else {}
    result.phases["rollout"] = {**engine, **held, **context}
    passes = [("old_log_probs", "actor", "inference"), ("update_actor", "actor", "training")]
    if config.algorithm.kl.where != "none":
        passes.insert(1, ("ref_log_probs", "reference" if "reference" in ranks else "actor", "inference"))
    if "critic" in ranks:
        passes[-1:-1] = [("values", "critic", "inference"), ("update_critic", "critic", "training")]
    for phase, role, kind in passes:
        memory: RankMemory = ranks[role]
        needed = memory.training if kind == "training" else memory.inference
        result.phases[phase] = {**states, f"{role} pass": needed, **beside, **context}
    other = beside or ({"engine weights": weights} if shares and gpu is not None else {})
    result.phases["weight_sync"] = {**states, **other, **bucket, **context}


def _host(
    result: Forecast,
    config: TrainConfig | SftConfig,
    specs: Mapping[str, ModelSpec],
    ranks: dict[str, RankMemory],
    gpu: Gpu | None,
) -> None:
    """Parts on the first node."""
    cluster = config.cluster
    slots = cluster.gpus_per_node if gpu is not None else None
    processes = 1
    for role, part in trained(config):
        size = part.layout.world_size
        count = min(size, slots) if slots is not None else -(-size // cluster.num_nodes)
        processes += count
        if config.checkpoint.background:
            # Replicas share what they have in common; sharded optimizer state is a rank's own.
            dp, state = part.layout.grid().dp, _saved_state(config, role, specs[role])
            # With adapters the frozen weights are not saved; gradients, in float32, count what is.
            weights = state.weights
            if part.lora is not None:
                weights = state.gradients * WEIGHT_BYTES[part.engine.dtype] // WEIGHT_BYTES["float32"]
            copied = weights // dp + state.optimizer // (1 if part.optimizer.distributed else dp)
            result.host[f"{role} checkpoint"] = count * copied
        if ranks[role].state.host:
            result.host[f"{role} optimizer"] = count * ranks[role].state.host
        members = [role, "reference"] if role == "actor" and "reference" in ranks else [role]
        for name in members:
            memory = ranks[name]
            if gpu is None:
                result.host[name] = count * (memory.state.total + max(memory.training, memory.inference))
            elif isinstance(config, TrainConfig) and role in leaving_roles(config):
                result.host[f"{name} offloaded"] = count * (memory.state.weights + memory.state.optimizer)
    if isinstance(config, TrainConfig):
        rollout = config.rollout
        engines = rollout.replicas * rollout.tp
        count = min(engines, slots) if slots is not None else -(-engines // cluster.num_nodes)
        processes += count + config.reward.workers
        if gpu is None:
            weights, _ = engine_bytes(specs["actor"], rollout.tp, rollout.dtype)
            result.host["engines"] = count * (weights + int(rollout.kv_cache_gib * GIB))
    result.host["processes"] = processes * HOST_PROCESS_BYTES[cluster.device]


def check_memory(
    config: TrainConfig | SftConfig, expected: Forecast, *, gpu: Gpu | None, host_bytes: int | None
) -> Iterator[Finding]:
    """Phases that do not fit on the device, a cache too small, a host too small.

    Args:
        config: the run's configuration.
        expected: its forecast.
        gpu: kind of GPU; None on CPU.
        host_bytes: memory of a node; None where it is not known.
    """
    for phase, parts in expected.phases.items():
        total = sum(parts.values())
        if gpu is None or total <= _TIGHT * gpu.memory_bytes:
            continue
        first = sorted(parts, key=lambda name: -parts[name])[:3]
        shown = ", ".join(f"{name} {parts[name] / GIB:.1f}" for name in first)
        room = f"the {gpu.memory_bytes / GIB:.1f} GiB of a {gpu.name.upper()}"
        problem = f"phase {phase} needs {total / GIB:.1f} GiB of {room} ({shown})"
        level: Level = "error" if total > gpu.memory_bytes else "warning"
        yield Finding("memory", _key(config, phase, parts), problem, _fix(config, phase), level)
    if isinstance(config, TrainConfig) and expected.kv_tokens is not None:
        _, longest = longest_sequence(config)
        key = "rollout.kv_cache_gib" if gpu is None else "rollout.gpu_memory_utilization"
        if expected.kv_tokens < longest:
            problem = (
                f"an engine's cache holds {expected.kv_tokens} tokens, fewer than the longest sequence of {longest}"
            )
            fix = f"raise {key} or rollout.tp, or shorten sequences"
            yield Finding("memory", key, problem, fix)
    needed = sum(expected.host.values())
    if host_bytes is not None and needed > host_bytes:
        largest = max(expected.host, key=lambda name: expected.host[name])
        problem = (
            f"a node's processes need {needed / GIB:.1f} GiB of its {host_bytes / GIB:.1f} GiB, most for {largest}"
        )
        fix = "use more nodes, ask Slurm for more (--mem), or set actor.engine.offload=false where the device has room"
        # What a process takes beside its tensors is assumed: on the word of that alone no job is refused.
        sure = needed - expected.host["processes"]
        yield Finding("memory", "host memory", problem, fix, "error" if sure > host_bytes else "warning")


def _key(config: TrainConfig | SftConfig, phase: str, parts: dict[str, int]) -> str:
    largest = max(parts, key=lambda name: parts[name])
    if largest in ("kv cache", "engine weights"):
        return "rollout.gpu_memory_utilization"
    role = "critic" if largest.startswith("critic") else "actor"
    return f"{role}.engine.microbatch_tokens" if largest.endswith("pass") else f"{role}.layout"


def _fix(config: TrainConfig | SftConfig, phase: str) -> str:
    role = "critic" if phase in ("values", "update_critic") else "actor"
    part = config.critic if role == "critic" and isinstance(config, TrainConfig) else config.actor
    assert part is not None
    options = []
    if isinstance(config, TrainConfig) and config.cluster.placement == "colocated" and not part.engine.offload:
        options.append(f"set {role}.engine.offload=true")
    if phase.startswith("update"):
        if part.engine.recompute != "full":
            options.append(f"set {role}.engine.recompute=full")
        options.append(f"lower {role}.engine.microbatch_tokens")
    if phase == "evaluation":
        options.append(f"lower {role}.engine.inference_microbatch_tokens")
    if phase == "rollout":
        options.append("lower rollout.gpu_memory_utilization")
    options.append(f"raise {role}.layout.tp or {role}.layout.pp")
    return ", ".join(options)
