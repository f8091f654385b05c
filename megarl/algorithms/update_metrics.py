"""What an update did to the policy, beside what its loss reports."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.masking import LOG_RATIO_BOUND, num_tokens, select, to_floats, widen
from megarl.observability.metrics import Mean, Metrics


def ratio_metrics(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float | None = None,
    clip_high: float | None = None,
) -> Metrics:
    """Means over the valid tokens, with d = clamp(lp - old, -20, 20) and rho = exp(d).

    actor/ppo_kl_k3: rho - 1 - d, the estimate of the KL from old to current that is never negative
    (Schulman, joschu.net/blog/kl-approx.html). With both bounds, where the clip acts and on which side:
    actor/pg_clipfrac_above: A > 0 and rho > 1 + clip_high; actor/pg_clipfrac_below: A < 0 and rho < 1 - clip_low.

    Shapes: all [B, T], response_mask bool.
    """
    with torch.no_grad():
        d = select(response_mask, widen(log_probs) - widen(old_log_probs)).clamp_(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        ratio = d.exp()
        sums = {"ppo_kl_k3": (d.expm1() - d).sum()}
        if clip_low is not None and clip_high is not None:
            signed = select(response_mask, advantages)
            sums["pg_clipfrac_above"] = ((signed > 0) & (ratio > 1 + clip_high)).sum()
            sums["pg_clipfrac_below"] = ((signed < 0) & (ratio < 1 - clip_low)).sum()
        numbers = to_floats({**sums, "tokens": num_tokens(response_mask)})
    return {f"actor/{name}": Mean(numbers[name], numbers["tokens"]) for name in sums}
