"""Microbatches through Megatron's pipeline schedule: passes without gradients, and forward-backward passes.

Invariants:
1. A pass without gradients runs in evaluation mode: no dropout ever enters a log-prob.
2. Megatron divides nothing: the loss a microbatch returns is its share of the minibatch's loss, gradients of
   microbatches and data-parallel ranks are summed.
3. A dummy microbatch contributes exactly zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from megarl.algorithms.context_parallel import whole_rows
from megarl.data.balance import SequenceCost
from megarl.data.batch import Batch
from megarl.train.megatron.acceleration import drop_quantized
from megarl.train.megatron.attention import SharedSequences
from megarl.train.megatron.balance import ExpertBalance, routed_tokens
from megarl.train.megatron.heads import vocab_log_probs
from megarl.train.megatron.microbatch import ContextSlice, Microbatch, build, level, plan_rows
from megarl.train.megatron.model import Chunk
from megarl.train.megatron.reduction import wait_for

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class TokenOutputs:
    """What the model says about the M response tokens of a microbatch, float32 [M] each, with a graph in training.

    Args:
        log_probs: log-probs of the tokens (language-model head).
        entropy: entropy of the distributions they were drawn from, if asked for.
        values: values before the tokens (value head).
        sum_pi_squared: sum over the vocabulary of squared probabilities, if asked for; without a graph.
    """

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    sum_pi_squared: Tensor | None = None


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """How the language-model head is read.

    Args:
        temperature: softmax temperature.
        with_entropy: also compute the entropy.
        with_sum_pi_squared: also compute the sum of squared probabilities.
    """

    temperature: float = 1.0
    with_entropy: bool = False
    with_sum_pi_squared: bool = False


@dataclass(frozen=True, slots=True)
class ModelParts:
    """One rank's part of a Megatron model and what a forward pass needs to know about it.

    Args:
        chunks: the model chunks the schedule runs, one for each virtual stage, wrapped in DistributedDataParallel if
            they are trained. On the last stage the last one's output is the hidden states [n or n / tp, 1, H] before
            the output layer, or, with a value head, the values [n, 1, 1].
        module: the bare ``model.Chunk`` inside the last.
        vocab_size: vocabulary entries that exist.
        chunk_tokens: tokens whose logits are held at once.
        is_value: the model ends in a value head.
        sequence_parallel: hidden states are split over ``tp_group`` along the tokens.
        tp_group: tensor-parallel group.
        cp_group: context-parallel group.
        pp_size: pipeline stages.
        device: where tensors live.
        cost: of a sequence.
        token_unit: the tokens of a rank, of its share of them under sequence parallelism, are a multiple of it.
        quantizing: modules that keep FP8 copies of weights while a pass lasts.
        shares_prompts: the core attention takes rows with a prompt in common (``SharedSequences``).
        balance: of the experts; None in a dense model, and in one that is not trained.
        gathers_weights: an update leaves weights for the next pass to gather (``reduction.py``).
    """

    chunks: Sequence[nn.Module]
    module: Chunk
    vocab_size: int
    chunk_tokens: int
    is_value: bool
    sequence_parallel: bool
    tp_group: dist.ProcessGroup
    cp_group: dist.ProcessGroup
    pp_size: int
    device: torch.device
    cost: SequenceCost
    token_unit: int = 1
    quantizing: Sequence[nn.Module] = ()
    shares_prompts: bool = False
    balance: ExpertBalance | None = None
    gathers_weights: bool = False

    @property
    def token_multiple(self) -> int:
        """Tokens of a microbatch are padded to a multiple of it."""
        ranks = self.context.size * (self.tp_group.size() if self.sequence_parallel else 1)
        return math.lcm(self.context.unit, ranks * self.token_unit)

    @property
    def context(self) -> ContextSlice:
        """Which tokens of a pack are this rank's."""
        return ContextSlice(self.cp_group.rank(), self.cp_group.size())

    def plan(self, batch: Batch, groups: Sequence[Sequence[int]], cap: int, dp_group: Any) -> list[list[list[int]]]:
        """Rows of each microbatch of each group of rows; collective over ``dp_group`` (``microbatch.plan_rows``)."""
        return plan_rows(
            self.context.padded(batch.sequence_lengths),
            groups,
            cap,
            cost=self.cost,
            multiple=self.token_multiple,
            fewest=self.fewest_microbatches,
            count_multiple=self.pp_size if len(self.chunks) > 1 else 1,
            dp_group=dp_group,
        )

    def pack(self, batch: Batch, rows: Sequence[int]) -> Microbatch:
        """Rows of the batch as one microbatch of this model."""
        return build(batch, rows, multiple=self.token_multiple, share_prompts=self.shares_prompts, context=self.context)

    @property
    def fewest_microbatches(self) -> int:
        """Microbatches below which pipeline stages would mostly wait: with 2 p of them, p - 1 of 3 p - 1 slots idle."""
        return 2 * self.pp_size if self.pp_size > 1 else 1


def configure_schedule(config: Any) -> None:
    """Set what Megatron's schedules read from the model's TransformerConfig beside what ``model.py`` set.

    ``calculate_per_token_loss`` makes the schedules and DistributedDataParallel sum instead of average. The division by
    a token count that goes with it is left out here: losses are divided by global denominators already.
    """
    if not config.calculate_per_token_loss:
        raise AssertionError("the model's configuration would average losses over microbatches and ranks")
    config.finalize_model_grads_func = _finalize_undivided


def _finalize_undivided(chunks: list[nn.Module], num_tokens: Tensor | None = None, **groups: Any) -> None:
    finalize_model_grads(chunks, None, **groups)


def forward_only(
    parts: ModelParts,
    microbatches: Sequence[Microbatch],
    read: Callable[[TokenOutputs, Microbatch], Result],
    options: HeadOptions,
) -> list[Result]:
    """``read`` of each microbatch's outputs, without gradients; empty on all but the last pipeline stage."""

    def collect(microbatch: Microbatch, output: Tensor, non_loss_data: bool = False) -> Result:
        return read(token_outputs(parts, output, microbatch, options), microbatch)

    was_training = parts.module.training
    for chunk in parts.chunks:
        chunk.eval()
    try:
        with torch.no_grad():
            return _run(parts, microbatches, collect, forward_only=True, collect_non_loss_data=True)
    finally:
        for chunk in parts.chunks:
            chunk.train(was_training)


def forward_backward(
    parts: ModelParts,
    microbatches: Sequence[Microbatch],
    loss: Callable[[TokenOutputs, Microbatch], tuple[Tensor, Result]],
    options: HeadOptions,
) -> list[Result]:
    """Accumulate and reduce the gradient of the summed losses; returns what ``loss`` returned beside its loss.

    ``loss`` is not called for dummies, whose result is missing from the list; the list is empty on all but the last
    pipeline stage.
    """

    def share(microbatch: Microbatch, output: Tensor) -> tuple[Tensor, Tensor, Result | None]:
        outputs = token_outputs(parts, output, microbatch, options)
        no_tokens = torch.zeros((), dtype=torch.int32, device=parts.device)
        if not microbatch.rows:
            # The whole graph takes part, as pipeline and data-parallel peers expect, with zero gradients.
            return _any_output(outputs).sum() * 0.0, no_tokens, None
        value, result = loss(outputs, microbatch)
        return value, no_tokens, result

    for chunk in parts.chunks:
        chunk.train()
    results = _run(parts, microbatches, share, forward_only=False)
    return [result for result in results if result is not None]


def _run(
    parts: ModelParts, microbatches: Sequence[Microbatch], finish: Callable[..., Any], **options: Any
) -> list[Any]:
    is_split = parts.sequence_parallel
    tp_rank, tp_size = (parts.tp_group.rank(), parts.tp_group.size()) if is_split else (0, 1)

    def forward_step(microbatches: Iterator[Microbatch], model: nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
        microbatch = next(microbatches).to(parts.device)
        output = model(
            input_ids=microbatch.tokens,
            position_ids=microbatch.position_ids,
            attention_mask=None,
            packed_seq_params=packed_seq_params(microbatch),
            routed=None if parts.balance is None else routed_tokens(microbatch, tp_rank=tp_rank, tp_size=tp_size),
        )
        return output, lambda *args, **kwargs: finish(microbatch, *args, **kwargs)

    if not microbatches:
        return []
    is_interleaved = len(parts.chunks) > 1
    if is_interleaved:
        microbatches = level(microbatches, parts.context)
    try:
        return list(
            get_forward_backward_func()(
                forward_step_func=forward_step,
                # Every virtual stage sees every microbatch.
                data_iterator=[iter(microbatches) for _ in parts.chunks] if is_interleaved else iter(microbatches),
                model=list(parts.chunks),
                num_microbatches=len(microbatches),
                seq_length=max(microbatch.num_tokens for microbatch in microbatches),
                micro_batch_size=1,
                **options,
            )
        )
    finally:
        drop_quantized(parts.quantizing)


def packed_seq_params(microbatch: Microbatch) -> PackedSeqParams:
    """Sequence boundaries in the form Megatron's and Transformer Engine's attention read (format THD)."""
    sequences: dict[str, Any] = {
        "qkv_format": "thd",
        "cu_seqlens_q": microbatch.cu_seqlens,
        "cu_seqlens_kv": microbatch.cu_seqlens,
        "max_seqlen_q": microbatch.max_seqlen,
        "max_seqlen_kv": microbatch.max_seqlen,
    }
    if microbatch.token_of_place is None:
        return PackedSeqParams(**sequences)
    return SharedSequences(microbatch.token_of_place, microbatch.num_tokens, **sequences)


def token_outputs(parts: ModelParts, output: Tensor, microbatch: Microbatch, options: HeadOptions) -> TokenOutputs:
    """Outputs of a microbatch's response tokens from what the last stage's chunk returned; collective over ``cp``."""
    if parts.is_value:
        values = output.reshape(-1).float().index_select(0, microbatch.positions)
        return TokenOutputs(values=_whole(parts, values, microbatch))
    hidden = output.reshape(-1, output.shape[-1])
    squares = None
    if options.with_sum_pi_squared:
        squares = torch.zeros(len(microbatch.targets), dtype=torch.float32, device=parts.device)
    weight = parts.module.output_weight()
    if parts.gathers_weights:
        wait_for(parts.chunks[-1], weight)
    log_probs, entropy = vocab_log_probs(
        hidden,
        weight,
        microbatch.targets,
        vocab_size=parts.vocab_size,
        positions=microbatch.positions,
        temperature=options.temperature,
        chunk_tokens=parts.chunk_tokens,
        with_entropy=options.with_entropy,
        tp_group=parts.tp_group,
        sequence_parallel=parts.sequence_parallel,
        sum_pi_squared=squares,
    )
    return TokenOutputs(
        log_probs=_whole(parts, log_probs, microbatch),
        entropy=None if entropy is None else _whole(parts, entropy, microbatch),
        sum_pi_squared=None if squares is None else _whole(parts, squares, microbatch),
    )


def _whole(parts: ModelParts, mine: Tensor, microbatch: Microbatch) -> Tensor:
    """Values of all M response tokens from this rank's [m], on every context-parallel rank."""
    if microbatch.places is None:
        return mine

    def total(rows: Tensor) -> Tensor:
        dist.all_reduce(rows, group=parts.cp_group)
        return rows

    size = int(microbatch.response_lengths.sum())
    return whole_rows(mine[None], microbatch.places, size, total)[0]


def _any_output(outputs: TokenOutputs) -> Tensor:
    present = outputs.log_probs if outputs.log_probs is not None else outputs.values
    if present is None:
        raise AssertionError("a microbatch has neither log-probs nor values")
    return present
