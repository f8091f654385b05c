"""Published runs as data, and how far the step-time model is from them.

Only figures that stand in a source are here. NeMo RL's tables give seconds of a step; its recipes give the layouts.
NeMo-Aligner's user guide has the table of its paper (arXiv:2405.01481) without layouts, which are assumed. HybridFlow's
paper (arXiv:2409.19256) shows throughput as bars without numbers: it is not guessed at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megarl.models import ModelSpec
from megarl.parallel.grid import ParallelLayout
from megarl.planning.gpus import gpu_named
from megarl.planning.known_models import known_spec
from megarl.planning.step_time import Placement, StepTime, Workload, step_time

_PAGE = "github.com/NVIDIA-NeMo/RL docs/about/performance-summary.md"
_RECIPES = "examples/configs/recipes/llm/performance"
_GUIDE = "github.com/NVIDIA/NeMo-Aligner docs/user-guide/rlhf.rst"
# The tables state the mean length of a whole sequence; the prompt's share of it is an assumption.
PROMPT_TOKENS = 150.0

DENSE, EXPERTS, ALIGNER = "NeMo RL, dense", "NeMo RL, experts", "NeMo-Aligner"
GROUPS = (DENSE, EXPERTS, ALIGNER)
"""Kinds of runs whose errors are of one kind."""


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """One row of a published table.

    Args:
        name: model and mode.
        source: where the figure stands.
        recipe: where the layout stands.
        model: name of the model (``known_models.py``).
        gpu: GPU kind.
        num_gpus: of all roles.
        step_s: measured seconds of a step.
        work: what the step computes.
        place: where it runs.
        group: the kind of run.
    """

    name: str
    source: str
    recipe: str
    model: str
    gpu: str
    num_gpus: int
    step_s: float
    work: Workload
    place: Placement
    group: str = DENSE

    @property
    def spec(self) -> ModelSpec:
        """The model's numbers."""
        return known_spec(self.model)

    def predicted(self) -> StepTime:
        """What the model says."""
        return step_time(self.spec, gpu_named(self.gpu), self.work, self.place)


def _grpo(mean_tokens: float, release: str = "0.4", *, prompts: int = 64, longest: int = 4096) -> Workload:
    # 32 responses a prompt; loss with a KL to the reference. Updates of 512 after an old log-prob pass; release 0.7
    # trains on the 2,048 in one update and, by its recipe (read for Qwen3-30B-A3B), without that pass.
    is_one_update = release == "0.7" and prompts == 64
    updates = 1 if is_one_update else prompts * 32 // 512
    limit = longest - int(PROMPT_TOKENS)
    return Workload(
        prompts, 32, PROMPT_TOKENS, mean_tokens - PROMPT_TOKENS, limit, updates, 1, not is_one_update, reference=True
    )


def _llama(release: str, mean_tokens: float, step_s: float, *, off: bool, pp: int) -> PublishedRun:
    layout = ParallelLayout(pp=pp, dp=(8 if off else 16) // pp)
    place = Placement(
        layout, 8 if off else 16, 1,
        colocated=not off, offload=not off, one_step_off=off, recompute="full", microbatch_tokens=4096,
        gpu_memory_utilization=0.8 if off else 0.6,
    )  # fmt: skip
    mode = "1-step off" if off else "on-policy"
    recipe = f"{_RECIPES}/{'async-' if off else ''}grpo-llama3.1-8b-instruct-2n8g.yaml"
    return PublishedRun(
        f"NeMo RL {release} Llama-3.1-8B {mode}", _PAGE, recipe, "Llama-3.1-8B", "h100", 16, step_s,
        _grpo(mean_tokens), place,
    )  # fmt: skip


def _qwen(release: str, mean_tokens: float, step_s: float, *, off: bool) -> PublishedRun:
    layout = ParallelLayout(tp=4, pp=4, dp=2, sequence_parallel=True)
    place = Placement(
        layout, 8, 4,
        colocated=not off, offload=not off, one_step_off=off, recompute="none", microbatch_tokens=4096,
        gpu_memory_utilization=0.8 if off else 0.6,
    )  # fmt: skip
    mode = "1-step off" if off else "on-policy"
    recipe = f"{_RECIPES}/{'grpo-qwen3-32b-8n8g-async-1off' if off else 'grpo-qwen3-32b-4n8g'}.yaml"
    return PublishedRun(
        f"NeMo RL {release} Qwen3-32B {mode}", _PAGE, recipe, "Qwen3-32B", "h100", 64 if off else 32, step_s,
        _grpo(mean_tokens, release), place,
    )  # fmt: skip


def _engines(replicas: int, tp: int, layout: ParallelLayout, *, off: bool, recompute: str, tokens: int) -> Placement:
    return Placement(
        layout, replicas, tp,
        colocated=not off, offload=not off, one_step_off=off, recompute=recompute, microbatch_tokens=tokens,
        gpu_memory_utilization=0.8 if off else 0.6,
    )  # fmt: skip


def _qwen_30b_a3b(release: str, mean_tokens: float, step_s: float, place: Placement) -> PublishedRun:
    mode = "1-step off" if place.one_step_off else "on-policy"
    recipe = f"{_RECIPES}/grpo-qwen3-30ba3b-4n8g{'-async-1off' if place.one_step_off else ''}.yaml"
    return PublishedRun(
        f"NeMo RL {release} Qwen3-30B-A3B {mode}", _PAGE, recipe, "Qwen3-30B-A3B", "h100", 32, step_s,
        _grpo(mean_tokens, release), place, EXPERTS,
    )  # fmt: skip


def _qwen_235b(release: str, mean_tokens: float, step_s: float, *, num_gpus: int, off: bool = False) -> PublishedRun:
    training = num_gpus // 2 if off else num_gpus
    tp, cp = (4, 1) if off else (2, 2)
    layout = ParallelLayout(
        tp=tp, cp=cp, pp=8, dp=training // (8 * tp * cp), ep=16, sequence_parallel=True,
        first_stage_layers=11, last_stage_layers=11,
    )  # fmt: skip
    engine_tp = 8 if off else 16
    place = _engines(
        (num_gpus - training if off else num_gpus) // engine_tp, engine_tp, layout,
        off=off, recompute="full", tokens=8192,
    )  # fmt: skip
    mode = "1-step off" if off else "on-policy"
    recipe = f"{_RECIPES}/grpo-qwen3-235b-{num_gpus // 8}n8g{'-async-1off' if off else ''}.yaml"
    return PublishedRun(
        f"NeMo RL {release} Qwen3-235B {mode}", _PAGE, recipe, "Qwen3-235B-A22B", "h100", num_gpus, step_s,
        _grpo(mean_tokens, release, prompts=16, longest=8192), place, EXPERTS,
    )  # fmt: skip


def _aligner(nodes: int, response_tokens: float, step_s: float) -> PublishedRun:
    """Llama-3-70B under PPO: actor and sampling on these nodes, critic and reward model beside them on half as many.

    1,024 responses of at most 1,024 tokens in 8 updates. Assumed: prompts of HelpSteer2 have 500 tokens, the actor is
    at TP8 x PP4, the critic is never waited for. TensorRT-LLM samples 8 at a time, 16 on 64 nodes, as batches that end
    together, where the model has engines that start the next response as one ends.
    """
    layout = ParallelLayout(tp=8, pp=4, dp=nodes // 4, sequence_parallel=True)
    place = Placement(
        layout, nodes, 8, offload=False, recompute="selective", microbatch_tokens=1024,
        max_num_seqs=16 if nodes == 64 else 8, gpu_memory_utilization=0.5,
    )  # fmt: skip
    work = Workload(1024, 1, 500.0, response_tokens, 1024, 8, 1, old_log_probs=True, reference=True)
    name = f"NeMo-Aligner Llama-3-70B, {nodes} nodes"
    return PublishedRun(
        name, _GUIDE, "assumed", "Llama-3.1-70B", "h100", 8 * nodes, step_s, work, place, ALIGNER
    )  # fmt: skip


_EP8 = ParallelLayout(dp=32, ep=8)
_EP8_PP2 = ParallelLayout(pp=2, dp=8, ep=8)
_EP8_TP2 = ParallelLayout(tp=2, dp=16, ep=8, sequence_parallel=True)

RUNS: tuple[PublishedRun, ...] = (
    _llama("0.4", 1060, 97.7, off=False, pp=2),
    _llama("0.4", 1129, 74.6, off=True, pp=2),
    _qwen("0.4", 3206, 393.0, off=False),
    _qwen("0.4", 3207, 215.0, off=True),
    _llama("0.5", 1019, 92.8, off=False, pp=2),
    _llama("0.5", 1123, 64.8, off=True, pp=1),
    _qwen("0.5", 3251, 376.0, off=False),
    _qwen("0.5", 3252, 200.0, off=True),
    _qwen("0.7", 3256, 323.0, off=False),
    _qwen("0.7", 3258, 161.0, off=True),
    _qwen_30b_a3b("0.4", 3154, 225.0, _engines(8, 4, _EP8_TP2, off=False, recompute="none", tokens=4096)),
    _qwen_30b_a3b("0.4", 3158, 244.0, _engines(8, 2, _EP8_PP2, off=True, recompute="none", tokens=4096)),
    _qwen_30b_a3b("0.6", 3203, 192.0, _engines(16, 2, _EP8, off=False, recompute="none", tokens=4096)),
    _qwen_30b_a3b("0.6", 3201, 152.0, _engines(8, 2, _EP8_PP2, off=True, recompute="none", tokens=4096)),
    _qwen_30b_a3b("0.7", 3198, 171.0, _engines(16, 2, _EP8, off=False, recompute="none", tokens=4096)),
    _qwen_30b_a3b("0.7", 3203, 141.0, _engines(8, 2, _EP8_PP2, off=True, recompute="none", tokens=4096)),
    _qwen_235b("0.4", 5671, 506.0, num_gpus=128),
    _qwen_235b("0.4", 5691, 241.0, num_gpus=256, off=True),
    _qwen_235b("0.6", 5698, 395.0, num_gpus=128),
    _qwen_235b("0.6", 5713, 312.0, num_gpus=256),
    _qwen_235b("0.6", 5721, 231.0, num_gpus=256, off=True),
    _qwen_235b("0.7", 5719, 367.0, num_gpus=128),
    _qwen_235b("0.7", 5698, 285.0, num_gpus=256),
    _qwen_235b("0.7", 5695, 204.0, num_gpus=256, off=True),
    _aligner(8, 350.7, 366.7),
    _aligner(16, 323.3, 190.4),
    _aligner(32, 331.7, 108.0),
    _aligner(64, 334.0, 56.9),
)
"""Runs on H100: releases 0.4 to 0.7 of NeMo RL (DGX-H100, bfloat16, Megatron-Core), scaling of NeMo-Aligner's PPO."""


def errors(group: str = DENSE) -> Iterator[tuple[PublishedRun, float]]:
    """Each run of a group with the model's relative error: positive where it predicts too long."""
    for run in RUNS:
        if run.group == group:
            yield run, run.predicted().step_s / run.step_s - 1


def table() -> str:
    """Measured and predicted seconds of each run, phases of the prediction, each group's mean absolute error."""
    lines = [f"{'run':<39} {'GPUs':>4} {'measured':>8} {'predicted':>9} {'error':>7}  seconds by phase"]
    for group in GROUPS:
        found = list(errors(group))
        for run, error in found:
            predicted = run.predicted()
            phases = " ".join(f"{name} {seconds:.0f}" for name, seconds in predicted.phases.items())
            numbers = f"{run.num_gpus:>4} {run.step_s:>8.1f} {predicted.step_s:>9.1f} {error:>+7.0%}"
            lines.append(f"{run.name:<39} {numbers}  {phases}")
        mean = sum(abs(error) for _, error in found) / len(found)
        lines.append(f"{group}: mean absolute error {mean:.0%} over {len(found)} runs")
    return "\n".join([*lines, f"sources: {_PAGE}, {_RECIPES}; {_GUIDE}"])
