"""The engine's end of a weight update, in every tensor-parallel rank: a vLLM weight-transfer backend named ``megarl``.

Where this rank's parts of all tensors belong is traced from the model's own loader (``trace.py``) and kept on disk
(``layout_cache.py``). An update takes every part from its bucket to that place (``target.py``).

Invariants:
1. A parameter that an update does not fill is an error, as it is in a fresh load.
2. After a failure the layers hold usable tensors again (with mixed values), so that the next update can start; that
   they are not used until then is the engine's part.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from megarl.platform.device import memory_sharing
from megarl.rollout.vllm import layout_cache
from megarl.rollout.vllm.target import DirectTarget, LoaderTarget
from megarl.rollout.vllm.trace import Trace, UntraceableError, trace
from megarl.weights.intake import Intake
from megarl.weights.region import Region, Shape, contiguous_strides, whole
from megarl.weights.row_sums import Share
from megarl.weights.schedule import Program
from megarl.weights.sender import Membership
from megarl.weights.sync import DIRECT, RankConnection, RankLayout
from megarl.weights.transport.board import Address, machine

BACKEND = "megarl"

logger = logging.getLogger(__name__)


@dataclass
class ConnectInfo(WeightTransferInitInfo):
    """How the ranks of this engine meet the senders: one entry of ``ranks`` for each, see ``connect_info``."""

    ranks: list[dict[str, Any]] = field(default_factory=list)
    who: str = ""


@dataclass
class ReceiveInfo(WeightTransferUpdateInfo):
    """One update. ``digest`` is that of the plan the senders use, ``share`` that of their checksums."""

    digest: str = ""
    timeout_s: float = 0.0
    share: list[int] | None = None


def connect_info(connections: Sequence[RankConnection], who: str) -> dict[str, Any]:
    """``ConnectInfo`` as plain values, which is what vLLM passes on to its ranks."""
    ranks = [
        {
            "program": connection.program.to_json(),
            "rank": connection.rank,
            "board": [connection.membership.board.host, connection.membership.board.port],
            "network_rank": connection.membership.network_rank,
            "network_ranks": list(connection.membership.network_ranks.items()),
            "network_size": connection.membership.network_size,
            "names": list(connection.membership.names.items()),
            "timeout_s": connection.membership.timeout_s,
            "sockets": [(source, name.hex()) for source, name in connection.sockets.items()],
        }
        for connection in connections
    ]
    return {"ranks": ranks, "who": who}


class WeightReceiver(WeightTransferEngine[ConnectInfo, ReceiveInfo]):
    """See the module's docstring; ``phase`` and ``tensor`` say where a failed update was."""

    init_info_cls = ConnectInfo
    update_info_cls = ReceiveInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.phase = "connect"
        self.checksums: dict[str, int] = {}
        self._intake: Intake | None = None
        self._layout: Trace | None = None
        self._way = DIRECT
        self._target: DirectTarget | LoaderTarget | None = None
        self._sharing = memory_sharing(self.device)

    @property
    def tensor(self) -> str | None:
        """The tensor at hand."""
        return None if self._intake is None else self._intake.tensor

    def layout(self, shapes: Mapping[str, Shape], may_write: bool = True) -> RankLayout:
        """What this rank needs of checkpoint tensors of these shapes; whole tensors where ``may_write`` is false."""
        self.phase = "prepare"
        dtype = self.model_config.dtype
        self._way = DIRECT if may_write else "so it was asked for"
        if may_write:
            try:
                self._layout = self._traced(shapes, dtype)
            except UntraceableError as error:
                self._way = str(error)
        if self._way != DIRECT:
            self._layout = _whole_tensors(shapes, dtype)
        assert self._layout is not None
        device_id = "" if self._sharing is None else self._sharing.device_id
        return RankLayout(tuple(self._layout.regions), self._layout.dtypes, machine(), device_id, self._way)

    def init_transfer_engine(self, init_info: ConnectInfo) -> None:
        """Connect to all senders."""
        self.shutdown()
        self.phase = "connect"
        rank = self.parallel_config.rank
        told = init_info.ranks[rank]
        membership = Membership(
            Address(*told["board"]),
            told["network_rank"],
            dict(told["network_ranks"]),
            told["network_size"],
            dict(told["names"]),
            told["timeout_s"],
        )
        self._intake = Intake(
            Program.from_json(told["program"]),
            told["rank"],
            f"{init_info.who} rank {rank}",
            membership,
            {source: bytes.fromhex(name) for source, name in told["sockets"]},
            device=self.device,
            sharing=self._sharing,
        )

    def start_weight_update(self) -> None:
        """Take the layers' tensors out of use, as far as they are not written in place."""
        self.phase = "prepare"
        if self._intake is None or self._layout is None:
            raise RuntimeError("this rank has not connected to the senders")
        if self._way == DIRECT:
            self._target = DirectTarget(self.model, self.model_config, self._layout.regions, self.device)
        else:
            self._target = LoaderTarget(
                self.model, self.model_config, self._layout.regions, self._layout.dtypes, self.device
            )
        self._target.begin()

    def receive_weights(self, update_info: ReceiveInfo) -> None:
        """Take all buckets. Raises TransportError, or whatever writing raises."""
        self.phase, self.checksums = "transfer", {}
        intake, target = self._intake, self._target
        if intake is None or target is None or intake.program.plan_digest != update_info.digest:
            raise RuntimeError("the senders go by another plan than this rank connected with")
        deadline = time.monotonic() + update_info.timeout_s
        share = None if update_info.share is None else Share(*update_info.share)
        self.checksums = intake.run(target, deadline=deadline, share=share)

    def finish_weight_update(self) -> None:
        """Bring everything into the form that the model computes with."""
        self.phase = "load"
        assert self._target is not None
        self._target.finish()
        self._target = None

    def abort(self, reason: str) -> None:
        """Tell everybody, leave the links, and give the layers tensors again."""
        if self._intake is not None:
            self._intake.fail(reason)
        self.shutdown()
        if self._target is not None:
            self._target.restore()
            self._target = None

    def shutdown(self) -> None:
        """Leave the links."""
        if self._intake is not None:
            self._intake.close()
        self._intake = None

    def _traced(self, shapes: Mapping[str, Shape], dtype: torch.dtype) -> Trace:
        name = layout_cache.key(self.vllm_config, self.parallel_config.rank, shapes, dtype)
        found = layout_cache.read(name, self.model)
        if found is None:
            started = time.monotonic()
            with set_current_vllm_config(self.vllm_config):
                found = trace(self.model, shapes, dtype)
            logger.info("traced the layout of %d tensors in %.3f s", len(shapes), time.monotonic() - started)
            layout_cache.write(name, found)
        return found


def _whole_tensors(shapes: Mapping[str, Shape], dtype: torch.dtype) -> Trace:
    """Every checkpoint tensor as a parameter of its own."""
    regions = [
        Region(name, shape, whole(shape), name, shape, 0, contiguous_strides(shape)) for name, shape in shapes.items()
    ]
    return Trace(regions, {name: str(dtype).removeprefix("torch.") for name in shapes})


WeightTransferEngineFactory.register_engine(BACKEND, WeightReceiver)
