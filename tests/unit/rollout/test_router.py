from __future__ import annotations

import numpy as np
import pytest

from megarl.errors import RolloutError
from megarl.rollout.engine import Completion, Request, WeightSpan
from megarl.rollout.router import collect, route


def request(index: int, length: int = 4, group: int | None = None) -> Request:
    return Request(index, list(range(3, 3 + length)), seed=index, group_id=group)


def ids(parts: list[list[Request]]) -> list[list[int]]:
    return [[item.request_id for item in part] for part in parts]


def test_the_longest_expected_goes_first_to_the_least_loaded():
    expected = {0: 10.0, 1: 100.0, 2: 20.0, 3: 60.0}
    parts = route([request(i) for i in range(4)], 2, n=1, max_tokens=128, expected_tokens=expected)
    # 104 | 64, then 24 joins 64, then 14 joins 88.
    assert ids(parts) == [[1], [0, 2, 3]]


def test_without_expectations_prompts_count():
    parts = route([request(0, 5), request(1, 50), request(2, 40), request(3, 5)], 2, n=2, max_tokens=8)
    assert ids(parts) == [[1, 3], [0, 2]]


def test_all_requests_of_a_group_go_to_one_replica():
    parts = route([request(i, group=i % 3) for i in range(12)], 2, n=1, max_tokens=8)
    homes = [{item.group_id for item in part} for part in parts]
    assert not homes[0] & homes[1] and homes[0] | homes[1] == {0, 1, 2}


def test_every_request_is_routed_once_and_ties_are_settled_by_order():
    requests = [request(i) for i in range(7)]
    parts = route(requests, 3, n=4, max_tokens=16)
    assert sorted(index for part in ids(parts) for index in part) == list(range(7))
    assert parts == route(requests, 3, n=4, max_tokens=16)
    assert ids(parts)[0][0] == 0
    assert ids(route([request(0)], 3, n=1, max_tokens=1)) == [[0], [], []]


def test_two_requests_with_one_id_are_refused():
    with pytest.raises(RolloutError, match="same id"):
        route([request(1), request(1)], 2, n=1, max_tokens=1)
    with pytest.raises(RolloutError, match="no rollout replica"):
        route([request(1)], 0, n=1, max_tokens=1)


def test_a_greedy_request_has_one_sample():
    parts = [[request(0), Request(1, [3], seed=0, is_greedy=True)]]
    done = Completion(np.array([1], np.int32), np.array([-0.5], np.float32), "stop", (WeightSpan(0, 0, 1),))
    assert collect(parts, [[(0, [done, done]), (1, [done])]], n=2) == {0: [done, done], 1: [done]}
    with pytest.raises(RolloutError, match="request 1 has 2 samples, expected 1"):
        collect(parts, [[(0, [done, done]), (1, [done, done])]], n=2)


def test_a_replica_that_answers_something_else_is_named():
    parts = [[request(0)], [request(1)]]
    done = Completion(np.array([1], np.int32), np.array([-0.5], np.float32), "stop", (WeightSpan(0, 0, 1),))
    assert collect(parts, [[(0, [done])], [(1, [done])]], n=1) == {0: [done], 1: [done]}
    with pytest.raises(RolloutError, match=r"replica 1"):
        collect(parts, [[(0, [done])], []], n=1)
    with pytest.raises(RolloutError, match=r"1 samples, expected 2.*replica 0"):
        collect(parts, [[(0, [done])], [(1, [done])]], n=2)
