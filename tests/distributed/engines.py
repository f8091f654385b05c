"""Engines on tiny models and recorded batches for distributed tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megarl.algorithms.policy_losses import build_policy_loss
from megarl.config.schema.train import EngineConfig, LoraConfig, OptimizerConfig, ScheduleConfig
from megarl.data.batch import Batch, Ragged
from megarl.models.spec import ModelSpec
from megarl.parallel.groups import ParallelGroups
from megarl.platform.device import get_device
from megarl.train.engine import PolicyUpdate
from megarl.train.megatron import reduction
from megarl.train.megatron.engine import MegatronEngine

ROWS = 12
MINIBATCHES = [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
"""Rows of the global batch."""


def make_engine(
    spec: ModelSpec,
    groups: ParallelGroups,
    *,
    cap: int = 64,
    chunk: int = 7,
    head: Any = "lm",
    distributed: bool = True,
    trained: bool = True,
    dtype: Any = "float32",
    seed: int = 3,
    model_dir: Any = None,
    optimizer: dict[str, Any] | None = None,
    lora: LoraConfig | None = None,
    **engine: Any,
) -> MegatronEngine:
    """An engine with random weights that do not depend on the layout."""
    settings = {"lr": 1e-2, "weight_decay": 0.1, "clip_grad": 1.0, "schedule": ScheduleConfig(warmup_steps=2)}
    # Adam divides by |gradient| + eps: with the usual 1e-8 the rounding of a gradient near zero becomes a whole step.
    settings["eps"] = 1e-3
    return MegatronEngine(
        "actor" if head == "lm" else "critic",
        spec,
        model_dir,
        groups,
        get_device("cpu"),
        EngineConfig(dtype=dtype, microbatch_tokens=cap, logits_chunk_tokens=chunk, **engine),
        OptimizerConfig(distributed=distributed, **(settings | (optimizer or {}))) if trained else None,
        head=head,
        seed=seed,
        lora=lora,
    )


@contextmanager
def buckets_of(elements: int | None) -> Iterator[None]:
    """Gradient buffers that are made within it are cut into buckets of so many elements."""
    kept, reduction.BUCKET_ELEMENTS = reduction.BUCKET_ELEMENTS, elements
    try:
        yield
    finally:
        reduction.BUCKET_ELEMENTS = kept


def recorded_batch(vocab_size: int) -> Batch:
    """Twelve samples of unequal lengths: one response is empty, one is masked whole, one has a masked stretch."""
    generator = torch.Generator().manual_seed(11)
    prompt_lengths = torch.randint(1, 9, (ROWS,), generator=generator).tolist()
    response_lengths = torch.randint(2, 14, (ROWS,), generator=generator).tolist()
    response_lengths[4] = 0
    mask = [torch.ones(length, dtype=torch.bool) for length in response_lengths]
    mask[7][:] = False
    mask[2][1:2] = False

    def tokens(lengths: list[int]) -> Ragged:
        return Ragged.from_rows([torch.randint(0, vocab_size, (n,), generator=generator) for n in lengths])

    def floats(scale: float, shift: float = 0.0) -> Ragged:
        return Ragged.from_rows([shift + scale * torch.randn(n, generator=generator) for n in response_lengths])

    return Batch.create(
        sample_id=torch.arange(ROWS),
        prompts=tokens(prompt_lengths),
        responses=tokens(response_lengths),
        response_mask=Ragged.from_rows(mask),
        old_log_probs=floats(0.5, -5.0),
        ref_log_probs=floats(0.5, -5.0),
        advantages=floats(1.0),
        values=floats(0.3),
        returns=floats(0.3),
    )


def replica(batch: Batch, groups: ParallelGroups) -> tuple[Batch, list[list[int]]]:
    """This replica's rows and its share of each minibatch: every dp-th row, so that shares are unequal."""
    dp, size = groups.coordinate.dp, groups.layout.dp
    mine = [row for row in range(len(batch)) if row % size == dp]
    place = {row: index for index, row in enumerate(mine)}
    return batch.select(mine), [[place[row] for row in rows if row in place] for rows in MINIBATCHES]


def policy_update(**options: Any) -> PolicyUpdate:
    """PPO with every term of the loss."""
    kind = options.pop("kind", "ppo")
    loss = build_policy_loss(kind, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    terms = {"entropy_coef": 0.01, "kl_estimator": "k3", "kl_coef": 0.1, "temperature": 0.9}
    return PolicyUpdate(loss, **(terms | options))


def owned_weights(engine: MegatronEngine) -> list[Any]:
    """The pieces this rank stands for, copied."""
    return [(region, piece.detach().clone()) for region, piece in engine.pieces()]
