"""Published runs as data, and how far the step-time model is from them.

Only figures that stand in a source are here. NeMo RL's tables give seconds of a step; its recipes give the layouts. The
HybridFlow paper (arXiv:2409.19256) shows throughput as bars without numbers, and NeMo-Aligner's table
(arXiv:2405.01481) could not be read where this was written: neither is guessed at.
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
# The tables state the mean length of a whole sequence; the prompt's share of it is an assumption.
PROMPT_TOKENS = 150.0


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

    @property
    def spec(self) -> ModelSpec:
        """The model's numbers."""
        return known_spec(self.model)

    def predicted(self) -> StepTime:
        """What the model says."""
        return step_time(self.spec, gpu_named(self.gpu), self.work, self.place)


def _grpo(mean_tokens: float) -> Workload:
    # 64 prompts of 32 responses, four updates of 512; loss with a KL to the reference; an old log-prob pass.
    return Workload(64, 32, PROMPT_TOKENS, mean_tokens - PROMPT_TOKENS, 4096 - int(PROMPT_TOKENS), 4, 1, True, True)


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
        _grpo(mean_tokens), place,
    )  # fmt: skip


RUNS: tuple[PublishedRun, ...] = (
    _llama("0.4", 1060, 97.7, off=False, pp=2),
    _llama("0.4", 1129, 74.6, off=True, pp=2),
    _qwen("0.4", 3206, 393.0, off=False),
    _qwen("0.4", 3207, 215.0, off=True),
    _llama("0.5", 1019, 92.8, off=False, pp=2),
    _llama("0.5", 1123, 64.8, off=True, pp=1),
    _qwen("0.5", 3251, 376.0, off=False),
    _qwen("0.5", 3252, 200.0, off=True),
)
"""Dense models on H100 (DGX-H100, bfloat16, Megatron-Core): releases 0.4 and 0.5 of NeMo RL."""


def errors() -> Iterator[tuple[PublishedRun, float]]:
    """Each run with the model's relative error: positive where it predicts too long."""
    for run in RUNS:
        yield run, run.predicted().step_s / run.step_s - 1


def table() -> str:
    """Measured and predicted seconds of each run, phases of the prediction, mean absolute error."""
    lines = [f"{'run':<38} {'GPUs':>4} {'measured':>8} {'predicted':>9} {'error':>7}  seconds by phase"]
    total = 0.0
    for run, error in errors():
        predicted = run.predicted()
        phases = " ".join(f"{name} {seconds:.0f}" for name, seconds in predicted.phases.items())
        numbers = f"{run.num_gpus:>4} {run.step_s:>8.1f} {predicted.step_s:>9.1f} {error:>+7.0%}"
        lines.append(f"{run.name:<38} {numbers}  {phases}")
        total += abs(error)
    lines.append(f"mean absolute error {total / len(RUNS):.0%} over {len(RUNS)} runs")
    return "\n".join([*lines, f"source: {_PAGE}; {_RECIPES}"])
