"""One step of policy-gradient training. Read top to bottom: each span is one row of the timeline.

GRPO (arXiv:2402.03300, algorithm 1) and PPO (arXiv:1707.06347, algorithm 1) are the same dataflow; the estimator says
whether values are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megarl.config.schema import TrainConfig
from megarl.controller import credit, shaping
from megarl.controller.roles import Roles
from megarl.controller.rounds import Rounds
from megarl.data.batch import Batch
from megarl.data.prompts import Prompt
from megarl.observability.metrics import Metrics, merge
from megarl.observability.trace import span


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step leaves behind: the weight version now served, the finished batch, the metrics."""

    version: int
    batch: Batch
    metrics: Metrics


def policy_step(
    roles: Roles, draw: Callable[[int], list[Prompt]], config: TrainConfig, *, step: int, version: int
) -> StepResult:
    """Sample, score, estimate, update, publish.

    Args:
        roles: the worker groups.
        draw: the next so many prompts of the data.
        config: the run's configuration.
        step: number of this step, from 1.
        version: weight version the engines serve; the update is published as ``version + 1``.
    """
    algorithm, metrics, greedy = config.algorithm, [], roles.estimator.needs_greedy_baseline

    # The engine's log-probs under top-p, top-k or min-p are of another distribution than the trainer's.
    is_comparable = roles.rollout.sampling.is_full_softmax

    rounds = Rounds(draw, config.data.prompts_per_step, algorithm.filter)
    while rounds.wanted:  # once, unless groups without a signal are replaced (algorithm.filter)
        with span("rollout"):
            first, prompts = rounds.num_drawn, rounds.prompts()
            batch, seen = roles.rollout.generate(prompts, step=step, version=version, first=first, with_greedy=greedy)
            metrics.append(seen)
            if rounds.is_last:
                roles.turns.to_training()
        with span("reward"):
            batch, seen = roles.reward.score(batch)
            metrics.append(seen)
            batch, seen = shaping.weigh(batch, algorithm.shaping)
            metrics.append(seen)
            rounds.admit(shaping.take_greedy(batch))
    roles.turns.to_training()  # nothing to do if the last round was known to be the last
    batch = rounds.batch()
    metrics.append(rounds.metrics())
    if algorithm.old_log_probs == "bypass":
        batch = batch.add(old_log_probs=batch["rollout_log_probs"])
    elif algorithm.old_log_probs == "decoupled":  # "current" leaves them to the update
        with span("old_log_probs"):
            squares = "sum_pi_squared" in roles.estimator.needs
            batch, seen = roles.actor.add_old_log_probs(batch, with_sum_pi_squared=squares)
            metrics += [seen, credit.mismatch_metrics(batch) if is_comparable else {}]
    if roles.reference is not None:
        with span("ref_log_probs"):
            batch = batch.add(ref_log_probs=roles.reference.log_probs(batch))
    if roles.critic is not None:
        with span("values"):
            batch = batch.add(values=roles.critic.values(batch))
    with span("advantages"):
        longest = config.rollout.sampling.max_tokens
        batch, seen = credit.token_rewards(batch, algorithm.shaping, algorithm.kl, roles.kl, max_tokens=longest)
        metrics.append(seen)
        # With bypass and current the first pass of the trainer is the update, which corrects and measures by itself.
        correction = roles.correction if is_comparable and algorithm.old_log_probs == "decoupled" else None
        batch, seen = credit.advantages(batch, roles.estimator, correction, algorithm.correction.group_stats)
        metrics.append(seen)
    if roles.critic is not None:
        with span("update_critic"):
            metrics.append(roles.critic.update(batch, step=step))
    is_updated = roles.critic is None or step > roles.critic.warmup_steps
    if is_updated:
        with span("update_actor"):
            metrics.append(roles.actor.update(batch, step=step))
    if is_updated or not roles.turns.engines_hold_weights:
        with span("weight_sync"):
            version = roles.weights.publish(version + 1)
            metrics += [roles.weights.metrics(), roles.turns.metrics()]
    return StepResult(version, batch, merge(metrics))
