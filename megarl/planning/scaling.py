"""The best placement at each of several sizes: a table, and a drawing of step time and throughput.

matplotlib draws (extra ``plot``): files only, no display.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megarl.config.schema import TrainConfig
from megarl.errors import PlanError, SetupError
from megarl.models import ModelSpec
from megarl.planning.gpus import Gpu
from megarl.planning.search import Candidate, search
from megarl.planning.step_time import Workload


@dataclass(frozen=True, slots=True)
class Point:
    """One size: the best placement and what it does."""

    num_gpus: int
    best: Candidate
    work: Workload

    @property
    def tokens_per_gpu_s(self) -> float:
        """Prompt and response tokens of a step per second and GPU."""
        return self.work.tokens / self.best.time.step_s / self.num_gpus


def scale(
    config: TrainConfig,
    spec: ModelSpec,
    gpu: Gpu,
    sizes: Sequence[int],
    work: Workload,
    *,
    weak: bool = False,
    one_step_off: bool = False,
) -> list[Point]:
    """The best placement at each size, in ascending order.

    Args:
        config: the run's configuration.
        spec: its model.
        gpu: kind of GPU.
        sizes: numbers of GPUs.
        work: the step.
        weak: prompts grow with the GPUs; otherwise the step stays what it is.
        one_step_off: also look at rollout a step ahead.

    Raises:
        PlanError: nothing fits at a size; the reasons are in the message.
    """
    points = []
    for size in sorted(set(sizes)):
        mine = replace(work, prompts=work.prompts * size // min(sizes)) if weak else work
        found = search(config, spec, gpu, size, mine, one_step_off=one_step_off)
        if not found.candidates:
            reasons = "; ".join(f"{reason} ({count})" for reason, count in found.rejected.most_common(3))
            fix = "take more GPUs or a larger kind, or shorten sequences"
            raise PlanError(f"no placement fits {size} GPUs: {reasons or 'no degrees divide them'}", fix=fix)
        points.append(Point(size, found.candidates[0], mine))
    return points


def table(points: Sequence[Point]) -> str:
    """Step time, speed-up over the first size, tokens per GPU, and the placement."""
    first = points[0]
    lines = [f"{'GPUs':>5} {'step s':>8} {'tokens/s/GPU':>12} {'efficiency':>10}  placement and seconds by phase"]
    for point in points:
        place, layout = point.best.placement, point.best.placement.layout
        mode = "colocated" if place.colocated else "one step off" if place.one_step_off else "split"
        phases = " ".join(f"{name} {seconds:.1f}" for name, seconds in point.best.time.phases.items())
        efficiency = point.tokens_per_gpu_s / first.tokens_per_gpu_s
        numbers = (
            f"{point.num_gpus:>5} {point.best.time.step_s:>8.1f} {point.tokens_per_gpu_s:>12.0f} {efficiency:>10.0%}"
        )
        shape = f"{mode} tp{layout.tp} pp{layout.pp} dp{layout.dp}, {place.replicas} x tp{place.rollout_tp}"
        lines.append(f"{numbers}  {shape}: {phases}")
    return "\n".join(lines)


def draw(points: Sequence[Point], path: Path, title: str) -> list[Path]:
    """Write the drawing beside ``path`` as PNG and SVG; returns both.

    Raises:
        SetupError: matplotlib is missing, or the files cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SetupError("drawing needs matplotlib", fix="pip install 'megarl[plot]'") from error
    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    stacked, speed = figure.subplots(1, 2)
    names = list(dict.fromkeys(name for point in points for name in point.best.time.phases))
    labels = [str(point.num_gpus) for point in points]
    below = [0.0] * len(points)
    for name in names:
        heights = [point.best.time.phases.get(name, 0.0) for point in points]
        stacked.bar(labels, heights, bottom=below, label=name)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    stacked.set(xlabel="GPUs", ylabel="seconds", title="step by phase")
    stacked.legend(fontsize="small")
    sizes = [point.num_gpus for point in points]
    totals = [point.work.tokens / point.best.time.step_s for point in points]
    speed.plot(sizes, totals, marker="o", label="predicted")
    speed.plot(sizes, [totals[0] * size / sizes[0] for size in sizes], linestyle="--", label="ideal")
    speed.set(xlabel="GPUs", ylabel="tokens/s", title="throughput")
    speed.set_xticks(sizes, labels)
    speed.set_ylim(bottom=0)
    speed.legend(fontsize="small")
    figure.suptitle(title)
    written = [path.with_suffix(".png"), path.with_suffix(".svg")]
    try:
        for file in written:
            figure.savefig(file)
    except OSError as error:
        raise SetupError(
            f"cannot write the drawing: {error.strerror}", where=str(path), fix="choose another path"
        ) from error
    return written
