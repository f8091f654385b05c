"""Two checkpoints of any formats compared: tensors bit by bit, and options that no tensor shows.

Invariants:
1. Memory is a worker's blocks, whatever the models' size.
2. What only one of them has, another shape, another dtype and other bits are told apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megarl.errors import CheckpointError
from megarl.models.spec import ModelSpec
from megarl.weights.conversion.copying import Done, Job, run
from megarl.weights.conversion.session import Settings
from megarl.weights.conversion.source import Source
from megarl.weights.files.arrays import Array
from megarl.weights.region import Box, Region

TRAINING_ONLY = ("init_std", "bos_token_id", "eos_token_ids", "pad_token_id", "num_mtp_layers")
"""Fields of a spec that change neither weights nor what the model computes."""

ARGUMENTS = {
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "ffn_hidden_size",
    "num_attention_heads": "num_heads",
    "num_query_groups": "num_kv_heads",
    "kv_channels": "head_dim",
    "norm_epsilon": "rms_norm_eps",
    "layernorm_epsilon": "rms_norm_eps",
    "rotary_base": "rope_theta",
    "rotary_percent": "rotary_fraction",
}
"""Megatron-LM's arguments that say the same as a field of the spec."""


@dataclass
class Difference:
    """What distinguishes two checkpoints.

    Args:
        equal: tensors with the same bits.
        only_first: tensors the second has not.
        only_second: tensors the first has not.
        shapes: tensors of two shapes.
        dtypes: tensors of two dtypes, whose bits are not compared.
        values: tensors of one dtype with other bits.
    """

    equal: list[str] = field(default_factory=list)
    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    dtypes: dict[str, tuple[str, str]] = field(default_factory=dict)
    values: list[str] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether the two hold the same weights."""
        return not (self.only_first or self.only_second or self.shapes or self.dtypes or self.values)


def reading_jobs(source: Source) -> list[Job]:
    """Jobs that read every tensor of a checkpoint, compare its replicas and write nothing."""
    jobs: dict[str, Job] = {}
    seen: dict[str, dict[Box, tuple[Array, Region]]] = {}
    for rank, regions in source.store.regions.items():
        for region in regions:
            if not region.numel:
                continue
            array = source.store.array(rank, region)
            job = jobs.get(region.tensor)
            if job is None:
                dtype = source.dtypes[region.tensor]
                job = jobs[region.tensor] = Job(region.tensor, region.tensor_shape, array.dtype, dtype)
                job.scales = source.scales.get(region.tensor)
            boxes = seen.setdefault(region.tensor, {})
            if region.box in boxes:
                job.replicas.append((array, region))
            else:
                boxes[region.box] = (array, region)
                job.reads.append((array, region))
    return list(jobs.values())


def checksums_of(source: Source, settings: Settings) -> dict[str, int]:
    """Checksum of every tensor, replicas compared.

    Raises:
        CheckpointError: a file cannot be read, or replicas differ.
    """
    found: dict[str, int] = {}

    def note(done: Done) -> None:
        found[done.tensor] = done.checksum

    jobs = reading_jobs(source)
    run(jobs, workers=settings.workers, block_bytes=settings.block_bytes(), on_done=note)
    return {job.tensor: found[job.tensor] for job in jobs}


def compare(first: Source, second: Source, settings: Settings) -> Difference:
    """The difference between two checkpoints' tensors."""
    one, other = checksums_of(first, settings), checksums_of(second, settings)
    shapes = [{job.tensor: job.shape for job in reading_jobs(source)} for source in (first, second)]
    result = Difference()
    result.only_first = [name for name in one if name not in other]
    result.only_second = [name for name in other if name not in one]
    for name in one:
        if name not in other:
            continue
        if shapes[0][name] != shapes[1][name]:
            result.shapes[name] = (shapes[0][name], shapes[1][name])
        elif first.dtypes[name] != second.dtypes[name]:
            result.dtypes[name] = (first.dtypes[name], second.dtypes[name])
        elif one[name] != other[name]:
            result.values.append(name)
        else:
            result.equal.append(name)
    return result


def check_receipt(source: Source, receipt: Mapping[str, Any], settings: Settings) -> list[str]:
    """Tensors whose checksum, dtype or presence is not what a receipt says."""
    sums, noted = checksums_of(source, settings), receipt["tensors"]
    problems = [f"{name} is absent" for name in noted if name not in sums]
    for name, value in sums.items():
        if name not in noted:
            problems.append(f"{name} is not in the receipt")
        elif noted[name]["dtype"] != source.dtypes[name]:
            problems.append(f"{name} is {source.dtypes[name]}, the receipt says {noted[name]['dtype']}")
        elif noted[name]["checksum"] != f"{value:016x}":
            problems.append(f"{name} has checksum {value:016x}, the receipt says {noted[name]['checksum']}")
    return problems


def option_differences(first: ModelSpec, second: ModelSpec) -> list[str]:
    """What two specs say differently about the model's computation: sizes, rotary embeddings, norms, router."""
    one, other = asdict(first), asdict(second)
    return [
        f"{name}: {one[name]!r} and {other[name]!r}"
        for name in one
        if name not in TRAINING_ONLY and one[name] != other[name]
    ]


def argument_differences(spec: ModelSpec, arguments: Mapping[str, Any]) -> list[str]:
    """Arguments of a Megatron run that contradict the model's configuration."""
    problems = []
    for name, field_name in ARGUMENTS.items():
        value, expected = arguments.get(name), getattr(spec, field_name)
        if isinstance(value, int | float) and not isinstance(value, bool) and value != expected:
            problems.append(f"{name} was {value!r}, the configuration says {expected!r}")
    untied = arguments.get("untie_embeddings_and_output_weights")
    if isinstance(untied, bool) and untied == spec.tied_embeddings:
        problems.append(f"untie_embeddings_and_output_weights was {untied}, tie_word_embeddings is {untied}")
    if arguments.get("rotary_interleaved") is True:
        problems.append("rotary_interleaved was true: rows of q and k lie otherwise than Hugging Face's")
    return problems


def require_same(difference: Difference) -> None:
    """Raises CheckpointError where a difference is not empty, with what it is."""
    if not difference.is_empty:
        raise CheckpointError("the checkpoints differ: " + "; ".join(difference_lines(difference)[:20]))


def difference_lines(difference: Difference) -> list[str]:
    """One line a tensor that differs."""
    lines = [f"{name}: only in the first" for name in difference.only_first]
    lines += [f"{name}: only in the second" for name in difference.only_second]
    lines += [f"{name}: shape {list(a)} and {list(b)}" for name, (a, b) in difference.shapes.items()]
    lines += [f"{name}: {a} and {b}" for name, (a, b) in difference.dtypes.items()]
    return lines + [f"{name}: other values" for name in difference.values]
