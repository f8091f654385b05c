"""Whether a kind of GPU and a model's sizes allow the FP8 that a configuration asks for."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.schema import SftConfig, TrainConfig
from megarl.models import ModelSpec
from megarl.models.fp8 import unfit_sides
from megarl.planning.finding import Finding
from megarl.planning.gpus import Gpu
from megarl.planning.model_fit import trained


def check_fp8(
    config: TrainConfig | SftConfig, spec: ModelSpec, critic_spec: ModelSpec, gpu: Gpu | None
) -> Iterator[Finding]:
    """What would end the start of a role with ``engine.fp8``; ``gpu`` is None on CPU, which a rule refuses."""
    for role, part in trained(config):
        engine, layout = part.engine, part.layout
        if engine.fp8 is None or gpu is None:
            continue
        key = f"{role}.engine.fp8"
        if engine.fp8_recipe not in gpu.fp8_recipes:
            can = f"set {role}.engine.fp8_recipe to one of {', '.join(gpu.fp8_recipes)}, or " if gpu.fp8_recipes else ""
            problem = f"{gpu.name.upper()} cannot multiply in FP8 with {engine.fp8_recipe} scales"
            yield Finding("model", f"{key}_recipe", problem, f"{can}set {key}=null")
        model = critic_spec if role == "critic" else spec
        unfit = unfit_sides(model, engine.fp8_multiple, tp=layout.tp, etp=layout.etp)
        for name, size in unfit.items():
            problem = f"expected a multiple of {engine.fp8_multiple} {name} on a rank, found {size}"
            yield Finding("model", key, problem, f"lower {role}.layout.tp or etp until they divide, or set {key}=null")
