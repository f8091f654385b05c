"""Keys that were set and change nothing, because another key switches them off.

"Nothing silent": a coefficient given with its penalty off is a mistake. But a preset's coefficient must not stand in
the way of switching the penalty off on the command line, nor a file's beside the switch that it sets itself (a resolved
configuration has both). So a key is refused if a later layer set it than its switch (`origin.py`, levels), or if both
are on the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megarl.config.algorithm_rules import ESTIMATOR_SETTINGS, LOSS_SETTINGS
from megarl.config.breach import AnyConfig, Breach, lookup
from megarl.config.origin import FLAG_LEVEL, Origins
from megarl.config.schema import TrainConfig

RULE = "key_has_effect"


@dataclass(frozen=True, slots=True)
class Switch:
    """``key`` has an effect only where ``works(value of switch)``; ``when`` says so in words."""

    key: str
    switch: str
    works: Callable[[Any], bool]
    when: str


def _equals(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


def _training(role: str) -> tuple[Switch, ...]:
    optimizer, schedule = f"{role}.optimizer", f"{role}.optimizer.schedule"
    ends, falls = _equals("linear", "cosine", "wsd"), _equals("linear", "cosine", "inverse_sqrt", "wsd")
    adam = (_equals("adam", "muon"), "kind adam or muon")
    return (
        Switch(f"{schedule}.decay_steps", f"{schedule}.kind", ends, "kind linear, cosine or wsd"),
        Switch(f"{schedule}.cooldown_steps", f"{schedule}.kind", _equals("wsd"), "kind wsd"),
        Switch(f"{schedule}.min_lr", f"{schedule}.kind", falls, "another kind than constant"),
        Switch(f"{optimizer}.beta1", f"{optimizer}.kind", *adam),
        Switch(f"{optimizer}.beta2", f"{optimizer}.kind", *adam),
        Switch(f"{optimizer}.eps", f"{optimizer}.kind", *adam),
        Switch(f"{optimizer}.momentum", f"{optimizer}.kind", _equals("sgd", "muon"), "kind sgd or muon"),
        Switch(f"{role}.engine.fp8_recipe", f"{role}.engine.fp8", lambda fp8: fp8 is not None, "an fp8 format"),
        Switch(f"{role}.engine.offload", "cluster.device", _equals("cuda"), "device cuda"),
        Switch(f"{role}.engine.offload", "cluster.placement", _equals("colocated"), "placement colocated"),
        Switch(f"{optimizer}.overlap_cpu_offload", f"{optimizer}.cpu_offload_fraction", bool, "a share on the host"),
        *(
            Switch(f"{optimizer}.{name}", f"{optimizer}.precision_aware", bool, "precision_aware")
            for name in ("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype")
        ),
    )


_KL_ON = (_equals("loss", "reward"), "where loss or reward")
_WEIGHTS = (_equals("token", "sequence"), "weights token or sequence")


def _read_by(section: str, table: Mapping[str, frozenset[str]], own: str) -> tuple[Switch, ...]:
    """Settings that only some estimators or losses read; one of the user's own may read any."""

    def switch(name: str, kinds: frozenset[str]) -> Switch:
        works: Callable[[Any], bool] = lambda kind: kind in kinds or ":" in str(kind)  # noqa: E731
        return Switch(
            f"{section}.{name}", f"{section}.kind", works, f"kind {', '.join(sorted(kinds))} or your own {own}"
        )

    return tuple(switch(name, kinds) for name, kinds in table.items())


SWITCHES: tuple[Switch, ...] = (
    *_training("actor"),
    *_training("critic"),
    Switch("algorithm.kl.coef", "algorithm.kl.where", *_KL_ON),
    Switch("algorithm.kl.estimator", "algorithm.kl.where", *_KL_ON),
    Switch("algorithm.kl.target", "algorithm.kl.adaptive", bool, "adaptive"),
    Switch("algorithm.kl.horizon", "algorithm.kl.adaptive", bool, "adaptive"),
    Switch(
        "algorithm.policy_loss.aggregation_length",
        "algorithm.policy_loss.aggregation",
        _equals("seq-mean-token-sum-norm"),
        "seq-mean-token-sum-norm",
    ),
    Switch(
        "algorithm.shaping.overlong_factor",
        "algorithm.shaping.overlong_share",
        lambda share: share is not None,
        "an overlong_share",
    ),
    Switch("algorithm.correction.upper", "algorithm.correction.weights", *_WEIGHTS),
    Switch("algorithm.correction.lower", "algorithm.correction.weights", *_WEIGHTS),
    Switch("algorithm.correction.normalize", "algorithm.correction.weights", *_WEIGHTS),
    Switch("algorithm.correction.group_stats", "algorithm.correction.reject", bool, "rejection"),
    Switch("algorithm.correction.group_stats", "algorithm.old_log_probs", _equals("decoupled"), "decoupled"),
    *_read_by("algorithm.advantage", ESTIMATOR_SETTINGS, "estimator"),
    *_read_by("algorithm.policy_loss", LOSS_SETTINGS, "loss"),
    Switch("reward.path", "reward.kind", _equals("function"), "kind function"),
    Switch("reward.pattern", "reward.kind", lambda kind: kind != "function", "another kind than function"),
    Switch("checkpoint.keep_every_steps", "checkpoint.every_steps", bool, "every_steps"),
    Switch("checkpoint.export_hf_every", "checkpoint.every_steps", bool, "every_steps"),
    Switch("rollout.gpu_memory_utilization", "cluster.device", _equals("cuda"), "device cuda"),
    Switch("rollout.kv_cache_gib", "cluster.device", _equals("cpu"), "device cpu"),
    Switch("rollout.threads_per_rank", "cluster.device", _equals("cpu"), "device cpu"),
)


def keys_without_effect(config: AnyConfig, origins: Origins) -> Iterator[Breach]:
    """Breaches of "every key that is set has an effect"."""
    for entry in SWITCHES:
        if not _present(config, entry.key):
            continue
        level, switch_level = origins.of(entry.key).level, origins.of(entry.switch).level
        later = level > switch_level or level == switch_level == FLAG_LEVEL
        inert = lookup(config, entry.key) in (None, False)
        if later and not inert and not entry.works(lookup(config, entry.switch)):
            yield Breach((entry.key, entry.switch), f"{entry.when} (the key has no effect otherwise)", RULE)


def _present(config: AnyConfig, key: str) -> bool:
    section = key.partition(".")[0]
    return section in ("actor", "checkpoint") or (
        isinstance(config, TrainConfig) and lookup(config, section) is not None
    )
