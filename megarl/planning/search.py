"""Layouts that fit a number of GPUs, ranked by predicted step time, and why the others do not fit.

Every candidate is the configuration itself with other degrees, judged by the same forecast and checks as the doctor's:
what the search offers, the doctor accepts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from megarl.config.schema import TrainConfig
from megarl.errors import ConfigError, LayoutError
from megarl.models import ModelSpec
from megarl.planning.finding import errors
from megarl.planning.forecast import forecast
from megarl.planning.fp8 import check_fp8
from megarl.planning.gpus import GIB, Gpu
from megarl.planning.model_fit import check_specs
from megarl.planning.step_time import Placement, StepTime, Workload, step_time

ROOM = 0.95
"""Of a device's memory that a phase may take."""
DEGREES = (1, 2, 4, 8)
EXPERT_DEGREES = (1, 2, 4, 8, 16, 32, 64)
MOST_STAGES = 16
SPLIT_SHARES = (0.25, 0.5, 0.75)
"""Of the nodes that train where roles are split."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to place a run.

    Args:
        placement: layouts, engines and mode.
        time: predicted seconds.
        fullest: phase that takes most memory, and its bytes.
        overrides: ``key=value`` that make the configuration this one.
    """

    placement: Placement
    time: StepTime
    fullest: tuple[str, int]
    overrides: tuple[str, ...]

    def line(self, gpu: Gpu) -> str:
        """For a table."""
        layout, place = self.placement.layout, self.placement
        mode = "colocated" if place.colocated else "one step off" if place.one_step_off else "split"
        phase, size = self.fullest
        ep = f" ep{layout.ep}" if layout.ep > 1 else ""
        return (
            f"{self.time.step_s:>8.1f} s  {mode:<12} actor tp{layout.tp} pp{layout.pp} dp{layout.dp}{ep} "
            f"recompute {place.recompute:<5} engines {place.replicas} x tp{place.rollout_tp}  "
            f"{size / GIB:.0f} of {gpu.memory_bytes / GIB:.0f} GiB in {phase}"
        )


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found: candidates by step time, and reasons with how many candidates each of them ruled out."""

    candidates: list[Candidate]
    rejected: Counter[str]


def workload(config: TrainConfig, *, mean_prompt: float | None = None, mean_response: float | None = None) -> Workload:
    """The work of a step; lengths that are not given are half of their limits."""
    data, rollout, algorithm = config.data, config.rollout, config.algorithm
    batch = data.prompts_per_step * rollout.samples_per_prompt
    size = algorithm.minibatch_size
    return Workload(
        data.prompts_per_step,
        rollout.samples_per_prompt,
        data.max_prompt_tokens / 2 if mean_prompt is None else mean_prompt,
        rollout.sampling.max_tokens / 2 if mean_response is None else mean_response,
        rollout.sampling.max_tokens,
        updates=algorithm.epochs * (1 if size is None else -(-batch // size)),
        epochs=algorithm.epochs,
        old_log_probs=algorithm.old_log_probs == "decoupled",
        reference=algorithm.kl.where != "none",
        critic=config.critic is not None,
    )


def placement_of(config: TrainConfig, *, one_step_off: bool = False) -> Placement:
    """The configuration's own placement."""
    engine, cluster, rollout = config.actor.engine, config.cluster, config.rollout
    return Placement(
        config.actor.layout.grid(),
        rollout.replicas,
        rollout.tp,
        colocated=cluster.placement == "colocated",
        offload=engine.offload,
        one_step_off=one_step_off,
        recompute=engine.recompute,
        microbatch_tokens=engine.microbatch_tokens,
        max_num_seqs=rollout.max_num_seqs,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        gpus_per_node=cluster.gpus_per_node,
    )


def search(
    config: TrainConfig,
    spec: ModelSpec,
    gpu: Gpu,
    num_gpus: int,
    work: Workload,
    *,
    one_step_off: bool = False,
) -> Found:
    """All placements on a number of GPUs.

    Args:
        config: what everything else is taken from: batch, lengths, precision, caps.
        spec: the model; a critic is taken to be of its size, at the actor's layout.
        gpu: kind of GPU.
        num_gpus: GPUs of the run, whole nodes.
        work: the step.
        one_step_off: also where rollout runs a step ahead of training on its own GPUs.
    """
    found: list[Candidate] = []
    rejected: Counter[str] = Counter()
    for changed, off in _candidates(config, spec, num_gpus, one_step_off):
        try:
            reason = _judge(changed, spec, gpu, work)
            if reason is not None:
                rejected[reason] += 1
                continue
            expected = forecast(changed, spec, spec, gpu)
        except LayoutError as error:
            rejected[error.problem] += 1
            continue
        phase, size = max(
            ((phase, sum(parts.values())) for phase, parts in expected.phases.items()), key=lambda p: p[1]
        )
        if size > ROOM * gpu.memory_bytes:
            rejected[f"{phase} needs more than {ROOM:.0%} of the device's memory"] += 1
            continue
        longest = changed.data.max_prompt_tokens + changed.rollout.sampling.max_tokens
        if expected.kv_tokens is not None and expected.kv_tokens < longest:
            rejected["an engine's cache does not hold the longest sequence"] += 1
            continue
        place = placement_of(changed, one_step_off=off)
        found.append(Candidate(place, step_time(spec, gpu, work, place), (phase, size), _overrides(changed)))
    found.sort(key=lambda candidate: candidate.time.step_s)
    return Found(found, rejected)


def report(
    config: TrainConfig, spec: ModelSpec, gpu: Gpu, work: Workload, *, one_step_off: bool = False, top: int = 10
) -> str:
    """The configuration's own step time, the best placements on its GPUs, and why others do not fit."""
    num_gpus = config.cluster.num_nodes * config.cluster.gpus_per_node
    if num_gpus == 0:
        raise ConfigError(
            "the preset runs on CPU: there is no GPU to plan for", fix="give --gpus and cluster.device=cuda"
        )
    own = step_time(spec, gpu, work, placement_of(config))
    lines = [
        f"{num_gpus} {gpu.name.upper()}, {work.sequences} responses, mean {work.prompt_tokens:.0f} + "
        f"{work.response_tokens:.0f} tokens",
        f"as configured: {own.step_s:.1f} s a step: " + ", ".join(f"{n} {s:.1f}" for n, s in own.phases.items()),
        forecast(config, spec, spec, gpu).table(),
    ]
    found = search(config, spec, gpu, num_gpus, work, one_step_off=one_step_off)
    lines.append(f"{len(found.candidates)} placements fit{'; the fastest:' if found.candidates else ''}")
    lines += [f"  {candidate.line(gpu)}" for candidate in found.candidates[:top]]
    if found.candidates:
        lines.append(f"the first: {' '.join(found.candidates[0].overrides)}")
    lines.append(f"{sum(found.rejected.values())} do not fit:")
    lines += [f"  {count:>4}  {reason}" for reason, count in found.rejected.most_common()]
    return "\n".join(lines)


def _candidates(
    config: TrainConfig, spec: ModelSpec, num_gpus: int, one_step_off: bool
) -> Iterator[tuple[TrainConfig, bool]]:
    per_node = config.cluster.gpus_per_node
    nodes = max(1, num_gpus // per_node)
    splits = [(num_gpus, num_gpus, "colocated", False)]
    # Experts are dealt out over powers of two: so many nodes train as well, beside what is left.
    for share in sorted({round(share * nodes) for share in SPLIT_SHARES} | {1 << (nodes - 1).bit_length() >> 1}):
        training = share * per_node
        if 0 < training < num_gpus:
            splits.append((training, num_gpus - training, "split", False))
            if one_step_off:
                splits.append((training, num_gpus - training, "split", True))
    stages = [pp for pp in range(1, MOST_STAGES + 1) if spec.num_layers % pp == 0 or _outer(spec.num_layers, pp)]
    dealt = [1] if spec.moe is None else [ep for ep in EXPERT_DEGREES if spec.moe.num_experts % ep == 0]
    for (training, rollout, mode, off), tp, pp, ep, engine_tp, recompute in product(
        splits, DEGREES, stages, dealt, DEGREES, ("none", "full")
    ):
        ranks = tp * pp * config.actor.layout.cp
        if training % ranks or rollout % engine_tp or max(tp, engine_tp) > per_node:
            continue
        if training // pp % (ep * config.actor.layout.etp):
            continue
        first, last = _outer(spec.num_layers, pp) or (None, None)
        layout = config.actor.layout.model_copy(
            update={
                "tp": tp, "pp": pp, "dp": training // ranks, "ep": ep, "sequence_parallel": tp > 1,
                "num_layers_in_first_stage": first, "num_layers_in_last_stage": last, "vpp": 1, "pipeline": None,
            }
        )  # fmt: skip
        engine = config.actor.engine.model_copy(update={"recompute": recompute, "offload": mode == "colocated"})
        part = {"layout": layout, "engine": engine}
        update = {
            "actor": config.actor.model_copy(update=part),
            "critic": None if config.critic is None else config.critic.model_copy(update=part),
            "rollout": config.rollout.model_copy(update={"tp": engine_tp, "replicas": rollout // engine_tp}),
            "cluster": config.cluster.model_copy(update={"num_nodes": nodes, "placement": mode}),
        }
        yield config.model_copy(update=update), off


def _outer(num_layers: int, pp: int) -> tuple[int, int] | None:
    """Layers of the first and last of a power of two of stages that do not divide them: a layer or so fewer."""
    if num_layers % pp == 0 or pp < 4 or pp & (pp - 1):
        return None
    rest = num_layers - (pp - 2) * -(-num_layers // pp)
    return (rest - rest // 2, rest // 2) if rest >= 2 else None


def _judge(config: TrainConfig, spec: ModelSpec, gpu: Gpu, work: Workload) -> str | None:
    """The first reason that rules a candidate out before its memory is looked at."""
    if problems := errors([*check_specs(config, spec, spec), *check_fp8(config, spec, spec, gpu)]):
        return f"{problems[0].key}: {problems[0].problem}"
    rows = work.sequences / work.updates * work.epochs
    dp, replicas = config.actor.layout.dp, config.rollout.replicas
    if rows < dp:
        return f"an update has {rows:.0f} rows, fewer than data-parallel ranks"
    if work.prompts < replicas:
        return f"a step has {work.prompts} prompts, fewer than engines"
    return None


def _overrides(config: TrainConfig) -> tuple[str, ...]:
    layout = config.actor.layout
    values = {
        "cluster.num_nodes": config.cluster.num_nodes,
        "cluster.placement": config.cluster.placement,
        "actor.layout.tp": layout.tp,
        "actor.layout.pp": layout.pp,
        "actor.layout.dp": layout.dp,
        "actor.layout.ep": layout.ep,
        "actor.layout.num_layers_in_first_stage": layout.num_layers_in_first_stage or "null",
        "actor.layout.num_layers_in_last_stage": layout.num_layers_in_last_stage or "null",
        "actor.layout.sequence_parallel": str(layout.sequence_parallel).lower(),
        "actor.engine.recompute": config.actor.engine.recompute,
        "actor.engine.offload": str(config.actor.engine.offload).lower(),
        "rollout.tp": config.rollout.tp,
        "rollout.replicas": config.rollout.replicas,
    }
    return tuple(f"{key}={value}" for key, value in values.items())
