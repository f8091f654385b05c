"""Faults inside the process of an end of a weight update: at a call, or at a tensor under way.

A fault strikes once and is gone, so that the next update can heal what it did.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from megarl.weights import sender
from megarl.weights.sender import _Session, agree
from tests.integration.sync_ends import TrainerRank

SLOW_S = 4.0


class Fault:
    """What goes wrong, and where.

    Args:
        kind: ``raise``, ``slow``, ``flip`` (a bit of what travels, after the sender summed it or before the receiver
            does), ``stop`` (the process freezes until it is told to go on) or ``die``.
        place: a tensor, or the name of a call.
    """

    def __init__(self, kind: str = "", place: str = "") -> None:
        self.kind, self.place = kind, place

    def strikes(self, place: str, *kinds: str) -> bool:
        """Whether this is its moment; ends the fault."""
        if self.place != place or self.kind not in kinds:
            return False
        self.place = ""
        return True

    def meet(self, place: str) -> None:
        """Fail, if it is to be here."""
        if not self.strikes(place, "raise", "slow", "stop", "die"):
            return
        if self.kind == "raise":
            raise RuntimeError("it was told to fail")
        if self.kind == "slow":
            time.sleep(SLOW_S)
        else:
            os.kill(os.getpid(), signal.SIGSTOP if self.kind == "stop" else signal.SIGKILL)

    def before(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        """The call, failing first."""

        def entry(*args: Any, **kwargs: Any) -> Any:
            self.meet(name)
            return call(*args, **kwargs)

        return entry


class FaultyTrainer(TrainerRank):
    """A trainer rank whose sender fails as told."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.told = Fault()
        payload = self.sender._payload

        def told_payload(bucket: Any, *args: Any) -> Any:
            for item in bucket.items:
                self.sender._tensor = item.region.tensor
                self.told.meet(item.region.tensor)
            found = payload(bucket, *args)
            for item in bucket.items:
                if self.told.strikes(item.region.tensor, "flip"):
                    found[item.start] ^= 1
            return found

        self.sender._payload = told_payload
        self.sender._regions = lambda: self.told.before(lambda: self.regions, "offer")()
        sender._Session = lambda *args: self.told.before(_Session, "open")(*args)
        sender.agree = lambda *args, **kwargs: self.told.before(agree, "connect")(*args, **kwargs)

    def tell(self, kind: str, place: str) -> None:
        """The next fault: at a tensor, or inside ``offer``, ``open`` or ``connect``."""
        self.told = Fault(kind, place)
