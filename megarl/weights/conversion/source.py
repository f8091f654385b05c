"""An opened checkpoint: what it holds as regions of canonical tensors, whatever its format."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.models.rules import VALUE_HEAD, NamingScheme
from megarl.models.spec import ModelSpec
from megarl.parallel.grid import ParallelLayout
from megarl.weights.conversion.dist_view import SLOTS, slot_prefix
from megarl.weights.conversion.store import Store
from megarl.weights.files.arrays import Array

OPTIMIZER_PREFIX = "optimizer.state."
_EXACT = (VALUE_HEAD, "e_score_correction_bias")
STATE_FILE = "state.json"
MTP = "megarl does not train multi-token prediction"
HF_FOLDER = "hf"
"""Where a Megatron checkpoint of ours keeps the model's configuration and tokenizer."""


@dataclass
class KeptState:
    """What a torch_dist checkpoint holds beside tensors and goes along unchanged.

    Args:
        common: archive for ``common.pt``; None where it cannot be written without the classes it names.
        entry: archive of the entry ``common_state``, where ``common`` is None.
        trainer: contents of a megarl trainer's ``state.json``.
    """

    common: bytes | None
    entry: bytes | None
    trainer: dict[str, Any] | None


@dataclass
class Source:
    """An opened checkpoint.

    Args:
        format: hf, torch_dist or legacy.
        directory: with the files.
        spec: the model.
        value_head: whether it is a critic.
        config: the Hugging Face configuration that goes with it.
        companions: configuration and tokenizer files by name.
        store: its regions and arrays.
        dtypes: of every canonical tensor; for block-quantised ones, of what they are read as.
        unused: what is not converted, with the reason.
        scales: of block-quantised tensors.
        slots: optimizer slots it holds.
        naming: whose layers wrote it; None for Hugging Face's.
        layout: whose shards it has; None where it is not cut by ranks.
        files: all that belong to it.
        kept: state that is no tensor and goes along.
        iteration: of the run that wrote it.
        arguments: of that run, where the checkpoint names them.
    """

    format: str
    directory: Path
    spec: ModelSpec
    value_head: bool
    config: dict[str, Any]
    companions: dict[str, bytes]
    store: Store
    dtypes: dict[str, str]
    unused: dict[str, str] = field(default_factory=dict)
    scales: dict[str, Array] = field(default_factory=dict)
    slots: tuple[str, ...] = ()
    naming: NamingScheme | None = None
    layout: ParallelLayout | None = None
    files: list[Path] = field(default_factory=list)
    kept: KeptState | None = None
    iteration: int = 0
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def has_slots(self) -> bool:
        """Whether it holds optimizer state that another layout can take, read or not."""
        return any(name.startswith(slot_prefix(slot)) for slot in SLOTS for name in (*self.unused, *self.dtypes))

    def keeps_dtype(self, tensor: str) -> bool:
        """Whether a tensor stays as it is when weights are converted: what is float32 for its precision's sake."""
        return tensor.startswith(OPTIMIZER_PREFIX) or tensor.endswith(_EXACT)


@dataclass(frozen=True)
class Model:
    """A model and the files that describe it."""

    spec: ModelSpec
    config: dict[str, Any]
    companions: dict[str, bytes]


def dtypes_of(store: Store) -> dict[str, str]:
    """Dtype of every canonical tensor that a store holds."""
    return {
        region.tensor: store.array(rank, region).dtype for rank, regions in store.regions.items() for region in regions
    }
