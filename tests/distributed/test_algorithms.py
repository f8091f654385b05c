"""Estimators, corrections and losses over gloo ranks: the same numbers at every data- and context-parallel size.

Rows are dealt to data-parallel ranks in whole groups and unequal shares (one rank of four has none), each row is cut
over context-parallel ranks in Megatron's pairs of chunks, and each rank takes its rows in several microbatches.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.algorithms.aggregate import Aggregation, Denominators, aggregate, count
from megarl.algorithms.context_parallel import whole_rows
from megarl.algorithms.correction import Correction, Rejection, correct
from megarl.algorithms.kl import kl_penalty, penalized_rewards
from megarl.algorithms.masking import Reduce
from megarl.algorithms.value_losses import value_loss
from megarl.observability.metrics import Metrics, merge, values
from megarl.parallel.grid import ParallelLayout
from tests.distributed.ranks import Rank, RankPool
from tests.unit.algorithms.batches import Ragged, ragged
from tests.unit.algorithms.cases import ESTIMATOR_CASES, LOSSES, estimate, make_loss, policy_inputs, rows_of, single

ROWS, LENGTH = 24, 13
SHARES = {1: [24], 2: [9, 15], 4: [6, 0, 15, 3]}
"""Rows of each data-parallel rank; groups have three."""
CORRECTIONS = {
    "token": Correction("token", 1.2, normalize=True, rejections=[Rejection("token_k2", 0.05)]),
    "band": Correction("token", 1.3, lower=0.8, normalize=True, rejections=[Rejection("seq_mean_k3", 0.04)]),
    "sequence": Correction("sequence", 1.4, normalize=True, rejections=[Rejection("seq_max_k1", 1.5)]),
}
AGGREGATIONS: tuple[Aggregation, ...] = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")

Outcome = tuple[Tensor, list[Tensor], dict[str, Tensor], Metrics]
"""Shares of the loss, gradients of this rank's tokens, per-token results, metrics."""


def compute(b: Ragged, row_id: Tensor, over_dp: Reduce, places: Tensor, over_cp: Reduce) -> dict[str, Outcome]:
    """Every case on the rows of one rank, of whose tokens it holds those at ``places``."""

    def whole(part: Tensor) -> Tensor:
        return whole_rows(part, places, LENGTH, over_cp)

    def joined(x: Tensor) -> Tensor:
        return x if x.dim() == 1 else whole(x[:, places])

    held, b = b, Ragged(**{name: joined(getattr(b, name)) for name in b.__dataclass_fields__})
    results: dict[str, Outcome] = {}
    nothing = torch.zeros(())
    for kind, norm in ESTIMATOR_CASES:
        made = estimate(kind, b, norm_by_std=norm, reduce=over_dp)
        columns = {"advantages": made.advantages} | ({} if made.returns is None else {"returns": made.returns})
        results[f"estimator {kind} {norm}"] = (nothing, [], columns, made.metrics)
    for name, settings in CORRECTIONS.items():
        done = correct(b.old, b.rollout, b.mask, settings, reduce=over_dp)
        assert done.importance_weights is not None
        columns = {"kept": done.kept.float(), "weights": done.importance_weights}
        results[f"correction {name}"] = (nothing, [], columns, done.metrics)
    rewards, metrics = penalized_rewards(b.rewards, b.old, b.ref, b.mask, coef=0.1, estimator="k3")
    results["reward kl"] = (nothing, [], {"rewards": rewards}, metrics)

    # Losses train on what the sequence correction kept, under its normalised weights.
    fixed = correct(b.old, b.rollout, b.mask, CORRECTIONS["sequence"], reduce=over_dp)
    denominators = _over_all(count(fixed.kept), over_dp)
    for number, case in enumerate(LOSSES):
        loss = make_loss(case)
        mode = loss.aggregation or AGGREGATIONS[number % 3]
        leaf = held.log_probs[:, places].clone().requires_grad_()
        log_probs = whole(leaf)
        inputs = policy_inputs(
            loss, b, row_id, reduce=over_dp, response_mask=fixed.kept, importance_weights=fixed.importance_weights
        )
        shares, seen = torch.zeros(()), []
        for rows in torch.arange(len(leaf)).split(4):
            result = loss(replace(inputs, log_probs=log_probs).rows(rows))
            kl = kl_penalty(log_probs[rows], b.ref[rows], fixed.kept[rows], "k3+")
            share = aggregate(result.loss + 0.1 * kl, fixed.kept[rows], mode, denominators=denominators)
            share.backward(retain_graph=True)
            shares += share.detach()
            seen.append(result.metrics)
        assert leaf.grad is not None or not len(leaf)
        results[f"loss {case}"] = (
            shares,
            [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad],
            {},
            merge(seen),
        )
    leaf = held.values[:, places].clone().requires_grad_()
    result = value_loss(whole(leaf), b.old_values, b.returns, b.mask, clip=0.2)
    share = aggregate(result.loss, b.mask, "token-mean", denominators=_over_all(count(b.mask), over_dp))
    share.backward()
    assert leaf.grad is not None
    results["loss value"] = (share.detach(), [leaf.grad], {}, result.metrics)
    return results


def _over_all(mine: Denominators, reduce: Reduce) -> Denominators:
    if reduce is None:
        return mine
    tokens, rows = reduce(torch.tensor([mine.num_tokens, mine.num_rows])).tolist()
    return Denominators(tokens, rows)


def on_rank(rank: Rank, layout: ParallelLayout) -> tuple[Tensor, Tensor, int, dict[str, Outcome]]:
    groups = rank.start(layout)
    at = groups.coordinate

    def summed(group: Any) -> Reduce:
        def reduce(x: Tensor) -> Tensor:
            dist.all_reduce(x, group=group)
            return x

        return reduce

    first = sum(SHARES[layout.dp][: at.dp])
    mine = torch.arange(first, first + SHARES[layout.dp][at.dp])
    chunks = torch.arange(LENGTH).tensor_split(2 * layout.cp)
    places = torch.cat([chunks[at.cp], chunks[2 * layout.cp - 1 - at.cp]])
    results = compute(rows_of(batch(), mine), mine + 100, summed(groups.dp), places, summed(groups.cp))
    return mine, places, at.cp, results


def batch() -> Ragged:
    return single(ragged(17, rows=ROWS, length=LENGTH))


_seen: dict[Any, Any] = {}


@pytest.mark.parametrize("case", [
    *(f"estimator {kind} {norm}" for kind, norm in ESTIMATOR_CASES),
    *(f"correction {name}" for name in CORRECTIONS),
    "reward kl",
    *(f"loss {case}" for case in LOSSES),
    "loss value",
])  # fmt: skip
@pytest.mark.parametrize(("dp", "cp"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)])
def test_numbers_do_not_depend_on_ranks(ranks: RankPool, dp: int, cp: int, case: str) -> None:
    layout = ParallelLayout(dp=dp, cp=cp)
    if layout not in _seen:
        _seen[layout] = ranks(layout.world_size).run(on_rank, layout)
    if not _seen.get("whole"):
        _seen["whole"] = compute(batch(), torch.arange(ROWS) + 100, None, torch.arange(LENGTH), None)
    expected_loss, expected_gradients, expected_columns, expected_metrics = _seen["whole"][case]
    loss, metrics = torch.zeros(()), []
    gradients = [torch.full((ROWS, LENGTH), torch.nan) for _ in expected_gradients]
    columns = {name: torch.full((ROWS, LENGTH), torch.nan) for name in expected_columns}
    for mine, places, cp_rank, results in _seen[layout]:
        share, parts, rows, seen = results[case]
        for whole, part in zip(gradients, parts, strict=True):
            whole[mine[:, None], places] = part
        for name, part in rows.items():
            if cp_rank == 0:
                columns[name][mine] = part
            assert torch.equal(part, columns[name][mine]), "context-parallel ranks disagree"
        if cp_rank == 0:
            loss += share
            metrics.append(seen)
    close(loss, expected_loss)
    for actual, expected in zip(gradients, expected_gradients, strict=True):
        close(actual, expected)
    for name, expected in expected_columns.items():
        close(columns[name], expected)
    assert values(merge(metrics)) == pytest.approx(values(expected_metrics), rel=1e-5, abs=1e-6, nan_ok=True)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * max(float(expected.abs().max()), 1e-3))


def test_a_row_cut_over_ranks_is_put_together_with_its_gradient() -> None:
    part = torch.tensor([[1.0, torch.nan], [3.0, 4.0]], requires_grad=True)
    places = torch.tensor([3, 0])
    whole = whole_rows(part, places, 4, lambda x: x + torch.tensor([0.0, 5.0, 6.0, 0.0]))
    torch.testing.assert_close(
        whole, torch.tensor([[torch.nan, 5, 6, 1], [4, 5, 6, 3]]), equal_nan=True, rtol=0, atol=0
    )
    (whole * torch.arange(4.0)).sum().backward()
    assert part.grad is not None and part.grad.tolist() == [[3.0, 0.0], [3.0, 0.0]]
    mask = whole_rows(torch.tensor([[True, False]]), places, 4, None)
    assert mask.tolist() == [[False, False, False, True]]
