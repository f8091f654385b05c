"""Batch refuses what contradicts the field table, and says where."""

from __future__ import annotations

import math

import pytest
import torch

from megarl.data.batch import Batch, Ragged
from megarl.data.fields import FIELDS, Field, declare
from megarl.errors import DataError


def _batch() -> Batch:
    responses = Ragged.from_rows([[5, 6], [7]], torch.int64)
    return Batch.create(
        sample_id=torch.tensor([10, 11]),
        prompts=Ragged.from_rows([[1], [2, 3]], torch.int64),
        responses=responses,
        response_mask=responses.with_values(torch.tensor([True, False, True])),
    )


def _per_token(*values: float) -> Ragged:
    return Ragged(torch.tensor(values, dtype=torch.float32), torch.tensor([2, 1]))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"old_logprobs": _per_token(0, 0, 0)}, "did you mean old_log_probs"),
        (
            {"old_log_probs": _per_token(0, 0, 0).with_values(torch.zeros(3, dtype=torch.float64))},
            "must be torch.float32",
        ),
        ({"old_log_probs": Ragged(torch.zeros(3), torch.tensor([1, 2]))}, "has 1 tokens in row 0, its response has 2"),
        ({"old_log_probs": torch.zeros(2, 2)}, "must be Ragged"),
        ({"old_log_probs": _per_token(0, 0, math.nan)}, "is nan in row 1"),
        ({"old_log_probs": _per_token(-math.inf, 0, 0)}, "is -inf in row 0"),
        ({"scores": torch.zeros(3)}, "has 3 rows, the batch has 2"),
        ({"scores": torch.tensor([1.0, math.nan])}, "is nan in row 1"),
        ({"scores": [1.0, 2.0]}, "must be a tensor"),
        ({"finish_reason": ["stop", "eos"]}, "must be one of"),
        ({"data_source": ["a", 1]}, "found int"),
        ({"data_source": ("a", "b")}, "must be a list"),
        ({"responses": Ragged.from_rows([[1], [2]], torch.int64)}, "are in the batch already"),
    ],
)
def test_a_wrong_column_is_refused(columns, message):
    with pytest.raises(DataError, match=message):
        _batch().add(**columns)


def test_numbers_off_the_mask_may_be_anything():
    assert "old_log_probs" in _batch().add(old_log_probs=_per_token(0, math.nan, 0))


def test_a_field_arrives_after_what_it_needs():
    with pytest.raises(DataError, match="needs responses, response_mask"):
        Batch.create(old_log_probs=_per_token(0, 0, 0))


def test_replacing_the_responses_checks_what_is_aligned_to_them():
    with pytest.raises(DataError, match="field 'response_mask' has 2 tokens in row 0, its response has 1"):
        _batch().replace(responses=Ragged.from_rows([[5], [7]], torch.int64))
    with pytest.raises(DataError, match=r"lacks scores \(written by stage score\)"):
        _batch().replace(scores=torch.zeros(2))


def test_a_missing_field_names_the_stage_that_writes_it():
    with pytest.raises(DataError, match=r"values \(written by stage values\)"):
        _batch().require("sample_id", "values")
    with pytest.raises(DataError, match="written by stage advantages"):
        _batch()["advantages"]


def test_a_sample_that_comes_twice_is_refused():
    with pytest.raises(DataError, match=r"more than once: \[10, 11\]"):
        Batch.concat([_batch(), _batch()])
    with pytest.raises(DataError, match=r"more than once: \[3\]"):
        Batch.create(sample_id=torch.tensor([3, 3]))


def test_other_samples_do_not_join():
    with pytest.raises(DataError, match=r"missing \[11\], unexpected \[12\]"):
        _batch().join(Batch.output(sample_id=torch.tensor([12, 10]), scores=torch.zeros(2)))


def test_a_stages_output_is_checked_against_the_batch_it_joins():
    output = Batch.output(sample_id=torch.tensor([11, 10]), old_log_probs=_per_token(0, 0, 0).select([0, 1]))
    with pytest.raises(DataError, match="field 'old_log_probs' has 1 tokens in row 0, its response has 2"):
        _batch().join(output)
    with pytest.raises(DataError, match="must be a tensor"):
        Batch.output(sample_id=torch.tensor([11, 10]), scores=[0.0, 1.0])


def test_concat_needs_the_same_columns():
    with pytest.raises(DataError, match=r"batch 1 differs from batch 0 in the columns \['scores'\]"):
        Batch.concat([_batch(), _batch().add(scores=torch.zeros(2))])
    with pytest.raises(DataError, match="no batches"):
        Batch.concat([])


@pytest.mark.parametrize("index", [[0, 2], [-1], torch.tensor([True]), torch.tensor([5])])
def test_rows_that_do_not_exist_are_not_selected(index):
    with pytest.raises(DataError):
        _batch().select(index)


def test_a_column_is_read_as_what_it_is():
    with pytest.raises(DataError, match="no tokens"):
        _batch().ragged("sample_id")
    with pytest.raises(DataError, match="no per-sample tensor"):
        _batch().tensor("prompts")
    assert list(_batch().without("response_mask", "absent")) == ["sample_id", "prompts", "responses"]


def test_a_plug_in_declares_its_own_field(monkeypatch):
    monkeypatch.setattr("megarl.data.fields.FIELDS", dict(FIELDS))
    declare(Field("tool_calls", torch.int64, "sample", "generate", ("responses",)))
    assert _batch().add(tool_calls=torch.tensor([1, 2])).tensor("tool_calls").tolist() == [1, 2]
    with pytest.raises(DataError, match="already declared differently"):
        declare(Field("tool_calls", torch.float32, "sample", "generate"))


def test_every_declared_need_is_declared():
    assert all(needed in FIELDS for field in FIELDS.values() for needed in field.needs)


def test_lengths_must_describe_the_values():
    with pytest.raises(DataError, match="sum to 3, but there are 4"):
        Ragged(torch.zeros(4), torch.tensor([1, 2]))
    with pytest.raises(DataError, match="negative length"):
        Ragged(torch.zeros(1), torch.tensor([2, -1]))
    with pytest.raises(DataError, match="row 0 has 2 tokens, padding allows 1"):
        _batch()["responses"].padded(1)
    with pytest.raises(DataError, match="cannot cut"):
        _batch()["responses"].tail(torch.tensor([1, 2]))
    with pytest.raises(DataError, match="cannot concatenate no columns"):
        Ragged.concat([])
    with pytest.raises(DataError, match="need a dtype"):
        Ragged.from_rows([[1]])


def test_ragged_rows_may_have_inner_dimensions():
    ragged = Ragged(torch.arange(6.0).view(3, 2), torch.tensor([1, 2]))
    assert ragged.padded().shape == (2, 2, 2)
    assert Ragged.from_padded(ragged.padded(), ragged.lengths).equal(ragged)
    assert ragged[1].tolist() == [[2, 3], [4, 5]] and ragged[-1].equal(ragged[1])
