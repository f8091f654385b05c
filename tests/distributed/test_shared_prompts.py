"""A group's prompt computed once is the prompt computed for each sample; and updates that are their own old policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.data.batch import Batch
from megarl.errors import ModelError
from megarl.models.spec import ModelSpec
from megarl.observability.metrics import values
from megarl.parallel.grid import ParallelLayout
from megarl.weights.pieces import assemble
from tests.distributed.engines import ROWS, make_engine, owned_weights, policy_update, recorded_batch, replica
from tests.distributed.models import QWEN2
from tests.distributed.parity import EXPERTS, LATENT
from tests.distributed.ranks import Rank, RankPool

EP2 = ParallelLayout(tp=2, ep=2, sequence_parallel=True)
CASES = {
    "one": (QWEN2, ParallelLayout()),
    "tp2-sp": (QWEN2, ParallelLayout(tp=2, sequence_parallel=True)),
    "pp2": (QWEN2, ParallelLayout(pp=2)),
    "dp2": (QWEN2, ParallelLayout(dp=2)),
    "experts": (EXPERTS, EP2),
    "latent": (LATENT, EP2),
}


def grouped_batch() -> Batch:
    """The recorded batch with the prompts of three groups of four."""
    batch = recorded_batch(QWEN2.vocab_size)
    return batch.replace(prompts=batch.ragged("prompts").select([row // 4 * 4 for row in range(ROWS)]))


def train(rank: Rank, spec: ModelSpec, layout: ParallelLayout, share: bool, cap: int) -> tuple[Any, Any, list[Any]]:
    groups = rank.start(layout)
    balance = {} if spec.moe is None else {"moe_aux_loss_coef": 0.05}
    engine = make_engine(spec, groups, cap=cap, share_prompts=share, **balance)
    batch, minibatches = replica(grouped_batch(), groups)
    columns = engine.log_probs(batch, with_entropy=True)
    metrics = engine.update_policy(batch, policy_update(), minibatches)
    flat = None if columns is None else {name: column.values for name, column in columns.items()}
    return flat, None if metrics is None else values(metrics), owned_weights(engine)


def tokens_of_a_pass(rank: Rank, share: bool | None, cp: int) -> int:
    """Tokens of the whole batch in one microbatch."""
    engine = make_engine(QWEN2, rank.start(ParallelLayout(cp=cp)), cap=1000, share_prompts=share)
    return engine._parts.pack(grouped_batch(), range(ROWS)).num_tokens


def test_prompts_are_shared_where_they_can_be_and_the_key_does_not_say_no(ranks: RankPool) -> None:
    (shared,), (alone,) = (ranks(1).run(tokens_of_a_pass, share, 1) for share in (True, False))
    prompts = grouped_batch().prompt_lengths
    assert alone - shared == int(prompts.sum()) - int(prompts[::4].sum())
    assert ranks(1).run(tokens_of_a_pass, None, 1) == [shared]
    assert min(ranks(2).run(tokens_of_a_pass, None, 2)) >= alone


def refuse(rank: Rank) -> str:
    with pytest.raises(ModelError) as refused:
        tokens_of_a_pass(rank, True, 2)
    return str(refused.value)


def test_context_parallel_ranks_do_not_share_prompts(ranks: RankPool) -> None:
    for message in ranks(2).run(refuse):
        assert "cp=2" in message and "engine.share_prompts" in message


def outcome(results: list[Any]) -> tuple[dict[str, float], dict[str, Tensor]]:
    metrics = [metrics for _, metrics, _ in results if metrics is not None]
    return metrics[0], assemble(piece for _, _, pieces in results for piece in pieces)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if CASES[name][0] is QWEN2 else pytest.mark.slow) for name in CASES]
)
def test_sharing_changes_neither_log_probs_nor_updates(ranks: RankPool, name: str) -> None:
    spec, layout = CASES[name]
    (alone,) = ranks(1).run(train, spec, ParallelLayout(), False, 1000)
    results = ranks(layout.world_size).run(train, spec, layout, True, 60)
    if layout.dp == 1:
        (columns,) = [columns for columns, _, _ in results if columns is not None]
        for column, expected in alone[0].items():
            torch.testing.assert_close(columns[column], expected, rtol=0, atol=1e-5, msg=column)
    metrics, weights = outcome(results)
    expected_metrics, expected_weights = outcome([alone])
    assert metrics == pytest.approx(expected_metrics, rel=1e-5, abs=1e-5)
    for tensor, expected in expected_weights.items():
        torch.testing.assert_close(weights[tensor], expected, rtol=1e-5, atol=1e-5, msg=tensor)


def update_once(rank: Rank, with_old: bool) -> tuple[dict[str, float], list[Any]]:
    engine = make_engine(QWEN2, rank.start(ParallelLayout()))
    update = policy_update(measures_gap=not with_old)
    batch = recorded_batch(QWEN2.vocab_size)
    batch = batch.add(rollout_log_probs=batch["old_log_probs"]).without("old_log_probs")
    if with_old:
        columns = engine.log_probs(batch, temperature=update.temperature)
        assert columns is not None
        batch = batch.add(old_log_probs=columns["log_probs"])
    metrics = engine.update_policy(batch, update, [list(range(ROWS))])
    assert metrics is not None
    return values(metrics), owned_weights(engine)


def test_one_update_without_old_log_probs_is_one_with_those_of_a_pass_before_it(ranks: RankPool) -> None:
    ((metrics, pieces),) = ranks(1).run(update_once, False)
    ((expected_metrics, expected_pieces),) = ranks(1).run(update_once, True)
    compared = {name: metrics.pop(name) for name in list(metrics) if name not in expected_metrics}
    assert compared["training/rollout_log_probs_diff/mean"] > 0.1
    assert metrics == pytest.approx(expected_metrics, rel=1e-5, abs=1e-6)
    weights, expected = assemble(pieces), assemble(expected_pieces)
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-6, atol=1e-6, msg=name)
