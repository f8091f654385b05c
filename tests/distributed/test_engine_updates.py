"""Updates do not depend on how model and batch are cut: loss, gradient norm, metrics and weights after two updates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algorithms.correction import Rejection, reject
from megarl.data.batch import Ragged
from megarl.models.spec import ModelSpec
from megarl.observability.metrics import values
from megarl.parallel.grid import ParallelLayout
from megarl.train.engine import ValueUpdate
from megarl.weights.pieces import assemble
from tests.distributed.engines import MINIBATCHES, make_engine, owned_weights, policy_update, recorded_batch, replica
from tests.distributed.models import QWEN2
from tests.distributed.ranks import Rank, RankPool

UNTIED = replace(QWEN2, tied_embeddings=False)


def train(
    rank: Rank, layout: ParallelLayout, spec: ModelSpec, kind: str, cap: int, distributed: bool, options: dict[str, Any]
) -> tuple[dict[str, float] | None, list[Any]]:
    groups = rank.start(layout)
    engine = make_engine(spec, groups, cap=cap, distributed=distributed, head="value" if kind == "value" else "lm")
    recorded = recorded_batch(spec.vocab_size)
    if "rejections" in options:  # bypass: the policy that sampled is the old one
        recorded = recorded.add(rollout_log_probs=recorded["old_log_probs"])
    batch, minibatches = replica(recorded, groups)
    if kind == "policy":
        metrics = engine.update_policy(batch, policy_update(**options), minibatches)
    elif kind == "value":
        metrics = engine.update_values(batch, ValueUpdate(clip_value=0.2), minibatches)
    else:
        metrics = engine.update_sft(batch, minibatches)
    return None if metrics is None else values(metrics), owned_weights(engine)


def outcome(results: list[Any]) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Metrics, which all reporting ranks agree on, and full tensors."""
    metrics = [metrics for metrics, _ in results if metrics is not None]
    assert metrics and all(other == metrics[0] for other in metrics)
    return metrics[0], assemble(piece for _, pieces in results for piece in pieces)


def assert_same(actual: Any, expected: Any) -> None:
    metrics, weights = actual
    expected_metrics, expected_weights = expected
    assert metrics == pytest.approx(expected_metrics, rel=1e-4, abs=1e-5)
    for name, tensor in expected_weights.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


_one_rank: dict[Any, Any] = {}


def on_one_rank(ranks: RankPool, spec: ModelSpec, role: str, **options: Any) -> Any:
    """The reference: one process, one microbatch a minibatch, plain optimizer."""
    key = (spec, role, tuple(options.items()))
    if key not in _one_rank:
        _one_rank[key] = outcome(ranks(1).run(train, ParallelLayout(), spec, role, 1000, False, options))
    return _one_rank[key]


LAYOUTS = {
    "one": ParallelLayout(),
    "tp2": ParallelLayout(tp=2),
    "tp2-sp": ParallelLayout(tp=2, sequence_parallel=True),
    "pp2": ParallelLayout(pp=2),
    "tp2-pp2": ParallelLayout(tp=2, pp=2, sequence_parallel=True),
    "dp2": ParallelLayout(dp=2),
    "tp2-dp2": ParallelLayout(tp=2, dp=2),
    "pp2-dp2": ParallelLayout(pp=2, dp=2),
}


@pytest.mark.parametrize("distributed", [True, False], ids=["sharded", "plain"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_policy_update_is_the_same_at_every_layout(ranks: RankPool, name: str, distributed: bool) -> None:
    layout = LAYOUTS[name]
    results = ranks(layout.world_size).run(train, layout, QWEN2, "policy", 30, distributed, {})
    assert_same(outcome(results), on_one_rank(ranks, QWEN2, "policy"))


@pytest.mark.parametrize("name", ["tp2-sp", "tp2-pp2", "pp2-dp2"])
def test_untied_embeddings_train_alike(ranks: RankPool, name: str) -> None:
    layout = LAYOUTS[name]
    results = ranks(layout.world_size).run(train, layout, UNTIED, "policy", 30, True, {})
    assert_same(outcome(results), on_one_rank(ranks, UNTIED, "policy"))


@pytest.mark.parametrize("cap", [22, 40, 1000])
def test_the_microbatch_cap_changes_nothing(ranks: RankPool, cap: int) -> None:
    results = ranks(1).run(train, ParallelLayout(), QWEN2, "policy", cap, True, {})
    assert_same(outcome(results), on_one_rank(ranks, QWEN2, "policy"))


@pytest.mark.parametrize("aggregation", ["seq-mean-token-sum", "seq-mean-token-mean"])
def test_row_means_have_global_denominators(ranks: RankPool, aggregation: str) -> None:
    layout = LAYOUTS["tp2-dp2"]
    options = {"aggregation": aggregation}
    results = ranks(layout.world_size).run(train, layout, QWEN2, "policy", 30, True, options)
    assert_same(outcome(results), on_one_rank(ranks, QWEN2, "policy", **options))


@pytest.mark.parametrize("kind", ["gspo", "geo_mean", "kl_cov", "clip_cov"])
def test_losses_over_rows_and_over_the_whole_minibatch_do_not_depend_on_the_cut(ranks: RankPool, kind: str) -> None:
    layout = LAYOUTS["pp2-dp2"]
    results = ranks(layout.world_size).run(train, layout, QWEN2, "policy", 30, True, {"kind": kind})
    assert_same(outcome(results), on_one_rank(ranks, QWEN2, "policy", kind=kind))


BOUNDS = {
    "tokens": (Rejection("token_k1", upper=1.2, lower=0.3),),
    "rows": (Rejection("seq_mean_k1", upper=4.26, lower=1.35), Rejection("seq_max_k3", upper=2.5)),
    "everything": (Rejection("token_k3", upper=1e-9),),
}


@pytest.mark.parametrize("kind", ["ppo", "gspo", "kl_cov"])
@pytest.mark.parametrize("bounds", ["tokens", "rows"])
def test_rejection_by_the_current_policy_does_not_depend_on_the_cut(ranks: RankPool, bounds: str, kind: str) -> None:
    """Denominators are counted over what the whole minibatch keeps, on all pipeline stages."""
    layout = LAYOUTS["pp2-dp2"]
    options = {"kind": kind, "rejections": BOUNDS[bounds], "measures_gap": True, "measures_entropy": True}
    expected = on_one_rank(ranks, QWEN2, "policy", **options)
    assert 0.1 < expected[0]["rollout_corr/rollout_rs_masked_fraction"] < 0.9
    assert expected[0]["rollout_corr/kl"] != 0 and expected[0]["actor/entropy"] > 0
    results = ranks(layout.world_size).run(train, layout, QWEN2, "policy", 30, True, options)
    assert_same(outcome(results), expected)


@pytest.mark.parametrize("bounds", ["tokens", "rows"])
def test_rejected_tokens_are_as_if_they_were_masked(ranks: RankPool, bounds: str) -> None:
    """The first minibatch's update equals that of a batch whose mask lacks what the bounds reject."""
    options = {"rejections": BOUNDS[bounds]}
    metrics, _ = on_one_rank(ranks, QWEN2, "policy", **options)
    ((expected, norm),) = ranks(1).run(masked_beforehand, BOUNDS[bounds])
    ((actual, actual_norm),) = ranks(1).run(masked_in_the_update, BOUNDS[bounds])
    assert actual == pytest.approx(expected, rel=1e-5) and actual_norm == pytest.approx(norm, rel=1e-5)
    assert metrics["actor/skipped_updates"] == 0


def test_a_minibatch_that_is_rejected_whole_updates_nothing(ranks: RankPool) -> None:
    metrics, weights = on_one_rank(ranks, QWEN2, "policy", rejections=BOUNDS["everything"])
    assert metrics["actor/empty_minibatches"] == 2 and "actor/grad_norm" not in metrics
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 1
    results = ranks(4).run(train, LAYOUTS["pp2-dp2"], QWEN2, "policy", 30, True, {"rejections": BOUNDS["everything"]})
    assert [metrics["actor/empty_minibatches"] for metrics, _ in results if metrics is not None] == [2, 2]
    untouched = assemble(piece for _, pieces in results for piece in pieces)
    for name, tensor in weights.items():
        torch.testing.assert_close(untouched[name], tensor)


def masked_in_the_update(rank: Rank, bounds: tuple[Rejection, ...]) -> tuple[float, float]:
    engine = make_engine(QWEN2, rank.start(ParallelLayout()))
    batch = recorded_batch(QWEN2.vocab_size)
    batch = batch.add(rollout_log_probs=batch["old_log_probs"])
    return loss_and_norm(engine.update_policy(batch, policy_update(rejections=bounds), MINIBATCHES[:1]))


def masked_beforehand(rank: Rank, bounds: tuple[Rejection, ...]) -> tuple[float, float]:
    engine = make_engine(QWEN2, rank.start(ParallelLayout()))
    batch = recorded_batch(QWEN2.vocab_size)
    columns = engine.log_probs(batch.only("prompts", "responses"), temperature=0.9)
    assert columns is not None
    mask = batch.ragged("response_mask")
    ratio = columns["log_probs"].padded() - batch.ragged("old_log_probs").padded()
    kept, _ = reject(ratio, mask.padded(fill=False), bounds)
    batch = batch.replace(response_mask=Ragged.from_padded(kept, batch.response_lengths))
    return loss_and_norm(engine.update_policy(batch, policy_update(), MINIBATCHES[:1]))


def loss_and_norm(metrics: Any) -> tuple[float, float]:
    numbers = values(metrics)
    return numbers["actor/loss"], numbers["actor/grad_norm"]


@pytest.mark.parametrize("kind", ["value", "sft"])
@pytest.mark.parametrize("name", ["tp2", "tp2-sp", "tp2-pp2", "dp2"])
def test_critic_and_sft_updates_are_the_same_at_every_layout(ranks: RankPool, kind: str, name: str) -> None:
    layout = LAYOUTS[name]
    results = ranks(layout.world_size).run(train, layout, QWEN2, kind, 30, True, {})
    assert_same(outcome(results), on_one_rank(ranks, QWEN2, kind))
