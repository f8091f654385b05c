"""What a user's own estimator or loss gets wrong is found before any process starts; a controller's state goes on."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.algorithms.advantages import Advantages, TokenInputs, custom_estimator
from megarl.algorithms.policy_losses import PolicyInputs, TokenLoss
from megarl.config.schema import TrainConfig
from megarl.config.schema.algorithm import KlConfig
from megarl.controller.roles import check_algorithm, make_kl
from megarl.errors import ConfigError

HERE = __name__


def config(samples_per_prompt: int = 2, **algorithm: Any) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "model": {"path": "model"},
            "data": {"train": [{"kind": "reasoning_gym", "task": "chain_sum"}]},
            "rollout": {"samples_per_prompt": samples_per_prompt},
            "algorithm": algorithm,
        }
    )


def plain(inputs: TokenInputs, *, gamma: float, scale: float) -> Advantages:
    return Advantages(inputs.rewards * gamma * scale, None, {})


@custom_estimator(needs=frozenset({"values"}))
def with_critic(inputs: TokenInputs) -> Advantages:
    return Advantages(inputs.rewards, None, {})


@custom_estimator(needs=frozenset({"groups", "sum_pi_squared"}))
def with_groups(inputs: TokenInputs) -> Advantages:
    return Advantages(inputs.rewards, None, {})


def loss(inputs: PolicyInputs, *, strength: float = 1.0) -> TokenLoss:
    return TokenLoss(-inputs.advantages * inputs.log_probs * strength, {})


def test_functions_by_import_path_are_found_with_their_options():
    check_algorithm(config(advantage={"kind": f"{HERE}:plain", "options": {"scale": 2.0}}))
    check_algorithm(config(policy_loss={"kind": f"{HERE}:loss", "options": {"strength": 0.5}}))
    check_algorithm(config(advantage={"kind": f"{HERE}:with_groups"}))


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ({"advantage": {"kind": f"{HERE}:plain"}}, "needs the option 'scale'"),
        ({"advantage": {"kind": f"{HERE}:plain", "options": {"scale": 1.0, "size": 2}}}, "does not take 'size'"),
        ({"advantage": {"kind": f"{HERE}:plane"}}, "has no 'plane'"),
        ({"advantage": {"kind": "no.such.module:plain"}}, "cannot import"),
        ({"advantage": {"kind": f"{HERE}:with_critic"}}, r"needs values.*critic"),
        ({"advantage": {"kind": f"{HERE}:with_groups"}, "old_log_probs": "bypass"}, "sums of squared probabilities"),
        ({"policy_loss": {"kind": f"{HERE}:loss", "options": {"weakness": 1.0}}}, "does not take 'weakness'"),
        ({"policy_loss": {"kind": f"{HERE}:HERE"}}, "not a function"),
    ],
)
def test_what_does_not_fit_is_told(algorithm: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        check_algorithm(config(**algorithm))


def test_an_estimator_of_groups_needs_two_responses():
    with pytest.raises(ConfigError, match="needs groups"):
        check_algorithm(config(samples_per_prompt=1, advantage={"kind": f"{HERE}:with_groups"}))


def test_an_adaptive_coefficient_goes_on_from_a_checkpoint_and_a_fixed_one_stays_as_configured():
    adaptive = KlConfig(where="reward", coef=0.1, adaptive=True, target=6.0, horizon=1e4)
    whole, first = make_kl(adaptive), make_kl(adaptive)
    for kl in (12.0, 3.0, 6.3):
        whole.update(kl, 256)
    first.update(12.0, 256)
    resumed = make_kl(adaptive)
    resumed.load_state_dict(first.state_dict())
    for kl in (3.0, 6.3):
        resumed.update(kl, 256)
    assert resumed.value == whole.value != 0.1
    fixed = make_kl(KlConfig(where="reward", coef=0.2))
    fixed.load_state_dict(first.state_dict())
    assert fixed.value == 0.2
