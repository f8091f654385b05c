"""KL divergence from the reference policy: per-token estimators, the penalty in the reward, and its coefficient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megarl.algorithms.masking import (
    LOG_RATIO_BOUND,
    attach,
    bits_of,
    blocks,
    keep_bits,
    num_tokens,
    select,
    to_floats,
    widen,
)
from megarl.errors import CheckpointError, ConfigError
from megarl.observability.metrics import Last, Mean, Metrics

_K3_BOUND = 10.0
# Names of the same estimators in verl and TRL.
_ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, response_mask: Tensor, estimator: str) -> Tensor:
    """Per-token estimate of KL(current || reference) from tokens of the current policy, x = log_probs - ref_log_probs.

    k1: x. abs: |x|. k2: x^2 / 2. k3: clamp(exp(-x) + x - 1, -10, 10) with -x clamped to +-20
    (Schulman, joschu.net/blog/kl-approx.html). A ``+`` (``k1+``, ``abs+``, ``k3+``) keeps the value and takes the
    gradient of k2, whose expectation is the gradient of the KL. Where a clamp acts, the gradient is 0.

    Shapes: all [B, T], float and bool. Returns [B, T] at least float32, 0 off the mask, differentiable in log_probs
    only.

    Raises:
        ConfigError: unknown estimator.
    """
    base = estimator.removesuffix("+")
    base = _ALIASES.get(base, base)
    if base not in ("k1", "abs", "k2", "k3"):
        raise ConfigError(f"unknown KL estimator {estimator!r}", fix="use k1, abs, k2 or k3, or one of them with a +")
    with torch.no_grad():
        value = torch.empty(log_probs.shape, dtype=widen(log_probs[:0]).dtype, device=log_probs.device)
        slope = torch.empty_like(value)
        for rows in blocks(value.shape[0], value.shape[1], value.device):
            bits = bits_of(response_mask[rows], value.dtype)
            x = log_probs[rows].to(value.dtype) - ref_log_probs[rows].to(value.dtype)
            keep_bits(bits, x, out=x)
            _value_and_slope(x, base, value[rows], slope[rows])
            if estimator.endswith("+"):
                slope[rows] = x
            elif base == "k1":
                slope[rows] = response_mask[rows]
    return attach(log_probs, value, slope)


def _value_and_slope(x: Tensor, base: str, value: Tensor, slope: Tensor) -> None:
    """Writes the estimate and its derivative for x, which is 0 off the mask."""
    if base == "k1":
        value.copy_(x)
    elif base == "abs":
        torch.abs(x, out=value)
        torch.sign(x, out=slope)
    elif base == "k2":
        torch.mul(x, x, out=value).mul_(0.5)
        slope.copy_(x)
    else:
        free_negative = x.neg()
        negative = free_negative.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        # exp(-x) - 1, not exp: the estimate of nearby policies is far below the rounding of 1.
        above = negative.expm1()
        free = above - negative
        torch.clamp(free, -_K3_BOUND, _K3_BOUND, out=value)
        # 1 - exp(-x), and 0 where either clamp acts.
        inside = torch.eq(negative, free_negative, out=negative)
        torch.eq(value, free, out=free)
        torch.neg(above, out=slope).mul_(inside).mul_(free)


def penalized_rewards(
    token_level_scores: Tensor,
    log_probs: Tensor,
    ref_log_probs: Tensor,
    response_mask: Tensor,
    *,
    coef: float,
    estimator: str,
) -> tuple[Tensor, Metrics]:
    """Token rewards with the KL subtracted, r = score - coef * kl (arXiv:1909.08593, eq. 2), and the KL measured.

    ``log_probs`` are those of the policy that anchors this batch (old_log_probs). The mean KL per valid token is
    metric ``actor/reward_kl_penalty``; give its value to ``KlController.update``.

    Shapes: all [B, T]. Returns [B, T] at least float32, 0 off the mask.
    """
    with torch.no_grad():
        kl = kl_penalty(log_probs.detach(), ref_log_probs, response_mask, estimator)
        rewards = select(response_mask, token_level_scores) - coef * kl
        sums = to_floats({"kl": kl.sum(), "tokens": num_tokens(response_mask)})
    return rewards, {
        "actor/reward_kl_penalty": Mean(sums["kl"], sums["tokens"]),
        "actor/reward_kl_penalty_coeff": Last(coef),
    }


class KlController:
    """Coefficient of the KL in the reward: fixed, or adapted to a target (arXiv:1909.08593, section 2.2).

    Adaptive: value <- value * (1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon).
    """

    def __init__(self, coef: float, *, adaptive: bool, target: float, horizon: float) -> None:
        self.value = coef
        self._adaptive = adaptive
        self._target = target
        self._horizon = horizon

    def update(self, kl: float, num_samples: int) -> None:
        """Take one step's measured KL, in nats per token, over that many samples; NaN (nothing measured) is ignored."""
        if self._adaptive and kl == kl:
            error = min(max(kl / self._target - 1, -0.2), 0.2)
            self.value *= 1 + error * num_samples / self._horizon

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint; a fixed coefficient stays as configured.

        Raises:
            CheckpointError: the state holds no value.
        """
        if "value" not in state:
            raise CheckpointError("the state of the KL controller holds no value", where=f"keys {sorted(state)}")
        if self._adaptive:
            self.value = float(state["value"])
