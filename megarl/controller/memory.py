"""Memory by phase: what a worker's engines hold and what each kind of pass takes beside it, and the lines that say so.

Invariants:
1. A pass is measured where its tensors are: by CUDA's allocator, or on CPU by counting every tensor operations make.
2. Counting costs time, so on CPU only the second pass of a kind is counted: the first one makes the optimizer's state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from megarl.controller.dispatch import WorkerGroup
from megarl.observability.memory import expected_bytes
from megarl.observability.metrics import Last, Max, Metrics
from megarl.platform.device import Device
from megarl.train.engine import TrainEngine


class MemoryMeter:
    """Memory of one worker process, by ``memory/ROLE/PART``.

    Args:
        device: where the engines compute.
        engines: by role; one beside the worker's own is a reference policy.
    """

    def __init__(self, device: Device, engines: Mapping[str, TrainEngine]) -> None:
        self._device = device
        self._engines = engines
        self._passes: Counter[str] = Counter()
        self._held: dict[str, int] = {}
        self._on_host: dict[str, int] = {}
        self._measured: dict[str, int] = {}

    @contextmanager
    def watch(self, role: str, kind: str) -> Iterator[None]:
        """Measure a pass of a role: ``KIND_activations``, most above the state, and ``KIND_peak``, all of it."""
        self._passes[f"{role}/{kind}"] += 1
        if self._passes[f"{role}/{kind}"] != 2 and not self._device.watching_is_free:
            yield
            return
        self._note_state()
        with self._device.watch_pass(sum(self._held.values())) as memory:
            yield
        found = {
            f"memory/{role}/{kind}_activations": memory.working_bytes,
            f"memory/{role}/{kind}_peak": memory.held_bytes + memory.working_bytes,
        }
        for name, size in found.items():
            self._measured[name] = max(self._measured.get(name, 0), size)
        self._note_state()

    def _note_state(self) -> None:
        for role, engine in self._engines.items():
            state = engine.state_summary()
            self._held |= {
                f"memory/{role}/weights": state.weights_bytes,
                f"memory/{role}/gradients": state.gradients_bytes,
                f"memory/{role}/optimizer": state.optimizer_bytes,
            }
            if state.host_bytes:
                self._on_host[f"memory/{role}/optimizer_on_host"] = state.host_bytes

    def numbers(self) -> dict[str, int]:
        """Bytes by name: the state of the latest measured pass, and the most that each kind of pass took."""
        return self._held | self._on_host | self._measured


def measured_memory(groups: Mapping[str, WorkerGroup], forecast: Mapping[str, Mapping[str, int]] | None) -> Metrics:
    """``memory/ROLE/PART``: bytes of the fullest rank, and beside it ``memory/ROLE/PART_forecast``.

    Args:
        groups: worker groups by role.
        forecast: the parts of each role's fullest rank, ``ranks`` of the run's forecast; None where there is none.
    """
    metrics: Metrics = {}
    for group in groups.values():
        ranks: list[dict[str, int]] = group.memory()
        for name in dict.fromkeys(name for rank in ranks for name in rank):
            metrics[name] = Max(max(rank.get(name, 0) for rank in ranks))
            part = name.removeprefix("memory/")
            expected = None if forecast is None else expected_bytes(forecast, part)
            if expected is not None:
                metrics[f"memory/{part}_forecast"] = Last(expected)
    return metrics
