"""Hypothesis strategies: awkward models of every family and the layouts they divide into."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from megarl.models import FAMILIES, ModelSpec
from megarl.models.registry import family_named
from megarl.models.spec import LatentAttention, MixtureOfExperts
from megarl.parallel.grid import ParallelLayout
from megarl.weights.layout import canonical_shapes


@st.composite
def pipelines(draw: st.DrawFn, num_layers: int) -> dict[str, Any]:
    """Stages and chunks that hold this many layers: even, uneven at the ends, or spelled."""
    kind = draw(st.sampled_from(["one", "even", "uneven", "spelled"]))
    if kind == "even":
        pp = draw(st.sampled_from([pp for pp in range(1, num_layers + 1) if num_layers % pp == 0]))
        per_stage = num_layers // pp
        vpp = draw(st.sampled_from([v for v in range(1, per_stage + 1) if per_stage % v == 0]))
        return {"pp": pp, "vpp": vpp if pp > 1 else 1}
    if kind == "uneven" and num_layers > 2:
        first = draw(st.integers(1, num_layers - 1))
        last = draw(st.none() | st.integers(1, num_layers - 1))
        rest = num_layers - first - (last or 0)
        middle = [pp for pp in range(1, rest + 1) if rest % pp == 0] if rest > 0 else [0] if rest == 0 and last else []
        if middle:
            pp = draw(st.sampled_from(middle)) + 1 + (last is not None)
            return {"pp": pp, "first_stage_layers": first, "last_stage_layers": last}
    if kind == "spelled":
        pp, vpp = draw(st.integers(2, 3)), draw(st.integers(1, 2))
        cuts = sorted(draw(st.lists(st.integers(0, num_layers), min_size=pp * vpp - 1, max_size=pp * vpp - 1)))
        counts = [b - a for a, b in zip([0, *cuts], [*cuts, num_layers], strict=True)]
        return {"pp": pp, "vpp": vpp, "pipeline": "E" + "|".join("t" * count for count in counts) + "L"}
    return {}


@st.composite
def layouts_for(draw: st.DrawFn, spec: ModelSpec) -> ParallelLayout:
    """A layout that the model divides into."""
    divisors = [tp for tp in (1, 2, 3, 4, 6, 8) if divides(spec, tp)]
    tp = draw(st.sampled_from(divisors))
    cp, dp = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    options = draw(pipelines(spec.num_layers))
    if spec.moe is not None:
        moe = spec.moe
        stage = tp * cp * dp
        options["ep"], options["etp"] = draw(
            st.sampled_from(
                [
                    (ep, etp)
                    for ep in range(1, moe.num_experts + 1)
                    for etp in range(1, stage + 1)
                    if moe.num_experts % ep == 0 and moe.ffn_hidden_size % etp == 0 and stage % (ep * etp) == 0
                ]
            )
        )
    return ParallelLayout(tp=tp, cp=cp, dp=dp, vocab_rows_multiple=draw(st.sampled_from([1, 8, 64])), **options)


def divides(spec: ModelSpec, tp: int) -> bool:
    """Whether Megatron can cut the model over so many tensor-parallel ranks, latents of its own layers included."""
    sizes = [spec.ffn_hidden_size, spec.num_heads]
    sizes.append(spec.query_size + 2 * spec.kv_size)
    if spec.moe is not None:
        sizes.append(spec.moe.shared_ffn_hidden_size)
    if spec.mla is not None:
        sizes += [spec.mla.kv_lora_rank + spec.mla.rope_head_dim, spec.mla.q_lora_rank or 0]
    elif spec.num_kv_heads % tp and tp % spec.num_kv_heads:
        return False
    return all(size % tp == 0 for size in sizes)


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    """An awkward model of any family."""
    family = draw(st.sampled_from(sorted(FAMILIES)))
    declared = family_named(family)
    num_layers = draw(st.integers(1, 5))
    unit = draw(st.sampled_from([1, 2, 4, 6]))  # what most sizes divide by, so that there are layouts
    kv_heads = draw(st.sampled_from([1, 2, 3, unit]))
    options: dict[str, Any] = {"qkv_bias": declared.qkv_bias, "qk_norm": declared.qk_norm}
    num_heads = kv_heads * draw(st.integers(1, 4))
    head_dim = 2 * draw(st.integers(1, 3))
    if declared.qk_norm_key is not None:
        options["qk_norm"] = draw(st.booleans())
    if declared.experts is not None:
        keys = declared.experts
        shared = unit * draw(st.integers(0, 2)) if keys.num_shared or keys.shared_ffn else 0
        dense = draw(st.sets(st.integers(0, num_layers - 1))) if keys.sparse_step else set()
        if keys.first_dense:
            dense = set(range(draw(st.integers(0, num_layers))))
        num_experts = draw(st.sampled_from([2, 3, 4, 6]))
        options["moe"] = MixtureOfExperts(
            num_experts=num_experts,
            top_k=draw(st.integers(1, num_experts)),
            ffn_hidden_size=unit * draw(st.integers(1, 2)),
            dense_layers=tuple(sorted(dense)),
            shared_ffn_hidden_size=shared,
            shared_gate=keys.shared_gate and shared > 0,
            score=keys.score,
            expert_bias=keys.expert_bias,
        )
    if declared.latent:
        kv_heads = num_heads = unit * draw(st.integers(1, 2))
        rope = 2 * draw(st.integers(1, 2))
        q_lora = draw(st.none() | st.just(unit * draw(st.integers(1, 3))))
        options["mla"] = LatentAttention(
            q_lora, unit * 4 - rope if unit * 4 > rope else 4, draw(st.integers(1, 4)), rope, draw(st.integers(1, 4))
        )
    return ModelSpec(
        family=family,
        vocab_size=draw(st.integers(1, 200)),
        hidden_size=draw(st.integers(1, 12)),
        ffn_hidden_size=unit * draw(st.integers(1, 4)),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=64,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        tied_embeddings=draw(st.booleans()),
        **options,
    )


@st.composite
def models_and_layouts(draw: st.DrawFn) -> tuple[ModelSpec, ParallelLayout, bool]:
    """A model, a layout it divides into, and whether it has a value head."""
    spec = draw(models())
    return spec, draw(layouts_for(spec)), draw(st.booleans())


def random_model(spec: ModelSpec, value_head: bool) -> dict[str, torch.Tensor]:
    """Every canonical tensor, bfloat16."""
    generator = torch.Generator().manual_seed(7)
    return {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16)
        for name, shape in canonical_shapes(spec, value_head=value_head).items()
    }
