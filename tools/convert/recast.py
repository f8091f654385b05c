"""From an opened source to a written target: what the commands do once they have read their options."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from megarl.errors import CheckpointError
from megarl.weights.conversion.dist_target import dist_target
from megarl.weights.conversion.session import convert
from megarl.weights.conversion.source import Source
from megarl.weights.conversion.sources import open_source
from megarl.weights.conversion.target import Target
from megarl.weights.conversion.targets import hf_target, legacy_target, sharded_state_target
from tools.convert.options import DTYPES, ProgressLine, layout_of, layout_options_given, report, settings_of


def to_megatron(source: Source, given: argparse.Namespace) -> int:
    """Writes a Megatron checkpoint in ``given.format`` and layout."""
    if given.grouped_experts and (given.format != "legacy" or source.spec.moe is None):
        raise CheckpointError("--grouped-experts is for expert models in the legacy format", fix="leave it out")
    layout = layout_of(given, has_experts=source.spec.moe is not None)
    naming = given.naming or source.naming or "te"
    dtypes = target_dtypes(source, given.dtype)
    options = {"format": given.format, "layout": asdict(layout), "naming": naming, "dtype": given.dtype}

    def make(directory: Path) -> Target:
        if given.format == "legacy":
            if source.slots:
                raise CheckpointError("the legacy format has no place for a reshardable optimizer state")
            return legacy_target(
                directory,
                source.spec,
                layout,
                dtypes,
                value_head=source.value_head,
                naming=naming,
                grouped_experts=given.grouped_experts,
                iteration=source.iteration,
            )
        return dist_target(
            directory,
            source.spec,
            layout,
            dtypes,
            value_head=source.value_head,
            naming=naming,
            slots=source.slots,
            kept=source.kept,
        )

    return _write(source, given, make, options)


def to_hf(source: Source, given: argparse.Namespace) -> int:
    """Writes a Hugging Face directory."""
    dtypes = target_dtypes(source, given.dtype)
    options = {"format": "hf", "dtype": given.dtype, "max_shard_bytes": given.max_shard_size}

    def make(directory: Path) -> Target:
        return hf_target(
            directory, source.spec, dtypes, value_head=source.value_head, max_shard_bytes=given.max_shard_size
        )

    return _write(source, given, make, options)


def to_sharded_state(source: Source, given: argparse.Namespace) -> int:
    """Writes vLLM's sharded state for ``given.tp`` ranks."""
    if unused := [option for option in layout_options_given(given) if option != "--tp"]:
        raise CheckpointError(f"{', '.join(unused)}: an engine's shards depend on --tp alone", fix="leave it out")
    dtypes = target_dtypes(source, given.dtype)
    options = {"format": "sharded_state", "dtype": given.dtype, "tp": given.tp}
    if source.value_head:
        raise CheckpointError("an engine samples: a critic has no sharded state", where=str(source.directory))
    return _write(source, given, lambda place: sharded_state_target(place, source.spec, given.tp, dtypes), options)


def target_dtypes(source: Source, wanted: str) -> dict[str, str]:
    """Dtype of every tensor of the target: the weights' as asked for; optimizer state and what must be exact stay."""
    if wanted == "keep":
        return dict(source.dtypes)
    return {name: dtype if source.keeps_dtype(name) else DTYPES[wanted] for name, dtype in source.dtypes.items()}


def _write(source: Source, given: argparse.Namespace, make, options: dict) -> int:
    progress = ProgressLine(quiet=given.quiet)
    settings = settings_of(given)
    receipt = convert(source, given.target, make, options, settings, progress)
    progress.end()
    report(receipt, given.target, progress)
    return 0


def open_for(given: argparse.Namespace, *, optimizer: bool = False) -> Source:
    """The source that a command names."""
    return open_source(given.source, config=given.config, optimizer=optimizer)
