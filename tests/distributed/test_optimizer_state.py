"""The distributed optimizer's state in a checkpoint: what Megatron gathers on every rank, as views of what it holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing

from megarl.parallel.grid import ParallelLayout
from megarl.train.engine import ValueUpdate
from megarl.train.megatron import checkpoint
from megarl.train.megatron.optimizer_state import sharded_state
from tests.distributed.engines import buckets_of, make_engine, owned_weights, policy_update, recorded_batch, replica
from tests.distributed.models import QWEN2
from tests.distributed.ranks import Rank, RankPool


def describe(rank: Rank, layout: ParallelLayout, dtype: str) -> Any:
    """Parameters this rank saves, those that needed a copy, how many there are, and what differs from Megatron's."""
    groups = rank.start(layout)
    engine = make_engine(QWEN2, groups, dtype=dtype)
    batch, minibatches = replica(recorded_batch(QWEN2.vocab_size), groups)
    engine.update_policy(batch, policy_update(), minibatches)
    metadata = checkpoint._metadata(groups.dp_cp)
    (module,) = engine._modules
    model = module.sharded_state_dict(metadata=metadata)
    assert engine.optimizer is not None
    (part,) = engine.optimizer._parts()
    mine = sharded_state(part, model, is_loading=False, metadata=metadata)["param_state"]
    theirs = part.sharded_state_dict(model, metadata=metadata)["param_state"]
    different = [
        (index, key)
        for index, entries in mine.items()
        for key, entry in entries.items()
        if set(entries) != set(theirs[index])
        or entry.key != theirs[index][key].key
        or not torch.equal(entry.data, theirs[index][key].data)
    ]
    (inner,) = engine.optimizer.torch_optimizers()
    held = [main for group in inner.param_groups for main in group["params"]]
    held += [value for values in inner.state.values() for value in values.values()]
    own = {tensor.untyped_storage().data_ptr() for tensor in held}
    copied = {
        index for index, one in mine.items() for e in one.values() if e.data.untyped_storage().data_ptr() not in own
    }
    return set(mine), copied, len(theirs), different


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_parameter_is_saved_by_one_rank_and_copied_only_across_a_boundary(ranks: RankPool, dtype: str) -> None:
    results = ranks(2).run(describe, ParallelLayout(dp=2), dtype)
    (first, copied, number, _), (second, also_copied, _, _) = results
    assert first and second and not first & second and first | second == set(range(number))
    assert len(copied | also_copied) <= 1  # one boundary between two ranks
    assert all(different == [] for _, _, _, different in results)


def exchange_with_megatron(rank: Rank, layout: ParallelLayout, directory: Path, dtype: str) -> Any:
    """What differs: of a checkpoint of ours as Megatron's own calls read it; of one of theirs in an engine of ours."""
    groups = rank.start(layout)
    trained, new = (make_engine(QWEN2, groups, dtype=dtype, seed=seed) for seed in (3, 99))
    batch, minibatches = replica(recorded_batch(QWEN2.vocab_size), groups)
    trained.update_policy(batch, policy_update(), minibatches)
    assert trained.optimizer is not None and new.optimizer is not None
    new.optimizer.materialise_state()
    metadata = checkpoint._metadata(groups.dp_cp)

    def theirs(engine: Any, *, is_loading: bool) -> Any:
        (module,) = engine._modules
        model = module.sharded_state_dict(metadata=metadata)
        state = engine.optimizer.megatron.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
        return {"model": model, "optimizer": state}

    trained.save(directory / "ours")
    expected = theirs(trained, is_loading=False)
    loaded = dist_checkpointing.load(theirs(new, is_loading=True), str(directory / "ours"), strict="raise_unexpected")
    different = [
        entry.key
        for index, entries in expected["optimizer"]["param_state"].items()
        for key, entry in entries.items()
        if not torch.equal(entry.data, loaded["optimizer"]["param_state"][index][key])
    ]
    if rank.rank == 0:
        (directory / "theirs").mkdir()
    torch.distributed.barrier()
    content = checkpoint._storable(metadata)
    dist_checkpointing.save(expected, str(directory / "theirs"), content_metadata=content)
    new = make_engine(QWEN2, groups, dtype=dtype, seed=99)
    assert new.optimizer is not None
    new.optimizer.materialise_state()
    state = checkpoint._state_dict(new._modules, new.optimizer, metadata, is_loading=True, only_trained=False)
    new.optimizer.load_state(dist_checkpointing.load(state, str(directory / "theirs"))["optimizer"])
    (mine,), (origin,) = new.optimizer.torch_optimizers(), trained.optimizer.torch_optimizers()
    pairs = zip(mine.param_groups, origin.param_groups, strict=True)
    for one, other in ((a, b) for x, y in pairs for a, b in zip(x["params"], y["params"], strict=True)):
        held, wanted = {"param": one, **mine.state[one]}, {"param": other, **origin.state[other]}
        different += [key for key, value in wanted.items() if not torch.equal(held[key], value)]
    return len(expected["optimizer"]["param_state"]), different


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_optimizer_state_goes_to_megatron_and_comes_from_it(ranks: RankPool, tmp_path: Path, dtype: str) -> None:
    results = ranks(2).run(exchange_with_megatron, ParallelLayout(dp=2), tmp_path, dtype)
    assert all(number > 0 and different == [] for number, different in results)


def continue_critic(rank: Rank, directory: Path) -> Any:
    """The state a bfloat16 critic saved and another one loaded, by parameter, and the weights after another update."""
    groups = rank.start(ParallelLayout(dp=2))
    one, other = (make_engine(QWEN2, groups, head="value", dtype="bfloat16", seed=seed) for seed in (3, 99))
    batch, minibatches = replica(recorded_batch(QWEN2.vocab_size), groups)
    one.update_values(batch, ValueUpdate(0.2), minibatches)
    one.save(directory)
    other.load(directory)
    for engine in (one, other):
        engine.update_values(batch, ValueUpdate(0.2), minibatches)
    return owned_weights(one), owned_weights(other)


def test_a_critic_whose_head_is_float32_beside_bfloat16_continues(ranks: RankPool, tmp_path: Path) -> None:
    """Both are in one group of the optimizer, in another order than in their buffers."""
    results = ranks(2).run(continue_critic, tmp_path / "saved")
    assert any(piece.dtype == torch.float32 for _, piece in results[0][0])  # the first replica stands for all weights
    for weights, again in results:
        for (_, piece), (_, found) in zip(weights, again, strict=True):
            assert torch.equal(piece, found)


EXACT = {"clip_grad": 0.0, "overlap_grad_reduce": True}
"""The global norm adds shards up in another order where they are others, and clipping passes its rounding on. Without
overlap Megatron makes one bucket."""


def cut_into_buckets(rank: Rank, layout: ParallelLayout, sizes: list[int | None], directory: Path) -> Any:
    """Weights after updates, a checkpoint of one bucket size loaded with the other, and another update.

    Returns also the numbers of buckets, of those followed by padding, and of state tensors that differ from Megatron's.
    """
    groups = rank.start(layout)
    engines = []
    for size in sizes:
        with buckets_of(size):
            engines.append(make_engine(QWEN2, groups, optimizer=EXACT, seed=3 + 96 * len(engines)))
    one, other = engines
    batch, minibatches = replica(recorded_batch(QWEN2.vocab_size), groups)
    one.update_policy(batch, policy_update(), minibatches)
    one.save(directory)
    other.load(directory)
    for engine in engines:
        engine.update_policy(batch, policy_update(), minibatches)
    (part,) = one.optimizer._parts()
    (buffer,) = part.buffers
    padded = [bucket for bucket in buffer.buckets[:-1] if bucket.numel_unpadded < bucket.grad_data.numel()]
    metadata = checkpoint._metadata(groups.dp_cp)
    model = one._modules[0].sharded_state_dict(metadata=metadata)
    mine = sharded_state(part, model, is_loading=False, metadata=metadata)["param_state"]
    theirs = part.sharded_state_dict(model, metadata=metadata)["param_state"]
    different = sum(
        not torch.equal(entry.data, theirs[index][key].data)
        for index, entries in mine.items()
        for key, entry in entries.items()
    )
    return [owned_weights(engine) for engine in engines], len(buffer.buckets), len(padded), different


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[2000, None], [None, 2000]], ids=["from-several", "to-several"])
def test_state_in_several_buckets_is_that_in_one(ranks: RankPool, tmp_path: Path, sizes: list[int | None]) -> None:
    """Megatron's own gathering takes parameters' places in the padded buffer for places in one without padding.

    It warns that a "param range exceeds unpadded buffer" and saves what belongs to other parameters, as long as it does
    for all that stand behind the first padded bucket (0.16.1 and 0.19.2; distrib_optimizer.py, "this is a bug").
    """
    results = ranks(2).run(cut_into_buckets, ParallelLayout(dp=2), sizes, tmp_path / "saved")
    for (weights, loaded), num_buckets, num_padded, different in results:
        several = sizes[0] is not None
        assert (num_buckets > 3 and num_padded > 0) if several else num_buckets == 1
        assert (different > 0) == several
        for (_, piece), (_, again) in zip(weights, loaded, strict=True):
            assert torch.equal(piece, again)
