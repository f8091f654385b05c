"""Typed metrics reduce by their type, in any order and grouping."""

from __future__ import annotations

import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.observability.metrics import Last, Max, Mean, Metric, Min, Sum, merge, values

numbers = st.integers(-1000, 1000)
KINDS = [lambda x: Mean(x, 1), lambda x: Sum(x), lambda x: Max(x), lambda x: Min(x)]


@pytest.mark.parametrize("kind", KINDS)
@given(given_values=st.lists(numbers, min_size=1, max_size=8), data=st.data())
def test_merging_does_not_depend_on_how_the_values_are_cut(kind, given_values, data):
    cut = data.draw(st.integers(0, len(given_values)))
    parts = [[{"m": kind(x)} for x in part] for part in (given_values[:cut], given_values[cut:])]
    whole = merge([entry for part in parts for entry in part])
    assert merge([merge(parts[0]), merge(parts[1])]) == whole == merge([merge(parts[1]), merge(parts[0])])


def test_values_and_the_empty_case():
    assert values({"a": Mean(3, 2), "b": Sum(4), "c": Max(5), "d": Min(-1), "e": Last(7)}) == {
        "a": 1.5,
        "b": 4,
        "c": 5,
        "d": -1,
        "e": 7,
    }
    assert math.isnan(Mean(0, 0).value())
    assert merge([{"lr": Last(1)}, {"lr": Last(2)}])["lr"].value() == 2
    assert isinstance(pickle.loads(pickle.dumps(Mean(1, 2))), Metric)


def test_one_name_keeps_one_type():
    with pytest.raises(TypeError, match="'loss' is Mean and Sum"):
        merge([{"loss": Mean(1, 1)}, {"loss": Sum(1)}])
