"""Load and auxiliary loss of experts: the formula, its gradient, and what must not touch them.

That neither depends on microbatches or the layout is a part of ``test_parity_matrix.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megarl.errors import ModelError
from megarl.models.spec import ModelSpec
from megarl.observability.metrics import values
from megarl.parallel.grid import ParallelLayout
from megarl.train.megatron.balance import routed_tokens
from megarl.train.megatron.microbatch import build
from tests.distributed.engines import make_engine, policy_update, recorded_batch
from tests.distributed.parity import BIASED, EXPERTS, TIED
from tests.distributed.ranks import Rank, RankPool

COEF = 0.5
LAST = EXPERTS.num_layers - 1
ROUTER = f"decoder.layers.{LAST}.mlp.router.weight"


def step(rank: Rank, coef: float, shift: float = 0.0, **engine: Any) -> tuple[dict[str, float], Tensor, Tensor]:
    """One update: metrics, gradient of the last layer's router, and the direction that router was shifted along."""
    trained = make_engine(
        EXPERTS, rank.start(ParallelLayout()), cap=1000, distributed=False, moe_aux_loss_coef=coef, **engine
    )
    weight = trained.parameters()[ROUTER]
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        weight += shift * direction
    optimizer = trained.optimizer
    assert optimizer is not None
    gradient = torch.zeros(0)
    apply = optimizer.step

    def record() -> Any:
        nonlocal gradient
        gradient = weight.main_grad.clone()  # type: ignore[attr-defined]
        return apply()

    optimizer.step = record  # type: ignore[method-assign]
    batch = recorded_batch(EXPERTS.vocab_size)
    trained.log_probs(batch)
    metrics = trained.update_policy(batch, policy_update(), [list(range(len(batch)))])
    assert metrics is not None
    return values(metrics), gradient, direction


def measure(rank: Rank) -> dict[str, Any]:
    with_loss, with_gradient, direction = step(rank, COEF)
    without, without_gradient, _ = step(rank, 0.0)
    recomputed, recomputed_gradient, _ = step(rank, COEF, recompute="full")
    losses = [step(rank, COEF, shift)[0]["actor/moe_aux_loss"] for shift in (-2e-3, 2e-3)]
    return {
        "with": with_loss,
        "without": without,
        "recomputed": recomputed,
        "gradient": with_gradient,
        "recomputed_gradient": recomputed_gradient,
        "slope": float(((with_gradient - without_gradient) * direction).sum()) / COEF,
        # The metric is the mean over layers, the loss their sum, and only this layer's depends on the router.
        "expected_slope": (losses[1] - losses[0]) / 4e-3 * EXPERTS.num_expert_layers,
    }


def test_gradient_is_that_of_the_measured_loss(ranks: RankPool) -> None:
    (found,) = ranks(1).run(measure)
    assert found["slope"] == pytest.approx(found["expected_slope"], rel=0.02)
    assert abs(found["slope"]) > 1e-3
    assert "actor/moe_aux_loss" not in found["without"]
    loads = {name: value for name, value in found["with"].items() if name.startswith("actor/expert_load")}
    assert len(loads) == EXPERTS.num_expert_layers + 1
    assert all(found["without"][name] == value >= 1 for name, value in loads.items())
    # Recomputed layers run twice, and count once.
    assert found["recomputed"] == pytest.approx(found["with"], rel=1e-5)
    torch.testing.assert_close(found["recomputed_gradient"], found["gradient"])


def refuse(rank: Rank, spec: ModelSpec, key: str) -> str:
    with pytest.raises(ModelError, match="but the model has no") as refused:
        make_engine(spec, rank.start(ParallelLayout()), **{key: 0.1})
    return str(refused.value)


@pytest.mark.parametrize(
    ("spec", "key", "lacking"),
    [(TIED, "moe_aux_loss_coef", "no experts"), (EXPERTS, "moe_bias_update_rate", "no bias that chooses experts")],
)
def test_what_the_model_has_not_cannot_be_balanced(ranks: RankPool, spec: ModelSpec, key: str, lacking: str) -> None:
    (message,) = ranks(1).run(refuse, spec, key)
    assert key in message and lacking in message


def move(rank: Rank, recompute: str) -> list[tuple[Tensor, Tensor]]:
    """Each router's bias after one update, and tokens of its experts in one pass over a batch without padding."""
    trained = make_engine(
        BIASED,
        rank.start(ParallelLayout()),
        cap=1000,
        moe_bias_update_rate=0.25,
        recompute=recompute,
        share_prompts=False,
    )
    counts: dict[int, Tensor] = {}
    routers = [module for chunk in trained._modules for module in chunk.modules() if isinstance(module, TopKRouter)]
    for router in routers:
        router.register_forward_hook(lambda module, _, out: counts.update({module.layer_number: out[1].sum(0)}))
    batch = recorded_batch(BIASED.vocab_size)
    rows = [row for row in range(len(batch)) if batch.ragged("response_mask").select([row]).values.any()]
    before = [router.expert_bias.clone() for router in routers]
    trained.log_probs(batch.select(rows))
    trained.eval_sft(batch.select(rows))
    assert all(torch.equal(router.expert_bias, bias) for router, bias in zip(routers, before, strict=True))
    trained.update_policy(batch, policy_update(), [rows])
    return [(router.expert_bias.clone(), counts[router.layer_number]) for router in routers]


@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_a_bias_moves_against_the_load(ranks: RankPool, recompute: str) -> None:
    (moved,) = ranks(1).run(move, recompute)
    assert len(moved) == BIASED.num_expert_layers
    for bias, counts in moved:
        assert counts.unique().numel() > 1
        assert torch.equal(bias, 0.25 * torch.sign(counts.float().mean() - counts.float()))


@pytest.mark.parametrize("share", [False, True])
def test_every_token_of_every_row_is_counted_once_and_no_padding(share: bool) -> None:
    batch = recorded_batch(50)
    batch = batch.replace(prompts=batch.ragged("prompts").select([0] * 4 + list(range(4, 12))))
    microbatch = build(batch, range(8), multiple=32, share_prompts=share)
    counts = torch.zeros(8)
    for tp_rank in range(4):
        part = routed_tokens(microbatch, tp_rank=tp_rank, tp_size=4)
        counts += part.per_row(torch.ones(microbatch.num_tokens // 4, 1))[:, 0]
    assert counts.tolist() == batch.sequence_lengths[:8].tolist()
