from __future__ import annotations

import pytest

from megarl.config import fields
from megarl.config.explain import all_keys, explain
from megarl.config.schema import SftConfig, TrainConfig
from megarl.config.schema.correction_presets import CORRECTION_PRESETS
from megarl.errors import ConfigError

ROOTS = (TrainConfig, SftConfig)


def test_a_key_is_explained_in_full():
    text = explain("actor.layout.tp")
    assert text.startswith("actor.layout.tp  (megarl train, megarl sft)\n  Tensor-parallel size.\n")
    for line in ("type      integer", "bounds    >= 1", "default   1", "grpo_70b: 8 (configs/grpo_70b.yaml:"):
        assert line in text
    assert "sequence_parallel_needs_tp: " in text
    assert "read by   megarl/" in text


def test_the_default_is_that_of_the_place_not_of_the_class():
    assert "default   1e-05" in explain("critic.optimizer.lr")
    assert "default   1e-06" in explain("actor.optimizer.lr")


def test_allowed_values_and_required_keys():
    assert "one of none, loss, reward" in explain("algorithm.kl.where")
    assert "default   none: it has to be given" in explain("model.path")


def test_algorithms_that_set_a_key_are_listed():
    text = explain("algorithm.policy_loss.clip_high")
    assert "algorithm=dapo: 0.28 (configs/algorithm/dapo.yaml:" in text
    assert "algorithm=gspo: " in text and "algorithm=kl_cov" not in text
    assert "algorithm=ppo: 0.95 (configs/algorithm/ppo.yaml:" in explain("algorithm.advantage.lam")


def test_presets_of_a_correction_are_listed_with_what_they_stand_for():
    text = explain("algorithm.correction.preset")
    for name in CORRECTION_PRESETS:
        assert f" {name}: old_log_probs=" in text
    assert 'correction.weights="token", correction.upper=5.0, correction.lower=0.5' in text


@pytest.mark.parametrize("key", ["data.train.0.path", "data.train[0].path", "data.train.path", "data.train.*.path"])
def test_keys_inside_lists(key: str):
    assert "A .jsonl or .parquet file." in explain(key)


def test_a_key_of_several_sources_or_commands_is_explained_for_each():
    assert "one of file" in explain("data.train.0.kind") and "one of reasoning_gym" in explain("data.train.0.kind")
    assert "(megarl sft)" in explain("data.max_tokens")


def test_a_section_lists_its_keys():
    assert "keys      tp, pp, vpp, cp, dp, ep, etp, sequence_parallel" in explain("actor.layout")


def test_an_unknown_key_gets_suggestions():
    with pytest.raises(ConfigError, match=r"did you mean actor\.layout\.tp"):
        explain("layout.tp")
    with pytest.raises(ConfigError, match=r"rollout\.sampling\.temperature"):
        explain("temprature")
    with pytest.raises(ConfigError, match="lists all keys"):
        explain("qqqq")


def test_all_keys_are_listed_with_their_meaning():
    listing = all_keys().splitlines()
    assert any(line.split()[:2] == ["actor.layout.tp", "Tensor-parallel"] for line in listing)
    assert len(listing) > 200


@pytest.mark.parametrize("root", ROOTS, ids=lambda root: root.__name__)
def test_every_key_has_a_meaning_that_fits_a_sentence(root: type):
    for entry in fields.walk(root):
        assert entry.info.description and entry.info.description.strip().endswith((".", "``.")), entry.pattern


@pytest.mark.parametrize("root", ROOTS, ids=lambda root: root.__name__)
def test_every_type_has_words(root: type):
    for entry in fields.walk(root):
        assert "typing" not in fields.expectation(entry.info) and "<class" not in fields.expectation(entry.info)
