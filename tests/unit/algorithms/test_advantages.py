"""Estimators against NumPy references on ragged, gappy, poisoned batches; degenerate input; rejection."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megarl.algorithms.advantages import ESTIMATORS, Advantages, Estimator, TokenInputs, build_estimator
from megarl.algorithms.advantages.scan import ReverseSum
from megarl.errors import ConfigError, DataError
from megarl.observability.metrics import Sum
from tests.unit.algorithms import references as ref
from tests.unit.algorithms.batches import Ragged, ragged


def make(kind: str, **changes: Any) -> Estimator:
    settings = {"gamma": 0.9, "lam": 0.8, "norm_by_std": True, "bootstrap_truncated": True} | changes
    return build_estimator(kind, **settings)


def run(kind: str, b: Ragged, dtype: torch.dtype = torch.float64, **changes: Any) -> Advantages:
    extra = {k: changes.pop(k) for k in ("kept", "counted", "group_stats", "reduce") if k in changes}
    generator = torch.Generator().manual_seed(5)
    components = {"a": torch.randn(len(b.mask), generator=generator), "b": torch.rand(len(b.mask), generator=generator)}
    return make(kind, **changes)(
        b.rewards.to(dtype), b.mask, b.group, values=b.values.to(dtype), truncated=b.truncated,
        greedy_scores=b.greedy.to(dtype), old_log_probs=b.old.to(dtype), sum_pi_squared=b.pi2.to(dtype),
        importance_weights=b.weights.to(dtype), reward_components=components, **extra,
    )  # fmt: skip


def reference(kind: str, b: Ragged) -> np.ndarray:
    mask, group, rewards = b.mask.numpy(), b.group.numpy(), b.rewards.numpy()
    s = ref.scores(rewards, mask)
    if kind == "gae":
        raw, _ = ref.gae(rewards, b.values.numpy(), mask, 0.9, 0.8, b.truncated.numpy())
        return ref.whiten(raw, mask)
    if kind == "reinforce_plus_plus":
        return ref.whiten(ref.discounted(rewards, mask, 0.9), mask)
    if kind == "reinforce_plus_plus_baseline":
        return ref.whiten(ref.grpo(s, group, mask, norm=False), mask)
    if kind == "remax":
        return np.where(mask, ref.discounted(rewards, mask, 1.0) - b.greedy.numpy()[:, None], 0.0)
    if kind == "gdpo":
        generator = torch.Generator().manual_seed(5)
        a, c = torch.randn(len(mask), generator=generator), torch.rand(len(mask), generator=generator)
        parts = [ref.grpo(x.double().numpy(), group, mask) for x in (a, c)]
        return ref.whiten(2 * parts[0] - parts[1], mask)
    if kind == "optimal_token_baseline":
        return ref.optimal_token_baseline(rewards, mask, group, b.old.numpy(), b.pi2.numpy(), b.weights.numpy())
    functions = {"grpo": ref.grpo, "rloo": ref.rloo, "opo": ref.opo, "gpg": ref.gpg, "grpo_passk": ref.passk}
    return functions[kind](s, group, mask)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ESTIMATORS.names())
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_estimator_equals_its_reference(kind: str, seed: int, dtype: torch.dtype) -> None:
    b = ragged(seed)
    options = {"options": {"weights": {"a": 2.0, "b": -1.0}}} if kind == "gdpo" else {}
    result = run(kind, b, dtype, **options)
    tolerance = 1e-9 if dtype == torch.float64 else 2e-5
    np.testing.assert_allclose(result.advantages.double().numpy(), reference(kind, b), rtol=tolerance, atol=tolerance)
    assert result.advantages.dtype == dtype
    assert (result.advantages[~b.mask] == 0).all()
    if result.returns is not None:
        assert (result.returns[~b.mask] == 0).all()


def test_gae_returns_and_bootstrap_of_truncated_rows_only() -> None:
    b = ragged(3)
    for bootstrap in (True, False):
        result = run("gae", b, bootstrap_truncated=bootstrap)
        truncated = b.truncated.numpy() if bootstrap else None
        _, returns = ref.gae(b.rewards.numpy(), b.values.numpy(), b.mask.numpy(), 0.9, 0.8, truncated)
        assert result.returns is not None
        np.testing.assert_allclose(result.returns.numpy(), returns, rtol=1e-9, atol=1e-9)


def test_every_estimator_is_checked_here() -> None:
    assert set(ESTIMATORS.names()) == {
        "gae", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo", "gpg",
        "grpo_passk", "gdpo", "optimal_token_baseline",
    }  # fmt: skip


@pytest.mark.parametrize("length", [1, 31, 32, 64, 96, 160])
@pytest.mark.parametrize("discount", [0.0, 0.5, 0.95, 1.0])
def test_reverse_sum_in_chunks_and_by_doubling_agree_with_the_loop(length: int, discount: float) -> None:
    x = torch.randn(3, length, generator=torch.Generator().manual_seed(length), dtype=torch.float64)
    expected = torch.zeros(3, length + 1, dtype=torch.float64)
    for t in reversed(range(length)):
        expected[:, t] = x[:, t] + discount * expected[:, t + 1]
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        values = x.to(dtype)
        chunked = ReverseSum(length, discount, values)(values, out=torch.empty_like(values))
        torch.testing.assert_close(chunked.double(), expected[:, :-1], rtol=tolerance, atol=tolerance)


def test_low_matmul_precision_does_not_reach_the_scan() -> None:
    values = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    expected = ReverseSum(64, 0.9, values)(values, out=torch.empty_like(values))
    torch.set_float32_matmul_precision("medium")
    try:
        rounded = ReverseSum(64, 0.9, values)(values, out=torch.empty_like(values))
    finally:
        torch.set_float32_matmul_precision("highest")
    torch.testing.assert_close(rounded, expected, rtol=1e-6, atol=1e-6)


def test_a_reward_before_a_gap_does_not_reach_beyond_it() -> None:
    # Four tokens, the reward on the fourth place but not on the fourth token.
    mask = torch.tensor([[True, True, False, True, True]])
    rewards = torch.tensor([[0.0, 0.0, 0.0, 1.0, 0.0]])
    group = torch.zeros(1, dtype=torch.int64)
    result = make("remax")(rewards, mask, group, greedy_scores=torch.tensor([0.25]))
    assert result.returns is not None
    assert result.returns.tolist() == [[1.0, 1.0, 0.0, 1.0, 0.0]]
    assert result.advantages.tolist() == [[0.75, 0.75, 0.0, 0.75, -0.25]]


GROUP_KINDS = [k for k in ESTIMATORS.names() if make(k).needs_groups]


@pytest.mark.parametrize("kind", [k for k in GROUP_KINDS if k not in ("gdpo", "reinforce_plus_plus_baseline")])
def test_group_of_one_gets_zero_and_is_counted(kind: str) -> None:
    b = ragged(1, rows=5)
    b.group = torch.tensor([0, 1, 1, 2, 2])  # row 1 is empty: group 1 has one row left
    result = run(kind, b)
    assert (result.advantages[0] == 0).all() and (result.advantages[2] == 0).all()
    assert result.metrics["adv/singleton_groups"] == Sum(2.0)


@pytest.mark.parametrize("kind", ["grpo", "rloo", "opo", "gpg", "grpo_passk", "reinforce_plus_plus_baseline"])
def test_equal_scores_of_a_group_give_exactly_zero(kind: str) -> None:
    mask = torch.ones(6, 4, dtype=torch.bool)
    rewards = torch.zeros(6, 4)
    rewards[:, 3] = 0.1
    result = make(kind)(rewards, mask, torch.tensor([0, 0, 0, 1, 1, 1]))
    assert (result.advantages == 0).all()
    assert result.metrics["adv/zero_signal_groups"] == Sum(2.0)


def test_low_variance_of_large_scores_survives() -> None:
    mask = torch.ones(2, 1, dtype=torch.bool)
    result = make("grpo", norm_by_std=True)(torch.tensor([[10000.0], [10000.001]]), mask, torch.tensor([4, 4]))
    assert result.advantages[:, 0].tolist() == pytest.approx([-0.7063, 0.7063], abs=1e-3)


@pytest.mark.parametrize("kind", ESTIMATORS.names())
def test_all_masked_and_single_token_batches_are_finite(kind: str) -> None:
    for valid in (0, 1):
        b = ragged(2)
        b.mask = torch.zeros_like(b.mask)
        b.mask[0, :valid] = True
        result = run(kind, b)
        assert result.advantages.isfinite().all()
        if "adv/whitening_skipped" in result.metrics:
            assert result.metrics["adv/whitening_skipped"] == Sum(1.0)


def test_empty_row_does_not_shift_its_groups_baseline() -> None:
    mask = torch.tensor([[True], [True], [False]])
    rewards = torch.tensor([[1.0], [0.0], [-148.5]])
    result = make("grpo", norm_by_std=False)(rewards, mask, torch.tensor([0, 0, 0]))
    assert result.advantages[:, 0].tolist() == [0.5, -0.5, 0.0]


def test_rejected_row_leaves_the_baseline_unless_all_count() -> None:
    mask = torch.ones(3, 2, dtype=torch.bool)
    kept = mask.clone()
    kept[2] = False
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 5.0]])
    group = torch.zeros(3, dtype=torch.int64)
    left = make("grpo", norm_by_std=False)(rewards, mask, group, kept=kept)
    assert left.advantages.tolist() == [[0.5, 0.5], [-0.5, -0.5], [0.0, 0.0]]
    everything = make("grpo", norm_by_std=False)(rewards, mask, group, kept=kept, group_stats="all")
    assert everything.advantages.tolist() == [[-1.0, -1.0], [-2.0, -2.0], [0.0, 0.0]]


def test_rejected_token_keeps_its_reward_for_the_row_but_not_its_place() -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    kept = mask.clone()
    kept[0, 2] = False
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    result = make("grpo", norm_by_std=False)(rewards, mask, torch.zeros(2, dtype=torch.int64), kept=kept)
    assert result.advantages.tolist() == [[0.5, 0.5, 0.0], [-0.5, -0.5, -0.5]]
    scan = make("reinforce_plus_plus", gamma=1.0)(rewards, mask, torch.zeros(2, dtype=torch.int64), kept=kept)
    assert scan.returns is not None
    assert scan.returns.tolist() == [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    assert scan.advantages[kept].mean().abs() < 1e-6


def test_uncounted_rows_get_an_advantage_but_do_not_shift_the_baseline() -> None:
    mask = torch.ones(3, 1, dtype=torch.bool)
    counted = torch.tensor([True, True, False])
    result = make("grpo", norm_by_std=False)(
        torch.tensor([[1.0], [0.0], [4.0]]), mask, torch.zeros(3, dtype=torch.int64), counted=counted
    )
    assert result.advantages[:, 0].tolist() == [0.5, -0.5, 3.5]


@pytest.mark.parametrize("kind", ESTIMATORS.names())
def test_split_over_ranks_with_whole_groups_gives_the_same_numbers(kind: str) -> None:
    b = ragged(4)
    whole = run(kind, b, torch.float32)
    halves = [slice(0, 6), slice(6, 12)]
    parts = simulate_ranks(kind, b, halves)
    torch.testing.assert_close(torch.cat([p.advantages for p in parts]), whole.advantages, rtol=1e-5, atol=1e-5)


def simulate_ranks(kind: str, b: Ragged, slices: list[slice]) -> list[Advantages]:
    """Runs the ranks in threads that meet in each reduction."""
    import threading

    barrier, totals, lock = threading.Barrier(len(slices)), {}, threading.Lock()
    results: list[Any] = [None] * len(slices)

    def rank(n: int, rows: slice) -> None:
        calls = 0

        def reduce(x: Tensor) -> Tensor:
            nonlocal calls
            with lock:
                totals[calls] = totals.get(calls, 0) + x
            barrier.wait(timeout=30)
            calls += 1
            return totals[calls - 1].clone()

        part = Ragged(**{name: getattr(b, name)[rows] for name in b.__dataclass_fields__})
        generator = torch.Generator().manual_seed(5)
        rows_total = len(b.mask)
        a, c = torch.randn(rows_total, generator=generator), torch.rand(rows_total, generator=generator)
        results[n] = make(kind)(
            part.rewards.float(), part.mask, part.group, values=part.values.float(), truncated=part.truncated,
            greedy_scores=part.greedy.float(), old_log_probs=part.old.float(), sum_pi_squared=part.pi2.float(),
            importance_weights=part.weights.float(), reward_components={"a": a[rows], "b": c[rows]}, reduce=reduce,
        )  # fmt: skip

    threads = [threading.Thread(target=rank, args=(n, rows)) for n, rows in enumerate(slices)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(result is not None for result in results)
    return results


def test_missing_input_is_named() -> None:
    mask = torch.ones(2, 2, dtype=torch.bool)
    with pytest.raises(DataError, match="values"):
        make("gae")(torch.zeros(2, 2), mask, torch.zeros(2, dtype=torch.int64))


def test_mask_must_be_bool() -> None:
    with pytest.raises(DataError, match="bool"):
        make("grpo")(torch.zeros(2, 2), torch.ones(2, 2), torch.zeros(2, dtype=torch.int64))


def test_unknown_option_and_unknown_kind_say_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"does not take 'temperature'.*its options are: weights"):
        make("gdpo", options={"temperature": 1})
    with pytest.raises(ConfigError, match="did you mean 'grpo'"):
        make("grpoo")


def my_estimator(inputs: TokenInputs, *, gamma: float, factor: float = 2.0) -> Advantages:
    return Advantages(inputs.rewards * factor * gamma, None, {})


def test_import_path_needs_no_registration_and_cannot_write_off_the_mask() -> None:
    b = ragged(5)
    estimator = make(f"{__name__}:my_estimator", options={"factor": 3.0})
    result = estimator(b.rewards, b.mask, b.group)
    torch.testing.assert_close(result.advantages, torch.where(b.mask, b.rewards * 3.0 * 0.9, 0.0))
    with pytest.raises(ConfigError, match="has no 'nothing'"):
        make(f"{__name__}:nothing")
