"""One replica: vLLM's asynchronous engine with its processes, behind the protocol of ``rollout/engine.py``.

It runs inside whatever process makes it, on that process's event loop; vLLM starts one process that schedules and, for
tensor parallelism above 1, one per rank (on one node).

States: ``stale`` (no committed weights, or they cannot be trusted) -> receive -> ``updating`` -> commit -> ``serving``.
Sampling is possible in ``serving`` only. A dead process is for good.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from vllm import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from megarl.config.schema.roles import RolloutConfig
from megarl.errors import MegarlError, RolloutError, SyncError
from megarl.models.registry import load_spec
from megarl.rollout.engine import Completion, Request
from megarl.rollout.sampling import Sampling
from megarl.rollout.vllm.arguments import (
    DeviceName,
    check_requests,
    completion,
    engine_arguments,
    engine_environment,
    sampling_params,
)
from megarl.rollout.vllm.liveness import Liveness
from megarl.rollout.vllm.weights import connect_info
from megarl.weights.failure import sync_failure
from megarl.weights.region import Shape
from megarl.weights.row_sums import ALL, Share
from megarl.weights.schedule import region_of
from megarl.weights.sync import InFlight, RankConnection, RankLayout, ReceiverReport

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Beyond the time-out that the ranks keep themselves, before they are taken for hung.
_RPC_GRACE_S = 15.0
# To trace the layout of a model of tens of thousands of tensors, with all ranks on one core.
_LAYOUT_S = 300.0
# How long to look for the process that died after vLLM said that the engine is dead.
_DEATH_GRACE_S = 3.0
# vLLM's own grace before it kills processes that end slowly.
_STOP_GRACE_S = 1.0

_FIX_DEAD = "see the engine's log in the run directory; a kill by signal 9 often means that memory ran out"


class VllmEngine:
    """See ``RolloutEngine`` for the methods.

    Args:
        model_dir: Hugging Face directory; with ``load="dummy"`` its weights are not needed.
        config: the rollout role's settings.
        device: cpu or cuda.
        max_model_len: longest prompt plus response.
        seed: of the engine; requests bring their own.
        replica: number of this engine, for messages.
        load: ``dummy`` leaves the weights to the first update, ``checkpoint`` reads the directory's as version 0.
        can_sleep: whether ``sleep`` is going to be used (CUDA).
        collective_timeout_s: of the collectives among its ranks, rounded up to whole seconds; None leaves torch's.
        may_write: write updates where they belong; False brings whole tensors through the model's own loader.
    """

    def __init__(
        self,
        model_dir: Path | str,
        config: RolloutConfig,
        *,
        device: DeviceName,
        max_model_len: int,
        seed: int = 0,
        replica: int = 0,
        load: Literal["dummy", "checkpoint"] = "dummy",
        can_sleep: bool = False,
        collective_timeout_s: float | None = None,
        may_write: bool = True,
    ) -> None:
        self.replica = replica
        self.processes: dict[int, str] = {}
        self.weight_version: int | None = None
        self._spec = load_spec(model_dir)
        self._config, self._device, self._load = config, device, load
        self._max_model_len = max_model_len
        self._may_write = may_write
        self._arguments = {"model_dir": Path(model_dir), "seed": seed, "can_sleep": can_sleep}
        self._arguments["collective_timeout_s"] = collective_timeout_s
        self._state: Literal["serving", "stale", "updating"] = "stale"
        self._reason = "no weights have been committed yet"
        self._received: int | None = None
        self._is_paused = False
        self._num_running = 0
        self._num_calls = 0

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start vLLM's processes; with weights of its own the engine serves at once, as version 0."""
        arguments = engine_arguments(
            config=self._config,
            device=self._device,
            max_model_len=self._max_model_len,
            load=self._load,
            **self._arguments,  # type: ignore[arg-type]
        )
        try:
            with engine_environment(self._device):
                self._llm = AsyncLLM.from_engine_args(arguments)
        except (RuntimeError, ValueError, OSError, AssertionError) as error:
            raise RolloutError(
                f"the engine did not start: {_one_line(error)}", where=self.name, fix="the cause is above in its log"
            ) from error
        found = await self._llm.collective_rpc("megarl_process")
        self.processes = {pid: f"{self.name} rank {rank}" for rank, (pid, _) in enumerate(found)}
        if self._config.tp > 1:
            self.processes |= {parent: f"{self.name} scheduler" for _, parent in found}
        self._liveness = Liveness(self.processes)
        if self._load == "checkpoint":
            await self._serve(0)

    async def stop(self) -> None:
        """End all processes of the engine."""
        if hasattr(self, "_liveness"):
            self._liveness.stop()
            self._llm.shutdown(timeout=_STOP_GRACE_S)
            # Its finalizer shuts down again, and fails where that happens while the interpreter ends.
            del self._llm
        self._state, self._reason = "stale", "the engine was stopped"

    async def watch(self) -> None:
        """Returns when the engine is stopped. Raises RolloutError as soon as a process of it is dead."""
        death = self._liveness.death
        await asyncio.wait({death})
        if not death.cancelled():
            self._state, self._reason = "stale", f"{death.result()} died"
            raise RolloutError(self._reason, fix=_FIX_DEAD)

    @property
    def name(self) -> str:
        """How messages call this engine."""
        return f"rollout replica {self.replica}"

    # -- sampling ----------------------------------------------------------------------------------------------------

    async def generate(
        self, requests: Sequence[Request], sampling: Sampling, n: int = 1
    ) -> list[tuple[int, list[Completion]]]:
        """See ``RolloutEngine``."""
        if self._state != "serving":
            raise RolloutError(f"the engine refuses to sample: {self._reason}", where=self.name)
        check_requests(requests, sampling, n, max_model_len=self._max_model_len, vocab_size=self._spec.vocab_size)
        self._num_calls += 1
        self._num_running += 1
        tasks = [
            asyncio.create_task(self._one(f"{self._num_calls}-{request.request_id}", request, sampling, n))
            for request in requests
        ]
        try:
            return await self._alive(asyncio.gather(*tasks), "generate")
        finally:
            self._num_running -= 1
            for task in tasks:
                task.cancel()

    async def _one(self, vllm_id: str, request: Request, sampling: Sampling, n: int) -> tuple[int, list[Completion]]:
        if request.is_greedy:
            sampling, n = sampling.greedy(), 1
        params = sampling_params(request, sampling, n, self._spec.eos_token_ids)
        prompt = {"prompt_token_ids": list(request.prompt_token_ids)}
        outputs = []
        async for result in self._llm.generate(prompt, params, vllm_id):
            outputs = result.outputs
        ordered = sorted(outputs, key=lambda output: output.index)
        return request.request_id, [completion(output, request) for output in ordered]

    # -- weight updates ----------------------------------------------------------------------------------------------

    async def layout(self, shapes: Mapping[str, Shape]) -> list[RankLayout]:
        """See ``RolloutEngine``."""
        listed = [(name, list(shape)) for name, shape in shapes.items()]
        outcomes = await self._ranks("megarl_layout", (listed, self._may_write, self.name), _LAYOUT_S, "prepare")
        return [
            RankLayout(
                tuple(region_of(fields) for fields in outcome["regions"]),
                outcome["dtypes"],
                outcome["machine"],
                outcome["device_id"],
                outcome["way"],
            )
            for outcome in outcomes
        ]

    async def connect(self, connections: Sequence[RankConnection]) -> None:
        """See ``RolloutEngine``."""
        timeout_s = max(connection.membership.timeout_s for connection in connections)
        info = connect_info(connections, self.name)
        await self._ranks("megarl_connect", (info, self.name), timeout_s, "connect")

    async def receive(
        self,
        version: int,
        timeout_s: float,
        digest: str,
        share: Share | None = ALL,
        in_flight: InFlight = "finish",
    ) -> ReceiverReport:
        """See ``RolloutEngine``."""
        started = time.monotonic()
        self._state, self._received = "updating", None
        self._reason = f"it is between weight versions {self.weight_version} and {version}"
        await self._stop_sampling(in_flight, started + timeout_s)
        info = {"digest": digest, "timeout_s": timeout_s, "share": None if share is None else list(share)}
        outcomes = await self._ranks("megarl_receive", (info, self.name), timeout_s, "transfer")
        self._received = version
        checksums = tuple({name: int(v) for name, v in outcome["checksums"].items()} for outcome in outcomes)
        return ReceiverReport(self.replica, checksums, time.monotonic() - started)

    async def score(self, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """See ``RolloutEngine``."""
        if self._received is None and self._state != "serving":
            raise RolloutError(f"the engine has nothing to score with: {self._reason}", where=self.name)
        await self._alive(self._llm.reset_prefix_cache(), "verify")
        scored = [self._score_one(index, list(prompt), list(response)) for index, (prompt, response) in enumerate(rows)]
        return list(await self._alive(asyncio.gather(*scored), "verify"))

    async def _score_one(self, index: int, prompt: list[int], response: list[int]) -> list[float]:
        self._num_calls += 1
        tokens = [*prompt, *response]
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        found: Any = None
        async for result in self._llm.generate(
            {"prompt_token_ids": tokens}, params, f"{self._num_calls}-score-{index}"
        ):
            found = result.prompt_logprobs or found
        return [found[place][tokens[place]].logprob for place in range(len(prompt), len(tokens))]

    async def commit(self, version: int) -> None:
        """See ``RolloutEngine``."""
        if self._received != version:
            raise sync_failure(self.name, "commit", None, f"version {version} was not received")
        await self._serve(version)
        self._received = None

    async def poison(self, reason: str) -> None:
        """See ``RolloutEngine``."""
        self._state, self._reason, self._received = "stale", reason, None
        if self._is_paused:  # samples that wait for the update would wait for ever
            self._is_paused = False
            await self._alive(self._llm.pause_generation(mode="abort"), "poison")
            await self._alive(self._llm.resume_generation(), "poison")

    async def _stop_sampling(self, in_flight: InFlight, deadline: float) -> None:
        """End, wait for or freeze samples under way. New ones are refused since the update began."""
        if in_flight == "continue" and self._num_running:
            # Frozen samples keep their tokens; their keys and values are computed anew under the new weights.
            await self._alive(self._llm.pause_generation(mode="keep", clear_cache=False), "prepare")
            self._is_paused = True
            return
        if in_flight == "abort":
            await self.abort()
        while self._num_running:  # the others finish under the version they began with
            if time.monotonic() > deadline:
                raise sync_failure(self.name, "prepare", None, "samples are still under way")
            await asyncio.sleep(0.005)

    async def abort(self) -> None:
        """See ``RolloutEngine``."""
        if self._num_running:
            await self._alive(self._llm.pause_generation(mode="abort"), "abort")
            await self._alive(self._llm.resume_generation(), "abort")

    async def sleep(self) -> None:
        """See ``RolloutEngine``. vLLM does nothing on the CPU, and neither does this."""
        if self._device == "cuda":
            self._state, self._reason = "stale", "its weights were discarded by sleep"
            await self._alive(self._llm.sleep(level=2), "sleep")

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """See ``RolloutEngine``. Wake ``weights`` before an update, ``kv_cache`` after it."""
        if self._device == "cuda":
            await self._alive(self._llm.wake_up(None if tags is None else list(tags)), "wake_up")

    async def _serve(self, version: int) -> None:
        """Sample under ``version`` from now on; cached keys and values are those of other weights."""
        reset = self._llm.reset_prefix_cache(reset_running_requests=self._is_paused)
        if not await self._alive(reset, "commit"):
            raise sync_failure(self.name, "commit", None, "cached prompts of the previous weights are in use")
        await self._alive(self._llm.update_weight_version(str(version)), "commit")
        self.weight_version, self._state, self._reason = version, "serving", ""
        if self._is_paused:
            self._is_paused = False
            await self._alive(self._llm.resume_generation(), "commit")

    async def _ranks(self, method: str, args: tuple[Any, ...], timeout_s: float, phase: str) -> list[dict[str, Any]]:
        """Calls a method of the worker extension on every rank. Raises SyncError for the first cause."""
        rpc = asyncio.wait_for(self._llm.collective_rpc(method, args=args), timeout_s + _RPC_GRACE_S)
        try:
            outcomes: list[dict[str, Any]] = await self._alive(rpc, phase)
        except MegarlError as error:
            await self.poison(f"phase {phase} failed: {error.problem}")
            raise
        except TimeoutError:
            await self.poison(f"phase {phase} did not end")
            raise sync_failure(self.name, phase, None, f"no answer within {timeout_s + _RPC_GRACE_S:.0f} s") from None
        failed = [outcome for outcome in outcomes if outcome.get("failed")]
        if failed:
            # What broke comes before what only lost its connection by that.
            first = min(failed, key=lambda outcome: (outcome["from_peer"], outcome["is_transport"]))
            error = (
                SyncError(first["cause"])
                if first["from_peer"]
                else sync_failure(f"{self.name} rank {first['rank']}", first["phase"], first["tensor"], first["cause"])
            )
            await self.poison(error.problem)
            raise error
        return outcomes

    # -- failures ----------------------------------------------------------------------------------------------------

    async def _alive(self, work: Awaitable[T], phase: str) -> T:
        """The result of ``work``, or a RolloutError as soon as a process of the engine is dead."""
        death = self._liveness.death
        task = asyncio.ensure_future(work)
        await asyncio.wait({task, death}, return_when=asyncio.FIRST_COMPLETED)
        if task.done() and not death.done():
            try:
                return task.result()
            except EngineDeadError as error:
                await asyncio.wait({death}, timeout=_DEATH_GRACE_S)
                if not death.done():
                    raise self._failure("its engine is dead", phase) from error
            except EngineGenerateError as error:
                raise self._failure(_one_line(error.__cause__ or error), phase) from error
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise self._failure("the engine was stopped" if death.cancelled() else f"{death.result()} died", phase)

    def _failure(self, cause: str, phase: str) -> RolloutError:
        self._state, self._reason = "stale", cause
        return RolloutError(f"{self.name} failed in phase {phase}: {cause}", fix=_FIX_DEAD)


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
