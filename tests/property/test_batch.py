"""Batch and Ragged: whatever goes in comes out, however it is cut."""

from __future__ import annotations

import pickle

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.data.batch import Batch, Ragged

rows = st.lists(st.lists(st.integers(0, 2**40), max_size=7), max_size=9)


@st.composite
def batches(draw: st.DrawFn, min_rows: int = 1) -> Batch:
    size = draw(st.integers(min_rows, 8))
    lengths = st.lists(st.integers(0, 6), min_size=size, max_size=size)
    prompts, responses = draw(lengths), draw(lengths)
    total = sum(responses)
    log_probs = draw(st.lists(st.floats(-50, 0, width=32), min_size=total, max_size=total))
    mask = draw(st.lists(st.booleans(), min_size=total, max_size=total))
    column = Ragged(torch.arange(total), torch.tensor(responses))
    first = draw(st.integers(0, 1000))
    return Batch.create(
        sample_id=torch.arange(first, first + size),
        prompts=Ragged(torch.arange(sum(prompts)), torch.tensor(prompts)),
        responses=column,
        response_mask=column.with_values(torch.tensor(mask, dtype=torch.bool)),
        rollout_log_probs=column.with_values(torch.tensor(log_probs, dtype=torch.float32)),
        finish_reason=["stop"] * size,
        metadata=[{"row": i} for i in range(size)],
    )


@given(rows, st.integers(0, 3), st.sampled_from(["left", "right"]))
def test_padding_and_back_is_the_identity(lists, extra, side):
    ragged = Ragged.from_rows(lists, torch.int64)
    padded = ragged.padded(ragged.max_length + extra, fill=-1, side=side)
    assert Ragged.from_padded(padded, ragged.lengths, side=side).equal(ragged)
    assert int((padded == -1).sum()) == padded.numel() - len(ragged.values)
    assert torch.equal(padded != -1, ragged.mask(ragged.max_length + extra, side=side))


@given(rows, st.data())
def test_select_is_list_indexing(lists, data):
    index = data.draw(st.lists(st.integers(0, len(lists) - 1), max_size=12)) if lists else []
    selected = Ragged.from_rows(lists, torch.int64).select(index)
    assert [row.tolist() for row in selected.rows()] == [lists[i] for i in index]


@given(rows, st.data())
def test_a_slice_selects_views_of_the_same_rows(lists, data):
    ragged = Ragged.from_rows(lists, torch.int64)
    bounds = st.integers(-len(lists) - 2, len(lists) + 2) | st.none()
    cut = slice(data.draw(bounds), data.draw(bounds), data.draw(st.sampled_from([None, 1, 2, -1])))
    assert [row.tolist() for row in ragged.select(cut).rows()] == lists[cut]


@given(st.data())
def test_joined_rows_come_apart_again(data):
    pairs = data.draw(st.lists(st.tuples(st.lists(st.integers(0, 9)), st.lists(st.integers(0, 9))), max_size=6))
    left = Ragged.from_rows([a for a, _ in pairs], torch.int64)
    right = Ragged.from_rows([b for _, b in pairs], torch.int64)
    joined = Ragged.join_rows(left, right)
    assert [row.tolist() for row in joined.rows()] == [a + b for a, b in pairs]
    assert joined.head(left.lengths).equal(left) and joined.tail(right.lengths).equal(right)


@given(batches(), st.data())
def test_split_then_concat_then_inverse_is_the_identity(batch, data):
    from megarl.data.balance import inverse

    owner = data.draw(st.lists(st.integers(0, 2), min_size=len(batch), max_size=len(batch)))
    parts = [[i for i, o in enumerate(owner) if o == part] for part in range(3)]
    assert Batch.concat(batch.split(parts)).select(inverse(parts)).equal(batch)


@given(batches(), st.randoms(use_true_random=False))
def test_join_matches_by_sample_id_in_any_order(batch, random):
    order = list(range(len(batch)))
    random.shuffle(order)
    old = batch["rollout_log_probs"]
    output = batch.add(old_log_probs=old).only("sample_id", "old_log_probs").select(order)
    assert batch.join(output)["old_log_probs"].equal(old)


@given(batches())
def test_pickling_keeps_everything_even_as_read_only_buffers(batch):
    assert pickle.loads(pickle.dumps(batch)).equal(batch)
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    # What Ray hands a worker: memory that numpy marks read-only.
    frozen = [memoryview(bytes(buffer.raw())).toreadonly() for buffer in buffers]
    assert pickle.loads(head, buffers=frozen).equal(batch)


@given(batches())
def test_sequences_are_prompt_then_response(batch):
    expected = [
        np.concatenate([p, r]).tolist() for p, r in zip(batch["prompts"].rows(), batch["responses"].rows(), strict=True)
    ]
    assert [row.tolist() for row in batch.sequences().rows()] == expected
    assert batch.sequence_lengths.tolist() == [len(row) for row in expected]


@given(batches())
def test_a_mask_selects_like_its_row_numbers(batch):
    keep = batch.response_lengths > 2
    assert batch.select(keep).equal(batch.select(keep.nonzero().squeeze(1)))
