"""A stand-in for Transformer Engine's FusedAdam, whose kernels need a GPU: its state and interface in plain torch.

After the source of 2.20.2 (pytorch/optimizers/fused_adam.py and the kernels in multi_tensor/adam.cu): moments and main
parameters in dtypes of their own, float16 with a scale; of a bfloat16 parameter's float32 one the lower 16 bits alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

MAIN = "master_param"


class FusedAdam(torch.optim.Optimizer):
    """AdamW whose state is held as the arguments say."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, {**defaults, "weight_decay": weight_decay})
        assert adam_w_mode and not capturable
        self.name_to_dtype_map = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype, MAIN: master_weight_dtype}
        self.master_weights = master_weights
        self.use_decoupled_grad = use_decoupled_grad
        self.store_param_remainders = store_param_remainders and master_weights and master_weight_dtype == torch.float32
        self._scales: dict[Tensor, dict[str, Tensor]] = {}

    def _has_remainder(self, param: Tensor, name: str) -> bool:
        return self.store_param_remainders and name == MAIN and param.dtype == torch.bfloat16

    def initialize_state(self, param: Tensor, store_param_remainders: bool) -> None:
        for name in ("exp_avg", "exp_avg_sq"):
            self._make(param, name)
        if self.master_weights:
            self._make(param, MAIN)
            if not store_param_remainders:
                self.set_scaled_state(param, MAIN, param.clone().detach().float())

    def _make(self, param: Tensor, name: str) -> None:
        dtype = torch.int16 if self._has_remainder(param, name) else self.name_to_dtype_map[name]
        self.state[param][name] = torch.zeros_like(param, dtype=dtype)
        self._scales.setdefault(param, {})[name] = torch.ones(1)

    def get_unscaled_state(self, param: Tensor, name: str) -> Tensor:
        held: Tensor = self.state[param][name]
        if held.dtype in (torch.float32, torch.int16):
            return held
        return held.float() * (self._scales[param][name] if held.dtype == torch.float16 else 1.0)

    def set_scaled_state(self, param: Tensor, name: str, unscaled: Tensor) -> None:
        assert unscaled.dtype == (torch.int16 if self._has_remainder(param, name) else torch.float32)
        if name not in self.state[param]:
            self._make(param, name)
        held = self.state[param][name]
        if held.dtype == torch.float16:
            scale = unscaled.abs().max() / (torch.finfo(torch.float16).max / 2)
            self._scales[param][name].copy_(scale)
            unscaled.mul_(torch.where(scale > 0, scale.reciprocal(), 0.0))  # in the caller's memory
        held.copy_(unscaled)

    def state_dict(self) -> dict[str, Any]:
        described = super().state_dict()
        for number, param in enumerate(p for group in self.param_groups for p in group["params"]):
            if number in described["state"]:
                names = described["state"][number]
                described["state"][number] = {name: self.get_unscaled_state(param, name) for name in names}
        return described

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for number, param in enumerate(p for group in self.param_groups for p in group["params"]):
            if number in state_dict["state"]:
                self.state[param] = {}
                for name, value in state_dict["state"][number].items():
                    value = value.clone() if self._has_remainder(param, name) else value.clone().float()
                    self.set_scaled_state(param, name, value)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            assert group["bias_correction"]
            for param in group["params"]:
                if not self.state[param]:
                    self.initialize_state(param, self._has_remainder(param, MAIN))
                gradient = param.decoupled_grad if self.use_decoupled_grad else param.grad
                if gradient is not None:
                    self._update(group, param, gradient.float())

    def _update(self, group: dict[str, Any], param: Tensor, gradient: Tensor) -> None:
        (beta1, beta2), count = group["betas"], group["step"]
        mean = self.get_unscaled_state(param, "exp_avg") * beta1 + (1 - beta1) * gradient
        square = self.get_unscaled_state(param, "exp_avg_sq") * beta2 + (1 - beta2) * gradient**2
        high = None
        if param.dtype == torch.float32:
            main = param
        elif self._has_remainder(param, MAIN):
            low = self.state[param][MAIN].int()
            high = param.view(torch.int16).int()
            main = ((high << 16) + low).view(torch.float32)
        else:
            main = self.get_unscaled_state(param, MAIN)
        change = (mean / (1 - beta1**count)) / ((square / (1 - beta2**count)).sqrt() + group["eps"])
        main = main - group["lr"] * (change + group["weight_decay"] * main)
        if high is not None:
            bits = main.view(torch.int32)
            high = (bits + 0x8000) >> 16
            param.copy_(high.short().view(torch.bfloat16))
            self.state[param][MAIN].copy_((bits - (high << 16)).short())
        else:
            param.copy_(main)
            if param.dtype != torch.float32:
                self.set_scaled_state(param, MAIN, main.clone())
        self.set_scaled_state(param, "exp_avg", mean)
        self.set_scaled_state(param, "exp_avg_sq", square)


@contextmanager
def installed() -> Iterator[None]:
    """Megatron-Core finds it where Transformer Engine would be."""
    import megatron.core.optimizer as building
    from megatron.core.optimizer import distrib_optimizer, optimizer_config

    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers")
    modules = {name: ModuleType(name) for name in names}
    modules[names[-1]].FusedAdam = FusedAdam  # type: ignore[attr-defined]
    with ExitStack() as stack:
        stack.enter_context(patch.dict(sys.modules, modules))
        for module in (building, distrib_optimizer):
            stack.enter_context(patch.object(module, "Adam", FusedAdam))
        stack.enter_context(patch.object(building, "USING_PYTORCH_OPTIMIZER", False))
        for name, value in {"HAVE_APEX_OR_TE": True, "USING_TE_OPTIMIZER": True, "USING_APEX_OPTIMIZER": False}.items():
            stack.enter_context(patch.object(distrib_optimizer, name, value, create=True))
        for module in (building, optimizer_config):
            stack.enter_context(patch.object(module, "is_te_min_version", lambda *_, **__: True))
        yield
