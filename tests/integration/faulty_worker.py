"""Ranks of a real vLLM engine that fail in a weight update as they are told."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d
from vllm.distributed.parallel_state import get_tp_group, get_world_group

from megarl.rollout.vllm.target import DirectTarget
from megarl.rollout.vllm.worker import WorkerExtension
from megarl.weights import intake
from tests.integration.faulty_ends import Fault

UNPACK, AGREE = intake._unpack, intake.agree
BEGIN, FINISH = DirectTarget.begin, DirectTarget.finish


class FaultyWorker(WorkerExtension):
    """What megarl adds to vLLM's worker, ``megarl_tell`` and ``megarl_group_timeouts_s``."""

    def megarl_group_timeouts_s(self) -> list[float]:
        """Of collectives, of every group that this rank is in."""
        groups = [distributed_c10d._get_default_group()]
        for coordinator in (get_world_group(), get_tp_group()):
            groups += [coordinator.device_group, coordinator.cpu_group]
        return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]

    def megarl_tell(self, rank: int, kind: str, place: str) -> None:
        """The next fault of a rank: at a tensor, or inside ``layout``, ``connect``, ``start`` or ``finish``."""
        if self.rank != rank:
            return
        told, receiver = Fault(kind, place), self.weight_transfer_engine

        def unpacked(item: Any, buffer: Tensor, target: Any, share: Any) -> Any:
            told.meet(item.region.tensor)
            if told.strikes(item.region.tensor, "flip"):
                buffer = buffer.clone()
                buffer[item.start] ^= 1
            return UNPACK(item, buffer, target, share)

        intake._unpack = unpacked
        intake.agree = told.before(AGREE, "connect")
        receiver._traced = told.before(type(receiver)._traced.__get__(receiver), "layout")
        DirectTarget.begin = told.before(BEGIN, "start")
        DirectTarget.finish = told.before(FINISH, "finish")
