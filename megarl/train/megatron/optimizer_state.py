"""Optimizer state of Megatron's distributed optimizer as tensors of a checkpoint, without gathering it.

The format (``fully_reshardable``) has a tensor of a parameter's shape for each kind of state. Megatron-Core gathers the
state of all data-parallel ranks on each of them to make these, in memory of three times the float32 weights. A rank
holds consecutive elements of a flat buffer, so all but the few parameters that lie across the end of a rank's share are
whole on one rank: views of the state itself are saved and loaded. Pieces of the others go to the rank with the most.

Invariants:
1. Every parameter's state is saved by one data-parallel rank; that rank is known from the layout of the buffer alone.
2. State a rank holds whole is neither copied to be saved nor to be loaded, unless it is held in less than float32.
3. A rank reads the state of parameters of which it holds a piece, and no other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from torch import Tensor

from megarl.train.megatron import host_optimizer, precision

SHARDING_TYPE = "fully_reshardable"


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a parameter's state lies.

    Args:
        index: number of the parameter among all of the optimizer, the same on every rank.
        parameter: of the model.
        pieces: flat elements ``[start, stop)`` of the parameter by data-parallel rank, those that are not empty.
    """

    index: int
    parameter: Tensor
    pieces: Mapping[int, tuple[int, int]]

    @property
    def owner(self) -> int:
        """The data-parallel rank that saves it: the one with the most elements, the first of equals."""
        return max(self.pieces, key=lambda rank: (self.pieces[rank][1] - self.pieces[rank][0], -rank))


@torch.no_grad()
def sharded_state(
    part: Any, model_state: Mapping[str, Any], *, is_loading: bool, metadata: Mapping[str, Any]
) -> dict[str, Any]:
    """What a distributed optimizer has in a checkpoint; collective over its data-parallel group unless it is loading.

    Args:
        part: Megatron's DistributedOptimizer.
        model_state: the model's sharded state dict.
        is_loading: describe where to load to: the state itself where it is whole, memory of its own elsewhere.
        metadata: how Megatron shards; its ``distrib_optim_sharding_type`` must be ``fully_reshardable``.
    """
    if metadata["distrib_optim_sharding_type"] != SHARDING_TYPE:
        raise ValueError(f"sharding type {metadata['distrib_optim_sharding_type']}, expected {SHARDING_TYPE}")
    described: dict[str, Any] = part.state_dict()
    if host_optimizer.is_hybrid(part.optimizer):
        described = host_optimizer.described(described)
    elif is_loading:
        part.load_state_dict(part.state_dict())  # allocates what the inner optimizer has not made yet
    rank = part.data_parallel_group.rank()
    found = _places(part)
    whole = _targets(part, found, rank) if is_loading else _whole_tensors(part, found, rank)
    by_parameter = {
        entry.data: entry for entry in nested_values(extract_sharded_tensors_and_factories(dict(model_state))[0])
    }
    described["param_state"] = {
        place.index: {
            key: _entry(by_parameter[place.parameter], key, tensor, replica=0 if rank == place.owner else 1 + rank)
            for key, tensor in whole[place.index].items()
        }
        for place in found
        if place.index in whole
    }
    described["param_state_sharding_type"] = SHARDING_TYPE
    return described


@torch.no_grad()
def take_loaded(part: Any, loaded: Mapping[int, Mapping[str, Tensor]]) -> None:
    """Copy what was loaded into memory of its own to where it belongs; the rest is there already."""
    rank = part.data_parallel_group.rank()
    for place in _places(part):
        if rank not in place.pieces or _is_in_place(part, place):
            continue
        start, stop = place.pieces[rank]
        pieces = {key: tensor.flatten()[start:stop] for key, tensor in loaded[place.index].items()}
        if is_precision_aware(part):
            precision.take_state(part.optimizer, _main(part, place.parameter), pieces)
            continue
        # Megatron's setter would look for Adam's step among the pieces (0.16.1).
        for key, tensor in _state(part, place).items():
            tensor.copy_(pieces[key])


def is_precision_aware(part: Any) -> bool:
    """Whether the inner optimizer is Transformer Engine's with state of its own dtypes, float32 weights included."""
    return part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 and not host_optimizer.is_hybrid(part.optimizer)


def _places(part: Any) -> list[_Place]:
    size = part.data_parallel_group.size()
    found: list[_Place] = []
    for buffer in part.buffers:
        for parameter, (start, stop, bucket_id) in buffer.param_index_map.items():
            bucket = buffer.buckets[bucket_id]
            share = bucket.grad_data.numel() // size
            bounds = {
                rank: (
                    max(start, bucket.offset + rank * share) - start,
                    min(stop, bucket.offset + (rank + 1) * share) - start,
                )
                for rank in range(size)
            }
            pieces = {rank: (first, last) for rank, (first, last) in bounds.items() if first < last}
            found.append(_Place(len(found), parameter, pieces))
    return found


def _state(part: Any, place: _Place) -> dict[str, Tensor]:
    """This rank's elements of a parameter's state by kind, flat; without Adam's step, which groups hold."""
    inner, main = part.optimizer, _main(part, place.parameter)
    if host_optimizer.is_hybrid(inner):
        return host_optimizer.state_of(inner, main)
    if is_precision_aware(part):
        return precision.state_of(inner, main)
    tensors = {"param": main, **inner.state[main]}
    return {key: tensors[key].detach() for key in sorted(tensors) if torch.is_tensor(tensors[key]) and key != "step"}


def _main(part: Any, parameter: Tensor) -> Tensor:
    """This rank's elements of a parameter as the inner optimizer's groups have them.

    Megatron-Core's own map counts a group's parameters in the order of their buffers, the groups have float32 ones
    first: beside bfloat16 weights a critic's head is one (0.16.1 and 0.19.2; distrib_optimizer.py,
    ``_build_model_and_main_param_groups``).
    """
    group, _ = part.model_param_group_index_map[parameter]
    models = [*part.model_fp32_groups[group], *part.model_float16_groups[group]]
    index = next(index for index, model in enumerate(models) if model is parameter)
    main: Tensor = part.optimizer.param_groups[group]["params"][index]
    return main


def _whole_tensors(part: Any, found: list[_Place], rank: int) -> dict[int, dict[str, Tensor]]:
    """State this rank saves, by parameter and kind: its own, and pieces that others send."""
    whole: dict[int, dict[str, Tensor]] = {}
    exchange: list[dist.P2POp] = []
    group = part.data_parallel_group
    # NCCL wants all ranks of a group in its first operation; the messages below may be between two of them.
    dist.barrier(group)
    for place in found:
        if rank not in place.pieces:
            continue
        shape = place.parameter.shape
        own = _state(part, place)
        if len(place.pieces) == 1:
            whole[place.index] = {key: tensor.view(shape) for key, tensor in own.items()}
            continue
        # State may lie on the host while the group's messages go from device to device.
        own = {key: tensor.to(place.parameter.device) for key, tensor in own.items()}
        if rank != place.owner:
            exchange += _messages(dist.isend, own, dist.get_global_rank(group, place.owner), group, place.index)
            continue
        whole[place.index] = assembled = {key: tensor.new_empty(shape) for key, tensor in own.items()}
        for sender, (start, stop) in place.pieces.items():
            pieces = {key: tensor.view(-1)[start:stop] for key, tensor in assembled.items()}
            if sender == rank:
                for key, piece in pieces.items():
                    piece.copy_(own[key])
            else:
                exchange += _messages(dist.irecv, pieces, dist.get_global_rank(group, sender), group, place.index)
    if exchange:
        for request in dist.batch_isend_irecv(exchange):
            request.wait()
    return whole


def _messages(
    operation: Any, tensors: Mapping[str, Tensor], peer: int, group: dist.ProcessGroup, index: int
) -> Iterator[dist.P2POp]:
    for number, tensor in enumerate(tensors.values()):
        yield dist.P2POp(operation, tensor, peer, group, tag=index * len(tensors) + number)


def _targets(part: Any, found: list[_Place], rank: int) -> dict[int, dict[str, Tensor]]:
    """Where to load the state of this rank's parameters, by parameter and kind."""
    targets: dict[int, dict[str, Tensor]] = {}
    for place in found:
        if rank in place.pieces:
            shape, own = place.parameter.shape, _state(part, place)
            if _is_in_place(part, place):
                targets[place.index] = {key: tensor.view(shape) for key, tensor in own.items()}
            else:
                targets[place.index] = {
                    key: torch.empty(shape, dtype=tensor.dtype, device="cpu") for key, tensor in own.items()
                }
    return targets


def _is_in_place(part: Any, place: _Place) -> bool:
    """Whether what ``_state`` returns is the optimizer's own memory and whole."""
    return len(place.pieces) == 1 and not is_precision_aware(part)


def _entry(weight: Any, key: str, tensor: Tensor, *, replica: int) -> Any:
    """The state's entry beside that of its parameter, in the same place of a tensor of the same shape."""
    options: dict[str, Any] = {
        "key": f"optimizer.state.{key}.{weight.key}",
        "data": tensor,
        "replica_id": (*weight.replica_id[:2], replica),
    }
    if not isinstance(weight, ShardedTensorFactory):
        options["dtype"] = tensor.dtype
    entry = replace(weight, **options)
    entry.validate_metadata_integrity()
    return entry
