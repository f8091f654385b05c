"""One recorded batch through an engine at any layout: what an update is made of, in Hugging Face's coordinates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.models.rules import ROUTING_BIAS
from megarl.models.spec import LatentAttention, MixtureOfExperts, ModelSpec, YarnScaling
from megarl.observability.metrics import values
from megarl.parallel.grid import ParallelLayout
from megarl.parallel.groups import ParallelGroups
from megarl.weights.pieces import assemble, pieces
from tests.distributed.engines import make_engine, owned_weights, policy_update, recorded_batch, replica
from tests.distributed.models import QWEN2, QWEN2_MOE, QWEN3
from tests.distributed.ranks import Rank, RankPool

TIED = replace(QWEN2, num_heads=8, num_kv_heads=4)
UNTIED = replace(QWEN3, num_heads=8, num_kv_heads=4, head_dim=8, tied_embeddings=False)
# Shared experts behind a gate, and dense layers on both stages.
EXPERTS = replace(
    UNTIED,
    family="qwen2_moe",
    qk_norm=False,
    qkv_bias=True,
    moe=replace(QWEN2_MOE.moe, num_experts=4, top_k=2),
)
# Latent attention with YaRN, routing within groups and a bias that chooses, dense layers first.
LATENT = replace(
    UNTIED,
    family="deepseek_v3",
    num_kv_heads=8,
    head_dim=14,
    qk_norm=False,
    rope_scaling=YarnScaling(4.0, 16, mscale=0.7, mscale_all_dim=0.7),
    mla=LatentAttention(20, kv_lora_rank=26, nope_head_dim=8, rope_head_dim=6, v_head_dim=10),
    moe=MixtureOfExperts(
        num_experts=8,
        top_k=4,
        ffn_hidden_size=20,
        dense_layers=(0,),
        shared_ffn_hidden_size=24,
        score="sigmoid",
        expert_bias=True,
        routed_scale=1.5,
        num_groups=4,
        top_groups=2,
    ),
)
# A bias that chooses beside attention of which half a head has position.
BIASED = replace(
    UNTIED,
    family="glm4_moe",
    qkv_bias=True,
    rotary_fraction=0.5,
    moe=replace(LATENT.moe, num_experts=4, top_k=2, num_groups=1, top_groups=1),  # type: ignore[type-var]
)
MATRIX_MODELS = ("tied", "untied", "experts")
MODELS: dict[str, ModelSpec] = {
    "tied": TIED,
    "untied": UNTIED,
    "experts": EXPERTS,
    "latent": LATENT,
    "biased": BIASED,
}


@dataclass(frozen=True)
class Case:
    """One cell of the matrix. ``cap`` cuts the batch into many microbatches, or packs it into few."""

    model: str = "tied"
    tp: int = 1
    sequence_parallel: bool = False
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    cap: int = 1000
    distributed: bool = False
    pipeline: str | None = None

    @property
    def layout(self) -> ParallelLayout:
        degrees = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in ("model", "cap", "distributed")
        }
        return ParallelLayout(**degrees)

    @property
    def is_valid(self) -> bool:
        """Whether there is such a layout, and megarl trains the model in it."""
        if (self.sequence_parallel and self.tp == 1) or (self.vpp > 1 and self.pp == 1):
            return False
        if self.tp * self.cp * self.dp % (self.ep * self.etp):
            return False
        if MODELS[self.model].moe is None:
            return self.ep == self.etp == 1
        return self.tp == 1 or self.sequence_parallel

    def __str__(self) -> str:
        names = {"model": "", "sequence_parallel": "sp", "distributed": "sharded"}
        told = [(names.get(field.name, field.name), getattr(self, field.name)) for field in fields(self)]
        return "-".join(
            name if value is True else f"{name}{value}"
            for name, value in told
            if value is True or value not in (1, 0, None)
        )


FACTORS: dict[str, tuple[Any, ...]] = {
    "model": MATRIX_MODELS,
    "tp": (1, 2, 4),
    "sequence_parallel": (False, True),
    "pp": (1, 2),
    "vpp": (1, 2),
    "cp": (1, 2),
    "dp": (1, 2),
    "ep": (1, 2),
    "etp": (1, 2),
    "cap": (28, 1000),
    "distributed": (False, True),
}


def all_cases() -> Iterator[Case]:
    """Every cell that is valid."""
    for values_of in product(*FACTORS.values()):
        case = Case(**dict(zip(FACTORS, values_of, strict=True)))
        if case.is_valid:
            yield case


def cases_by_start() -> dict[ParallelLayout, list[Case]]:
    """Every cell under the process groups it runs in: what differs beside them needs no other start."""
    starts: dict[ParallelLayout, list[Case]] = {}
    for case in all_cases():
        starts.setdefault(replace(case.layout, sequence_parallel=False), []).append(case)
    return starts


Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs_of(case: Case) -> set[Pair]:
    """Each two choices that meet in a case."""
    chosen = [(name, getattr(case, name)) for name in FACTORS]
    return set(combinations(chosen, 2))


RankOutcome = tuple[dict[str, float] | None, list[Any], list[Any]]


def run(rank: Rank, case: Case, kind: str = "policy") -> RankOutcome:
    """Metrics of two updates, gradients of the first before clipping, and weights after both, of one rank.

    With the distributed optimizer a rank's gradients are complete in its own part of the buffer only: none come back.
    """
    return update(rank.start(case.layout), case, kind)


def run_all(rank: Rank, start: ParallelLayout, cases: Sequence[Case]) -> list[RankOutcome]:
    """The same of several cases, in one start of the process groups they have in common."""
    groups = rank.start(start)
    outcomes = []
    for case in cases:
        try:
            outcomes.append(update(replace(groups, layout=case.layout), case))
        except Exception as error:
            error.add_note(f"in {case}")
            raise
    return outcomes


def update(groups: ParallelGroups, case: Case, kind: str = "policy") -> RankOutcome:
    """What ``run`` returns, in groups that are there."""
    moe = MODELS[case.model].moe
    engine = make_engine(
        MODELS[case.model],
        groups,
        cap=case.cap,
        distributed=case.distributed,
        head="value" if kind == "value" else "lm",
        moe_aux_loss_coef=0.0 if moe is None else 0.05,
        moe_bias_update_rate=0.02 if moe is not None and moe.expert_bias else 0.0,
    )
    batch, minibatches = replica(recorded_batch(engine.spec.vocab_size), groups)
    optimizer = engine.optimizer
    assert optimizer is not None
    gradients: list[Any] = []
    step = optimizer.step

    def record() -> Any:
        if not gradients and not case.distributed:
            found = {name: p.main_grad for name, p in engine.parameters().items() if hasattr(p, "main_grad")}
            regions = [region for region in engine.regions() if not region.tensor.endswith(ROUTING_BIAS)]
            gradients.extend((region, piece.clone()) for region, piece in pieces(regions, found))
        return step()

    optimizer.step = record  # type: ignore[method-assign]
    metrics = engine.update_policy(batch, policy_update(), minibatches)
    return None if metrics is None else values(metrics), gradients, owned_weights(engine)


Outcome = tuple[dict[str, float], dict[str, Tensor], dict[str, Tensor]]


def outcome(ranks: RankPool, case: Case) -> Outcome:
    """The case's metrics, whole gradients and whole weights."""
    return joined(ranks(case.layout.world_size).run(run, case, timeout_s=280), case)


def joined(results: Sequence[RankOutcome], case: Case) -> Outcome:
    """Of all ranks; every rank that reports says the same."""
    metrics = [metrics for metrics, _, _ in results if metrics is not None]
    assert len(metrics) == case.dp and all(other == metrics[0] for other in metrics)
    gradients = [piece for _, found, _ in results for piece in found]
    return metrics[0], assemble(gradients) if gradients else {}, assemble(p for _, _, w in results for p in w)


_expected: dict[str, Outcome] = {}


def expected(ranks: RankPool, model: str) -> Outcome:
    """One rank, one microbatch a minibatch, plain optimizer."""
    if model not in _expected:
        _expected[model] = outcome(ranks, Case(model=model))
    return _expected[model]


def compare(ranks: RankPool, case: Case) -> None:
    """The case against one rank: metrics, loss and norm among them, gradients and weights."""
    check(ranks, case, outcome(ranks, case))


def check(ranks: RankPool, case: Case, found: Outcome) -> None:
    """What was found of the case against one rank."""
    metrics, gradients, weights = found
    one_metrics, one_gradients, one_weights = expected(ranks, case.model)
    assert metrics == pytest.approx(one_metrics, rel=1e-4, abs=1e-5)
    learned = {name for name in one_weights if not name.endswith(ROUTING_BIAS)}
    assert case.distributed or gradients.keys() == one_gradients.keys() == learned
    for name, gradient in gradients.items():
        scale = max(1.0, float(one_gradients[name].abs().max()))
        torch.testing.assert_close(
            gradient, one_gradients[name], rtol=0, atol=1e-4 * scale, msg=lambda m, n=name: f"gradient of {n}: {m}"
        )
    for name, weight in one_weights.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
