"""What megarl adds to vLLM's worker, in every tensor-parallel rank.

Results and failures are returned as plain values. An exception would leave the answers of the other ranks unread in
vLLM's queues, and the next call would take them for its own.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.platforms import current_platform

from megarl.rollout.vllm import weights as weights  # registers the transfer backend before the model is built
from megarl.rollout.vllm.weights import WeightReceiver
from megarl.weights.schedule import region_fields
from megarl.weights.transport.board import TransportError

logger = logging.getLogger(__name__)

if current_platform.is_cpu():
    # A rank polls for its next call for a second after the last one: with the very cores that are to score and train
    # what was sampled. Of several ranks each takes a core. Here it sleeps until it is called.
    SpinCondition.__init__ = functools.partialmethod(SpinCondition.__init__, busy_loop_s=0.0)


class WorkerExtension:
    """Mixed into vLLM's worker class by ``worker_extension_cls``."""

    rank: int
    weight_transfer_engine: WeightReceiver
    _weight_update_active: bool

    def megarl_process(self) -> tuple[int, int]:
        """Process id, and that of the process that schedules."""
        return os.getpid(), os.getppid()

    def megarl_layout(self, shapes: list[tuple[str, list[int]]], may_write: bool, who: str) -> dict[str, Any]:
        """Where this rank wants which parts of the checkpoint's tensors."""
        try:
            found = self.weight_transfer_engine.layout({name: tuple(shape) for name, shape in shapes}, may_write)
        except Exception as error:  # the entry point of a process: see the module's docstring
            return self._failed(error, who)
        return {
            "rank": self.rank,
            "regions": [region_fields(region) for region in found.regions],
            "dtypes": dict(found.dtypes),
            "machine": found.machine,
            "device_id": found.device_id,
            "way": found.way,
        }

    def megarl_connect(self, info: dict[str, Any], who: str) -> dict[str, Any]:
        """Connect to the senders."""
        try:
            self.init_weight_transfer_engine(info)  # type: ignore[attr-defined]
        except Exception as error:
            return self._failed(error, who)
        return {"rank": self.rank}

    def megarl_receive(self, info: dict[str, Any], who: str) -> dict[str, Any]:
        """One whole update; the weights are in the model afterwards."""
        try:
            self.start_weight_update()  # type: ignore[attr-defined]
            self.update_weights(info)  # type: ignore[attr-defined]
            self.finish_weight_update()  # type: ignore[attr-defined]
        except Exception as error:
            return self._failed(error, who)
        checksums = {name: str(value) for name, value in self.weight_transfer_engine.checksums.items()}
        return {"rank": self.rank, "checksums": checksums}

    def _failed(self, error: Exception, who: str) -> dict[str, Any]:
        receiver = self.weight_transfer_engine
        outcome = {
            "rank": self.rank,
            "failed": True,
            "phase": receiver.phase,
            "tensor": receiver.tensor,
            "cause": error.cause if isinstance(error, TransportError) else f"{type(error).__name__}: {error}",
            "from_peer": isinstance(error, TransportError) and error.from_peer,
            "is_transport": isinstance(error, TransportError),
        }
        logger.warning("weight update failed: %s", outcome, exc_info=error)
        place = "" if receiver.tensor is None else f" at {receiver.tensor}"
        reason = f"weight update failed on {who} rank {self.rank} in phase {receiver.phase}{place}: {outcome['cause']}"
        self._weight_update_active = False
        receiver.abort(outcome["cause"] if outcome["from_peer"] else reason)
        return outcome
