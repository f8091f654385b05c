"""One model, however it is cut: the same logits, values and gradients at every layout, packed and unpacked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megarl.models.spec import ModelSpec
from megarl.parallel.grid import ParallelLayout
from megarl.parallel.groups import ParallelGroups
from megarl.train.megatron.model import Chunk
from megarl.weights.layout import megatron_regions
from megarl.weights.pieces import pieces
from tests.distributed.models import LLAMA3, QWEN2, QWEN3, build, parameters
from tests.distributed.ranks import Rank, RankPool

LENGTHS = [5, 1, 9, 3, 6]  # 24 tokens: divisible by tp = 2
LAYOUTS = [
    ParallelLayout(tp=2),
    ParallelLayout(tp=2, sequence_parallel=True),
    ParallelLayout(pp=2),
    ParallelLayout(pp=2, first_stage_layers=1),
    ParallelLayout(tp=2, pp=2, sequence_parallel=True),
]
IDS = ["tp2", "tp2-sp", "pp2", "pp2-uneven", "tp2-sp-pp2"]


def tokens(vocab_size: int) -> Tensor:
    return torch.randint(0, vocab_size, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(3))


def packed(lengths: list[int]) -> PackedSeqParams:
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    longest = max(lengths)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def positions(lengths: list[int]) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


def logits_of(hidden: Tensor, chunk: Chunk, groups: ParallelGroups) -> Tensor:
    """[N, V] logits, gathered without a graph; only here are they ever whole."""
    if groups.layout.sequence_parallel:
        hidden = _gathered(hidden, groups, 0)
    logits = hidden.flatten(0, 1).float() @ chunk.output_weight().float().T
    return _gathered(logits, groups, 1)[:, : chunk.spec.vocab_size]


def _gathered(tensor: Tensor, groups: ParallelGroups, dim: int) -> Tensor:
    parts = [torch.empty_like(tensor) for _ in range(groups.tp.size())]
    dist.all_gather(parts, tensor.detach().contiguous(), group=groups.tp)
    return torch.cat(parts, dim)


def run(chunk: Any, groups: ParallelGroups, finish: Any, *, forward_only: bool) -> list[Any]:
    """One packed microbatch through Megatron's schedule."""
    spec = groups_spec(chunk)

    def step(data: Any, model: Any) -> Any:
        ids = next(data)
        output = model(input_ids=ids, position_ids=positions(LENGTHS), packed_seq_params=packed(LENGTHS))
        return output, finish

    return list(
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter([tokens(spec.vocab_size)]),
            model=[chunk],
            num_microbatches=1,
            seq_length=sum(LENGTHS),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
    )


def groups_spec(chunk: Any) -> ModelSpec:
    module = chunk
    while not isinstance(module, Chunk):
        module = module.module
    return module.spec


def forward(rank: Rank, layout: ParallelLayout, spec: ModelSpec, head: str, recompute: str = "none") -> Tensor | None:
    """Logits [N, V] or values [N] on the last stage."""
    groups = rank.start(layout)
    chunk = build(spec, groups, head=head, recompute=recompute)  # type: ignore[arg-type]
    if head == "value" and groups.is_last_stage:
        chunk.output_layer.weight.data.copy_(torch.linspace(-1, 1, spec.hidden_size)[None])

    def finish(output: Tensor, non_loss_data: bool = False) -> Tensor:
        return output.detach().flatten() if head == "value" else logits_of(output, chunk, groups)

    with torch.no_grad():
        results = run(chunk, groups, finish, forward_only=True)
    return results[0] if results else None


def gradients(
    rank: Rank, layout: ParallelLayout, spec: ModelSpec, head: str, recompute: str = "none"
) -> dict[tuple[str, Any], Tensor]:
    """Reduced gradients of this rank's regions, by canonical tensor and box."""
    groups = rank.start(layout)
    chunk = build(spec, groups, head=head, recompute=recompute)  # type: ignore[arg-type]
    if head == "value" and groups.is_last_stage:
        chunk.output_layer.weight.data.copy_(torch.linspace(-1, 1, spec.hidden_size)[None])
    wrapped = DistributedDataParallel(chunk.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), chunk)
    chunk.config.finalize_model_grads_func = lambda chunks, tokens=None, **kw: finalize_model_grads(chunks, None, **kw)

    def finish(output: Tensor) -> Any:
        if head == "value":
            loss = (output.flatten() * torch.linspace(-1, 1, output.numel())).sum()
        else:
            # Any function of the hidden states that every rank computes alike.
            weight = torch.linspace(-1, 1, spec.hidden_size)
            places = torch.linspace(0.5, 1, sum(LENGTHS))
            if layout.sequence_parallel:
                places = places.chunk(layout.tp)[groups.coordinate.tp]
            loss = (output.squeeze(1) * weight * places[:, None]).sum()
        return loss, torch.zeros((), dtype=torch.int32), {}

    wrapped.zero_grad_buffer()
    run(wrapped, groups, finish, forward_only=False)
    grads = {name: parameter.main_grad for name, parameter in parameters(chunk).items()}
    regions = megatron_regions(spec, layout, groups.coordinate, value_head=head == "value")
    return {(region.tensor, region.box): view.clone() for region, view in pieces(regions, grads, owned_only=False)}


def one_rank(ranks: RankPool, function: Any, *args: Any) -> Any:
    return ranks(1).run(function, ParallelLayout(), *args)[0]


@pytest.mark.parametrize("spec", [QWEN2, QWEN3, LLAMA3], ids=lambda spec: spec.family)
@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
def test_logits_do_not_depend_on_the_layout(ranks: RankPool, layout: ParallelLayout, spec: ModelSpec) -> None:
    expected = one_rank(ranks, forward, spec, "lm")
    assert expected.shape == (sum(LENGTHS), spec.vocab_size)
    assert expected.std() > 0.5, "logits this flat would hide a difference"
    results = ranks(layout.world_size).run(forward, layout, spec, "lm")
    found = [logits for logits in results if logits is not None]
    assert len(found) == layout.tp
    for logits in found:
        torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
def test_values_do_not_depend_on_the_layout(ranks: RankPool, layout: ParallelLayout) -> None:
    expected = one_rank(ranks, forward, QWEN2, "value")
    assert expected.shape == (sum(LENGTHS),)
    found = [values for values in ranks(layout.world_size).run(forward, layout, QWEN2, "value") if values is not None]
    assert len(found) == layout.tp
    for values in found:
        torch.testing.assert_close(values, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("spec", "head"), [(QWEN2, "value"), (QWEN3, "lm"), (LLAMA3, "value")], ids=lambda it: getattr(it, "family", it)
)
@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
def test_gradients_do_not_depend_on_the_layout(
    ranks: RankPool, layout: ParallelLayout, spec: ModelSpec, head: str
) -> None:
    expected = _assembled([one_rank(ranks, gradients, spec, head)])
    found = _assembled(ranks(layout.world_size).run(gradients, layout, spec, head))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=2e-5 * scale, msg=lambda m, n=name: f"{n}: {m}")


def _assembled(ranks_gradients: list[dict[tuple[str, Any], Tensor]]) -> dict[str, Tensor]:
    """Whole gradients; replicas must agree."""
    seen: dict[tuple[str, Any], Tensor] = {}
    for part in ranks_gradients:
        for key, gradient in part.items():
            if key in seen:
                torch.testing.assert_close(gradient, seen[key], rtol=1e-5, atol=1e-5)
            seen[key] = gradient
    whole: dict[str, Tensor] = {}
    for (name, box), gradient in seen.items():
        stops = [max(bound[dim][1] for other, bound in seen if other == name) for dim in range(len(box))]
        whole.setdefault(name, torch.full(stops, torch.nan))[tuple(slice(*bounds) for bounds in box)] = gradient
    return whole


def recomputed(rank: Rank, spec: ModelSpec, recompute: str) -> dict[tuple[str, Any], Tensor]:
    return gradients(rank, ParallelLayout(), spec, "lm", recompute)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_activations_give_the_same_gradients(ranks: RankPool, recompute: str) -> None:
    expected = one_rank(ranks, gradients, QWEN2, "lm")
    (found,) = ranks(1).run(recomputed, QWEN2, recompute)
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, rtol=0, atol=0)


def packed_against_unpacked(rank: Rank, layout: ParallelLayout, spec: ModelSpec) -> tuple[float, float]:
    """Largest differences of logits and embedding gradients between one pack and one sequence at a time."""
    groups = rank.start(layout)
    chunk = build(spec, groups)
    ids = tokens(spec.vocab_size)
    together = chunk(ids, positions(LENGTHS), packed_seq_params=packed(LENGTHS))
    loss_weights = torch.linspace(-1, 1, spec.hidden_size)
    (together.squeeze(1) * loss_weights).sum().backward()
    # The output matrix takes no part in hidden states.
    trained = {name: parameter for name, parameter in parameters(chunk).items() if parameter.grad is not None}
    assert set(parameters(chunk)) - set(trained) == (set() if spec.tied_embeddings else {"output_layer.weight"})
    packed_gradients = {name: parameter.grad.clone() for name, parameter in trained.items()}
    chunk.zero_grad()
    alone = []
    for part in ids[0].split(LENGTHS):
        hidden = chunk(part[None], torch.arange(len(part))[None])
        (hidden.squeeze(1) * loss_weights).sum().backward()
        alone.append(hidden)
    difference = (together - torch.cat(alone)).abs().max()
    gradient_difference = max(
        float((packed_gradients[name] - parameter.grad).abs().max()) for name, parameter in trained.items()
    )
    return float(difference.detach()), gradient_difference


@pytest.mark.parametrize("spec", [QWEN2, QWEN3, LLAMA3], ids=lambda spec: spec.family)
@pytest.mark.parametrize("layout", [ParallelLayout(), ParallelLayout(tp=2)], ids=["one", "tp2"])
def test_a_pack_equals_its_sequences_one_by_one(ranks: RankPool, layout: ParallelLayout, spec: ModelSpec) -> None:
    for difference, gradient_difference in ranks(layout.world_size).run(packed_against_unpacked, layout, spec):
        assert difference < 1e-5
        assert gradient_difference < 2e-4  # sums over tokens, largest entries above 10
