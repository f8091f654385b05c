"""All combinations of estimator, loss, aggregation and KL mode, and what the configuration says of each.

The values come from the registries and the schema, so that a new one joins the matrix by itself; what is allowed is
asked of the configuration itself.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from megarl.algorithms.advantages import ESTIMATORS
from megarl.algorithms.policy_losses import POLICY_LOSSES
from megarl.config.rules import Breach, check_rules
from megarl.config.schema import TrainConfig
from megarl.config.schema.algorithm import AlgorithmConfig, KlEstimator, LossAggregation

KL_MODES = ("none", *(f"{where} {name}" for where in ("loss", "reward") for name in get_args(KlEstimator)))
FACTORS: dict[str, tuple[str, ...]] = {
    "advantage": ESTIMATORS.names(),
    "loss": POLICY_LOSSES.names(),
    "aggregation": get_args(LossAggregation),
    "kl": KL_MODES,
}
KEYS = {
    "algorithm.advantage.kind": "advantage",
    "algorithm.policy_loss.kind": "loss",
    "algorithm.policy_loss.aggregation": "aggregation",
    "algorithm.kl.where": "kl",
    "algorithm.kl.estimator": "kl",
    "algorithm.old_log_probs": "old_log_probs",
}
"""Configuration key -> factor that sets it."""
PROXIMAL = {"old_log_probs": get_args(AlgorithmConfig.model_fields["old_log_probs"].annotation)}
"""The modes of the proximal policy, a fifth factor of the pairwise cover."""

OPTIONS = {"dro": {"dro_beta": 0.5}}
"""Options a loss cannot do without."""

Combination = dict[str, str]


def settings(combination: Mapping[str, str]) -> dict[str, Any]:
    """A whole configuration, as plain values, of a combination."""
    where, _, estimator = combination["kl"].partition(" ")
    loss: dict[str, Any] = {"kind": combination["loss"], "aggregation": combination["aggregation"]}
    if combination["aggregation"] == "seq-mean-token-sum-norm":
        loss["aggregation_length"] = 8
    if combination["loss"] in OPTIONS:
        loss["options"] = OPTIONS[combination["loss"]]
    algorithm: dict[str, Any] = {
        "advantage": {"kind": combination["advantage"], "gamma": 0.95, "lam": 0.9},
        "policy_loss": loss,
        "kl": {"where": where, "estimator": estimator, "coef": 0.1} if estimator else {"where": where},
        "old_log_probs": combination.get("old_log_probs", "decoupled"),
    }
    values: dict[str, Any] = {
        "run": {"name": "matrix", "steps": 4},
        "cluster": {"device": "cpu", "gpus_per_node": 0},
        "model": {"path": "models/tiny"},
        "data": {"train": [{"kind": "reasoning_gym", "task": "chain_sum", "seed": 1}], "prompts_per_step": 2},
        "reward": {"kind": "reasoning_gym"},
        "rollout": {"samples_per_prompt": 3},
        "validation": {"at_start": False, "at_end": False},
        "algorithm": algorithm,
    }
    if "values" in ESTIMATORS.get(combination["advantage"]).needs:
        values["critic"] = {}
    return values


def bind(combination: Mapping[str, str]) -> tuple[TrainConfig, list[Breach]]:
    """The configuration of a combination, and why it is refused if it is."""
    config = TrainConfig.model_validate(settings(combination))
    return config, list(check_rules(config))


def combinations() -> Iterator[Combination]:
    """The whole matrix."""
    for values in itertools.product(*FACTORS.values()):
        yield dict(zip(FACTORS, values, strict=True))


def pairwise() -> tuple[list[Combination], dict[frozenset[tuple[str, str]], Breach]]:
    """Allowed combinations in which every allowed pair of values occurs, and the parts that are refused, with why.

    A refusal names keys, so one combination teaches which values do not go together; no other with them is tried.
    """
    factors = FACTORS | PROXIMAL
    everything = [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]
    random.Random(0).shuffle(everything)
    refused: dict[frozenset[tuple[str, str]], Breach] = {}
    covered: set[tuple[tuple[str, str], ...]] = set()
    chosen = []
    # First those that show many new pairs, then the rest.
    for wanted in (8, 4, 1):
        for combination in everything:
            pairs = set(itertools.combinations(sorted(combination.items()), 2))
            if len(pairs - covered) < wanted or any(part <= combination.items() for part in refused):
                continue
            _, breaches = bind(combination)
            for breach in breaches:
                refused[blamed(combination, breach)] = breach
            if not breaches:
                chosen.append(combination)
                covered |= pairs
    return chosen, refused


def blamed(combination: Mapping[str, str], breach: Breach) -> frozenset[tuple[str, str]]:
    """The values of a combination that a breach names."""
    named = {KEYS[key] for key in breach.keys if key in KEYS}
    return frozenset((factor, value) for factor, value in combination.items() if factor in named)
