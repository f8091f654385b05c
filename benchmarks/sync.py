"""A weight update of 2.7 GB from two trainer ranks to two engine ranks, beside the usual way and beside raw gloo.

Usage: python benchmarks/sync.py [--layers 18] [--rounds 5] [--bucket-mib 512]
Four processes of one thread. ``host`` and ``network`` are megarl's updates through shared memory and over gloo, from a
bfloat16 Megatron layout into vLLM's: rows of queries, keys and values apart, the vocabulary cut elsewhere, checksums at
both ends and compared, as a run makes them, of all rows, or not at all. ``usual`` gathers full tensors on the first
trainer rank, broadcasts them in 512 MB buckets, and lets every engine rank copy its part. ``raw`` sends the bytes of an
engine rank from each trainer rank over gloo, out of and into one buffer. The last line is one JSON object; ``value`` is
the usual way's time over that of the update that a run would use here. The share of checksums is the median difference
of processor time, all four processes together, between pairs of updates of one session with and without them: two cores
are always busy in an update, what one waits for another is not the checksums', and sessions differ in their memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megarl.config.schema.roles import SyncConfig
from megarl.models.spec import ModelSpec
from megarl.parallel.grid import ParallelLayout
from megarl.weights.engine_layout import engine_regions
from megarl.weights.intake import Intake
from megarl.weights.layout import canonical_shapes, megatron_regions, parameter_shapes
from megarl.weights.pieces import region_view
from megarl.weights.region import Region
from megarl.weights.row_sums import Share
from megarl.weights.sender import WeightSender
from megarl.weights.sync import DIRECT, Call, RankConnection, RankLayout, ReceiverReport, SyncOptions, SyncSession
from megarl.weights.transport.board import machine

HOST = "127.0.0.1"
TP = 2
MIB = 1 << 20
USUAL_BUCKET = 512_000_000
FASTER, SLOWER_THAN_RAW, BUCKETS, CHECKED = 5.0, 1.5, 2, 0.02
EVERY = SyncConfig().checksum_every
PAIRS = 16


def spec(layers: int) -> ModelSpec:
    return ModelSpec(
        family="llama", vocab_size=128_256, hidden_size=2048, ffn_hidden_size=8192, num_layers=layers, num_heads=32,
        num_kv_heads=8, head_dim=64, max_position=4096, rms_norm_eps=1e-5, rope_theta=5e5, tied_embeddings=True,
    )  # fmt: skip


class Peak:
    """Most memory of this process, shared pages included, over what it had at the start."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self._before = self._read("VmRSS")

    @staticmethod
    def _read(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))

    @property
    def num_bytes(self) -> int:
        return self._read("VmHWM") - self._before


class Rank:
    """One of the four processes: trainer ranks first, then engine ranks."""

    def __init__(self, number: int, layers: int, port: int) -> None:
        torch.set_num_threads(1)
        self.number, self.is_trainer, self.rank = number, number < TP, number % TP
        self.model = model = spec(layers)
        layout = ParallelLayout(tp=TP)
        self.regions = (
            megatron_regions(model, layout, layout.coordinate(self.rank))
            if self.is_trainer
            else engine_regions(model, TP, self.rank)
        )
        generator = torch.Generator().manual_seed(number)
        self.parameters: dict[str, Tensor] = {}
        for name, shape in parameter_shapes(self.regions).items():
            tensor = torch.zeros(shape, dtype=torch.bfloat16)
            if self.is_trainer:  # the values of vectors are replicated and must be equal
                if len(shape) == 1:
                    tensor.fill_(1.0)
                else:
                    tensor.view(torch.int16).random_(-9999, 9999, generator=generator)
            self.parameters[name] = tensor
        self.senders: dict[str, WeightSender] = {}
        self.intakes: dict[str, Intake] = {}
        self.peak = Peak()
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=300)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]
        store = dist.TCPStore(HOST, port, is_master=number == 0, wait_for_workers=False)
        self.group = dist.ProcessGroupGloo(dist.PrefixStore("bench", store), number, 2 * TP, options)
        if number != 1:
            place = max(0, number - 1)
            self.broadcasters = dist.ProcessGroupGloo(dist.PrefixStore("usual", store), place, 1 + TP, options)
        self._store = store

    # -- megarl's, in several ways --

    def on(self, way: str, method: str, *arguments: Any) -> Any:
        """A call of a session of one way: of the sender, or of the engine end below."""
        if not self.is_trainer:
            return getattr(self, method)(way, *arguments)
        if way not in self.senders:
            self.senders[way] = WeightSender(self.rank, lambda: self.regions, lambda: self.parameters)
        return getattr(self.senders[way], method)(*arguments)

    def layout(self, way: str, shapes: Mapping[str, tuple[int, ...]]) -> list[RankLayout]:
        dtypes = dict.fromkeys(self.parameters, "bfloat16")
        return [RankLayout(tuple(self.regions), dtypes, machine(), "", DIRECT)]

    def connect(self, way: str, connections: list[RankConnection]) -> None:
        (told,) = connections
        self.intakes[way] = Intake(told.program, told.rank, f"engine {self.rank}", told.membership, told.sockets)

    def receive(
        self, way: str, version: int, timeout_s: float, digest: str, share: Share | None, _: str
    ) -> ReceiverReport:
        started = time.monotonic()
        found = self.intakes[way].run(self, deadline=started + timeout_s, share=share)
        return ReceiverReport(self.rank, (found,), time.monotonic() - started)

    def commit(self, way: str, version: int) -> None:
        return None

    def poison(self, way: str, reason: str) -> None:
        print("poisoned:", reason)

    def processor_s(self) -> float:
        return time.process_time()

    def watch_memory(self) -> None:
        self.peak = Peak()

    def peak_bytes(self) -> int:
        return self.peak.num_bytes

    def place(self, region: Region) -> Tensor:
        return region_view(region, self.parameters[region.local_name])

    def written(self, region: Region) -> None:
        return None

    def clear(self) -> None:
        """Engine ranks forget, so that an update that brings nothing shows."""
        for tensor in self.parameters.values():
            tensor.zero_()

    def digest(self) -> int:
        return sum(int(tensor.view(torch.int16).to(torch.int64).sum()) for tensor in self.parameters.values())

    # -- the others --

    def raw(self, num_bytes: int) -> None:
        """This rank's bytes to its counterpart, in 512 MB messages out of and into one buffer."""
        if not hasattr(self, "_raw"):
            self._raw = torch.zeros(USUAL_BUCKET, dtype=torch.uint8)
        for start in range(0, num_bytes, USUAL_BUCKET):
            part = self._raw[: min(USUAL_BUCKET, num_bytes - start)]
            if self.is_trainer:
                self.group.send([part], self.rank + TP, 0).wait()
            else:
                self.group.recv([part], self.rank, 0).wait()

    def usual(self) -> None:
        """Every full tensor is gathered on trainer rank 0, broadcast in buckets, and cut by each engine rank."""
        if self.number == 1:
            for name in self.parameters:
                self.group.send([self.parameters[name]], 0, 1).wait()
            return
        if not hasattr(self, "_shapes"):
            self._shapes = canonical_shapes(self.model)
            self._parts: dict[str, list[tuple[int, Region]]] = {}
            layout = ParallelLayout(tp=TP)
            for rank in range(TP if self.is_trainer else 0):
                for region in megatron_regions(self.model, layout, layout.coordinate(rank)):
                    self._parts.setdefault(region.tensor, []).append((rank, region))
            for region in () if self.is_trainer else self.regions:
                self._parts.setdefault(region.tensor, []).append((0, region))
            self._full = torch.zeros(max(USUAL_BUCKET, 2 * prod(next(iter(self._shapes.values())))), dtype=torch.uint8)
        others: dict[str, Tensor] = {}
        order = iter(self.parameters)
        for names in buckets(self._shapes):
            start = 0
            if self.is_trainer:
                for name in names:
                    start = self._gather(name, start, others, order)
            num_bytes = sum(2 * prod(self._shapes[name]) for name in names)
            options = dist.BroadcastOptions()
            options.rootRank = options.rootTensor = 0
            self.broadcasters.broadcast([self._full[:num_bytes]], options).wait()
            start = 0
            for name in () if self.is_trainer else names:
                full = self._tensor(name, start)
                for _, region in self._parts[name]:
                    region_view(region, self.parameters[region.local_name]).copy_(full[region.slices])
                start += 2 * full.numel()

    def _tensor(self, name: str, start: int) -> Tensor:
        shape = self._shapes[name]
        return self._full[start : start + 2 * prod(shape)].view(torch.bfloat16).view(shape)

    def _gather(self, name: str, start: int, others: dict[str, Tensor], order: Iterator[str]) -> int:
        """Put a full tensor together in the bucket; the other rank's parameters come in their order."""
        full = self._tensor(name, start)
        for rank, region in self._parts[name]:
            local = region.local_name
            while rank == 1 and local not in others:
                following = next(order)
                others[following] = torch.empty_like(self.parameters[following])
                self.group.recv([others[following]], 1, 1).wait()
            source = self.parameters if rank == 0 else others
            full[region.slices].copy_(region_view(region, source[local]))
        for local in {region.local_name for rank, region in self._parts[name] if rank == 1}:
            if not local.endswith(("qkv.weight", "fc1.weight")):
                others.pop(local, None)
        return start + 2 * full.numel()


def buckets(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[list[str]]:
    """Consecutive tensors of at most 512 MB; a larger one alone."""
    names: list[str] = []
    fill = 0
    for name, shape in shapes.items():
        if names and fill + 2 * prod(shape) > USUAL_BUCKET:
            yield names
            names, fill = [], 0
        names.append(name)
        fill += 2 * prod(shape)
    yield names


def serve(number: int, layers: int, port: int, pipe: Any) -> None:
    rank = Rank(number, layers, port)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(rank, method)(*arguments)))
        except Exception as error:
            pipe.send((False, error))


class Process:
    """A rank in a process of its own."""

    def __init__(self, number: int, layers: int, port: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(number, layers, port, other), daemon=True)
        self.process.start()

    def call(self, method: str, *arguments: Any) -> Any:
        self.pipe.send((method, arguments))
        is_fine, result = self.pipe.recv()
        if not is_fine:
            raise result
        return result


class End:
    """A process in the sessions of one way."""

    def __init__(self, process: Process, way: str) -> None:
        self.process, self.way = process, way

    def call(self, method: str, *arguments: Any) -> Any:
        return self.process.call("on", self.way, method, *arguments)


def invoke(calls: list[Call], timeout_s: float) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(lambda call: call.target.call(call.method, *call.args), calls))


def everywhere(processes: list[Process], method: str, *arguments: Any) -> list[Any]:
    return invoke([Call(process, method, arguments) for process in processes], 0.0)


def free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        return int(listener.getsockname()[1])


def session(processes: list[Process], way: str, bucket_bytes: int) -> SyncSession:
    ends = [End(process, way) for process in processes]
    transport: Any = way.split(",")[0]
    options = SyncOptions(
        bucket_bytes, 300.0, "no checksums" not in way, 1 if "all rows" in way else EVERY, transport=transport
    )
    return SyncSession(ends[:TP], ends[TP:], invoke, host=HOST, ranks_per_receiver=1, options=options)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bucket-mib", type=int, default=512)
    arguments = parser.parse_args()
    port = free_port()
    processes = [Process(number, arguments.layers, port) for number in range(2 * TP)]
    bucket_bytes = arguments.bucket_mib * MIB
    ways: dict[str, Callable[[], object]] = {}
    peaks: dict[str, int] = {}
    found: set[tuple[int, ...]] = set()
    num_bytes = 0
    sessions: dict[str, SyncSession] = {}
    for way in ("host", "network", "host, no checksums", "network, no checksums", "host, all rows"):
        sessions[way] = update = session(processes, way, bucket_bytes)
        ways[way] = lambda update=update: update.publish(1)  # type: ignore[misc]
        everywhere(processes[TP:], "clear")
        everywhere(processes, "watch_memory")
        num_bytes = update.publish(0).num_bytes  # meets, and touches memory for the first time
        peaks[way] = max(everywhere(processes, "peak_bytes"))
        found.add(tuple(everywhere(processes[TP:], "digest")))
    ways["usual"] = lambda: everywhere(processes, "usual")
    ways["raw"] = lambda: everywhere(processes, "raw", num_bytes // TP)
    everywhere(processes[TP:], "clear")
    ways["usual"]()
    found.add(tuple(everywhere(processes[TP:], "digest")))
    assert len(found) == 1, "the ways do not bring the same values"
    ways["raw"]()
    seconds: dict[str, list[float]] = {way: [] for way in ways}

    def measure(way: str) -> None:
        started = time.perf_counter()
        ways[way]()
        seconds[way].append(time.perf_counter() - started)

    def processor_s(way: str) -> float:
        before = sum(everywhere(processes, "processor_s"))
        ways[way]()
        return float(sum(everywhere(processes, "processor_s")) - before)

    # In turn, so that a busy moment of the machine meets all of them; what checksums cost is less than two updates
    # differ by chance, so it is measured from many updates, side by side and in either order.
    pairs: list[tuple[float, float]] = []
    for number in range(arguments.rounds):
        for way in ways:
            measure(way)
        for pair in range(PAIRS):
            times = {}
            for verify in (True, False)[:: 1 if (number + pair) % 2 else -1]:
                sessions["host"].options = replace(sessions["host"].options, verify=verify)
                times[verify] = processor_s("host")
            pairs.append((times[True], times[False]))
        sessions["host"].options = replace(sessions["host"].options, verify=True)
    for process in processes:
        process.pipe.close()
    report_all(seconds, pairs, peaks, num_bytes, bucket_bytes)


def report_all(
    seconds: dict[str, list[float]],
    pairs: list[tuple[float, float]],
    peaks: dict[str, int],
    num_bytes: int,
    bucket_bytes: int,
) -> None:
    best = {name: min(values) for name, values in seconds.items()}
    for name, values in seconds.items():
        memory = f", {peaks[name] / MIB:6.0f} MiB beside the weights" if name in peaks else ""
        print(f"{name:24}{best[name]:7.3f} s best, {statistics.median(values):7.3f} s median{memory}")
    faster, over_raw = best["usual"] / best["host"], best["host"] / best["raw"]
    shares = [(with_sums - without) / with_sums for with_sums, without in pairs]
    checked = statistics.median(shares)
    checked_whole = (best["host, all rows"] - best["host, no checksums"]) / best["host, all rows"]
    quarters = statistics.quantiles(shares, n=4)
    fits = max(peaks.values()) <= BUCKETS * bucket_bytes
    print(f"{faster:.2f} x the usual way (target {FASTER}), {over_raw:.2f} x raw gloo (target {SLOWER_THAN_RAW}), "
          f"over gloo {best['network'] / best['raw']:.2f} x")  # fmt: skip
    print(f"checksums {checked:.1%} of the update (target {CHECKED:.0%}), of all rows {checked_whole:.1%}; "
          f"half of {len(pairs)} pairs between {quarters[0]:.1%} and {quarters[2]:.1%}")  # fmt: skip
    print(
        json.dumps(
            {
                "name": "sync",
                "value": round(faster, 2),
                "unit": "times faster than gather, broadcast, load",
                "target": FASTER,
                "holds": faster >= FASTER and over_raw <= SLOWER_THAN_RAW and fits and checked <= CHECKED,
                "over_raw_gloo": round(over_raw, 2),
                "network_over_raw_gloo": round(best["network"] / best["raw"], 2),
                "checksum_share": round(checked, 3),
                "checksum_share_of_all_rows": round(checked_whole, 3),
                "extra_mib": {name: round(value / MIB) for name, value in peaks.items()},
                "bytes": num_bytes,
                "seconds": {name: round(value, 3) for name, value in best.items()},
                "peers": {"usual": round(best["usual"], 3), "raw gloo": round(best["raw"], 3)},
                "machine": f"{platform.machine()}, torch {torch.__version__}, 2 + 2 processes of one thread",
            }
        )
    )


if __name__ == "__main__":
    main()
