"""``megarl plan sync``: what a weight update of a run moves, over which links, and how long that takes at best.

Made by arithmetic: the actor's layout, the engines' layout as vLLM cuts the model, and the plan between them, proved
complete. Nothing is started and no weight is read.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from megarl.config.schema import TrainConfig
from megarl.planning.known_models import spec_of
from megarl.weights.check import check_plan
from megarl.weights.engine_layout import engine_replicas
from megarl.weights.layout import megatron_regions
from megarl.weights.plan import Plan, collector_paused, plan
from megarl.weights.region import volume

ITEM_BYTES = {"float32": 4, "bfloat16": 2}

_SHOWN_LINKS = 16


@dataclass(frozen=True, slots=True)
class Link:
    """Bytes from one host to one host; a host's own are copies inside it."""

    source: str
    destination: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SyncPlan:
    """What one update moves.

    Args:
        model: the family.
        num_parameters: distinct numbers of the model.
        dtype: on the wire.
        num_copies: boxes that move.
        num_bytes: over all destinations.
        num_tensors: canonical tensors.
        links: by host pair, in order.
        sent: bytes of each actor rank.
        received: bytes of each engine rank, engine by engine.
        dropped: elements of the actor's shards that are not sent, by reason.
        engine_padding: elements of the engines' parameters that are padding.
        peak_buffer_bytes: most of a process: two buckets, or what it moves in all where that is less.
        bandwidth: bytes a second each rank is taken to send and receive at over the network.
        local_bandwidth: the same inside a host.
        seconds: of the slowest rank at these bandwidths; sending and receiving overlap.
        digest: of the plan.
    """

    model: str
    num_parameters: int
    dtype: str
    num_copies: int
    num_bytes: int
    num_tensors: int
    links: tuple[Link, ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]
    dropped: Mapping[str, int]
    engine_padding: int
    peak_buffer_bytes: int
    bandwidth: float
    local_bandwidth: float
    seconds: float
    digest: str

    @property
    def send_balance(self) -> float:
        """The busiest sender's bytes over the mean of those that send; 1 is even."""
        busy = [num_bytes for num_bytes in self.sent if num_bytes]
        return max(busy) * len(busy) / sum(busy)

    def json(self) -> str:
        """For a script: the fields, and ``send_balance``."""
        return json.dumps({**asdict(self), "send_balance": self.send_balance}, indent=2)

    def text(self) -> str:
        """For a person."""
        billions = self.num_parameters / 1e9
        lines = [
            f"model          {self.model}, {billions:.2f} billion parameters in {self.num_tensors} tensors",
            f"moved          {_size(self.num_bytes)} as {self.dtype} in {self.num_copies} copies",
            *(f"not sent       {count} elements: {reason}" for reason, count in self.dropped.items()),
            f"padding        {self.engine_padding} elements of the engines' parameters",
        ]
        shown = sorted(self.links, key=lambda link: -link.num_bytes)[:_SHOWN_LINKS]
        lines += [f"link           {link.source} -> {link.destination}  {_size(link.num_bytes)}" for link in shown]
        if len(self.links) > len(shown):
            lines.append(f"link           and {len(self.links) - len(shown)} more (--json has all)")
        lines += [
            f"sent           {_spread(self.sent)}, busiest over mean of those that send {self.send_balance:.2f}",
            f"received       {_spread(self.received)}",
            f"peak buffer    {_size(self.peak_buffer_bytes)} a process",
            f"predicted      {self.seconds:.3g} s at {self.bandwidth / 1e9:g} GB/s a rank each way between hosts, "
            f"{self.local_bandwidth / 1e9:g} GB/s inside one",
            f"digest         {self.digest}",
        ]
        return "\n".join(lines)


def plan_sync(
    config: TrainConfig,
    *,
    actor_hosts: Sequence[str],
    engine_hosts: Sequence[str],
    bandwidth: float = 50e9,
    local_bandwidth: float = 150e9,
    expert_parallel: bool = False,
) -> SyncPlan:
    """Plans and proves an update of a run's engines.

    Args:
        config: the run.
        actor_hosts: host of each actor rank.
        engine_hosts: host of each engine rank, engine by engine.
        bandwidth: bytes a second of each rank between hosts, each way (a 400 Gb/s card each by default).
        local_bandwidth: the same inside a host.
        expert_parallel: the engines deal experts out whole.

    Raises:
        ModelError: the model's configuration cannot be read or represented, and its name is none that is known.
        LayoutError: it does not divide into the actor's or the engines' layout.
        PlanError: the plan is not complete, which is a defect of megarl.
    """
    spec, _ = spec_of(config.model.path)
    layout = config.actor.layout.grid()
    naming = "te" if config.cluster.device == "cuda" else "local"
    with collector_paused():
        sources = {
            rank: megatron_regions(spec, layout, layout.coordinate(rank), naming=naming)
            for rank in range(layout.world_size)
        }
        destinations = engine_replicas(
            spec, replicas=config.rollout.replicas, tp=config.rollout.tp, expert_parallel=expert_parallel
        )
        source_hosts, destination_hosts = dict(enumerate(actor_hosts)), dict(enumerate(engine_hosts))
        made = plan(sources, destinations, source_hosts=source_hosts, destination_hosts=destination_hosts)
        proof = check_plan(made)
    item_bytes = ITEM_BYTES[config.rollout.dtype]
    moves = _moves(made, item_bytes)
    sent, received = _totals(moves, 0, len(sources)), _totals(moves, 1, len(destinations))
    return SyncPlan(
        model=spec.family,
        num_parameters=spec.num_parameters(),
        dtype=config.rollout.dtype,
        num_copies=len(made.copies),
        num_bytes=sum(sent),
        num_tensors=len({copy.tensor for copy in made.copies}),
        links=_links(moves, source_hosts, destination_hosts),
        sent=sent,
        received=received,
        dropped=_dropped(made),
        engine_padding=sum(proof.padding.values()),
        peak_buffer_bytes=min(2 * config.sync.bucket_mib << 20, max(*sent, *received)),
        bandwidth=bandwidth,
        local_bandwidth=local_bandwidth,
        seconds=_seconds(moves, source_hosts, destination_hosts, bandwidth, local_bandwidth),
        digest=made.digest,
    )


Moves = Mapping[tuple[int, int], int]
"""Bytes by source and destination rank."""


def _moves(made: Plan, item_bytes: int) -> Moves:
    moves: dict[tuple[int, int], int] = defaultdict(int)
    for copy in made.copies:
        moves[copy.source, copy.destination] += volume(copy.box) * item_bytes
    return moves


def _totals(moves: Moves, side: int, num_ranks: int) -> tuple[int, ...]:
    totals = [0] * num_ranks
    for ranks, num_bytes in moves.items():
        totals[ranks[side]] += num_bytes
    return tuple(totals)


def _links(moves: Moves, source_hosts: Mapping[int, str], destination_hosts: Mapping[int, str]) -> tuple[Link, ...]:
    links: dict[tuple[str, str], int] = defaultdict(int)
    for (source, destination), num_bytes in moves.items():
        links[source_hosts[source], destination_hosts[destination]] += num_bytes
    return tuple(Link(*hosts, num_bytes) for hosts, num_bytes in sorted(links.items()))


def _seconds(
    moves: Moves,
    source_hosts: Mapping[int, str],
    destination_hosts: Mapping[int, str],
    bandwidth: float,
    local_bandwidth: float,
) -> float:
    """Of the rank whose bytes, one way, take longest."""
    busy: dict[tuple[str, int], float] = defaultdict(float)
    for (source, destination), num_bytes in moves.items():
        is_local = source_hosts[source] == destination_hosts[destination]
        seconds = num_bytes / (local_bandwidth if is_local else bandwidth)
        busy["send", source] += seconds
        busy["receive", destination] += seconds
    return max(busy.values(), default=0.0)


def _dropped(made: Plan) -> dict[str, int]:
    counts: dict[str, int] = defaultdict(int)
    for entry in made.dropped:
        counts[entry.reason] += entry.num_elements
    return dict(sorted(counts.items()))


def _size(num_bytes: int) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes / 1e3:.2f} kB"


def _spread(totals: Sequence[int]) -> str:
    mean = sum(totals) // len(totals)
    return f"least {_size(min(totals))}, mean {_size(mean)}, most {_size(max(totals))} of {len(totals)} ranks"
