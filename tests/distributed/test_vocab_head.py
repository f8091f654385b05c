"""The vocabulary head on shards: the same log-probs, entropy and gradients at every tensor-parallel size."""

from __future__ import annotations

import pytest
import torch

from megarl.parallel.grid import ParallelLayout
from megarl.train.megatron.heads import vocab_log_probs
from tests.distributed.ranks import Rank, RankPool

TOKENS, HIDDEN, VOCAB, PADDED = 12, 8, 70, 256
"""At tp=4 the third and fourth shards hold padding only."""


def head_on_shards(rank: Rank, layout: ParallelLayout) -> dict[str, torch.Tensor]:
    groups = rank.start(layout)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = torch.randn(PADDED, HIDDEN, generator=generator)
    positions = torch.tensor([0, 1, 3, 4, 7, 11])
    targets = torch.randint(0, VOCAB, (6,), generator=generator)
    rows = PADDED // layout.tp
    shard = weight[groups.coordinate.tp * rows : (groups.coordinate.tp + 1) * rows].clone().requires_grad_()
    if layout.sequence_parallel:
        part = TOKENS // layout.tp
        hidden = hidden[groups.coordinate.tp * part : (groups.coordinate.tp + 1) * part].clone()
    hidden.requires_grad_()
    squares = torch.zeros(len(targets))
    log_probs, entropy = vocab_log_probs(
        hidden,
        shard,
        targets,
        vocab_size=VOCAB,
        positions=positions,
        temperature=0.8,
        chunk_tokens=4,
        with_entropy=True,
        tp_group=groups.tp,
        sequence_parallel=layout.sequence_parallel,
        sum_pi_squared=squares,
    )
    assert entropy is not None
    scale = torch.linspace(0.1, 1.5, len(targets))
    ((log_probs * scale).sum() - (entropy * scale.flip(0)).sum()).backward()
    assert hidden.grad is not None and shard.grad is not None
    return {
        "log_probs": log_probs.detach(),
        "entropy": entropy.detach(),
        "sum_pi_squared": squares,
        "hidden_grad": hidden.grad,
        "weight_grad": shard.grad,
    }


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_results_and_gradients_do_not_depend_on_tensor_parallel_size(
    ranks: RankPool, tp: int, sequence_parallel: bool
) -> None:
    (expected,) = ranks(1).run(head_on_shards, ParallelLayout())
    results = ranks(tp).run(head_on_shards, ParallelLayout(tp=tp, sequence_parallel=sequence_parallel))
    for result in results:
        for name in ("log_probs", "entropy", "sum_pi_squared"):
            torch.testing.assert_close(result[name], expected[name], rtol=1e-5, atol=1e-6)
    if sequence_parallel:
        hidden_grads = [torch.cat([result["hidden_grad"] for result in results])]
    else:
        hidden_grads = [result["hidden_grad"] for result in results]
    for grad in hidden_grads:
        torch.testing.assert_close(grad, expected["hidden_grad"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        torch.cat([result["weight_grad"] for result in results]), expected["weight_grad"], rtol=1e-5, atol=1e-6
    )
