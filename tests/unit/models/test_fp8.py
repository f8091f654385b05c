"""Sides of matrices that are multiplied in FP8, on a rank."""

from __future__ import annotations

from dataclasses import replace

from megarl.models.fp8 import sides, unfit_sides
from megarl.models.spec import MixtureOfExperts
from megarl.planning.known_models import known_spec

DENSE = known_spec("Qwen2.5-7B")  # hidden 3584, ffn 18944, 28 heads and 4 key-value heads of 128


def test_sides_are_those_of_one_rank():
    assert sides(DENSE, tp=4, etp=1) == {
        "hidden size": 3584,
        "rows of queries, keys and values": (28 + 8) * 128 // 4,
        "rows of queries": 28 * 128 // 4,
        "feed-forward rows": 18944 // 4,
    }


def test_experts_are_cut_by_their_own_degree():
    moe = MixtureOfExperts(num_experts=8, top_k=2, ffn_hidden_size=1408, shared_ffn_hidden_size=5632)
    found = sides(replace(DENSE, moe=moe), tp=2, etp=4)
    assert (found["rows of an expert"], found["rows of the shared experts"]) == (352, 2816)
    assert "feed-forward rows" not in found  # no layer is dense


def test_only_sides_that_do_not_divide_are_named():
    assert unfit_sides(DENSE, 16, tp=4, etp=1) == {}
    odd = replace(DENSE, ffn_hidden_size=18944 + 32)
    assert unfit_sides(odd, 16, tp=4, etp=1) == {"feed-forward rows": 4744}
    assert unfit_sides(odd, 32, tp=1, etp=1) == {}
