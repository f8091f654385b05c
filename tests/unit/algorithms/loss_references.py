"""Policy losses as NumPy functions of one row in float64, written from docs/algorithms.md, section 2.

``lp`` is the current log-prob where a gradient flows and ``lp0`` the same number where it is stopped, so that finite
differences in ``lp`` alone are the gradient the papers mean.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.unit.algorithms.references import Array

LO, HI, DUAL = 0.2, 0.28, 3.0


def clip(x: Any, low: float, high: float) -> Any:
    return np.minimum(np.maximum(x, low), high)


def token_losses(
    kind: str, options: dict[str, Any], lp: Array, lp0: Array, old: Array, a: Array, chosen: Array
) -> Array:
    """Loss of each valid token of a row; all arguments [n], ``chosen`` of the first pass."""
    d = clip(lp - old, -20, 20)
    ratio = np.exp(d)
    stopped = np.exp(clip(lp0 - old, -20, 20))
    if kind in ("ppo", "vanilla"):
        loss = np.maximum(-a * ratio, -a * clip(ratio, 1 - LO, 1 + HI))
        return np.where(a < 0, np.minimum(loss, -a * DUAL), loss)
    if kind == "gspo":
        g = clip(lp0 - old, -20, 20).mean()
        s = np.exp(np.minimum(lp - lp0 + g, 10.0))
        return np.maximum(-a * s, -a * clip(s, 1 - LO, 1 + HI))
    if kind == "geo_mean":
        bounded = np.where(a > 0, np.minimum(d, HI), np.where(a < 0, np.maximum(d, -LO), 0.0))
        return np.full(len(lp), -a.mean() * np.exp(bounded.mean()))
    if kind == "cispo":
        return -clip(stopped, 1 - LO, 1 + HI) * a * lp
    if kind == "sapo":
        tau = np.where(a > 0, 1.0, 1.05)
        return -a * (1 / (1 + np.exp(-tau * (ratio - 1)))) * 4 / tau
    if kind == "gpg":
        return -a * lp
    if kind == "dro":
        return -(a * lp - options["dro_beta"] / 2 * d**2)
    if kind == "reinforce":
        return -a * lp * reinforce_weight(options, lp0, old)
    if kind in ("dppo_tv", "dppo_kl"):
        return -a * np.minimum(stopped, 20.0) * lp * dppo_keeps(kind, lp0, old, a)
    if kind == "clip_cov":
        return np.where(chosen, 0.0, np.maximum(-a * ratio, -a * clip(ratio, 1 - LO, 1 + HI)))
    if kind == "kl_cov":
        return -a * ratio + np.where(chosen, 0.1 * np.abs(d), 0.0)
    raise AssertionError(f"no reference for {kind}")


def reinforce_weight(options: dict[str, Any], lp0: Array, old: Array) -> Array:
    level, cap, floor = options.get("ratio_level", "token"), options.get("ratio_cap", 2.0), options.get("ratio_floor")
    if level == "none":
        return np.ones(len(lp0))
    d = lp0 - old
    raw = np.exp(clip(np.full(len(d), d.sum()) if level == "sequence" else d, -20, 20))
    return np.minimum(raw, cap) if floor is None else np.where((raw < floor) | (raw > cap), 0.0, raw)


def dppo_keeps(kind: str, lp0: Array, old: Array, a: Array) -> Array:
    p, q = np.exp(lp0), np.exp(old)
    if kind == "dppo_tv":
        return np.where(a > 0, p - q <= HI, p - q >= -LO)
    kl = q * np.log(q / p) + (1 - q) * np.log((1 - q + 1e-8) / (1 - p + 1e-8))
    return np.where(a > 0, (kl <= HI) | (p <= q), (kl <= LO) | (p >= q))


def clip_counts(kind: str, options: dict[str, Any], lp: Array, old: Array, a: Array, chosen: Array) -> dict[str, int]:
    """How many tokens of a row each clip acts on, by the metric that counts them."""
    ratio = np.exp(clip(lp - old, -20, 20))
    beyond = ((a > 0) & (ratio > 1 + HI)) | ((a < 0) & (ratio < 1 - LO))
    if kind in ("ppo", "vanilla"):
        return {"pg_clipfrac": beyond.sum(), "pg_clipfrac_lower": ((a < 0) & (ratio > DUAL)).sum()}
    if kind == "gspo":
        s = np.exp(np.minimum(np.mean(lp - old), 10.0))
        return {"pg_clipfrac": (((a > 0) & (s > 1 + HI)) | ((a < 0) & (s < 1 - LO))).sum()}
    if kind == "geo_mean":
        d = lp - old
        return {"pg_clipfrac": ((a > 0) & (d > HI)).sum(), "pg_clipfrac_lower": ((a < 0) & (d < -LO)).sum()}
    if kind == "cispo":
        return {"pg_clipfrac": ((ratio < 1 - LO) | (ratio > 1 + HI)).sum()}
    if kind == "reinforce" and options.get("ratio_level", "token") != "none":
        free = reinforce_weight({**options, "ratio_cap": np.inf, "ratio_floor": None}, lp, old)
        return {"pg_clipfrac": (reinforce_weight(options, lp, old) != free).sum()}
    if kind in ("dppo_tv", "dppo_kl"):
        keeps = dppo_keeps(kind, lp, old, a)
        return {"pg_clipfrac": (~keeps).sum(), "pg_clipfrac_lower": (keeps & (ratio > 20.0)).sum()}
    if kind == "clip_cov":
        return {"pg_clipfrac": beyond.sum(), "pg_covfrac": chosen.sum()}
    return {"pg_covfrac": chosen.sum()} if kind == "kl_cov" else {}


def covariance(lp: Array, a: Array, mask: Array) -> Array:
    """(A - <A>)(lp - <lp>) of each valid token, 0 elsewhere: [B, T]."""
    terms = np.zeros(mask.shape)
    for i, t in zip(*np.nonzero(mask), strict=True):
        terms[i, t] = (a[i, t] - a[mask].mean()) * (lp[i, t] - lp[mask].mean())
    return terms
