"""State of Transformer Engine's FusedAdam in less than float32, as float32 tensors of a checkpoint.

A bfloat16 weight and the 16 bits that it lacks of float32, as a signed number, are one float32 weight: its bits are
``weight * 2**16 + remainder``, so that the weight is the nearest bfloat16. Moments and weights in 16 bits have a scale
where they are float16 (``get_unscaled_state``, ``set_scaled_state``; pytorch/optimizers/fused_adam.py in 2.20.2).

Invariants:
1. A checkpoint has the tensors, names and dtypes that it has with state in float32.
2. A float32 parameter is its own main parameter: FusedAdam makes another one, and never updates it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_MOMENTS = ("exp_avg", "exp_avg_sq")
_MAIN = "master_param"


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """float32 weights from bfloat16 ones and int16 remainders, all [n]."""
    return ((weight.view(torch.int16).to(torch.int32) << 16) + remainder.to(torch.int32)).view(torch.float32)


def split(weight: Tensor) -> tuple[Tensor, Tensor]:
    """bfloat16 weights and int16 remainders of finite float32 weights, all [n]."""
    bits = weight.contiguous().view(torch.int32)
    rounded = (bits + (1 << 15)) >> 16
    return rounded.to(torch.int16).view(torch.bfloat16), (bits - (rounded << 16)).to(torch.int16)


def materialise(fused: Any) -> None:
    """Make the state that the first update would, which makes no difference there."""
    for group in fused.param_groups:
        for parameter in group["params"]:
            if not fused.state[parameter]:
                fused.initialize_state(parameter, fused.store_param_remainders and parameter.dtype == torch.bfloat16)


def state_of(fused: Any, parameter: Tensor) -> dict[str, Tensor]:
    """The float32 weights and moments of a parameter of its groups; copies but where they are float32."""
    moments = {name: fused.get_unscaled_state(parameter, name) for name in _MOMENTS}
    main = fused.state[parameter][_MAIN]
    if parameter.dtype == torch.float32:
        weight = parameter
    elif main.dtype == torch.int16:
        weight = join(parameter, main)
    else:
        weight = fused.get_unscaled_state(parameter, _MAIN)
    return {"param": weight.detach(), **moments}


@torch.no_grad()
def take_state(fused: Any, parameter: Tensor, state: Mapping[str, Tensor]) -> None:
    """Keep what ``state_of`` returned; a bfloat16 weight becomes the one that goes with its remainder."""
    values = {name: tensor.to(parameter.device, torch.float32, copy=True) for name, tensor in state.items()}
    for name in _MOMENTS:
        fused.set_scaled_state(parameter, name, values[name])
    if parameter.dtype == torch.float32:
        parameter.copy_(values["param"])
    elif fused.state[parameter][_MAIN].dtype == torch.int16:
        weight, remainder = split(values["param"])
        parameter.copy_(weight)
        fused.state[parameter][_MAIN].copy_(remainder)
    else:
        fused.set_scaled_state(parameter, _MAIN, values["param"])


@torch.no_grad()
def take_weights(fused: Any) -> None:
    """Update from the model's weights as they are now."""
    materialise(fused)
    for parameter, values in fused.state.items():
        if parameter.dtype == torch.float32:
            continue
        if values[_MAIN].dtype == torch.int16:
            values[_MAIN].zero_()
        else:
            fused.set_scaled_state(parameter, _MAIN, parameter.detach().float())
