"""Ranks of a real vLLM engine that fail in a weight update as they are told."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megarl.rollout.vllm.target import DirectTarget
from megarl.rollout.vllm.worker import WorkerExtension
from megarl.weights import intake
from tests.integration.faulty_ends import Fault

UNPACK, AGREE = intake._unpack, intake.agree
BEGIN, FINISH = DirectTarget.begin, DirectTarget.finish


class FaultyWorker(WorkerExtension):
    """What megarl adds to vLLM's worker, and ``megarl_tell``."""

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
