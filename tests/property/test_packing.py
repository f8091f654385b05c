"""Packing and balancing: every row once, no cap exceeded, the same result every time."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.balance import SequenceCost, balance, inverse
from megarl.data.packing import pack
from megarl.errors import DataError

lengths_and_cap = st.integers(1, 200).flatmap(
    lambda cap: st.tuples(st.lists(st.integers(1, cap), min_size=1, max_size=60), st.just(cap))
)


@given(lengths_and_cap, st.integers(1, 5))
def test_every_row_once_and_the_cap_holds(case, min_bins):
    lengths, cap = case
    if len(lengths) < min_bins:
        with pytest.raises(DataError):
            pack(lengths, cap, min_bins=min_bins)
        return
    bins = pack(lengths, cap, min_bins=min_bins)
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
    assert all(0 < sum(lengths[row] for row in rows) <= cap for rows in bins)
    assert len(bins) >= min_bins
    assert bins == pack(lengths, cap, min_bins=min_bins)


@given(lengths_and_cap, st.floats(0, 1), st.integers(1, 5))
def test_work_changes_neither_the_cap_nor_what_is_packed(case, squared, min_bins):
    lengths, cap = case
    min_bins = min(min_bins, len(lengths))
    costs = SequenceCost(1.0, squared).of(lengths)
    bins = pack(lengths, cap, costs=costs, min_bins=min_bins)
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
    assert all(0 < sum(lengths[row] for row in rows) <= cap for rows in bins)
    assert len(bins) >= min_bins
    assert len(bins) <= max(min_bins, math.floor(11 / 9 * _fewest_possible(lengths, cap) + 6 / 9) + 1)
    work = [sum(costs[row] for row in rows) for rows in bins]
    assert work == pytest.approx(sorted(work, reverse=True))


@given(lengths_and_cap)
def test_bins_stay_within_the_bound_of_decreasing_fit(case):
    lengths, cap = case
    assert len(pack(lengths, cap)) <= math.floor(11 / 9 * _fewest_possible(lengths, cap) + 6 / 9) + 1


def _fewest_possible(lengths: list[int], cap: int) -> int:
    """A lower bound on any packing's bins is not enough for the theorem, so allow halves: rows above cap/2 need one."""
    return max(math.ceil(sum(lengths) / cap), sum(length > cap / 2 for length in lengths)) * 2


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("rows", "cap"), [(256, 16_384), (1024, 32_768), (4096, 16_384)])
def test_waste_is_at_most_two_percent_on_realistic_lengths(seed, rows, cap):
    generator = random.Random(seed)
    lengths = [min(8192, 64 + int(generator.lognormvariate(6.5, 0.9))) for _ in range(rows)]
    bins = pack(lengths, cap)
    # The last bin's remainder is nobody's fault: compare with the fewest bins that could hold the tokens.
    fewest = math.ceil(sum(lengths) / cap)
    assert (len(bins) - fewest) / fewest <= 0.02


# Operations per token and per token squared of 7 billion parameters and of half a billion.
MODELS = {"7b": SequenceCost(1.4e10, 262_144.0), "0.5b": SequenceCost(1.0e9, 43_008.0)}


def realistic_lengths(rows: int, *, seed: int) -> list[int]:
    """Log-normal with mean 1,800, at most 16,384."""
    generator, sigma = random.Random(seed), 0.9
    mu = math.log(1800) - sigma**2 / 2
    return [min(16_384, max(1, int(generator.lognormvariate(mu, sigma)))) for _ in range(rows)]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("rows", "cap"), [(1024, 16_384), (1024, 32_768), (8192, 32_768), (8192, 16_384)])
def test_microbatches_are_full_and_their_work_is_even(model, rows, cap):
    lengths = realistic_lengths(rows, seed=1)
    costs = MODELS[model].of(lengths)
    bins = pack(lengths, cap, costs=costs)
    assert len(bins) <= max(math.ceil(sum(lengths) / cap), sum(lengths) / (0.99 * cap))
    work = [sum(costs[row] for row in members) for members in bins]
    # A row as long as the cap is a bin by itself, and its work is what it is.
    possible = max(sum(costs) / len(bins), max(costs))
    assert max(work) <= 1.1 * possible


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("ranks", [8, 64, 512])
def test_ranks_get_even_work_where_the_longest_row_allows(model, ranks):
    costs = MODELS[model].of(realistic_lengths(4096, seed=2))
    work = [sum(costs[row] for row in rows) for rows in balance(costs, ranks, equal_counts=False)]
    assert max(work) <= 1.02 * max(sum(costs) / ranks, max(costs))


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.integers(1, 8), st.booleans())
def test_balance_gives_every_row_to_one_part(costs, parts, equal_counts):
    if len(costs) < parts or (equal_counts and len(costs) % parts):
        with pytest.raises(DataError):
            balance(costs, parts, equal_counts=equal_counts)
        return
    found = balance(costs, parts, equal_counts=equal_counts)
    assert sorted(row for rows in found for row in rows) == list(range(len(costs)))
    assert all(found) and len(found) == parts
    if equal_counts:
        assert {len(rows) for rows in found} == {len(costs) // parts}
    else:
        largest = max(sum(costs[row] for row in rows) for rows in found)
        assert largest <= sum(costs) / parts + max(costs) + 1e-6
    assert found == balance(costs, parts, equal_counts=equal_counts)
    flat = [row for rows in found for row in rows]
    assert [flat[i] for i in inverse(found)] == list(range(len(costs)))


@pytest.mark.parametrize("equal_counts", [True, False])
def test_balanced_parts_differ_by_less_than_a_percent(equal_counts):
    generator = random.Random(0)
    costs = [64 + generator.lognormvariate(6.5, 0.9) for _ in range(1024)]
    totals = [sum(costs[row] for row in rows) for rows in balance(costs, 8, equal_counts=equal_counts)]
    assert max(totals) <= 1.01 * sum(totals) / 8


@pytest.mark.parametrize(
    ("lengths", "cap", "min_bins", "message"),
    [([5, 11], 10, 1, "row 1 has 11 tokens"), ([5, 0], 10, 1, "row 1 has no tokens"), ([5], 10, 2, "cannot fill 2")],
)
def test_what_cannot_be_packed_is_said(lengths, cap, min_bins, message):
    with pytest.raises(DataError, match=message):
        pack(lengths, cap, min_bins=min_bins)
