"""Policy losses by name. Each formula states its derivative; ``base`` runs it block by block and keeps the mask out."""

from __future__ import annotations

from megarl.algorithms.policy_losses.base import (
    POLICY_LOSSES,
    LossEntry,
    PolicyInputs,
    PolicyLoss,
    TokenLoss,
    build_policy_loss,
    custom_policy_loss,
)
from megarl.algorithms.policy_losses.covariance import clip_cov, clip_cov_first_pass, kl_cov, kl_cov_first_pass
from megarl.algorithms.policy_losses.ratio import cispo, dppo_kl, dppo_tv, ppo, sapo
from megarl.algorithms.policy_losses.score_function import dro, gpg, reinforce
from megarl.algorithms.policy_losses.sequence import geo_mean, gspo

__all__ = ["POLICY_LOSSES", "PolicyInputs", "PolicyLoss", "TokenLoss", "build_policy_loss", "custom_policy_loss"]

for _name, _entry in {
    "ppo": LossEntry(ppo),
    "vanilla": LossEntry(ppo),
    "cispo": LossEntry(cispo),
    "sapo": LossEntry(sapo),
    "dppo_tv": LossEntry(dppo_tv),
    "dppo_kl": LossEntry(dppo_kl),
    "gspo": LossEntry(gspo, aggregation="seq-mean-token-mean"),
    "geo_mean": LossEntry(geo_mean, aggregation="seq-mean-token-mean", weighs_rows=True),
    "gpg": LossEntry(gpg),
    "reinforce": LossEntry(reinforce),
    "dro": LossEntry(dro),
    "clip_cov": LossEntry(clip_cov, first_pass=clip_cov_first_pass),
    "kl_cov": LossEntry(kl_cov, first_pass=kl_cov_first_pass),
}.items():
    POLICY_LOSSES.add(_name, _entry)
