"""From rows of a batch to packed microbatches under a token cap, and back from flat results to rows.

A microbatch is one flat sequence of tokens in which whole sequences (prompt and response) stand one after another;
``cu_seqlens`` says where each begins. The log-prob of response token t is predicted at the position before it.

Invariants:
1. No microbatch holds more than ``cap`` tokens, padding included; a longer sequence is a DataError on every rank,
   raised before anything is computed.
2. Ranks of one data-parallel group run the same number of microbatches of one minibatch; missing ones are dummies
   without targets, which contribute exactly zero.
3. A row without targets (empty response, or nothing to learn from) is not computed at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.data.balance import SequenceCost
from megarl.data.batch import Batch, Ragged
from megarl.data.packing import pack
from megarl.errors import DataError, TrainError
from megarl.train.megatron.context import zigzag


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Packed sequences of one forward pass on one data-parallel rank: N tokens, of which M are response tokens.

    Under context parallelism tokens, positions and targets are those of this rank, n = N / context_size and m of them;
    sequences and response lengths are whole.

    Args:
        rows: batch rows in the order of packing; empty in a dummy.
        tokens: [1, n] int64.
        position_ids: [1, n] int64, from 0 in each sequence.
        cu_seqlens: [sequences + 1] int32, first token of each sequence, then N; padding is a sequence of its own.
        max_seqlen: longest sequence.
        positions: [m] int64 tokens of [0, n) whose output predicts a response token.
        targets: [m] int64 those response tokens.
        response_lengths: [rows] int64, in the order of ``rows``; they sum to M.
        row_of_place: [n] int64, [E] if rows share a prompt: index in ``rows`` of each place's row, -1 padding.
        token_of_place: [E] int64 if rows share a prompt: which token stands in each place of the sequences, which
            ``cu_seqlens`` then counts in places.
        context_size: ranks that share the tokens.
        places: [m] int64 where this rank's response tokens stand among all M; None if it has all of them.
    """

    rows: tuple[int, ...]
    tokens: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    positions: Tensor
    targets: Tensor
    response_lengths: Tensor
    row_of_place: Tensor
    token_of_place: Tensor | None = None
    context_size: int = 1
    places: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """N, tokens of all ranks that share them."""
        return self.tokens.shape[1] * self.context_size

    def to(self, device: torch.device) -> Microbatch:
        moved = {f.name: v.to(device) for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)}
        return replace(self, **moved)


def plan_rows(
    lengths: Tensor,
    groups: Sequence[Sequence[int]],
    cap: int,
    *,
    cost: SequenceCost | None = None,
    multiple: int = 1,
    fewest: int = 1,
    count_multiple: int = 1,
    dp_group: dist.ProcessGroup | None,
) -> list[list[list[int]]]:
    """Rows of each microbatch of each group of rows (a minibatch), the same number on every data-parallel rank.

    Args:
        lengths: [B] int64 tokens of each row, prompt and response, with the padding it gets.
        groups: rows of each minibatch on this rank.
        cap: most tokens of a microbatch.
        cost: of a sequence, which microbatches share evenly; its tokens if None.
        multiple: microbatches are padded to a multiple of it; the cap holds with padding.
        fewest: make at least so many of a group, if it has the rows: a pipeline wants some to overlap.
        count_multiple: make a multiple of it; virtual stages take turns in rounds of as many as there are stages.
        dp_group: ranks that must agree; None is one rank.

    Returns:
        per group, the rows of each microbatch; a microbatch without rows is a dummy.

    Raises:
        DataError: on every rank of ``dp_group``, if a row of any of them is longer than the cap.
        TrainError: ranks were given different numbers of minibatches.
    """
    usable = cap - cap % multiple
    longest = max((int(lengths[row]) for rows in groups for row in rows), default=0)
    _agree_on_input(len(groups), longest, usable, dp_group)
    cost = SequenceCost() if cost is None else cost
    plans = [_pack_rows(lengths, rows, usable, cost, fewest) for rows in groups]
    counts = torch.tensor([len(plan) for plan in plans], dtype=torch.int64)
    counts = _reduced(counts, dist.ReduceOp.MAX, dp_group)
    counts = -(-counts // count_multiple) * count_multiple
    for index, (plan, count) in enumerate(zip(plans, counts.tolist(), strict=True)):
        if len(plan) < count:
            plan = _pack_rows(lengths, groups[index], usable, cost, count)
        plans[index] = plan + [[] for _ in range(count - len(plan))]
    return plans


def _pack_rows(lengths: Tensor, rows: Sequence[int], cap: int, cost: SequenceCost, fewest: int) -> list[list[int]]:
    if not rows:
        return []
    tokens = lengths[list(rows)].tolist()
    bins = pack(tokens, cap, costs=cost.of(tokens), min_bins=min(fewest, len(rows)))
    return [[rows[index] for index in members] for members in bins]


def _agree_on_input(num_groups: int, longest: int, cap: int, dp_group: dist.ProcessGroup | None) -> None:
    """Raise on all ranks of the group what would stop one of them, so that none waits for it in a collective."""
    most, fewest, longest_anywhere = _reduced(
        torch.tensor([num_groups, -num_groups, longest]), dist.ReduceOp.MAX, dp_group
    ).tolist()
    if most != -fewest:
        raise TrainError(f"data-parallel ranks were given different numbers of minibatches ({-fewest} to {most})")
    if longest_anywhere > cap:
        raise DataError(
            f"a sequence of {longest_anywhere} tokens does not fit a microbatch of {cap} tokens",
            fix="raise engine.microbatch_tokens (or inference_microbatch_tokens), or shorten prompts and responses",
        )


def _reduced(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> Tensor:
    """The tensor reduced over the group, on the CPU; NCCL groups reduce on the current device."""
    if group is None or group.size() == 1:
        return tensor
    device = torch.device("cpu") if dist.get_backend(group) == "gloo" else torch.device("cuda")
    reduced = tensor.to(device)
    dist.all_reduce(reduced, op=op, group=group)
    return reduced.cpu()


def count_globally(counts: Tensor, dp_group: dist.ProcessGroup | None) -> Tensor:
    """Sum of int64 ``counts`` over data-parallel ranks, on the CPU."""
    return _reduced(counts, dist.ReduceOp.SUM, dp_group)


def largest(counts: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Largest of int64 ``counts`` over the ranks of a group, on the CPU."""
    return _reduced(counts, dist.ReduceOp.MAX, group)


@dataclass(frozen=True, slots=True)
class ContextSlice:
    """This rank among the context-parallel ranks, which share the tokens of a pack; see ``context.zigzag``."""

    rank: int = 0
    size: int = 1

    @property
    def unit(self) -> int:
        """Sequences are padded to a multiple of it."""
        return 2 * self.size if self.size > 1 else 1

    def padded(self, lengths: Tensor) -> Tensor:
        """Lengths of sequences with their padding."""
        return -(-lengths // self.unit) * self.unit


WHOLE = ContextSlice()
"""Without context parallelism."""


def build(
    batch: Batch,
    rows: Sequence[int],
    *,
    multiple: int = 1,
    share_prompts: bool = False,
    context: ContextSlice = WHOLE,
) -> Microbatch:
    """Pack whole rows of the batch into one microbatch, padded to a multiple of ``multiple`` tokens.

    With ``share_prompts`` rows of one prompt, a group's samples, have its tokens in common: what a token becomes
    depends on what precedes it only, so computing it once is exact, and its gradient is the sum over the rows.

    Args:
        batch: where the rows are.
        rows: which of them, in the order of packing.
        multiple: of tokens; a multiple of the context's unit.
        share_prompts: equal prompts stand in the pack once; not under context parallelism.
        context: which of the pack's tokens are this rank's.

    Raises:
        DataError: a row has a response but no prompt token that could predict its first token.
    """
    packed = batch.only("prompts", "responses").select(rows)
    responses = packed.ragged("responses")
    if unpredicted := ((packed.prompt_lengths == 0) & (responses.lengths > 0)).nonzero().flatten().tolist():
        raise DataError(
            "a response without any prompt token has no first log-prob", where=f"row {rows[unpredicted[0]]}"
        )
    sequences = packed.sequences()
    if context.size > 1:
        return _sliced(rows, sequences, responses, multiple, context)
    first_place, token_of_place = _first_places(packed, sequences) if share_prompts else (None, None)
    num_places, size = len(sequences.values), len(sequences.values) if first_place is None else len(first_place)
    lengths = _with_padding(sequences.lengths, size, multiple)
    padding = int(lengths.sum()) - num_places
    cu_seqlens = _boundaries(lengths)
    tokens = torch.nn.functional.pad(sequences.values, (0, padding))
    position_ids = torch.arange(num_places + padding) - cu_seqlens[:-1].repeat_interleave(lengths)
    positions = _predicting(sequences, responses)
    if first_place is not None and token_of_place is not None:
        ends = torch.arange(padding)
        first_place = torch.cat([first_place, num_places + ends])
        token_of_place = torch.cat([token_of_place, size + ends])
        tokens, position_ids, positions = tokens[first_place], position_ids[first_place], token_of_place[positions]
    return Microbatch(
        rows=tuple(rows),
        tokens=tokens[None],
        position_ids=position_ids[None],
        cu_seqlens=cu_seqlens.to(torch.int32),
        max_seqlen=int(lengths.max()),
        positions=positions,
        targets=responses.values,
        response_lengths=responses.lengths,
        row_of_place=torch.nn.functional.pad(sequences.row_index(), (0, padding), value=-1),
        token_of_place=token_of_place,
    )


def _sliced(
    rows: Sequence[int], sequences: Ragged, responses: Ragged, multiple: int, context: ContextSlice
) -> Microbatch:
    """The part of a pack that a context-parallel rank computes; every sequence is padded, that behind the pack too."""
    padded = context.padded(sequences.lengths)
    lengths = _with_padding(padded, int(padded.sum()), multiple)
    cu_seqlens = _boundaries(lengths)
    num_tokens = int(cu_seqlens[-1])
    position_ids = torch.arange(num_tokens) - cu_seqlens[:-1].repeat_interleave(lengths)
    shifts = cu_seqlens[: len(padded)] - _boundaries(sequences.lengths)[:-1]
    moved = torch.arange(len(sequences.values)) + shifts.repeat_interleave(sequences.lengths)
    tokens = torch.zeros(num_tokens, dtype=torch.int64)
    tokens[moved] = sequences.values
    row_of_place = torch.full((num_tokens,), -1)
    row_of_place[moved] = sequences.row_index()
    mine = zigzag(lengths.tolist(), context.rank, context.size)
    here = torch.full((num_tokens,), -1)
    here[mine] = torch.arange(len(mine))
    positions = here[moved[_predicting(sequences, responses)]]
    places = (positions >= 0).nonzero().flatten()
    return Microbatch(
        rows=tuple(rows),
        tokens=tokens[mine][None],
        position_ids=position_ids[mine][None],
        cu_seqlens=cu_seqlens.to(torch.int32),
        max_seqlen=int(lengths.max()),
        positions=positions[places],
        targets=responses.values[places],
        response_lengths=responses.lengths,
        row_of_place=row_of_place[mine],
        context_size=context.size,
        places=places,
    )


def _with_padding(lengths: Tensor, size: int, multiple: int) -> Tensor:
    """Lengths of a pack's sequences and of the padding behind its ``size`` tokens, a sequence of its own."""
    # A dummy is one padding sequence: attention and pipeline messages need at least one token.
    if padding := max(1, -(-size // multiple)) * multiple - size:
        return torch.cat([lengths, torch.tensor([padding])])
    return lengths


def _boundaries(lengths: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])


def _predicting(sequences: Ragged, responses: Ragged) -> Tensor:
    """Place before each response token; the last token of a prompt stands in several where prompts are shared."""
    return sequences.with_values(torch.arange(len(sequences.values))).tail(responses.lengths).values - 1


def level(microbatches: Sequence[Microbatch], context: ContextSlice = WHOLE) -> list[Microbatch]:
    """The same with padding to the longest, so that pipeline messages have one shape.

    What is added are sequences no longer than the longest of the pack, so that their attention costs no more.
    """
    most = max((microbatch.num_tokens for microbatch in microbatches), default=0)
    return [_lengthened(microbatch, most - microbatch.num_tokens, context) for microbatch in microbatches]


def _lengthened(microbatch: Microbatch, padding: int, context: ContextSlice) -> Microbatch:
    if not padding:
        return microbatch
    longest = max(microbatch.max_seqlen, context.unit)
    lengths = torch.tensor([longest] * (padding // longest) + [padding % longest] * (padding % longest > 0))
    mine = zigzag(lengths.tolist(), context.rank, context.size)
    own = torch.cat([torch.arange(int(length)) for length in lengths])[mine]
    cu_seqlens = microbatch.cu_seqlens
    token_of_place = microbatch.token_of_place
    if token_of_place is not None:
        ends = torch.arange(padding, dtype=torch.int64) + microbatch.num_tokens
        token_of_place = torch.cat([token_of_place, ends])
    return replace(
        microbatch,
        tokens=torch.nn.functional.pad(microbatch.tokens, (0, len(own))),
        position_ids=torch.cat([microbatch.position_ids, own[None]], dim=1),
        cu_seqlens=torch.cat([cu_seqlens, cu_seqlens[-1] + lengths.cumsum(0).to(torch.int32)]),
        max_seqlen=longest,
        row_of_place=torch.nn.functional.pad(microbatch.row_of_place, (0, len(own)), value=-1),
        token_of_place=token_of_place,
    )


def _first_places(packed: Batch, sequences: Ragged) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Sequences whose equal prompts are one: places [N] of the tokens that are left, and each place's token [E].

    None if no two prompts are equal.
    """
    seen: dict[bytes, int] = {}
    source = torch.arange(len(sequences.values))
    start = 0
    for prompt, length in zip(packed.ragged("prompts").rows(), sequences.lengths.tolist(), strict=True):
        first = seen.setdefault(prompt.numpy().tobytes(), start)
        source[start : start + len(prompt)] = torch.arange(first, first + len(prompt))
        start += length
    if len(seen) == len(sequences.lengths):
        return None, None
    is_first = source == torch.arange(len(source))
    return is_first.nonzero().flatten(), (is_first.cumsum(0) - 1)[source]


def by_row(flat: Sequence[Tensor], microbatches: Sequence[Microbatch], lengths: Tensor) -> Ragged:
    """Join float32 results per response token [M] of microbatches into a column of the batch.

    Args:
        flat: results of each microbatch.
        microbatches: where they came from; together they hold every row with a response once.
        lengths: [B] int64 response tokens of each row.
    """
    rows = [torch.zeros(0, dtype=torch.float32)] * len(lengths)
    for values, microbatch in zip(flat, microbatches, strict=True):
        parts = values.float().cpu().split(microbatch.response_lengths.tolist())
        for row, part in zip(microbatch.rows, parts, strict=True):
            rows[row] = part
    column = Ragged.from_rows(rows, dtype=torch.float32)
    if not torch.equal(column.lengths, lengths):
        raise TrainError("a forward pass did not return one value for each response token")
    return column
