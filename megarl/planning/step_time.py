"""Seconds of a step by phase, from the model's numbers, the layouts and the GPU kind.

Every formula counts work (operations, bytes over memory, over a link, over the network) and divides it by a stated
share of the device's peak. The shares are the constants below: set before the model was compared with any run, and not
fitted. ``megarl plan --published`` prints its error on published runs (``published.py``).

Invariants:
1. A phase's seconds are those of its slowest device.
2. Nothing overlaps that megarl does not overlap: gradients are reduced after the backward pass, weights are published
   after the update. One step off, rollout and training overlap and the longer of them counts.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import NormalDist

from megarl.models import ModelSpec
from megarl.parallel.grid import ParallelLayout
from megarl.planning.gpus import Gpu
from megarl.planning.memory import engine_bytes
from megarl.planning.state import WEIGHT_BYTES

MATMUL_SHARE = 0.42
"""Of peak operations, in training and log-prob passes: products with all that runs between them."""
PREFILL_SHARE = 0.42
MEMORY_SHARE = 0.7
"""Of memory bandwidth in decoding and optimizer steps."""
LINK_SHARE = 0.7
NETWORK_SHARE = 0.7
HOST_SHARE = 0.5
DECODE_STEP_S = 0.004
"""Of a decoding step whatever its size: scheduler, kernel launches, sampler."""
DECODE_SEQUENCE_S = 15e-6
"""Of a decoding step for each running sequence, on the engine's host."""
ALL_REDUCE_S = 15e-6
"""Of a small all-reduce inside a node."""
LENGTH_SIGMA = 0.6
"""Spread of response lengths: deviation of their logarithm before they are cut at the limit."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What a step computes.

    Args:
        prompts: prompts of a step.
        samples: responses of a prompt.
        prompt_tokens: mean prompt length.
        response_tokens: mean response length.
        longest_response: limit of a response.
        updates: optimizer updates of a step.
        epochs: passes over the batch.
        old_log_probs: a pass of the actor before the update.
        reference: a pass of the reference policy.
        critic: values and updates of a critic of the actor's size.
    """

    prompts: int
    samples: int
    prompt_tokens: float
    response_tokens: float
    longest_response: int
    updates: int = 1
    epochs: int = 1
    old_log_probs: bool = True
    reference: bool = False
    critic: bool = False

    @property
    def sequences(self) -> int:
        """Responses of a step."""
        return self.prompts * self.samples

    @property
    def tokens(self) -> float:
        """Prompt and response tokens of a step."""
        return self.sequences * (self.prompt_tokens + self.response_tokens)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a step runs.

    Args:
        layout: of the actor (and the critic).
        replicas: rollout engines.
        rollout_tp: tensor-parallel size of an engine.
        colocated: engines share the actor's GPUs.
        offload: training state leaves the GPU while engines sample.
        one_step_off: rollout of a step overlaps the training of the one before; split only.
        recompute: none, selective or full.
        microbatch_tokens: cap of a training microbatch; inference passes take the same.
        max_num_seqs: sequences an engine runs at once.
        gpu_memory_utilization: of an engine.
        gpus_per_node: GPUs of a node.
    """

    layout: ParallelLayout
    replicas: int
    rollout_tp: int
    colocated: bool = True
    offload: bool = True
    one_step_off: bool = False
    recompute: str = "none"
    microbatch_tokens: int = 16384
    max_num_seqs: int = 256
    gpu_memory_utilization: float = 0.85
    gpus_per_node: int = 8

    @property
    def num_gpus(self) -> int:
        """GPUs of all roles."""
        engines = self.replicas * self.rollout_tp
        return max(self.layout.world_size, engines) if self.colocated else self.layout.world_size + engines


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds by phase, and how they add up."""

    phases: dict[str, float] = field(default_factory=dict)
    one_step_off: bool = False

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        if not self.one_step_off:
            return sum(self.phases.values())
        sync = self.phases.get("weight_sync", 0.0)
        rollout = self.phases["rollout"]
        return max(rollout, sum(self.phases.values()) - rollout - sync) + sync


def step_time(spec: ModelSpec, gpu: Gpu, work: Workload, place: Placement) -> StepTime:
    """Seconds of each phase of a step. Raises LayoutError where the model does not divide."""
    phases = {"rollout": rollout_s(spec, gpu, work, place)}
    forward = pass_s(spec, gpu, work, place)
    if work.old_log_probs:
        phases["old_log_probs"] = forward
    if work.reference:
        phases["ref_log_probs"] = forward
    update = update_s(spec, gpu, work, place)
    if work.critic:
        phases["values"] = forward
        phases["update_critic"] = update
    phases["update_actor"] = update
    phases["weight_sync"] = sync_s(spec, gpu, place)
    if place.colocated and place.offload:
        phases["turns"] = _turns_s(spec, gpu, work, place)
    return StepTime(phases, place.one_step_off)


# Rollout


def response_lengths(count: int, mean: float, longest: int, sigma: float = LENGTH_SIGMA) -> list[float]:
    """Quantiles of a log-normal length cut at ``longest`` whose mean is ``mean``, ascending."""
    if mean >= longest:
        return [float(longest)] * count
    normal = NormalDist()
    scores = [math.exp(sigma * normal.inv_cdf((index + 0.5) / count)) for index in range(count)]
    low, high = 0.0, longest / min(scores)
    for _ in range(60):
        scale = (low + high) / 2
        if sum(min(scale * score, longest) for score in scores) < mean * count:
            low = scale
        else:
            high = scale
    return [max(1.0, min(high * score, longest)) for score in scores]


def rollout_s(spec: ModelSpec, gpu: Gpu, work: Workload, place: Placement) -> float:
    """Prefill and decoding on the engine that ends last, its longest response to the end."""
    # Of the layouts of a search many have the same engines.
    engines = replace(place, layout=ParallelLayout(), recompute="none", offload=True, one_step_off=False)
    return _rollout_s(spec, gpu, work, engines)


@lru_cache(maxsize=256)
def _rollout_s(spec: ModelSpec, gpu: Gpu, work: Workload, place: Placement) -> float:
    share = -(-work.sequences // place.replicas)
    lengths = response_lengths(share, work.response_tokens, work.longest_response)
    lengths[-1] = response_lengths(work.sequences, work.response_tokens, work.longest_response)[-1]
    tp = place.rollout_tp
    # vLLM computes a prompt once for all its samples.
    flops = spec.flops_per_token(round(work.prompt_tokens)) * work.prompt_tokens * share / work.samples
    prefill = flops / (tp * gpu.peak_flops * PREFILL_SHARE)
    weights, kv_token = engine_bytes(spec, tp, "bfloat16")
    room = max(1.0, (place.gpu_memory_utilization * gpu.memory_bytes - weights - 2 * 2**30) / kv_token)
    return prefill + _decode_s(spec, gpu, lengths, work.prompt_tokens, tp, place.max_num_seqs, weights, kv_token, room)


def _decode_s(
    spec: ModelSpec,
    gpu: Gpu,
    lengths: Sequence[float],
    prompt: float,
    tp: int,
    most: int,
    weights: int,
    kv_token: int,
    room_tokens: float,
) -> float:
    """Continuous batching: sequences start as others end, as far as slots and cache allow; time between two ends."""
    # A fixed shuffle: neighbours of the sorted lengths are spread over the order of arrival.
    count = len(lengths)
    step = next(k for k in range(max(1, round(0.618 * count)), 2 * count + 2) if math.gcd(k, count) == 1)
    waiting = [lengths[(index * step) % count] for index in range(count)][::-1]
    running: list[tuple[float, float]] = []  # end and start, in tokens decoded since the beginning
    clock = seconds = starts = 0.0
    reserved = 0.0
    while waiting or running:
        while waiting and len(running) < most and (not running or reserved + prompt + waiting[-1] <= room_tokens):
            length = waiting.pop()
            heapq.heappush(running, (clock + length, clock))
            starts += clock
            reserved += prompt + length
        end, start = heapq.heappop(running)
        batch = len(running) + 1
        context = batch * prompt + batch * (clock + end) / 2 - starts
        seconds += (end - clock) * _token_s(spec, gpu, batch, context, tp, weights, kv_token)
        clock = end
        starts -= start
        reserved -= prompt + end - start
    return seconds


def _token_s(spec: ModelSpec, gpu: Gpu, batch: int, context: float, tp: int, weights: int, kv_token: int) -> float:
    """One decoding step of a batch with this many tokens in its caches."""
    memory = (weights + context * kv_token) / (gpu.memory_bytes_per_s * MEMORY_SHARE)
    compute = batch * spec.flops_per_token(0) / (tp * gpu.peak_flops * PREFILL_SHARE)
    reduce = 0.0
    if tp > 1:
        moved = 2 * (tp - 1) / tp * batch * spec.hidden_size * 2
        reduce = 2 * spec.num_layers * (ALL_REDUCE_S + moved / (gpu.link_bytes_per_s * LINK_SHARE))
    return max(memory, compute) + reduce + DECODE_STEP_S + DECODE_SEQUENCE_S * batch


# Passes and updates


def pass_s(spec: ModelSpec, gpu: Gpu, work: Workload, place: Placement) -> float:
    """A pass without gradients over the batch."""
    return _pipeline_s(spec, gpu, work, place, tokens=work.tokens, factor=1.0, transfers=1)


def update_s(spec: ModelSpec, gpu: Gpu, work: Workload, place: Placement) -> float:
    """All optimizer updates of a step."""
    factor = 4.0 if place.recompute == "full" else 3.0
    transfers = 3 if place.recompute == "full" else 2
    tokens = work.tokens * work.epochs / work.updates
    one = _pipeline_s(spec, gpu, work, place, tokens=tokens, factor=factor, transfers=transfers)
    return work.updates * (one + _reduce_s(spec, gpu, place) + _optimizer_s(spec, gpu, place))


def _pipeline_s(
    spec: ModelSpec, gpu: Gpu, work: Workload, place: Placement, *, tokens: float, factor: float, transfers: int
) -> float:
    """Microbatches through 1F1B: ``m + p - 1`` slots of the slowest stage.

    Args:
        spec: the model.
        gpu: GPU kind.
        work: the step.
        place: layouts.
        tokens: of all replicas.
        factor: operations relative to a forward pass.
        transfers: times that a layer's tensor-parallel exchanges happen (forward, backward, recomputed).
    """
    layout = place.layout
    mine = tokens / layout.dp
    count = max(1, math.ceil(mine / place.microbatch_tokens))
    if layout.pp > 1:
        count = max(count, min(2 * layout.pp, math.ceil(work.sequences / work.updates / layout.dp)))
    each = mine / count
    length = round(work.prompt_tokens + work.response_tokens)
    own = each / layout.cp
    # Virtual stages of a spelled pipeline may differ in layers.
    layers = max(
        sum(len(layout.layers_of_stage(spec.num_layers, stage, chunk)) for chunk in range(layout.vpp))
        for stage in range(layout.pp)
    )
    flops = factor * spec.flops_per_token(length) * own / layout.tp * layers / spec.num_layers
    slot = flops / (gpu.peak_flops * MATMUL_SHARE)
    if layout.tp > 1:
        link = (
            gpu.link_bytes_per_s * LINK_SHARE
            if layout.tp <= place.gpus_per_node
            else gpu.network_bytes_per_s * NETWORK_SHARE
        )
        moved = 2 * (layout.tp - 1) / layout.tp * own * spec.hidden_size * 2
        slot += layers * transfers * 2 * (moved / link + ALL_REDUCE_S)
    if layout.cp > 1:
        # Keys and values of all other ranks, and their gradients.
        is_inside = layout.tp * layout.cp <= place.gpus_per_node
        link = gpu.link_bytes_per_s * LINK_SHARE if is_inside else gpu.network_bytes_per_s * NETWORK_SHARE
        moved = (layout.cp - 1) * own * 2 * spec.kv_size / layout.tp * 2
        slot += layers * transfers * (moved / link + ALL_REDUCE_S)
    if spec.moe is not None and layout.ep > 1:
        # Out and back; each rank sends its own tokens to top_k experts, most of them on other ranks.
        is_inside = layout.ep * layout.etp <= place.gpus_per_node
        link = gpu.link_bytes_per_s * LINK_SHARE if is_inside else gpu.network_bytes_per_s * NETWORK_SHARE
        visits = spec.moe.top_k * (layout.ep - 1) / layout.ep * own / layout.tp
        share = spec.num_expert_layers / spec.num_layers
        slot += layers * share * transfers * 2 * (visits * spec.hidden_size * 2 / link + ALL_REDUCE_S)
    if layout.pp > 1:
        crosses = layout.tp * layout.cp * layout.dp >= place.gpus_per_node
        link = gpu.network_bytes_per_s * NETWORK_SHARE if crosses else gpu.link_bytes_per_s * LINK_SHARE
        width = spec.hidden_size / (layout.tp if layout.sequence_parallel else 1)
        # With virtual stages a microbatch passes each stage as often as it has of them.
        slot += min(transfers, 2) * own * width * 2 / link * layout.vpp
    return (count + (layout.pp - 1) / layout.vpp) * slot


def _rank_parameters(spec: ModelSpec, layout: ParallelLayout) -> tuple[float, float]:
    """Parameters of a rank: those outside of experts, and those of its experts."""
    moe = spec.moe
    experts = (
        0 if moe is None else spec.num_expert_layers * moe.num_experts * 3 * spec.hidden_size * moe.ffn_hidden_size
    )
    return (
        (spec.num_parameters() - experts) / (layout.tp * layout.pp),
        experts / (layout.ep * layout.etp * layout.pp),
    )


def _reduce_s(spec: ModelSpec, gpu: Gpu, place: Placement) -> float:
    """Float32 gradients reduce-scattered, bfloat16 weights gathered over the replicas of a shard."""
    layout = place.layout
    crosses = layout.tp * layout.cp * layout.dp > place.gpus_per_node
    link = gpu.network_bytes_per_s * NETWORK_SHARE if crosses else gpu.link_bytes_per_s * LINK_SHARE
    parameters, replicas = _rank_parameters(spec, layout), (layout.dp * layout.cp, layout.expert_dp)
    return sum(own * (4 + 2) * (dp - 1) / dp / link for own, dp in zip(parameters, replicas, strict=True))


def _optimizer_s(spec: ModelSpec, gpu: Gpu, place: Placement) -> float:
    """Adam reads gradient, master weight and two moments and writes the last three and the weight, four bytes each."""
    return _sharded(spec, place.layout) * 8 * 4 / (gpu.memory_bytes_per_s * MEMORY_SHARE)


def _sharded(spec: ModelSpec, layout: ParallelLayout) -> float:
    """Parameters whose optimizer state a rank holds."""
    outside, experts = _rank_parameters(spec, layout)
    return outside / (layout.dp * layout.cp) + experts / layout.expert_dp


# Weights and turns


def sync_s(spec: ModelSpec, gpu: Gpu, place: Placement) -> float:
    """Every engine rank receives its part once, over the network unless all is inside a node."""
    weights, _ = engine_bytes(spec, place.rollout_tp, "bfloat16")
    inside = place.colocated and place.num_gpus <= place.gpus_per_node
    link = gpu.link_bytes_per_s * LINK_SHARE if inside else gpu.network_bytes_per_s * NETWORK_SHARE
    # Owners send to all replicas: their links, too, carry each byte once for each replica.
    sent = spec.num_parameters() * WEIGHT_BYTES["bfloat16"] * place.replicas / place.layout.world_size
    return max(weights, sent) / link


def _turns_s(spec: ModelSpec, gpu: Gpu, work: Workload, place: Placement) -> float:
    """Training state to the host and back: weights and optimizer, of each role."""
    layout = place.layout
    weights = 2 * sum(_rank_parameters(spec, layout))
    state = weights + 12 * _sharded(spec, layout)
    if work.reference:
        state += weights
    roles = 2 if work.critic else 1
    return 2 * roles * state / (gpu.host_bytes_per_s * HOST_SHARE)
