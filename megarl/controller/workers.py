"""The worker processes: thin Ray actors over a training engine. Each method says how a group calls it.

A training worker is one rank of a role. It holds the role's engine and, in the actor's processes, the frozen reference
policy, which shares the actor's layout and process groups.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

import ray
import torch.distributed as dist

from megarl.config.schema.train import EngineConfig, LoraConfig, OptimizerConfig
from megarl.controller.dispatch import Collect, Split, dispatch
from megarl.controller.memory import MemoryMeter
from megarl.data.batch import Batch, Ragged
from megarl.models.registry import load_spec
from megarl.observability.heartbeat import start_heartbeat
from megarl.observability.logs import set_context, set_up_logging
from megarl.observability.metrics import Metrics
from megarl.observability.stacks import Stack, thread_stacks
from megarl.parallel.grid import ParallelLayout
from megarl.platform import env
from megarl.platform.device import Introduction
from megarl.train.engine import Moved, PolicyUpdate, ValueUpdate
from megarl.weights.row_sums import Share
from megarl.weights.schedule import Program
from megarl.weights.sender import Membership, Offer, SenderReport, WeightSender


@dataclass(frozen=True, slots=True)
class TrainPlan:
    """Everything a training worker is told about its role.

    Args:
        role: actor or critic.
        model_dir: Hugging Face directory with configuration and tokenizer.
        random_init: draw weights from the seed instead of reading the directory's.
        layout: parallel degrees.
        device: cpu or cuda.
        engine: precision and microbatches.
        optimizer: optimizer and schedule.
        head: lm for a policy, value for a critic.
        seed: of random weights.
        total_updates: optimizer updates planned for the run.
        with_reference: hold a frozen copy of the initial policy as well. With adapters there is none: their base is it.
        lora: adapters to train instead of the weights.
        collective_timeout_s: time-out of collectives.
        logs: directory of the run's log files.
    """

    role: str
    model_dir: Path
    random_init: bool
    layout: ParallelLayout
    device: Literal["cpu", "cuda"]
    engine: EngineConfig
    optimizer: OptimizerConfig
    head: Literal["lm", "value"]
    seed: int
    total_updates: int
    with_reference: bool
    lora: LoraConfig | None
    collective_timeout_s: float
    logs: Path


def enter_worker(role: str, rank: int, directory: Path) -> None:
    """Send a worker's log lines to ``ROLE-RANK.log`` and all else it prints, native crashes included, to ``.out``.

    Its heartbeat, in ``ROLE-RANK.heartbeat.json``, beats until the process ends.
    """
    set_up_logging(role, rank, directory=directory)
    set_context(node=env.text("SLURMD_NODENAME"))
    output = os.open(directory / f"{role}-{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    start_heartbeat(directory / f"{role}-{rank}.heartbeat.json")


class TrainWorker:
    """One rank of the actor or the critic."""

    def __init__(self, plan: TrainPlan, rank: int) -> None:
        self.plan = plan
        self.rank = rank
        self._stopped = threading.Event()
        self._store: dist.Store | None = None
        self._timeout = timedelta(seconds=plan.collective_timeout_s)
        enter_worker(plan.role, rank, plan.logs)

    # -- life --------------------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="health")  # type: ignore[untyped-decorator]
    def watch(self) -> None:
        """Returns when the worker is told to stop; fails when the process dies. The controller waits on it."""
        self._stopped.wait()

    @ray.method(concurrency_group="health")  # type: ignore[untyped-decorator]
    def stop(self) -> None:
        """End ``watch``."""
        self._stopped.set()

    @ray.method(concurrency_group="health")  # type: ignore[untyped-decorator]
    def stacks(self) -> list[Stack]:
        """Where the threads of this process are, ``watch`` left out."""
        return [stack for stack in thread_stacks() if stack.frames[-1].function != "wait" or stack.collective]

    @dispatch(collect=Collect.FIRST)
    def rendezvous(self) -> tuple[str, int] | None:
        """Address of the store at which the role's ranks meet; rank 0 opens it and picks a free port."""
        if self.rank != 0:
            return None
        host = ray.util.get_node_ip_address()
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=self._timeout)
        return host, self._store.port

    @dispatch()
    def start(self, address: tuple[str, int]) -> None:
        """Join the role's process group and build the model."""
        from megarl.platform.device import get_device, memory_sharing
        from megarl.train.megatron import bootstrap
        from megarl.train.megatron.engine import MegatronEngine

        plan = self.plan
        if self._store is None:
            self._store = dist.TCPStore(*address, is_master=False, timeout=self._timeout)
        device = self._device = get_device(plan.device)
        groups = bootstrap.start(
            plan.layout,
            device=device,
            rank=self.rank,
            seed=plan.seed,
            store=self._store,
            timeout_s=plan.collective_timeout_s,
        )
        spec = load_spec(plan.model_dir)
        weights = None if plan.random_init else plan.model_dir
        self.engine = MegatronEngine(
            plan.role,
            spec,
            weights,
            groups,
            device,
            plan.engine,
            plan.optimizer,
            head=plan.head,
            seed=plan.seed,
            total_updates=plan.total_updates,
            source_dir=plan.model_dir,
            lora=plan.lora,
        )
        self.reference = (
            MegatronEngine("reference", spec, weights, groups, device, plan.engine, None, seed=plan.seed)
            if plan.with_reference
            else None
        )
        engines = {plan.role: self.engine} | ({} if self.reference is None else {"reference": self.reference})
        self._memory = MemoryMeter(device, engines)
        self._sender = WeightSender(
            self.rank,
            self.engine.regions,
            self.engine.parameters,
            device=device.torch_device,
            sharing=memory_sharing(device.torch_device),
            role=plan.role,
        )

    @dispatch()
    def introduce(self) -> Introduction:
        """What it computes on and with."""
        return self._device.introduce()

    # -- passes ------------------------------------------------------------------------------------------------------

    @dispatch(split=Split.ROWS, collect=Collect.COLUMNS)
    def log_probs(
        self, batch: Batch, *, temperature: float, with_entropy: bool, with_sum_pi_squared: bool
    ) -> dict[str, Ragged] | None:
        """``log_probs``, ``entropy`` and ``sum_pi_squared`` of every response token."""
        with self._memory.watch(self.plan.role, "log_probs"):
            return self.engine.log_probs(
                batch, temperature=temperature, with_entropy=with_entropy, with_sum_pi_squared=with_sum_pi_squared
            )

    @dispatch(split=Split.ROWS, collect=Collect.COLUMNS)
    def ref_log_probs(self, batch: Batch, *, temperature: float) -> dict[str, Ragged] | None:
        """``log_probs`` of the reference policy: the frozen one, or the actor without its adapters."""
        reference = self.engine if self.reference is None else self.reference
        with self._memory.watch("reference", "log_probs"), reference.without_adapters():
            return reference.log_probs(batch, temperature=temperature)

    @dispatch(split=Split.ROWS, collect=Collect.COLUMNS)
    def values(self, batch: Batch) -> dict[str, Ragged] | None:
        """``values`` before every response token."""
        with self._memory.watch(self.plan.role, "values"):
            values = self.engine.values(batch)
        return None if values is None else {"values": values}

    # -- updates -----------------------------------------------------------------------------------------------------

    @dispatch(split=Split.MINIBATCHES, collect=Collect.METRICS)
    def update_policy(self, batch: Batch, minibatches: list[list[int]], update: PolicyUpdate) -> Metrics | None:
        """One optimizer update per minibatch."""
        with self._memory.watch(self.plan.role, "update"):
            return self.engine.update_policy(batch, update, minibatches)

    @dispatch(split=Split.MINIBATCHES, collect=Collect.METRICS)
    def update_values(self, batch: Batch, minibatches: list[list[int]], update: ValueUpdate) -> Metrics | None:
        """One critic update per minibatch."""
        with self._memory.watch(self.plan.role, "update"):
            return self.engine.update_values(batch, update, minibatches)

    @dispatch(split=Split.MINIBATCHES, collect=Collect.METRICS)
    def update_sft(self, batch: Batch, minibatches: list[list[int]]) -> Metrics | None:
        """One update per minibatch on the cross-entropy of masked tokens."""
        with self._memory.watch(self.plan.role, "update"):
            return self.engine.update_sft(batch, minibatches)

    @dispatch(split=Split.ROWS, collect=Collect.METRICS)
    def eval_sft(self, batch: Batch) -> Metrics | None:
        """The same loss without an update."""
        return self.engine.eval_sft(batch)

    @dispatch()
    def memory(self) -> dict[str, int]:
        """Bytes of this rank by ``memory/ROLE/PART``: state, and what each kind of pass took so far."""
        return self._memory.numbers()

    # -- the sending end of a weight update (weights/sync.py) ----------------------------------------------------------

    @dispatch()
    def gather_weights(self) -> None:
        """Make this rank's weights whole, before some of the ranks send them."""
        self.engine.gather_weights()

    @dispatch()
    def offer(self) -> Offer:
        """What this rank could send."""
        return self._sender.offer()

    @dispatch()
    def open(self, program: Program, on_device: bool) -> bytes | None:
        """Where engines of this machine meet this rank."""
        return self._sender.open(program, on_device)

    @dispatch()
    def connect(self, membership: Membership) -> None:
        """Meet all engine ranks it sends to."""
        self._sender.connect(membership)

    @dispatch()
    def send(self, version: int, timeout_s: float, digest: str, share: Share | None) -> SenderReport:
        """Send this rank's part."""
        return self._sender.send(version, timeout_s, digest, share)

    # -- state -------------------------------------------------------------------------------------------------------

    @dispatch()
    def save(self, directory: Path, background: bool) -> None:
        """Write this role's part of a checkpoint; in the background, return when it is copied."""
        self.engine.save(directory, background=background)

    @dispatch()
    def save_is_written(self) -> bool:
        """Whether ``finish_save`` would not wait for this rank."""
        return self.engine.save_is_written

    @dispatch()
    def finish_save(self) -> None:
        """Complete a save in the background."""
        self.engine.finish_save()

    @dispatch()
    def load(self, directory: Path, fresh: Collection[str]) -> None:
        """Continue from this role's part of a checkpoint, leaving some parts as they are."""
        self.engine.load(directory, fresh=fresh)

    @dispatch()
    def export_hf(self, directory: Path) -> None:
        """Write the model as a Hugging Face directory."""
        self.engine.export_hf(directory)

    @dispatch()
    def offload(self) -> Moved:
        """Leave the device to the engines."""
        moved = self.engine.offload()
        return moved if self.reference is None else moved + self.reference.offload()

    @dispatch()
    def onload(self) -> Moved:
        """Come back to the device."""
        moved = self.engine.onload()
        return moved if self.reference is None else moved + self.reference.onload()
