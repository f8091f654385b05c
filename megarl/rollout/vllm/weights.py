"""The engine's end of a weight update, in every tensor-parallel rank: a vLLM weight-transfer backend named ``megarl``.

Pieces arrive in buckets, are put together to whole tensors, and go through the model's own ``load_weights`` inside
vLLM's layerwise reload, which cuts them for this rank and repacks them as after a fresh load.

Invariants:
1. Every whole tensor lies in memory of its own: layerwise reload keeps references to the tensors of an unfinished
   layer, and a buffer used again for the next bucket would give wrong weights without an error.
2. A parameter that no tensor reached is an error, as it is in a fresh load.
3. After a failure the layers hold usable tensors again (with mixed values), so that the next update can start; that
   they are not used until then is the engine's part.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload, layerwise

from megarl.weights.checksum import checksum
from megarl.weights.intake import Intake
from megarl.weights.manifest import Manifest
from megarl.weights.region import whole
from megarl.weights.transport.group import Address

BACKEND = "megarl"


class IncompleteError(RuntimeError):
    """Weights of the model that the update did not bring."""


@dataclass
class ConnectInfo(WeightTransferInitInfo):
    """How this rank joins the senders' groups.

    Args:
        manifest: of all updates of the session, as JSON.
        senders: (rank, host, port) of each sender.
        rank: of this process in every sender's group.
        size: of the groups.
        timeout_s: to join.
    """

    manifest: str = ""
    senders: list[tuple[int, str, int]] = field(default_factory=list)
    rank: int = 0
    size: int = 0
    timeout_s: float = 0.0


@dataclass
class ReceiveInfo(WeightTransferUpdateInfo):
    """One update. ``digest`` is that of the manifest the sender uses."""

    digest: str = ""
    timeout_s: float = 0.0
    with_checksums: bool = True


class WeightReceiver(WeightTransferEngine[ConnectInfo, ReceiveInfo]):
    """See the module's docstring; ``phase`` and ``tensor`` say where a failed update was."""

    init_info_cls = ConnectInfo
    update_info_cls = ReceiveInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.phase = "connect"
        self._tensor: str | None = None
        self.checksums: dict[str, int] = {}
        self._intake: Intake | None = None
        self._missing: set[str] = set()
        self._is_loading = False

    @property
    def tensor(self) -> str | None:
        """The tensor at hand."""
        at_intake = None if self._intake is None else self._intake.tensor
        return at_intake if self._tensor is None else self._tensor

    def init_transfer_engine(self, init_info: ConnectInfo) -> None:
        """Join the senders' groups, in the order of their ranks at every receiver."""
        self.shutdown()
        self.phase, self._tensor = "connect", None
        self._intake = Intake(
            Manifest.from_json(init_info.manifest),
            {sender: Address(host, port) for sender, host, port in init_info.senders},
            init_info.rank,
            init_info.size,
            device=self.device,
            timeout_s=init_info.timeout_s,
        )

    def start_weight_update(self) -> None:
        """Take the layers' tensors out of use."""
        self.phase, self._tensor = "prepare", None
        for layer in self.model.modules():
            # vLLM packs experts for the CPU only where no kernel exists yet; on a reload it would keep raw weights.
            method = getattr(layer, "quant_method", None)
            if self.device.type == "cpu" and getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None
        # Listed before the reload, which gives a tied head a parameter of its own.
        self._missing = {name for name, _ in self.model.named_parameters()}
        self._is_loading = True
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: ReceiveInfo) -> None:
        """Take all rounds. Raises TransportError, or whatever the model's loader raises."""
        self.phase, self.checksums = "transfer", {}
        intake = self._intake
        if intake is None or intake.manifest.digest != update_info.digest:
            raise RuntimeError("the sender uses another manifest than this rank connected with")
        for tensors in intake.rounds(time.monotonic() + update_info.timeout_s):
            if update_info.with_checksums:
                for self._tensor, tensor in tensors.items():
                    self.checksums[self._tensor] = checksum(tensor, whole(tuple(tensor.shape)))
            self.phase = "load"
            # One call for all: some models look through their parameters on every call.
            self._missing -= set(self.model.load_weights(self._named(tensors)) or ())
            self.phase, self._tensor = "transfer", None

    def finish_weight_update(self) -> None:
        """Put what arrived in place of the layers' tensors."""
        self.phase, self._tensor = "load", None
        if self._missing:
            raise IncompleteError("no tensor reached " + ", ".join(sorted(self._missing)[:10]))
        finalize_layerwise_reload(self.model, self.model_config)
        for layer in layers_with_shared_parameters(self.model):
            # vLLM leaves a layer alone that no tensor reached, as a tied head: its parameter holds the new values, the
            # copy packed for the CPU the old ones.
            layer.quant_method.process_weights_after_loading(layer)
        self._is_loading = False

    def abort(self, reason: str) -> None:
        """Tell everybody, leave the groups, and give the layers tensors again."""
        if self._intake is not None:
            self._intake.fail(reason)
        self.shutdown()
        if self._is_loading:
            restore_layers(self.model)
            self._is_loading = False

    def shutdown(self) -> None:
        """Leave the groups."""
        if self._intake is not None:
            self._intake.close()
        self._intake = None

    def _named(self, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The tensors as a loader takes them, noting which one it has at hand."""
        for self._tensor, tensor in tensors.items():
            yield self._tensor, tensor


def layers_with_shared_parameters(model: nn.Module) -> list[Any]:
    """Layers with a parameter that is also another layer's, such as a tied embedding and head."""
    owners: dict[int, list[nn.Module]] = {}
    for layer in model.modules():
        for parameter in layer.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(layer)
    shared = {id(layer): layer for layers in owners.values() if len(layers) > 1 for layer in layers}
    return [layer for layer in shared.values() if hasattr(layer, "quant_method")]


def restore_layers(model: nn.Module) -> None:
    """Ends a layerwise reload that will not be finished: layers get the tensors they had before it."""
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)
        info.reset()
    layerwise.LOADING_LAYERS.clear()


WeightTransferEngineFactory.register_engine(BACKEND, WeightReceiver)
