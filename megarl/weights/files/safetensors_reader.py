"""Reading a Hugging Face directory by slices, with every way it can be incomplete reported before a byte is used.

Invariants:
1. Opening reads headers only; a truncated or missing file, or an index that does not match the files, fails there.
2. A read maps the file and touches the pages of its box alone.
3. Against a model: each tensor is used, or declared droppable with a reason, or an error. All errors at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megarl.errors import ModelError
from megarl.models.spec import ModelSpec
from megarl.weights.files.safetensors_format import StoredTensor, stored
from megarl.weights.files.safetensors_header import directory_arrays, listing, unused_tensors
from megarl.weights.layout import canonical_shapes
from megarl.weights.pieces import fill
from megarl.weights.region import Box, Region


class SafetensorsReader:
    """The tensors of a Hugging Face directory.

    Args:
        directory: holds ``model.safetensors``, or ``model.safetensors.index.json`` and its shards.

    Raises:
        ModelError: no weights, a missing or truncated file, an index that names a tensor its file has not.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._maps: dict[Path, np.ndarray] = {}
        self.tensors = stored(directory_arrays(self.directory))

    def __enter__(self) -> SafetensorsReader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Forgets the mapped files; tensors handed out keep theirs."""
        self._maps.clear()

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A box of a tensor, as a view of the mapped file: copy it before writing to it.

        Raises:
            ModelError: no such tensor.
        """
        stored = self._stored(name)
        data = self._maps.get(stored.path)
        if data is None:
            # Copy-on-write keeps torch from warning about a read-only buffer; nothing is ever written to it.
            data = self._maps[stored.path] = np.memmap(stored.path, dtype=np.uint8, mode="c")
        raw = torch.from_numpy(data[stored.begin : stored.begin + stored.num_bytes])
        if stored.begin % stored.dtype.itemsize:
            raw = raw.clone()
        tensor = raw.view(stored.dtype).view(stored.shape)
        return tensor if box is None else tensor[tuple(slice(start, stop) for start, stop in box)]

    def _stored(self, name: str) -> StoredTensor:
        if name not in self.tensors:
            raise ModelError(f"tensor {name} is absent from the checkpoint", where=str(self.directory))
        return self.tensors[name]


def check_model(
    reader: SafetensorsReader, spec: ModelSpec, *, value_head: bool = False, new_value_head: bool = False
) -> dict[str, str]:
    """Checks a checkpoint against a model and returns what will not be used: name -> reason.

    Args:
        reader: the checkpoint.
        spec: the model.
        value_head: the model is a critic.
        new_value_head: a critic's head may be absent, because the caller makes a new one.

    Raises:
        ModelError: listing all tensors that are absent, unknown to the model, of another shape or of no floating dtype.
    """
    expected = canonical_shapes(spec, value_head=value_head)
    optional = set(expected) - set(canonical_shapes(spec)) if new_value_head else set()
    problems: list[str] = []
    for name, shape in expected.items():
        stored = reader.tensors.get(name)
        if stored is None:
            if name not in optional:
                problems.append(f"{name} is absent")
        elif stored.shape != shape:
            problems.append(f"{name} has shape {list(stored.shape)}, expected {list(shape)} ({stored.path.name})")
        elif not stored.dtype.is_floating_point or stored.dtype.itemsize == 1:
            problems.append(f"{name} has dtype {stored.dtype}, which is no plain floating type ({stored.path.name})")
    dropped, unknown = unused_tensors(
        [name for name in reader.tensors if name not in expected], spec, value_head=value_head
    )
    problems += [f"{name} belongs to no weight of the model ({reader.tensors[name].path.name})" for name in unknown]
    if problems:
        raise ModelError(f"checkpoint and configuration disagree: {listing(problems)}", where=str(reader.directory))
    return dropped


def load_into(
    regions: Sequence[Region],
    reader: SafetensorsReader,
    params: Mapping[str, Tensor],
    *,
    fresh: Mapping[str, Tensor] | None = None,
) -> None:
    """Fills one rank's parameters from a checkpoint; padding becomes zero, dtypes are converted.

    Call ``check_model`` first.

    Args:
        regions: the rank's regions.
        reader: the checkpoint.
        params: the rank's parameters by Megatron's name.
        fresh: full tensors to use where the checkpoint lacks them (a new value head).

    Raises:
        LayoutError: parameters and regions do not name each other exactly.
        ModelError: a tensor is absent.
    """
    made = fresh if fresh is not None else {}

    def source(region: Region) -> Tensor:
        if region.tensor not in reader.tensors and region.tensor in made:
            return made[region.tensor][region.slices]
        return reader.read(region.tensor, region.box)

    fill(regions, params, source)
