"""Losses on the token ratio current/old: ppo, cispo, sapo, dppo_tv, dppo_kl.

Notation in every docstring: lp, old = log-probs of the current and the proximal policy, d = clamp(lp - old, -20, 20),
rho = exp(d), A = advantages, sg = stop-gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.masking import count_below
from megarl.algorithms.policy_losses.base import Block, Terms


def ppo(block: Block, *, clip_low: float, clip_high: float, dual_clip: float | None) -> Terms:
    """Clipped surrogate with dual clip (arXiv:1707.06347, eq. 7; dual clip arXiv:1912.09729, eq. 5).

    L = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)); where A < 0: min(L, -A dual_clip).
    clip_high > clip_low is clip-higher (DAPO, arXiv:2503.14476). Metrics: pg_clipfrac counts tokens on which either
    side of the first clip acts, pg_clipfrac_lower those on which the dual clip acts (verl's names).
    """
    advantages = block.advantages
    free = advantages * block.ratio
    clipped = block.ratio.clamp(1 - clip_low, 1 + clip_high).mul_(advantages)
    objective = torch.minimum(free, clipped)
    sums = {"pg_clipfrac": count_below(clipped, free)}
    if dual_clip is not None:
        # 0 where A >= 0, and there the objective is not below 0: the bound acts on negative advantages alone.
        bound = advantages.clamp(max=0).mul_(dual_clip)
        sums["pg_clipfrac_lower"] = count_below(objective, bound)
        objective = torch.maximum(objective, bound)
    active = torch.eq(objective, free, out=torch.empty_like(free))
    if dual_clip is None:
        # With the dual clip, where the clamp of d acts the ratio is clipped or its slope at most 2e-9.
        active.mul_(block.inside)
    return Terms(torch.neg(objective, out=block.loss), torch.neg(active.mul_(free), out=block.slope), sums)


def cispo(block: Block, *, clip_low: float, clip_high: float) -> Terms:
    """Clipped importance-sampling weights (MiniMax-M1, arXiv:2506.13585, eq. 4): -sg(clip(rho)) A lp."""
    weight = block.ratio.clamp(1 - clip_low, 1 + clip_high)
    outside = torch.ne(weight, block.ratio, out=torch.empty_like(weight))
    slope = torch.mul(weight.neg_(), block.advantages, out=block.slope)
    return Terms(torch.mul(slope, block.log_probs, out=block.loss), slope, {"pg_clipfrac": outside.sum()})


def sapo(block: Block, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Terms:
    """Soft adaptive policy optimization (arXiv:2511.20347): -A sigmoid(tau (rho - 1)) 4 / tau.

    tau = tau_pos where A > 0, else tau_neg. The gate's derivative at rho = 1 is 1.
    """
    advantages = block.advantages
    positive = torch.gt(advantages, 0, out=torch.empty_like(advantages))
    tau = positive.mul_(tau_pos - tau_neg).add_(tau_neg)
    gate = (block.ratio - 1).mul_(tau).sigmoid_()
    loss = torch.div((gate * advantages).mul_(-4), tau, out=block.loss)
    # d gate / d rho = tau gate (1 - gate); tau cancels against 4 / tau.
    slope = (gate * (1 - gate)).mul_(-4).mul_(advantages).mul_(block.ratio).mul_(block.inside)
    return Terms(loss, slope, {})


def dppo_tv(block: Block, *, clip_low: float, clip_high: float, ratio_cap: float = 20.0) -> Terms:
    """Divergence-bounded policy optimization, binary total variation (DPPO, arXiv:2602.04879).

    -A sg(min(rho, ratio_cap)) lp; no loss where A > 0 and p - q > clip_high, or A <= 0 and p - q < -clip_low, with
    p = exp(lp), q = exp(old). clip_low and clip_high bound a divergence here, not a ratio.
    """
    change = block.log_probs.exp().sub_(block.old_log_probs.exp())
    up = torch.gt(change, clip_high, out=torch.empty_like(change))
    down = torch.lt(change, -clip_low, out=torch.empty_like(change))
    return _dppo(block, up, down, ratio_cap)


def dppo_kl(block: Block, *, clip_low: float, clip_high: float, ratio_cap: float = 20.0) -> Terms:
    """The same with the KL divergence q ln(q/p) + (1 - q) ln((1 - q)/(1 - p)) of the token's binary distribution.

    No loss where the divergence exceeds its bound in the direction the advantage pushes to. 1e-8 is added to 1 - q and
    1 - p.
    """
    p = block.log_probs.exp().clamp_(max=1)
    q = block.old_log_probs.exp().clamp_(max=1)
    up = torch.gt(p, q, out=torch.empty_like(p))
    down = torch.lt(p, q, out=torch.empty_like(p))
    p.neg_().add_(1)
    others = 1 - q
    divergence = ((others + 1e-8) / p.add_(1e-8)).log_().mul_(others).addcmul_(q, block.free_log_ratio, value=-1)
    up.mul_(torch.gt(divergence, clip_high, out=torch.empty_like(p)))
    down.mul_(torch.gt(divergence, clip_low, out=torch.empty_like(p)))
    return _dppo(block, up, down, ratio_cap)


def _dppo(block: Block, too_high: Tensor, too_low: Tensor, ratio_cap: float) -> Terms:
    """``too_high`` and ``too_low`` are 1 where the probability has risen or fallen beyond its bound, else 0."""
    rises = torch.gt(block.advantages, 0, out=torch.empty_like(too_high))
    kept = 1 - torch.lerp(too_low, too_high, rises)
    slope = block.ratio.clamp(max=ratio_cap).mul_(block.advantages).mul_(kept)
    slope = torch.neg(slope, out=block.slope)
    capped = torch.gt(block.ratio, ratio_cap, out=torch.empty_like(kept)).mul_(kept)
    # Off the mask both probabilities are 1 and every token is kept.
    sums = {"pg_clipfrac": kept.numel() - kept.sum(), "pg_clipfrac_lower": capped.sum()}
    return Terms(torch.mul(slope, block.log_probs, out=block.loss), slope, sums)
