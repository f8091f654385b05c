"""Sides of the matrices of a model that are multiplied in FP8: what does not fit its kernels is known beforehand."""

from __future__ import annotations

from megarl.models.spec import ModelSpec


def sides(spec: ModelSpec, *, tp: int, etp: int) -> dict[str, int]:
    """Rows and columns of the layers' matrices on one rank, by name.

    Queries, keys and values are one matrix, gate and up another. Embeddings, router, shared experts' gate and head are
    not multiplied in FP8.
    """
    found = {
        "hidden size": spec.hidden_size,
        "rows of queries, keys and values": (spec.query_size + 2 * spec.kv_size) // tp,
        "rows of queries": spec.query_size // tp,
    }
    if spec.num_expert_layers < spec.num_layers:
        found["feed-forward rows"] = spec.ffn_hidden_size // tp
    if spec.moe is not None:
        found["rows of an expert"] = spec.moe.ffn_hidden_size // etp
        if spec.moe.shared_ffn_hidden_size:
            found["rows of the shared experts"] = spec.moe.shared_ffn_hidden_size // tp
    return found


def unfit_sides(spec: ModelSpec, multiple: int, *, tp: int, etp: int) -> dict[str, int]:
    """Those of ``sides`` that are no multiple of ``multiple`` (``EngineConfig.fp8_multiple``)."""
    return {name: size for name, size in sides(spec, tp=tp, etp=etp).items() if size % multiple}
