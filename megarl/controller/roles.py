"""The roles of a run as the step sees them, and how their processes come up.

Start-up is concurrent: training ranks build their models while the engines start, since both take tens of seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from megarl.algorithms.advantages import Estimator, build_estimator
from megarl.algorithms.correction import Correction, Rejection
from megarl.algorithms.kl import KlController
from megarl.algorithms.policy_losses import PolicyLoss, build_policy_loss
from megarl.config.schema import TrainConfig
from megarl.config.schema.algorithm import AlgorithmConfig, CorrectionConfig, KlConfig
from megarl.config.schema.roles import CriticConfig
from megarl.controller.dispatch import Member, Watch, WorkerGroup, make_minibatches
from megarl.controller.publish import DeviceTurns, WeightPublisher
from megarl.controller.rollout import RolloutRole
from megarl.controller.scoring import RewardRole
from megarl.controller.value_check import ValueCheck
from megarl.data.batch import Batch, Ragged
from megarl.errors import ConfigError
from megarl.models.registry import load_spec
from megarl.observability.metrics import Mean, Metrics
from megarl.rollout.sampling import Sampling
from megarl.train.engine import PolicyUpdate, ValueUpdate

logger = logging.getLogger(__name__)

# Minibatches of step s are drawn with seed * SEED_STRIDE + s: steps of one run never repeat each other's order.
SEED_STRIDE = 1_000_003


class ActorRole:
    """The policy under training."""

    def __init__(self, group: WorkerGroup, algorithm: AlgorithmConfig, sampling: Sampling, *, seed: int) -> None:
        self.group = group
        self._algorithm = algorithm
        self._temperature = sampling.temperature
        self._is_comparable = sampling.is_full_softmax
        self._seed = seed
        self._loss = make_policy_loss(algorithm)

    def add_old_log_probs(self, batch: Batch, *, with_sum_pi_squared: bool = False) -> tuple[Batch, Metrics]:
        """The batch with ``old_log_probs``: the policy's log-probs before this step's first update; and its entropy.

        With ``with_sum_pi_squared`` also the column of that name, for the optimal token baseline.
        """
        columns = self.group.log_probs(
            batch.only("prompts", "responses"),
            temperature=self._temperature,
            with_entropy=True,
            with_sum_pi_squared=with_sum_pi_squared,
        )
        entropy = columns["entropy"].values
        batch = batch.add(old_log_probs=columns["log_probs"])
        if with_sum_pi_squared:
            batch = batch.add(sum_pi_squared=columns["sum_pi_squared"])
        return batch, {"actor/old_entropy": Mean(float(entropy.double().sum()), len(entropy))}

    def update(self, batch: Batch, *, step: int) -> Metrics:
        """``algorithm.epochs`` passes over the batch in minibatches."""
        algorithm, loss = self._algorithm, self._algorithm.policy_loss
        in_loss, has_old_pass = algorithm.kl.where == "loss", algorithm.old_log_probs == "decoupled"
        rejections = make_correction(algorithm.correction).rejections if algorithm.old_log_probs == "bypass" else ()
        update = PolicyUpdate(
            loss=self._loss,
            aggregation=self._loss.aggregation or loss.aggregation,
            aggregation_length=loss.aggregation_length,
            entropy_coef=loss.entropy_coef,
            kl_estimator=algorithm.kl.estimator if in_loss else None,
            kl_coef=algorithm.kl.coef if in_loss else 0.0,
            rejections=rejections,
            temperature=self._temperature,
            measures_gap=not has_old_pass and self._is_comparable,
            measures_entropy=not has_old_pass,
            seed=self._seed * SEED_STRIDE + step,
        )
        columns = [
            name
            for name in (
                "sample_id",
                "prompts",
                "responses",
                "response_mask",
                "old_log_probs",
                "rollout_log_probs",
                "ref_log_probs",
                "advantages",
                "importance_weights",
            )
            if name in batch
        ]
        minibatches = make_minibatches(
            len(batch),
            algorithm.minibatch_size,
            epochs=algorithm.epochs,
            shuffle=algorithm.shuffle,
            seed=self._seed * SEED_STRIDE + step,
        )
        metrics: Metrics = self.group.update_policy(batch.only(*columns), minibatches, update)
        return metrics


class ReferenceRole:
    """The frozen initial policy, living in the actor's processes."""

    def __init__(self, group: WorkerGroup, *, temperature: float) -> None:
        self._group = group
        self._temperature = temperature

    def log_probs(self, batch: Batch) -> Ragged:
        """Log-probs of every response token."""
        columns = self._group.ref_log_probs(batch.only("prompts", "responses"), temperature=self._temperature)
        log_probs: Ragged = columns["log_probs"]
        return log_probs


class CriticRole:
    """The value model."""

    def __init__(self, group: WorkerGroup, config: CriticConfig, algorithm: AlgorithmConfig, *, seed: int) -> None:
        self.group = group
        self.warmup_steps = config.warmup_steps
        self._config = config
        self._algorithm = algorithm
        self._seed = seed

    def values(self, batch: Batch) -> Ragged:
        """Value before every response token."""
        values: Ragged = self.group.values(batch.only("prompts", "responses"))["values"]
        return values

    def update(self, batch: Batch, *, step: int) -> Metrics:
        """``critic.epochs`` passes over the batch in minibatches."""
        size = self._config.minibatch_size
        minibatches = make_minibatches(
            len(batch),
            self._algorithm.minibatch_size if size is None else size,
            epochs=self._config.epochs,
            shuffle=self._algorithm.shuffle,
            seed=self._seed * SEED_STRIDE + step,
        )
        columns = batch.only("prompts", "responses", "response_mask", "values", "returns")
        metrics: Metrics = self.group.update_values(columns, minibatches, ValueUpdate(self._config.clip_value))
        return metrics


@dataclass(frozen=True, slots=True)
class Roles:
    """What a step works with."""

    actor: ActorRole
    rollout: RolloutRole
    reward: RewardRole
    weights: WeightPublisher
    turns: DeviceTurns
    estimator: Estimator
    correction: Correction
    kl: KlController
    reference: ReferenceRole | None = None
    critic: CriticRole | None = None


def build_roles(
    config: TrainConfig,
    actor: WorkerGroup,
    critic: WorkerGroup | None,
    engines: Sequence[Member],
    reward: RewardRole,
    watch: Watch,
) -> Roles:
    """Roles over processes that have started."""
    algorithm, seed, kl = config.algorithm, config.run.seed, config.algorithm.kl
    rollout = RolloutRole(engines, config.rollout, watch, seed=seed)
    sampling = rollout.sampling
    turns = device_turns(config, actor, critic, engines, watch)
    values = None
    if config.sync.verify == "values":
        vocab_size = load_spec(config.model.path).vocab_size
        values = ValueCheck(actor, engines, watch, vocab_size=vocab_size, dtype=config.rollout.dtype)
    return Roles(
        actor=ActorRole(actor, algorithm, sampling, seed=seed),
        rollout=rollout,
        reward=reward,
        weights=WeightPublisher(actor, engines, config.rollout, config.sync, turns, watch, values),
        turns=turns,
        estimator=make_estimator(algorithm),
        correction=make_correction(algorithm.correction),
        kl=make_kl(kl),
        reference=ReferenceRole(actor, temperature=sampling.temperature) if kl.where != "none" else None,
        critic=None
        if critic is None or config.critic is None
        else CriticRole(critic, config.critic, algorithm, seed=seed),
    )


def device_turns(
    config: TrainConfig, actor: WorkerGroup, critic: WorkerGroup | None, engines: Sequence[Member], watch: Watch
) -> DeviceTurns:
    """Engines take turns with the roles that leave the device; one that does not stays beside them."""
    groups = {"actor": actor} if critic is None else {"actor": actor, "critic": critic}
    leaving = [groups[role] for role in leaving_roles(config)]
    return DeviceTurns(takes_turns(config), leaving, engines, watch)


def leaving_roles(config: TrainConfig) -> list[str]:
    """Roles whose training state leaves devices that they share with engines, while those sample."""
    cluster, critic = config.cluster, config.critic
    if cluster.device != "cuda" or cluster.placement != "colocated":
        return []
    roles = ["actor"] if config.actor.engine.offload else []
    return [*roles, "critic"] if critic is not None and critic.engine.offload else roles


def takes_turns(config: TrainConfig) -> bool:
    """Whether engines sleep while training runs, since devices do not hold both."""
    return bool(leaving_roles(config))


def check_algorithm(config: TrainConfig) -> None:
    """Build what the configuration names, and see that an estimator of the user's own gets what it declares to need.

    Raises:
        ConfigError: an import path that leads nowhere, an option nobody takes or that is missing, a missing critic,
            group or pass.
    """
    make_policy_loss(config.algorithm)
    estimator = make_estimator(config.algorithm)
    if estimator.needs_values and config.critic is None:
        raise ConfigError(f"estimator {estimator.kind!r} needs values", where="critic", fix="add a critic section")
    if estimator.needs_groups and config.rollout.samples_per_prompt == 1:
        raise ConfigError(
            f"estimator {estimator.kind!r} needs groups",
            where="rollout.samples_per_prompt=1",
            fix="sample two responses of a prompt or more",
        )
    if "sum_pi_squared" in estimator.needs and config.algorithm.old_log_probs != "decoupled":
        raise ConfigError(
            f"estimator {estimator.kind!r} needs sums of squared probabilities, which come with the old log-probs",
            where=f"algorithm.old_log_probs={config.algorithm.old_log_probs}",
            fix="algorithm.old_log_probs=decoupled",
        )


def make_policy_loss(algorithm: AlgorithmConfig) -> PolicyLoss:
    """The configured policy loss."""
    settings = algorithm.policy_loss
    return build_policy_loss(
        settings.kind,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dual_clip=settings.dual_clip,
        options=settings.options,
    )


def make_estimator(algorithm: AlgorithmConfig) -> Estimator:
    """The configured advantage estimator; gdpo's weights of components are those of ``algorithm.shaping``."""
    settings, weights = algorithm.advantage, algorithm.shaping.weights
    options = settings.options | ({"weights": weights} if settings.kind == "gdpo" and weights else {})
    return build_estimator(
        settings.kind,
        gamma=settings.gamma,
        lam=settings.lam,
        norm_by_std=settings.norm_by_std,
        bootstrap_truncated=settings.bootstrap_truncated,
        options=options,
    )


def make_kl(settings: KlConfig) -> KlController:
    """The configured coefficient of the KL in the reward."""
    return KlController(settings.coef, adaptive=settings.adaptive, target=settings.target, horizon=settings.horizon)


def make_correction(settings: CorrectionConfig) -> Correction:
    """The configured rollout correction."""
    return Correction(
        level=None if settings.weights == "none" else settings.weights,
        upper=settings.upper,
        lower=settings.lower,
        normalize=settings.normalize,
        rejections=[Rejection(one.statistic, one.upper, one.lower) for one in settings.reject],
    )
