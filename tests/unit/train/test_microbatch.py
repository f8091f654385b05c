"""Packing rows into microbatches, and results back to rows."""

from __future__ import annotations

import pytest
import torch

from megarl.data.batch import Batch, Ragged
from megarl.errors import DataError
from megarl.train.megatron.microbatch import ContextSlice, build, by_row, level, plan_rows

PROMPTS = [[1, 2, 3], [4], [5, 6], [7, 8]]
RESPONSES = [[11, 12], [13, 14, 15], [], [16]]


def make_batch() -> Batch:
    prompts = Ragged.from_rows(PROMPTS, dtype=torch.int64)
    return Batch.create(prompts=prompts, responses=Ragged.from_rows(RESPONSES, dtype=torch.int64))


def test_a_response_token_is_predicted_one_position_before_it():
    microbatch = build(make_batch(), [1, 0])
    tokens = microbatch.tokens[0].tolist()
    assert tokens == [4, 13, 14, 15, 1, 2, 3, 11, 12]
    assert microbatch.position_ids[0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4]
    assert microbatch.cu_seqlens.tolist() == [0, 4, 9]
    assert microbatch.max_seqlen == 5
    assert microbatch.targets.tolist() == [13, 14, 15, 11, 12]
    assert [tokens[position + 1] for position in microbatch.positions.tolist()] == microbatch.targets.tolist()


def test_padding_is_a_sequence_of_its_own_and_no_more_than_needed():
    microbatch = build(make_batch(), [0, 3], multiple=4)
    assert microbatch.num_tokens == 8
    assert microbatch.cu_seqlens.tolist() == [0, 5, 8]
    microbatch = build(make_batch(), [0, 1], multiple=4)
    assert microbatch.num_tokens == 12
    assert microbatch.cu_seqlens.tolist() == [0, 5, 9, 12]
    assert microbatch.position_ids[0, -3:].tolist() == [0, 1, 2]


def test_a_dummy_has_tokens_but_no_targets():
    microbatch = build(make_batch(), [], multiple=2)
    assert microbatch.num_tokens == 2
    assert microbatch.cu_seqlens.tolist() == [0, 2]
    assert len(microbatch.positions) == len(microbatch.targets) == len(microbatch.response_lengths) == 0


def test_rows_of_one_prompt_have_its_tokens_in_common():
    prompts = Ragged.from_rows([[1, 2, 3], [4], [1, 2, 3], [1, 2, 3]], dtype=torch.int64)
    batch = Batch.create(prompts=prompts, responses=Ragged.from_rows(RESPONSES, dtype=torch.int64))
    microbatch = build(batch, [0, 1, 2, 3], multiple=4, share_prompts=True)
    tokens = microbatch.tokens[0].tolist()
    assert tokens == [1, 2, 3, 11, 12, 4, 13, 14, 15, 16, 0, 0]
    assert microbatch.position_ids[0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 3, 0, 1]
    assert [tokens[position] for position in microbatch.positions.tolist()] == [3, 11, 4, 13, 14, 3]
    assert microbatch.token_of_place is not None
    whole = build(batch, [0, 1, 2, 3])
    num_places = whole.num_tokens
    assert microbatch.cu_seqlens.tolist() == [*whole.cu_seqlens.tolist(), num_places + 2]
    assert microbatch.tokens[0, microbatch.token_of_place[:num_places]].tolist() == whole.tokens[0].tolist()
    assert microbatch.targets.tolist() == whole.targets.tolist()


def test_different_prompts_are_packed_as_without_sharing():
    microbatch, whole = build(make_batch(), [0, 1, 3], share_prompts=True), build(make_batch(), [0, 1, 3])
    assert microbatch.token_of_place is None
    assert torch.equal(microbatch.tokens, whole.tokens)


def test_results_come_back_in_row_order():
    batch = make_batch()
    microbatches = [build(batch, [3, 1]), build(batch, [0])]
    column = by_row([m.targets.float() for m in microbatches], microbatches, batch.response_lengths)
    assert [row.tolist() for row in column.rows()] == [[float(t) for t in row] for row in RESPONSES]


def test_every_row_is_planned_once_and_no_microbatch_exceeds_the_cap_with_its_padding():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 50, (200,), generator=generator)
    rows = list(range(0, 200, 2))
    (plan,) = plan_rows(lengths, [rows], 101, multiple=4, dp_group=None)
    assert sorted(row for members in plan for row in members) == rows
    assert all(-(-int(lengths[members].sum()) // 4) * 4 <= 101 for members in plan)


def test_a_sequence_longer_than_the_cap_is_refused_before_anything_runs():
    with pytest.raises(DataError, match="a sequence of 9 tokens does not fit a microbatch of 8 tokens"):
        plan_rows(torch.tensor([3, 9]), [[0], [1]], 8, dp_group=None)


def test_a_response_without_a_prompt_is_refused():
    batch = Batch.create(
        prompts=Ragged.from_rows([[1], []], dtype=torch.int64),
        responses=Ragged.from_rows([[2], [3]], dtype=torch.int64),
    )
    with pytest.raises(DataError, match=r"without any prompt token.*row 1"):
        build(batch, [0, 1])


def test_a_pipeline_gets_the_microbatches_it_asks_for_where_there_are_rows():
    lengths = torch.tensor([5, 6, 7, 8])
    (plan, small) = plan_rows(lengths, [[0, 1, 2, 3], [2]], 100, fewest=3, dp_group=None)
    assert len(plan) == 3 and sorted(row for rows in plan for row in rows) == [0, 1, 2, 3]
    assert small == [[2]]


def test_virtual_stages_get_rounds_of_microbatches():
    lengths = torch.tensor([3, 3, 3])
    (plan,) = plan_rows(lengths, [[0, 1, 2]], 3, count_multiple=2, dp_group=None)
    assert sorted(row for rows in plan for row in rows) == [0, 1, 2] and len(plan) == 4
    assert plan_rows(lengths, [[]], 3, count_multiple=2, dp_group=None) == [[]]


@pytest.mark.parametrize("size", [2, 3])
def test_context_parallel_ranks_share_a_pack(size: int):
    batch, rows = make_batch(), [1, 0, 3]
    whole = build(batch, rows)
    parts = [build(batch, rows, multiple=2 * size, context=ContextSlice(rank, size)) for rank in range(size)]
    assert len({part.num_tokens for part in parts}) == 1
    assert all(length % (2 * size) == 0 for length in parts[0].cu_seqlens.diff().tolist())
    targets = torch.full_like(whole.targets, -1)
    for part in parts:
        assert torch.equal(part.cu_seqlens, parts[0].cu_seqlens)
        assert torch.equal(part.response_lengths, whole.response_lengths)
        assert part.places is not None
        targets[part.places] = part.targets
        # The token before a response token is this rank's, whoever has the response token itself.
        before = part.tokens[0, part.positions]
        assert torch.equal(before, whole.tokens[0, whole.positions[part.places]])
        assert torch.equal(part.position_ids[0, part.positions], whole.position_ids[0, whole.positions[part.places]])
    assert torch.equal(targets, whole.targets)
    tokens = torch.cat([part.tokens[0] for part in parts])
    assert sorted(tokens[tokens > 0].tolist()) == sorted(whole.tokens[0].tolist())


@pytest.mark.parametrize("size", [1, 2])
def test_microbatches_are_padded_to_one_length_by_sequences_of_their_own(size: int):
    context = ContextSlice(0, size)
    batch = make_batch()
    packs = [build(batch, rows, multiple=4, context=context) for rows in ([0, 1, 3], [3], [])]
    same = level(packs, context)
    assert {pack.num_tokens for pack in same} == {packs[0].num_tokens} and same[0] is packs[0]
    for before, after in zip(packs, same, strict=True):
        assert after.cu_seqlens[-1] == after.num_tokens == after.position_ids.shape[1] * size
        assert torch.equal(after.cu_seqlens[: len(before.cu_seqlens)], before.cu_seqlens)
        assert after.max_seqlen == int(after.cu_seqlens.diff().max())
        assert torch.equal(after.tokens[:, : before.tokens.shape[1]], before.tokens)
        assert torch.equal(after.positions, before.positions)
