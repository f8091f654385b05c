"""What an engine computes, against transformers on the same weights, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.data.batch import Batch, Ragged
from megarl.errors import DataError, TrainError
from megarl.models.spec import ModelSpec
from megarl.observability.metrics import values
from megarl.parallel.grid import ParallelLayout
from megarl.weights.pieces import assemble
from tests.distributed.engines import ROWS, make_engine, owned_weights, policy_update, recorded_batch, replica
from tests.distributed.models import QWEN2
from tests.distributed.ranks import Rank, RankPool

TEMPERATURE = 0.8


def hf_model(spec: ModelSpec, weights: dict[str, Tensor]) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.ffn_hidden_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_position,
        rms_norm_eps=spec.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        tie_word_embeddings=spec.tied_embeddings,
    )
    model = Qwen2ForCausalLM(config).eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    return model


def hf_log_probs(model: Any, batch: Batch) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probs and entropies of each row's response, each row by itself."""
    log_probs, entropies = [], []
    for prompt, response in zip(batch["prompts"].rows(), batch["responses"].rows(), strict=True):
        logits = model(torch.cat([prompt, response])[None]).logits[0] / TEMPERATURE
        log_p = logits[len(prompt) - 1 : len(prompt) + len(response) - 1].log_softmax(-1)
        log_probs.append(log_p.gather(1, response[:, None]).squeeze(1))
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return log_probs, entropies


def passes(rank: Rank, layout: ParallelLayout, spec: ModelSpec, cap: int) -> Any:
    groups = rank.start(layout)
    engine = make_engine(spec, groups, cap=cap, trained=False)
    batch, _ = replica(recorded_batch(spec.vocab_size), groups)
    return (
        groups.coordinate.dp,
        engine.log_probs(batch, temperature=TEMPERATURE, with_entropy=True),
        owned_weights(engine),
    )


@pytest.mark.parametrize("cap", [24, 500], ids=["cut", "packed"])
@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(),
        ParallelLayout(tp=2, sequence_parallel=True),
        ParallelLayout(pp=2),
        ParallelLayout(pp=2, vpp=2),
        ParallelLayout(tp=2, dp=2),
        ParallelLayout(cp=2),
        ParallelLayout(tp=2, cp=2, sequence_parallel=True),
    ],
    ids=["one", "tp2-sp", "pp2", "pp2-vpp2", "tp2-dp2", "cp2", "tp2-sp-cp2"],
)
def test_log_probs_and_entropy_equal_transformers(ranks: RankPool, layout: ParallelLayout, cap: int) -> None:
    results = ranks(layout.world_size).run(passes, layout, QWEN2, cap)
    batch = recorded_batch(QWEN2.vocab_size)
    model = hf_model(QWEN2, assemble(piece for _, _, pieces in results for piece in pieces))
    with torch.no_grad():
        expected = dict(zip(("log_probs", "entropy"), hf_log_probs(model, batch), strict=True))
    reporting = [(dp, columns) for dp, columns, _ in results if columns is not None]
    assert sorted(dp for dp, _ in reporting) == list(range(layout.dp))
    for dp, columns in reporting:
        for name, column in columns.items():
            for row, actual in zip(range(dp, ROWS, layout.dp), column.rows(), strict=True):
                torch.testing.assert_close(actual, expected[name][row], rtol=1e-4, atol=1e-4)


def sft(rank: Rank, layout: ParallelLayout, spec: ModelSpec, num_updates: int) -> Any:
    groups = rank.start(layout)
    engine = make_engine(spec, groups, optimizer={"clip_grad": 0.0})
    before = owned_weights(engine)
    batch, _ = replica(recorded_batch(spec.vocab_size), groups)
    losses = [engine.eval_sft(batch)]
    updates = [engine.update_sft(batch) for _ in range(num_updates)]
    losses.append(engine.eval_sft(batch))
    return before, [values(m) for m in (*losses, *updates) if m is not None]


def test_sft_loss_and_gradient_norm_equal_transformers_and_the_loss_falls(ranks: RankPool) -> None:
    spec = replace(QWEN2, tied_embeddings=False)
    ((before, (first, last, *updates)),) = ranks(1).run(sft, ParallelLayout(), spec, 8)
    batch = recorded_batch(spec.vocab_size)
    model = hf_model(spec, assemble(before))
    mask = batch["response_mask"].values
    temperature_one = [
        log_probs
        for prompt, response in zip(batch["prompts"].rows(), batch["responses"].rows(), strict=True)
        for log_probs in [
            model(torch.cat([prompt, response])[None])
            .logits[0, len(prompt) - 1 : len(prompt) + len(response) - 1]
            .log_softmax(-1)
            .gather(1, response[:, None])
            .squeeze(1)
        ]
    ]
    loss = -torch.cat(temperature_one)[mask].mean()
    loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    assert first["val/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert updates[0]["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert updates[0]["train/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert last["val/loss"] < 0.8 * first["val/loss"]


def critic(rank: Rank, layout: ParallelLayout) -> Any:
    groups = rank.start(layout)
    engine = make_engine(QWEN2, groups, head="value")
    batch, _ = replica(recorded_batch(QWEN2.vocab_size), groups)
    before = engine.values(batch)
    for _ in range(12):
        engine.update_values(batch.replace(values=batch["returns"]), _unclipped(), [list(range(len(batch)))])
    after = engine.values(batch)
    return None if before is None else (before, after, batch["returns"], batch["response_mask"])


def _unclipped() -> Any:
    from megarl.train.engine import ValueUpdate

    return ValueUpdate(clip_value=1e6)


def test_a_fresh_critic_says_zero_and_learns_its_returns(ranks: RankPool) -> None:
    results = ranks(2).run(critic, ParallelLayout(tp=2, sequence_parallel=True))
    assert results[1] is None
    before, after, returns, mask = results[0]
    assert torch.equal(before.values, torch.zeros_like(before.values))
    error = (after.values - returns.values)[mask.values].square().mean()
    assert error < 0.8 * returns.values[mask.values].square().mean()


def one_sided(rank: Rank, layout: ParallelLayout, minibatches: list[list[list[int]]], cap: int) -> Any:
    groups = rank.start(layout)
    engine = make_engine(QWEN2, groups, cap=cap)
    batch, _ = replica(recorded_batch(QWEN2.vocab_size), groups)
    try:
        metrics = engine.update_policy(batch, policy_update(), minibatches[groups.coordinate.dp])
    except (DataError, TrainError) as error:
        return str(error)
    return values(metrics) if metrics is not None else None


def test_a_replica_without_rows_takes_part_and_changes_nothing(ranks: RankPool) -> None:
    (everything,) = ranks(1).run(one_sided, ParallelLayout(), [[[0, 2, 6, 8]]], 1000)
    results = ranks(2).run(one_sided, ParallelLayout(dp=2), [[[0, 1, 3, 4]], [[]]], 30)
    assert results[0] == results[1] == pytest.approx(everything, rel=1e-4, abs=1e-5)


def test_a_minibatch_with_nothing_to_learn_from_makes_no_update(ranks: RankPool) -> None:
    (metrics,) = ranks(1).run(one_sided, ParallelLayout(), [[[4, 7]]], 1000)
    assert metrics == {"actor/empty_minibatches": 1.0}


def test_a_sequence_longer_than_the_cap_stops_every_replica_before_the_step(ranks: RankPool) -> None:
    results = ranks(2).run(one_sided, ParallelLayout(dp=2), [[[0]], [[0, 1, 2, 3]]], 16)
    assert results[0] == results[1]
    assert "does not fit a microbatch of 16 tokens" in results[0]


def test_replicas_that_disagree_about_minibatches_are_told_so(ranks: RankPool) -> None:
    results = ranks(2).run(one_sided, ParallelLayout(dp=2), [[[0]], [[0], [1]]], 100)
    assert results[0] == results[1]
    assert "different numbers of minibatches (1 to 2)" in results[0]


def poisoned(rank: Rank, layout: ParallelLayout, distributed: bool, dtype: str) -> Any:
    groups = rank.start(layout)
    engine = make_engine(QWEN2, groups, distributed=distributed, dtype=dtype)
    batch, minibatches = replica(recorded_batch(QWEN2.vocab_size), groups)
    before = owned_weights(engine)
    rows = batch["advantages"].rows()
    # An advantage that overflows the gradient of the first minibatch only.
    bad = [row * 1e38 if index in minibatches[0] else row for index, row in enumerate(rows)]
    poison = batch.replace(advantages=Ragged.from_rows(bad))
    first = engine.update_policy(poison, policy_update(), minibatches[:1])
    unchanged = all(torch.equal(old, new) for (_, old), (_, new) in zip(before, engine.pieces(), strict=True))
    second = engine.update_policy(batch, policy_update(), minibatches[:1])
    clean = make_engine(QWEN2, groups, distributed=distributed, dtype=dtype)
    expected = clean.update_policy(batch, policy_update(), minibatches[:1])
    same = all(torch.equal(mine, other) for (_, mine), (_, other) in zip(engine.pieces(), clean.pieces(), strict=True))
    return unchanged, same, [None if m is None else values(m) for m in (first, second, expected)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("distributed", [True, False], ids=["sharded", "plain"])
def test_an_update_with_a_gradient_that_is_not_finite_is_skipped_and_leaves_no_trace(
    ranks: RankPool, distributed: bool, dtype: str
) -> None:
    results = ranks(2).run(poisoned, ParallelLayout(dp=2), distributed, dtype)
    for unchanged, same, (first, second, expected) in results:
        assert unchanged and same
        assert first["actor/skipped_updates"] == 1 and "actor/grad_norm" not in first
        assert second == expected and second["actor/skipped_updates"] == 0
