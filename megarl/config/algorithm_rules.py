"""Rules of the ``algorithm`` section: which estimator, loss, aggregation, KL and correction go together, and why not.

What the tables say about estimators and losses is what their signatures in ``megarl/algorithms`` say; they stand here a
second time because rules run on a login node without torch, and a test compares the two.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator

from megarl.config.breach import Breach
from megarl.config.schema import TrainConfig

VALUE_ESTIMATORS = frozenset({"gae"})
"""Registered estimators that need a critic."""
GROUP_ESTIMATORS = frozenset(
    {
        "grpo",
        "rloo",
        "reinforce_plus_plus_baseline",
        "opo",
        "gpg",
        "grpo_passk",
        "gdpo",
        "optimal_token_baseline",
    }
)
"""Registered estimators whose baseline is the response's group."""
OTHER_ESTIMATORS = frozenset({"reinforce_plus_plus", "remax"})
"""Registered estimators that need neither."""
ESTIMATOR_SETTINGS: dict[str, frozenset[str]] = {
    "gamma": frozenset({"gae", "reinforce_plus_plus"}),
    "lam": frozenset({"gae"}),
    "bootstrap_truncated": frozenset({"gae"}),
    "norm_by_std": frozenset({"grpo", "grpo_passk", "gdpo"}),
}
"""Keys of ``algorithm.advantage`` and the registered estimators that read them."""
ESTIMATOR_OPTIONS: dict[str, frozenset[str]] = {
    name: frozenset({"weights"} if name == "gdpo" else ())
    for name in (*VALUE_ESTIMATORS, *GROUP_ESTIMATORS, *OTHER_ESTIMATORS)
}
"""Registered estimators and the keys of their ``options``; none is required."""

_CLIPPED = frozenset({"ppo", "vanilla", "gspo", "cispo", "geo_mean", "clip_cov", "dppo_tv", "dppo_kl"})
LOSS_SETTINGS: dict[str, frozenset[str]] = {
    "clip_low": _CLIPPED,
    "clip_high": _CLIPPED,
    "dual_clip": frozenset({"ppo", "vanilla"}),
}
"""Keys of ``algorithm.policy_loss`` and the registered losses that read them."""
LOSS_OPTIONS: dict[str, frozenset[str]] = {
    "ppo": frozenset(),
    "vanilla": frozenset(),
    "gspo": frozenset(),
    "cispo": frozenset(),
    "geo_mean": frozenset(),
    "gpg": frozenset(),
    "dro": frozenset({"dro_beta"}),
    "sapo": frozenset({"tau_pos", "tau_neg"}),
    "dppo_tv": frozenset({"ratio_cap"}),
    "dppo_kl": frozenset({"ratio_cap"}),
    "reinforce": frozenset({"ratio_level", "ratio_cap", "ratio_floor"}),
    "clip_cov": frozenset({"clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"}),
    "kl_cov": frozenset({"kl_cov_ratio", "ppo_kl_coef"}),
}
"""Registered losses and the keys of their ``options``."""
REQUIRED_OPTIONS = {"dro": ("dro_beta",)}
"""Those that have no default."""
FIXED_AGGREGATION = {"gspo": "seq-mean-token-mean", "geo_mean": "seq-mean-token-mean"}
"""Policy losses that are defined for one aggregation only."""


def algorithm_is_known(config: TrainConfig) -> Iterator[Breach]:
    """An estimator or loss is a registered one or an import path; its options are its own."""
    advantage, loss = config.algorithm.advantage, config.algorithm.policy_loss
    yield from _known("algorithm.advantage", advantage.kind, advantage.options, ESTIMATOR_OPTIONS)
    yield from _known("algorithm.policy_loss", loss.kind, loss.options, LOSS_OPTIONS)
    if missing := [name for name in REQUIRED_OPTIONS.get(loss.kind, ()) if name not in loss.options]:
        keys = ("algorithm.policy_loss.options", "algorithm.policy_loss.kind")
        yield Breach(keys, f"the option {', '.join(missing)}, which {loss.kind} has no default for")


def _known(section: str, kind: str, options: Iterable[str], table: dict[str, frozenset[str]]) -> Iterator[Breach]:
    if ":" in kind:
        return
    if kind not in table:
        close = difflib.get_close_matches(kind, table, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        known = ", ".join(sorted(table))
        yield Breach((f"{section}.kind",), f"one of {known}, or package.module:function{hint}")
    elif unknown := sorted(set(options) - table[kind]):
        known = ", ".join(sorted(table[kind])) or "none"
        yield Breach((f"{section}.options", f"{section}.kind"), f"no {', '.join(unknown)}; options of {kind}: {known}")


def group_estimator_needs_group(config: TrainConfig) -> Iterator[Breach]:
    """A group-relative baseline does not exist for a group of one."""
    if config.algorithm.advantage.kind in GROUP_ESTIMATORS and config.rollout.samples_per_prompt == 1:
        keys = ("rollout.samples_per_prompt", "algorithm.advantage.kind")
        yield Breach(keys, f"samples_per_prompt >= 2 for {config.algorithm.advantage.kind}")


def estimator_gets_its_inputs(config: TrainConfig) -> Iterator[Breach]:
    """Sums of squared probabilities come with the trainer's own pass; components from a reward that returns some."""
    algorithm, kind = config.algorithm, config.algorithm.advantage.kind
    if kind == "optimal_token_baseline" and algorithm.old_log_probs != "decoupled":
        yield Breach(("algorithm.old_log_probs", "algorithm.advantage.kind"), f"decoupled for {kind}")


def gdpo_reads_components(config: TrainConfig) -> Iterator[Breach]:
    """GDPO compares reward components; what is added to the score, a KL included, would change nothing."""
    algorithm, shaping = config.algorithm, config.algorithm.shaping
    if algorithm.advantage.kind != "gdpo":
        return
    if algorithm.kl.where == "reward":
        yield Breach(("algorithm.kl.where", "algorithm.advantage.kind"), "loss or none for gdpo")
    inert = {
        "clip_low": shaping.clip_low is not None,
        "clip_high": shaping.clip_high is not None,
        "overlong_share": shaping.overlong_share is not None,
        "length_factor": shaping.length_factor > 0,
        "whiten": shaping.whiten,
    }
    for name in (name for name, is_on in inert.items() if is_on):
        yield Breach((f"algorithm.shaping.{name}", "algorithm.advantage.kind"), "none for gdpo, but weights")
    if shaping.weights and "weights" in algorithm.advantage.options:
        keys = ("algorithm.advantage.options", "algorithm.shaping.weights")
        yield Breach(keys, "weights in one place, algorithm.shaping.weights")


def shaping_is_possible(config: TrainConfig) -> Iterator[Breach]:
    """Bounds are ordered, lengths have others to be compared with, remax's baseline is on the scale of its scores."""
    shaping, prefix = config.algorithm.shaping, "algorithm.shaping"
    if shaping.clip_low is not None and shaping.clip_high is not None and shaping.clip_low > shaping.clip_high:
        yield Breach((f"{prefix}.clip_low", f"{prefix}.clip_high"), "clip_low <= clip_high")
    if shaping.length_factor > 0 and config.rollout.samples_per_prompt == 1:
        keys = (f"{prefix}.length_factor", "rollout.samples_per_prompt")
        yield Breach(keys, "samples_per_prompt >= 2 to compare lengths in a group")
    if shaping.whiten and config.algorithm.advantage.kind == "remax":
        keys = (f"{prefix}.whiten", "algorithm.advantage.kind")
        yield Breach(keys, "no whitening for remax, whose greedy baseline is a score that is not whitened")


def filter_has_groups(config: TrainConfig) -> Iterator[Breach]:
    """A group of one has equal scores always: the filter would drop everything."""
    if config.algorithm.filter is not None and config.rollout.samples_per_prompt == 1:
        keys = ("algorithm.filter", "rollout.samples_per_prompt")
        yield Breach(keys, "samples_per_prompt >= 2 with a group filter")


def components_are_returned(config: TrainConfig) -> Iterator[Breach]:
    """Verifiers return a score, ``accuracy`` and, but for reasoning_gym, ``extracted``; a function what it likes."""
    if config.reward.kind == "function":
        return
    known = {"score", "accuracy"} | ({"extracted"} if config.reward.kind != "reasoning_gym" else set())
    named = {"algorithm.shaping.weights": sorted(config.algorithm.shaping.weights)}
    if config.algorithm.filter is not None:
        named["algorithm.filter.metric"] = [config.algorithm.filter.metric]
    for key, names in named.items():
        if unknown := [name for name in names if name not in known]:
            expected = f"components of the reward ({', '.join(sorted(known))}) and not {', '.join(unknown)}"
            yield Breach((key, "reward.kind"), expected)


def critic_matches_estimator(config: TrainConfig) -> Iterator[Breach]:
    """A critic is trained exactly where the estimator reads its values; an estimator of your own decides for itself."""
    kind = config.algorithm.advantage.kind
    if kind in VALUE_ESTIMATORS and config.critic is None:
        yield Breach(("critic", "algorithm.advantage.kind"), f"a critic for {kind} (+critic={{}})")
    if kind in GROUP_ESTIMATORS | OTHER_ESTIMATORS and config.critic is not None:
        yield Breach(("critic", "algorithm.advantage.kind"), f"no critic for {kind} (remove it with ~critic)")


def kl_has_weight(config: TrainConfig) -> Iterator[Breach]:
    """A reference policy that is computed and then weighted with 0 costs a forward pass for nothing."""
    kl = config.algorithm.kl
    if kl.where != "none" and kl.coef == 0:
        yield Breach(("algorithm.kl.coef", "algorithm.kl.where"), "coef > 0, or where=none")


def adaptive_kl_is_in_reward(config: TrainConfig) -> Iterator[Breach]:
    """The adaptive controller steers a KL that was subtracted from the reward."""
    if config.algorithm.kl.adaptive and config.algorithm.kl.where != "reward":
        yield Breach(("algorithm.kl.adaptive", "algorithm.kl.where"), "where=reward with adaptive")


def reward_kl_has_no_gradient(config: TrainConfig) -> Iterator[Breach]:
    """The ``+`` estimators change only the gradient, and a reward has none."""
    kl = config.algorithm.kl
    if kl.where == "reward" and kl.estimator.endswith("+"):
        yield Breach(("algorithm.kl.estimator", "algorithm.kl.where"), f"{kl.estimator.rstrip('+')} in the reward")


def ratios_need_full_softmax(config: TrainConfig) -> Iterator[Breach]:
    """Under top-p, top-k or min-p the engine's log-probs are renormalised over the tokens that were left.

    The trainer's are of the full softmax, so trainer/engine is not the ratio of the two policies: neither a weight, nor
    a bound, nor bypass's own ratio may be made of it. Ratios between two passes of the trainer are exact.
    """
    algorithm, correction = config.algorithm, config.algorithm.correction
    uses = [
        key
        for key, is_used in (
            ("algorithm.old_log_probs", algorithm.old_log_probs == "bypass"),
            ("algorithm.correction.weights", correction.weights != "none"),
            ("algorithm.correction.reject", bool(correction.reject)),
        )
        if is_used
    ]
    sampling = config.rollout.sampling
    for name, neutral in (("top_p", (1.0,)), ("top_k", (-1, 0)), ("min_p", (0.0,))):
        if uses and getattr(sampling, name) not in neutral:
            expected = (
                f"{name}={neutral[0]} (the engine's log-probs are renormalised over what {name} left, the trainer's "
                "are not), or decoupled without weights and reject"
            )
            yield Breach((f"rollout.sampling.{name}", *uses), expected)


def current_needs_one_update(config: TrainConfig) -> Iterator[Breach]:
    """The policy before the update is the current one only in the first update, and only known inside it."""
    algorithm, correction = config.algorithm, config.algorithm.correction
    if algorithm.old_log_probs != "current":
        return
    key, batch = "algorithm.old_log_probs", config.data.prompts_per_step * config.rollout.samples_per_prompt
    if algorithm.epochs > 1 or algorithm.minibatch_size not in (None, batch):
        keys = (key, "algorithm.epochs", "algorithm.minibatch_size")
        yield Breach(keys, "decoupled where a step has several updates")
    if correction.weights != "none" or correction.reject:
        keys = (key, "algorithm.correction.weights", "algorithm.correction.reject")
        yield Breach(keys, "decoupled with a rollout correction")
    if algorithm.kl.where == "reward":
        yield Breach((key, "algorithm.kl.where"), "decoupled with a KL in the reward")


def norm_needs_length(config: TrainConfig) -> Iterator[Breach]:
    """seq-mean-token-sum-norm divides by a constant length."""
    loss = config.algorithm.policy_loss
    if loss.aggregation == "seq-mean-token-sum-norm" and loss.aggregation_length is None:
        prefix = "algorithm.policy_loss"
        keys = (f"{prefix}.aggregation_length", f"{prefix}.aggregation")
        yield Breach(keys, "a length for seq-mean-token-sum-norm")


def loss_fits_aggregation(config: TrainConfig) -> Iterator[Breach]:
    """A loss of whole rows has no other mean than that over rows."""
    loss = config.algorithm.policy_loss
    fixed = FIXED_AGGREGATION.get(loss.kind)
    if fixed is not None and loss.aggregation != fixed:
        yield Breach(("algorithm.policy_loss.aggregation", "algorithm.policy_loss.kind"), f"{fixed} for {loss.kind}")


ALGORITHM_RULES: tuple[Callable[[TrainConfig], Iterator[Breach]], ...] = (
    algorithm_is_known,
    group_estimator_needs_group,
    estimator_gets_its_inputs,
    shaping_is_possible,
    filter_has_groups,
    components_are_returned,
    critic_matches_estimator,
    kl_has_weight,
    adaptive_kl_is_in_reward,
    reward_kl_has_no_gradient,
    ratios_need_full_softmax,
    current_needs_one_update,
    norm_needs_length,
    loss_fits_aggregation,
    gdpo_reads_components,
)
