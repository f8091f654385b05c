"""Low-rank adapters on a model's linear layers (LoRA, arXiv:2106.09685): ``y = W x + (alpha / rank) B A x``.

``A`` [rank, in] is drawn, ``B`` [out, rank] starts at zero, ``W`` and every other weight of the model are frozen. The
adapters of a chunk are its child ``adapters`` and act through forward hooks of the linear layers, so that the base
keeps its modules and names.

Invariants:
1. At the start, and with adapters switched off, the model is the base, bit for bit.
2. A column-parallel layer shards ``B`` by rows and replicates ``A``, a row-parallel one shards ``A`` by columns and
   replicates ``B``. Replicated factors are equal on all tensor-parallel ranks: their gradients are whole, or those of
   the tokens of a sequence-parallel rank and marked for Megatron-Core's sum.
3. What is drawn does not depend on the layout, nor do the names of adapters in checkpoints.
4. Merging makes one weight shard at a time, sums in float32 and leaves the base as it is.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from megarl.config.schema.train import ATTENTION_TARGETS, COLUMN_PARALLEL_TARGETS, LoraConfig
from megarl.errors import CheckpointError, LayoutError, ModelError
from megarl.models.spec import ModelSpec
from megarl.parallel.groups import ParallelGroups
from megarl.train.megatron.model import named_weights
from megarl.weights.checksum import add, checksums
from megarl.weights.pieces import pieces
from megarl.weights.region import Region

_PREFIX = "adapters."


class Adapter(nn.Module):
    """The two factors of one linear layer.

    Args:
        linear: the layer, with its shard ``weight`` [out, in].
        target: its name in the transformer layer.
        name: of the adapter in the whole model; what is drawn depends on it and the seed.
        groups: this rank's groups.
        config: rank and alpha.
        seed: of ``A``.
    """

    def __init__(
        self, linear: Any, target: str, name: str, groups: ParallelGroups, config: LoraConfig, seed: int
    ) -> None:
        super().__init__()
        self.is_column = target in COLUMN_PARALLEL_TARGETS
        self.is_on = True
        self.scale = config.alpha / config.rank
        self._is_gated = target == "linear_fc1"
        self._tp_group = groups.tp
        self._sequence_parallel = groups.layout.sequence_parallel
        weight: Tensor = linear.weight
        tp = 1 if self.is_column else groups.layout.tp
        drawn = _kaiming_uniform(config.rank, weight.shape[1] * tp, f"{seed}/{name}")
        own = drawn.chunk(tp, dim=1)[groups.coordinate.tp if tp > 1 else 0]
        self.a = nn.Parameter(own.to(weight, copy=True).contiguous())
        self.b = nn.Parameter(weight.new_zeros(weight.shape[0], config.rank))
        sharded, replicated, dim = (self.b, self.a, 0) if self.is_column else (self.a, self.b, 1)
        set_tensor_model_parallel_attributes(sharded, is_parallel=True, dim=dim, stride=1)
        replicated.sequence_parallel = self._sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor, result: Tensor) -> Tensor:
        """``result + scale B A hidden`` for what the layer made of ``hidden`` [.., in]: [.., out], sharded as it is."""
        low = nn.functional.linear(hidden, self.a)
        if self.is_column:
            # Every rank's rows of B add to the gradient of what all of them were given.
            gather = gather_from_sequence_parallel_region
            low = (gather if self._sequence_parallel else copy_to_tensor_model_parallel_region)(
                low, group=self._tp_group
            )
        else:
            scatter = reduce_scatter_to_sequence_parallel_region
            low = (scatter if self._sequence_parallel else reduce_from_tensor_model_parallel_region)(
                low, group=self._tp_group
            )
        # One product that adds, or the layer's change and its sum would be two more tensors of the result's size.
        rows = torch.addmm(result.flatten(0, -2), low.flatten(0, -2), self.b.t(), alpha=self.scale)
        return rows.view(result.shape)

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """``weight + scale B A`` [out, in] of this rank's shard, summed in float32, in the dtype of ``weight``."""
        total = torch.addmm(weight.float(), self.b.float(), self.a.float(), alpha=self.scale)
        return total.to(weight.dtype)

    def sharded_state(self, prefix: str, offsets: tuple[Any, ...], metadata: Mapping[str, Any]) -> dict[str, Any]:
        """The factors as Megatron-Core's distributed checkpoints name and place them."""
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            {"a": self.a, "b": self.b},
            prefix,
            {"b": 0} if self.is_column else {"a": 1},
            offsets,
            tp_group=self._tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        if self._is_gated:
            # A rank's rows are those of the gate, then those of the other projection.
            state[f"{prefix}b"] = apply_swiglu_sharded_factory(
                state[f"{prefix}b"], offsets, metadata["singleton_local_shards"]
            )
        return state


class ChunkAdapters(nn.ModuleDict):
    """The adapters of a chunk by layer of the model, from 0, and target."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Megatron-Core asks every child of a model for it."""
        state: dict[str, Any] = {}
        for name, module in self.named_modules():
            if isinstance(module, Adapter):
                state |= module.sharded_state(f"{prefix}{name}.", sharded_offsets, metadata or {})
        return state


class Adapters:
    """All adapters of a rank; makes them, and freezes everything else but a critic's head, which has no base.

    Args:
        chunks: the rank's chunks, filled with the base's weights, not yet wrapped for training.
        spec: the model.
        groups: this rank's groups.
        config: rank, alpha and targets.
        seed: of what is drawn.

    Raises:
        ModelError: a target is a mixture of experts in the model, or its attention is latent.
        LayoutError: a pipeline stage has no layer, so that it would have nothing to train.
    """

    def __init__(
        self, chunks: Sequence[Any], spec: ModelSpec, groups: ParallelGroups, config: LoraConfig, seed: int
    ) -> None:
        _check(spec, groups, config)
        self._chunks, self._groups, self._config = chunks, groups, config
        self._described: dict[str, Any] | None = None
        self._adapters: dict[str, Adapter] = {}
        for index, chunk in enumerate(chunks):
            for name, parameter in chunk.named_parameters():
                parameter.requires_grad_(chunk.head == "value" and name.startswith("output_layer."))
            if chunk.pre_process:
                chunk.embedding.register_forward_hook(_require_grad)
            start = f"model{index}." if len(chunks) > 1 else ""
            layers = groups.layout.layers_of_stage(spec.num_layers, groups.coordinate.pp, index)
            by_layer: dict[str, nn.ModuleDict] = {}
            for place, (number, layer) in enumerate(zip(layers, chunk.decoder.layers, strict=True)):
                of_layer: dict[str, Adapter] = {}
                for target in config.targets:
                    part = "self_attention" if target in ATTENTION_TARGETS else "mlp"
                    linear = getattr(getattr(layer, part), target)
                    adapter = Adapter(linear, target, f"{_PREFIX}{number}.{target}", groups, config, seed)
                    linear.register_forward_hook(_adding(adapter))
                    of_layer[target] = adapter
                    self._adapters[f"{start}decoder.layers.{place}.{part}.{target}.weight"] = adapter
                by_layer[str(number)] = nn.ModuleDict(of_layer)
            chunk.adapters = ChunkAdapters(by_layer)
        self.num_trained = _count(chunks, groups)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Within it the model is the base."""
        for adapter in self._adapters.values():
            adapter.is_on = False
        try:
            yield
        finally:
            for adapter in self._adapters.values():
                adapter.is_on = True

    def merged(self) -> MergedParameters:
        """The rank's parameters by the base's names, adapters merged into copies of them."""
        return MergedParameters(_without_adapters(named_weights(self._chunks)), self._adapters)

    def describe(self, regions: Sequence[Region]) -> dict[str, Any]:
        """What a checkpoint of adapters goes with: their settings and a digest of the frozen weights; collective.

        Args:
            regions: this rank's.
        """
        if self._described is not None:
            return self._described  # they never change
        base = _without_adapters(named_weights(self._chunks))
        frozen = [region for region in regions if not base[region.local_name].requires_grad]
        shares: list[dict[str, int]] = [{}] * self._groups.layout.world_size
        dist.all_gather_object(shares, checksums(pieces(frozen, base)), group=self._groups.world)
        digest = hashlib.blake2b(repr(sorted(add(shares).items())).encode(), digest_size=8).hexdigest()
        self._described = {**self._config.model_dump(), "targets": sorted(self._config.targets), "base": digest}
        return self._described


def check_described(directory: Path, saved: Mapping[str, Any] | None, adapters: Mapping[str, Any] | None) -> None:
    """Compare ``Adapters.describe()`` of a checkpoint and of a run, None where whole weights are trained.

    Raises:
        CheckpointError: they differ.
    """
    if saved == adapters:
        return
    if saved is None or adapters is None:
        raise CheckpointError(
            f"the checkpoint holds {'whole weights' if saved is None else 'adapters of frozen weights'}, "
            f"the run trains {'whole weights' if adapters is None else 'adapters'}",
            where=str(directory),
            fix="set or leave out lora as it was, or start from an export (checkpoint.export_hf) with model.path",
        )
    names = {"base": "other frozen weights"}
    differ = [
        names.get(key, f"{key} {saved.get(key)} instead of {adapters.get(key)}")
        for key in sorted({*saved, *adapters})
        if saved.get(key) != adapters.get(key)
    ]
    raise CheckpointError(
        f"the checkpoint's adapters are not those of this run: {', '.join(differ)}",
        where=str(directory),
        fix="continue with the lora section, the model and the dtype that it was written with",
    )


class MergedParameters(Mapping[str, Tensor]):
    """Parameters whose adapted weights are merged when they are asked for.

    The last one is kept, since callers ask for one region of it after another.
    """

    def __init__(self, params: Mapping[str, Tensor], adapters: Mapping[str, Adapter]) -> None:
        self._params, self._adapters = params, adapters
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        adapter = self._adapters.get(name)
        if adapter is None:
            return self._params[name]
        if self._last is None or self._last[0] != name:
            self._last = None  # before the next one is made
            self._last = (name, adapter.merged(self._params[name]))
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._params)

    def __len__(self) -> int:
        return len(self._params)


def _check(spec: ModelSpec, groups: ParallelGroups, config: LoraConfig) -> None:
    if spec.mla is not None:
        raise ModelError("latent attention takes no adapters", where=f"{spec.family}, lora", fix="remove lora")
    experts = [target for target in config.targets if target not in ATTENTION_TARGETS]
    if spec.moe is not None and experts:
        raise ModelError(
            f"experts take no adapters: the model's layers are mixtures of them, the targets name {', '.join(experts)}",
            where="lora.targets",
            fix=f"lora.targets=[{','.join(ATTENTION_TARGETS)}]",
        )
    layout = groups.layout
    for stage in range(layout.pp):
        for chunk in range(layout.vpp):
            if not layout.layers_of_stage(spec.num_layers, stage, chunk):
                raise LayoutError(
                    f"pipeline stage {stage} has a part without layers, hence nothing to train with adapters",
                    where=f"pipeline {layout.pipeline!r}",
                    fix="give every stage a layer",
                )


def _kaiming_uniform(rows: int, columns: int, name: str) -> Tensor:
    """[rows, columns] float32, uniform with the bound ``1 / sqrt(columns)``, from the name alone."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    bound = 1 / math.sqrt(columns)
    return torch.empty(rows, columns).uniform_(-bound, bound, generator=generator)


def _adding(adapter: Adapter) -> Any:
    """A forward hook that adds the adapter's product to what its layer returns."""

    def add_change(module: Any, args: tuple[Tensor, ...], output: Any) -> Any:
        if not adapter.is_on:
            return output
        hidden, (result, bias) = args[0], output
        norm = getattr(module, "layer_norm_weight", None)
        if norm is not None:  # Transformer Engine's, with the norm before it inside
            hidden = nn.functional.rms_norm(hidden, norm.shape, norm, module.eps)
        return adapter(hidden, result), bias

    return add_change


def _require_grad(_: Any, __: Any, output: Tensor) -> Tensor:
    """Recomputed layers give gradients only if their input asks for one, and a frozen embedding's output does not."""
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_()
    return output


def _without_adapters(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in params.items() if _PREFIX not in name}


def _count(chunks: Sequence[nn.Module], groups: ParallelGroups) -> int:
    """Numbers under training in the whole model; collective."""
    at = groups.coordinate
    mine = sum(
        parameter.numel()
        for chunk in chunks
        for parameter in chunk.parameters()
        if parameter.requires_grad and (at.tp == 0 or getattr(parameter, "tensor_model_parallel", False))
    )
    counts = [0] * groups.layout.world_size
    dist.all_gather_object(counts, mine if at.dp == at.cp == 0 else 0, group=groups.world)
    return sum(counts)
