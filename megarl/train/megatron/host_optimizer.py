"""Optimizer state in host memory: Megatron-Core's HybridDeviceOptimizer, inside of its distributed optimizer.

It updates a share of the parameters on the host's cores, each from a float32 copy there, and the rest where they are.
It leaves float32 parameters that stay on the device without their gradients (``hand_over_gradients``).
Its own loading is left aside (0.16.1 and 0.19.2): it looks for a float32 copy of float32 parameters, which have none;
it moves weights by random gradients to make its state; it hands a step to Transformer Engine's Adam that every update
then starts from.

Invariants:
1. A checkpoint has the tensors, names and groups that it has without state on the host.
2. Loading writes into the tensors that are there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
# Of its groups; the optimizers inside have none of them, or the same under torch's and Transformer Engine's defaults.
_OWN_SETTINGS = frozenset(
    {
        "offload_fraction",
        "cpu_optimizer_cls",
        "gpu_optimizer_cls",
        "param_update_in_fp32",
        "pin_cpu_grads",
        "pin_cpu_params",
        "overlap_cpu_optimizer_d2h_h2d",
        "bias_correction",
        "fused",
    }
)


def is_hybrid(optimizer: Any) -> bool:
    """Whether part of what it updates may be on the host."""
    return isinstance(optimizer, HybridDeviceOptimizer)


@torch.no_grad()
def materialise(hybrid: Any) -> None:
    """Make the moments that the first update would, zero."""
    for inner in hybrid.sub_optimizers:
        for group in inner.param_groups:
            for parameter in group["params"]:
                if not inner.state[parameter]:
                    inner.state[parameter] = _first_state(inner, parameter)
    hybrid._sync_sub_optimizers_state_to_hdo()


def _first_state(inner: Any, parameter: Tensor) -> dict[str, Any]:
    moments = {name: torch.zeros_like(parameter) for name in MOMENTS}
    # Transformer Engine's Adam counts in the group.
    return {"step": torch.zeros(()), **moments} if isinstance(inner, torch.optim.AdamW) else moments


def state_of(hybrid: Any, parameter: Tensor) -> dict[str, Tensor]:
    """The float32 weights and the moments of a parameter of its groups, where they lie."""
    own = hybrid.param_to_inner_param[parameter]
    values = hybrid.state[parameter]
    return {"param": own, **{name: values[name] for name in MOMENTS}}


def described(state: dict[str, Any]) -> dict[str, Any]:
    """Megatron-Core's ``state_dict`` of the distributed optimizer around it, without settings that only it has."""
    for group in state["optimizer"]["param_groups"]:
        for name in _OWN_SETTINGS & set(group):
            del group[name]
    return state


def continue_from(hybrid: Any, groups: list[Mapping[str, Any]]) -> None:
    """Count updates from where a checkpoint's groups are."""
    steps = {int(group["step"]) for group in groups if group.get("step") is not None}
    if not steps:
        return
    (step,) = steps
    for inner in hybrid.sub_optimizers:
        if isinstance(inner, torch.optim.AdamW):
            for values in inner.state.values():
                values["step"].fill_(step)
        else:
            for group in inner.param_groups:
                group["step"] = step


def hand_over_gradients(hybrid: Any) -> None:
    """Give float32 parameters that are updated where they are their gradients, which it gives to all others."""
    for parameter, own in hybrid.param_to_inner_param.items():
        if own is parameter:
            parameter.grad = parameter.decoupled_grad


def drop_gradients(hybrid: Any) -> None:
    """Free what it updates on the device from gradients of their own, float32 copies where buffers hold less."""
    if hybrid.gpu_optimizer is not None:
        for group in hybrid.gpu_optimizer.param_groups:
            for own in group["params"]:
                own.grad = None


@torch.no_grad()
def take_weights(hybrid: Any) -> None:
    """Update from the model's weights as they are now."""
    for parameter, own in hybrid.param_to_inner_param.items():
        if own is not parameter:
            own.copy_(parameter)


def host_tensors(hybrid: Any) -> Iterator[Tensor]:
    """What it keeps in host memory: weights, moments, and gradients of the last update."""
    for inner in hybrid.cpu_optimizers:
        yield from tensors_of(inner)
    yield from hybrid.cpu_copy_map_grad.values()


def device_tensors(hybrid: Any) -> Iterator[Tensor]:
    """What it keeps on the device; weights that it updates in place are among them."""
    for group in hybrid.param_groups:
        yield from (parameter.data for parameter in group["params"])
    if hybrid.gpu_optimizer is not None:
        yield from tensors_of(hybrid.gpu_optimizer)


def tensors_of(inner: Any) -> Iterator[Tensor]:
    """Parameters and state of one of torch's optimizers."""
    for group in inner.param_groups:
        yield from (parameter.data for parameter in group["params"])
    for values in inner.state.values():
        yield from (value for value in values.values() if isinstance(value, Tensor) and value.dim() > 0)
