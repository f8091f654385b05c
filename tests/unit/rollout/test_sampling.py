from __future__ import annotations

import pickle

import pytest

from megarl.config.schema.roles import SamplingConfig
from megarl.errors import RolloutError
from megarl.rollout.sampling import Sampling


def test_the_configuration_s_section_becomes_a_sampling_as_it_is():
    config = SamplingConfig(temperature=0.7, stop_token_ids=[3, 4])
    sampling = Sampling(**config.model_dump())
    assert sampling.stop_token_ids == (3, 4)
    assert hash(sampling) == hash(pickle.loads(pickle.dumps(sampling)))
    assert Sampling(**SamplingConfig().model_dump()) == Sampling()


@pytest.mark.parametrize(
    ("change", "is_full"),
    [
        ({}, True),
        ({"temperature": 0.5}, True),
        ({"temperature": 0.0, "top_p": 0.9}, True),
        ({"top_p": 0.9}, False),
        ({"top_k": 5}, False),
        ({"min_p": 0.1}, False),
    ],
)
def test_the_record_says_what_the_log_probs_mean(change, is_full):
    sampling = Sampling(**change)
    assert sampling.is_full_softmax is is_full
    assert sampling.record()["log_probs"] == ("full_softmax" if is_full else "renormalized")


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.5}, {"top_k": 0}, {"min_p": 1}, {"max_tokens": 0}]
)
def test_a_setting_out_of_range_is_named(wrong):
    with pytest.raises(RolloutError, match=next(iter(wrong))):
        Sampling(**wrong)
