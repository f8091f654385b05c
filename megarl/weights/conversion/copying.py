"""The plan carried out on files: canonical tensors pass block by block through a buffer of each worker.

A block is a run of rows of one canonical tensor. It is read from wherever the sources hold its parts, checked and
checksummed, and written to wherever the destinations want them.

Invariants:
1. Memory is workers x a few blocks (x one tensor where a destination wants it transposed), whatever the model's size.
2. Replicas among the sources are compared bit for bit; two that differ end the conversion.
3. A tensor is reported done once, after all its bytes were handed to the operating system.
4. The first failure stops all workers and is the one that is raised.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from megarl.errors import CheckpointError
from megarl.weights.conversion.store import Store
from megarl.weights.files.arrays import ITEM_BYTES, Array, Bits, Handles, bits_of
from megarl.weights.files.bits import checksum_bits, converter, from_float, scale_blocks, to_float
from megarl.weights.plan import Plan
from megarl.weights.region import Box, Region, Shape, overlap, whole

_MODULUS = 1 << 64
_TASK_BLOCKS = 16
DEFAULT_BLOCK_BYTES = 1 << 20
SMALLEST_BLOCK_BYTES = 1 << 16
BUFFERS_PER_WORKER = 4
"""Blocks a worker may hold: what was read, a replica, what was converted, a contiguous copy for a file."""

Place = tuple[Array, Region]


@dataclass
class Job:
    """One canonical tensor: where its parts are read and written.

    Args:
        tensor: canonical name.
        shape: of the whole tensor.
        source_dtype: in the source's files.
        dtype: in the destination's.
        reads: places that tile what is wanted.
        replicas: further places that must hold the same.
        writes: all places to fill.
        scales: of a block-quantised fp8 tensor.
    """

    tensor: str
    shape: Shape
    source_dtype: str
    dtype: str
    reads: list[Place] = field(default_factory=list)
    replicas: list[Place] = field(default_factory=list)
    writes: list[Place] = field(default_factory=list)
    scales: Array | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes read once from the source."""
        return prod(self.shape) * ITEM_BYTES[self.source_dtype]


@dataclass(frozen=True, slots=True)
class Done:
    """A tensor that was written: checksums of its elements in the source's and in the destination's dtype."""

    tensor: str
    source_checksum: int
    checksum: int


def jobs_of(
    plan: Plan,
    source: Store,
    destination: Store,
    *,
    dtypes: Mapping[str, str] | None = None,
    scales: Mapping[str, Array] | None = None,
) -> list[Job]:
    """The work of a plan, tensor by tensor in its order.

    Args:
        plan: proved copies between the two.
        source: its sources.
        destination: its destinations.
        dtypes: dtype of tensors in the source, where it is not that of their array.
        scales: scales of block-quantised tensors.

    Raises:
        CheckpointError: parts of one tensor with different dtypes, or dtypes that do not convert.
    """
    jobs: dict[str, Job] = {}
    read: set[tuple[int, int]] = set()
    written: set[tuple[int, int]] = set()
    for copy in plan.copies:
        region = plan.sources[copy.source][copy.source_region]
        target = plan.destinations[copy.destination][copy.destination_region]
        place, home = (source.array(copy.source, region), region), (destination.array(copy.destination, target), target)
        job = jobs.get(copy.tensor)
        if job is None:
            job = jobs[copy.tensor] = Job(copy.tensor, region.tensor_shape, place[0].dtype, home[0].dtype)
            job.scales = (scales or {}).get(copy.tensor)
            if job.scales is None:
                converter(job.source_dtype, job.dtype)
        if (place[0].dtype, home[0].dtype) != (job.source_dtype, job.dtype):
            raise CheckpointError(f"parts of {copy.tensor} have different dtypes", where=str(place[0].path))
        if (copy.source, copy.source_region) not in read:
            read.add((copy.source, copy.source_region))
            job.reads.append(place)
        if (copy.destination, copy.destination_region) not in written:
            written.add((copy.destination, copy.destination_region))
            job.writes.append(home)
    for rank, regions in plan.sources.items():
        for index, region in enumerate(regions):
            if region.numel and (rank, index) not in read and region.tensor in jobs:
                jobs[region.tensor].replicas.append((source.array(rank, region), region))
    for job in jobs.values():
        _leave_out_replicas(job)
    return list(jobs.values())


def _leave_out_replicas(job: Job) -> None:
    """Sources of one box share the reading in the plan; on files one is enough and the others are compared."""
    seen: dict[Box, Place] = {}
    for place in job.reads:
        if place[1].box in seen:
            job.replicas.append(place)
        else:
            seen[place[1].box] = place
    job.reads = list(seen.values())


def run(
    jobs: Sequence[Job],
    *,
    workers: int,
    block_bytes: int,
    on_done: Callable[[Done], None],
    on_bytes: Callable[[int], None] = lambda count: None,
) -> None:
    """Copies all jobs' tensors.

    Args:
        jobs: from ``jobs_of``.
        workers: threads; moving bytes does not hold the interpreter's lock.
        block_bytes: size of a block.
        on_done: called once a tensor, by the worker that finished it.
        on_bytes: called with the bytes of each block.

    Raises:
        CheckpointError: a file cannot be read or written, or replicas differ.
    """
    crew = _Crew(jobs, block_bytes, on_done, on_bytes)
    threads = [threading.Thread(target=crew.work, name=f"convert-{index}") for index in range(workers - 1)]
    for thread in threads:
        thread.start()
    try:
        crew.work()
    except BaseException as error:  # an interrupt ends the other workers too
        crew.stop(error)
    for thread in threads:
        thread.join()
    if crew.failure is not None:
        raise crew.failure


@dataclass
class _Open:
    """A job under way."""

    job: Job
    left: int
    source_sum: int = 0
    sum: int = 0


class _Crew:
    """Workers over one queue of tasks."""

    def __init__(
        self, jobs: Sequence[Job], block_bytes: int, on_done: Callable[[Done], None], on_bytes: Callable[[int], None]
    ) -> None:
        self._lock = threading.Lock()
        self._on_done, self._on_bytes = on_done, on_bytes
        self._tasks = deque(_interleaved([_tasks(job, block_bytes) for job in jobs]))
        self.failure: BaseException | None = None

    def stop(self, error: BaseException) -> None:
        with self._lock:
            self.failure = self.failure or error
            self._tasks.clear()

    def work(self) -> None:
        with Handles() as source, Handles(writable=True) as target:
            worker = _Worker(source, target)
            while True:
                with self._lock:
                    if not self._tasks:
                        return
                    opened, blocks = self._tasks.popleft()
                try:
                    self._task(worker, opened, blocks)
                except Exception as error:  # whatever a thread meets must reach the caller
                    self.stop(error)
                    return

    def _task(self, worker: _Worker, opened: _Open, blocks: Sequence[Box]) -> None:
        source_sum = total = 0
        for block in blocks:
            if self.failure is not None:
                return
            before, after, count = worker.move(opened.job, block)
            source_sum, total = source_sum + before, total + after
            self._on_bytes(count)
        with self._lock:
            opened.source_sum = (opened.source_sum + source_sum) % _MODULUS
            opened.sum = (opened.sum + total) % _MODULUS
            opened.left -= 1
            is_last = opened.left == 0
        if is_last:
            self._on_done(Done(opened.job.tensor, opened.source_sum, opened.sum))


class _Worker:
    """Buffers and files of one thread."""

    def __init__(self, source: Handles, target: Handles) -> None:
        self._source, self._target = source, target
        self._buffer = np.empty(0, np.uint8)

    def move(self, job: Job, block: Box) -> tuple[int, int, int]:
        """Copies a block; returns its checksums in the source's and destination's dtype, and its bytes."""
        data = self._take(job, block)
        before = checksum_bits(data, block)
        count = data.nbytes
        if job.scales is not None:
            data = from_float(
                scale_blocks(to_float(data, job.source_dtype), self._scales(job.scales), block), job.dtype
            )
        elif (convert := converter(job.source_dtype, job.dtype)) is not None:
            data = convert(data)
        after = before if job.source_dtype == job.dtype else checksum_bits(data, block)
        for array, region in job.writes:
            if (common := overlap(region.box, block)) is not None:
                self._target.write(array, region, common, data[_within(common, block)])
        return before, after, count

    def _take(self, job: Job, block: Box) -> Bits:
        """The block's bits, gathered from the sources; replicas are compared with them."""
        kind = bits_of(job.source_dtype)
        shape = tuple(stop - start for start, stop in block)
        size = prod(shape) * ITEM_BYTES[job.source_dtype]
        if self._buffer.nbytes < size:
            self._buffer = np.empty(size, np.uint8)
        data: Bits = self._buffer[:size].view(kind).reshape(shape)
        for array, region in job.reads:
            if (common := overlap(region.box, block)) is not None:
                self._source.read(array, region, common, data[_within(common, block)])
        for array, region in job.replicas:
            if (common := overlap(region.box, block)) is not None:
                other = np.empty(tuple(stop - start for start, stop in common), kind)
                self._source.read(array, region, common, other)
                if not np.array_equal(other, data[_within(common, block)]):
                    raise CheckpointError(
                        f"replicas of {job.tensor} differ in {common}: {array.path.name} against "
                        f"{job.reads[0][0].path.name}",
                        where=str(array.path),
                        fix="the run that wrote them let ranks drift apart; choose another checkpoint",
                    )
        return data

    def _scales(self, array: Array) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        out = np.empty(array.shape, np.uint32)
        box = whole(array.shape)
        strides = (array.shape[1], 1)
        self._source.read(array, Region("", array.shape, box, "", array.shape, 0, strides), box, out)
        return out.view(np.float32)


def _within(box: Box, block: Box) -> tuple[slice, ...]:
    return tuple(slice(start - origin, stop - origin) for (start, stop), (origin, _) in zip(box, block, strict=True))


def _tasks(job: Job, block_bytes: int) -> list[tuple[_Open, list[Box]]]:
    """A job's blocks in bundles that keep a worker busy for some milliseconds."""
    item = max(ITEM_BYTES[job.source_dtype], ITEM_BYTES[job.dtype])
    straight = all(_is_row_major(region) for _, region in (*job.reads, *job.writes))
    limit = max(1, block_bytes // item) if straight else max(1, prod(job.shape[-2:]))
    blocks = list(blocks_of(job.shape, limit))
    bundles = [blocks[first : first + _TASK_BLOCKS] for first in range(0, len(blocks), _TASK_BLOCKS)]
    opened = _Open(job, len(bundles))
    return [(opened, bundle) for bundle in bundles]


def blocks_of(shape: Shape, limit: int) -> Iterator[Box]:
    """Boxes of at most ``limit`` elements that tile a shape in row-major order."""
    if prod(shape) <= limit or not shape:
        yield whole(shape)
        return
    inner = prod(shape[1:])
    if inner > limit:
        rest = list(blocks_of(shape[1:], limit))
        yield from (((row, row + 1), *box) for row in range(shape[0]) for box in rest)
        return
    step = limit // inner
    for start in range(0, shape[0], step):
        yield ((start, min(start + step, shape[0])), *whole(shape[1:]))


def _is_row_major(region: Region) -> bool:
    steps = [stride for size, stride in zip(region.shape, region.strides, strict=True) if size > 1]
    return steps == sorted(steps, reverse=True)


def _interleaved(jobs: Sequence[list[tuple[_Open, list[Box]]]]) -> Iterator[tuple[_Open, list[Box]]]:
    """Tasks in an order that keeps workers on different files: writers of one file wait for each other."""
    queues: dict[str, deque[tuple[_Open, list[Box]]]] = defaultdict(deque)
    for tasks in jobs:
        for task in tasks:
            queues[str((task[0].job.writes or task[0].job.reads)[0][0].path)].append(task)
    order = deque(queues.values())
    while order:
        queue = order.popleft()
        yield queue.popleft()
        if queue:
            order.append(queue)
