"""What speeds a model up on a GPU by configuration, as options of Megatron-Core's TransformerConfig.

Nothing here is chosen by what is found: an option that was set and cannot be is an error.

FP8 keeps weights in bfloat16 (Megatron-Core's ``fp8_param`` stays off) and has no ``delayed`` recipe: its scales come
from earlier training passes, so a log-prob would depend on history, and the first pass, as every one of a reference
policy, would have none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from megarl.config.schema.train import EngineConfig
from megarl.errors import ModelError
from megarl.models.fp8 import unfit_sides
from megarl.models.spec import ModelSpec
from megarl.parallel.grid import ParallelLayout
from megarl.platform.device import Device

# TransformerEngineBaseModule's, pytorch/module/base.py in 2.20.2.
_COPIES = "_fp8_workspaces"


def options(engine: EngineConfig, spec: ModelSpec, layout: ParallelLayout, device: Device) -> dict[str, Any]:
    """Options of TransformerConfig.

    Raises:
        SetupError: the device or a package cannot do what the configuration says.
        ModelError: the model's sizes do not allow it in this layout.
    """
    return _fp8(engine, spec, layout, device)


def _fp8(engine: EngineConfig, spec: ModelSpec, layout: ParallelLayout, device: Device) -> dict[str, Any]:
    if engine.fp8 is None:
        return {}
    device.check_fp8(engine.fp8_recipe)
    if unfit := unfit_sides(spec, engine.fp8_multiple, tp=layout.tp, etp=layout.etp):
        found = ", ".join(f"{size} {name}" for name, size in unfit.items())
        raise ModelError(
            f"FP8 with {engine.fp8_recipe} scales multiplies by {engine.fp8_multiple} rows; a rank has {found}",
            where=f"engine.fp8={engine.fp8}",
            fix="lower layout.tp (or etp) until they divide, or set engine.fp8=null",
        )
    return {"fp8": engine.fp8, "fp8_recipe": engine.fp8_recipe}


def quantizing_modules(chunks: Iterable[nn.Module]) -> list[nn.Module]:
    """Transformer Engine's modules, which keep FP8 copies of their weights between the microbatches of a pass."""
    return [module for chunk in chunks for module in chunk.modules() if hasattr(module, _COPIES)]


def drop_quantized(modules: Iterable[nn.Module]) -> None:
    """Free the FP8 copies of weights that ``quantizing_modules`` keep, at the end of a pass.

    They are made anew for the first microbatch of the next one in any case (Megatron-Core's
    ``set_is_first_microbatch``); kept, they would stay on the device where the weights leave it, and once more for a
    reference policy.
    """
    for module in modules:
        getattr(module, _COPIES).clear()
