"""Minibatches and their shares over data-parallel ranks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.controller.dispatch import Collect, Split, WorkerGroup, dispatch, make_minibatches, split_minibatches
from megarl.parallel.grid import ParallelLayout


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    dp=st.integers(1, 4),
    size=st.integers(1, 50),
    epochs=st.integers(1, 3),
)
def test_every_row_of_every_minibatch_goes_to_exactly_one_rank(lengths, dp, size, epochs):
    minibatches = make_minibatches(len(lengths), size, epochs=epochs, shuffle=True, seed=3)
    rows, local = split_minibatches(lengths, minibatches, dp)
    assert [len(share) for share in local] == [len(minibatches)] * dp
    for number, minibatch in enumerate(minibatches):
        shared = [rows[d][index] for d in range(dp) for index in local[d][number]]
        assert sorted(shared) == sorted(minibatch)


@settings(deadline=None)
@given(num_rows=st.integers(1, 60), size=st.integers(1, 70), epochs=st.integers(1, 3))
def test_an_epoch_visits_each_row_once(num_rows, size, epochs):
    minibatches = make_minibatches(num_rows, size, epochs=epochs, shuffle=True, seed=0)
    per_epoch = len(minibatches) // epochs
    for epoch in range(epochs):
        visited = [row for minibatch in minibatches[epoch * per_epoch : (epoch + 1) * per_epoch] for row in minibatch]
        assert sorted(visited) == list(range(num_rows))


def test_minibatches_depend_on_the_seed_and_on_nothing_else():
    first = make_minibatches(16, 4, epochs=2, shuffle=True, seed=7)
    assert first == make_minibatches(16, 4, epochs=2, shuffle=True, seed=7)
    assert first != make_minibatches(16, 4, epochs=2, shuffle=True, seed=8)
    assert make_minibatches(5, None, epochs=1, shuffle=False, seed=0) == [[0, 1, 2, 3, 4]]


def test_a_rank_gets_its_rows_once_even_over_several_epochs():
    minibatches = make_minibatches(12, 6, epochs=3, shuffle=True, seed=1)
    rows, _ = split_minibatches([1] * 12, minibatches, 2)
    assert all(len(part) == len(set(part)) for part in rows)


def test_a_method_that_is_not_declared_cannot_be_called_on_a_group():
    class Worker:
        @dispatch(split=Split.BROADCAST, collect=Collect.FIRST)
        def declared(self) -> int:
            return 1

        def internal(self) -> int:
            return 2

    group = WorkerGroup(Worker, [], ParallelLayout(), watch=None)
    assert callable(group.declared)
    with pytest.raises(AttributeError, match=r"Worker\.internal is not declared"):
        _ = group.internal
