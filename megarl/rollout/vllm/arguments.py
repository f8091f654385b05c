"""megarl's settings as vLLM's: engine arguments, sampling parameters, and what a finished output means."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
from vllm import SamplingParams
from vllm.config import WeightTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind

from megarl.config.schema.roles import RolloutConfig
from megarl.errors import RolloutError
from megarl.platform import env
from megarl.rollout.engine import Completion, FinishReason, Request, WeightSpan
from megarl.rollout.sampling import Sampling

DeviceName = Literal["cpu", "cuda"]

# Fewest tokens of a step; a whole prompt must fit where prompts are not computed in parts.
_CPU_STEP_TOKENS = 4096
# Keys and values of this many tokens share a block, the unit in which prompts share their prefix. vLLM's default on
# the CPU is 128: nothing is shared between samples of a shorter prompt, and generation was 10 % slower.
_CPU_BLOCK_TOKENS = 32


def engine_arguments(
    model_dir: Path,
    config: RolloutConfig,
    *,
    device: DeviceName,
    max_model_len: int,
    seed: int,
    load: Literal["dummy", "checkpoint"],
    can_sleep: bool,
    collective_timeout_s: float | None,
) -> AsyncEngineArgs:
    """Arguments of one engine; without a time-out its groups have torch's own."""
    timeout_s = None if collective_timeout_s is None else math.ceil(collective_timeout_s)
    arguments: dict[str, Any] = {
        "model": str(model_dir),
        "skip_tokenizer_init": True,
        "dtype": config.dtype,
        "load_format": "dummy" if load == "dummy" else "auto",
        "tensor_parallel_size": config.tp,
        "max_model_len": max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "enforce_eager": config.enforce_eager,
        "seed": seed % 2**32,
        # Log-probs after the temperature and the filters: of the distribution sampled from. The raw ones would be
        # those of temperature 1 whatever the temperature.
        "logprobs_mode": "processed_logprobs",
        # Neither temperatures nor stop tokens from the model's own generation_config.json: settings are ours to record.
        "generation_config": "vllm",
        "worker_extension_cls": "megarl.rollout.vllm.worker.WorkerExtension",
        "weight_transfer_config": WeightTransferConfig(backend="megarl"),
        "disable_log_stats": True,
        "distributed_timeout_seconds": timeout_s,
        "cpu_distributed_timeout_seconds": timeout_s,
    }
    if device == "cpu":
        arguments |= {
            "enforce_eager": True,
            "block_size": _CPU_BLOCK_TOKENS,
            "kv_cache_memory_bytes": int(config.kv_cache_gib * 2**30),
            # A seeded request whose prompt is cut over two steps ends the engine on the CPU ("CPU Generator does not
            # use offset", vllm 0.32): prompts are computed whole.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(max_model_len, _CPU_STEP_TOKENS),
            "distributed_executor_backend": "uni" if config.tp == 1 else "mp",
        }
    else:
        arguments |= {
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "enable_sleep_mode": can_sleep,
            "distributed_executor_backend": "uni" if config.tp == 1 else "mp",
        }
    return AsyncEngineArgs(**arguments)


@contextmanager
def engine_environment(device: DeviceName) -> Iterator[None]:
    """Variables an engine's processes inherit when it starts; this process gets its own values back afterwards."""
    variables: dict[str, str] = {}
    if device == "cpu":
        variables = {
            # With it vLLM keeps one rank in the process that schedules: one process and six seconds of start-up less.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # Nothing is compiled in eager mode but a helper of the sampler, which costs seconds in the first step.
            "TORCH_COMPILE_DISABLE": "1",
        }
    before = {name: env.text(name) for name in variables}
    env.update(variables)
    try:
        yield
    finally:
        env.restore(before)


def sampling_params(request: Request, sampling: Sampling, n: int, eos_token_ids: Sequence[int]) -> SamplingParams:
    """Parameters of one request."""
    return SamplingParams(
        n=n,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_tokens,
        stop_token_ids=sorted({*eos_token_ids, *sampling.stop_token_ids}),
        seed=None if sampling.is_greedy else request.seed,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def completion(output: CompletionOutput, request: Request) -> Completion:
    """A finished output.

    Raises:
        RolloutError: tokens, log-probs or weight versions are missing or do not belong together.
    """
    token_ids, flat = list(output.token_ids), cast(Any, output.logprobs)
    reason = output.finish_reason
    if reason not in get_args(FinishReason):
        raise _inconsistent(request, f"generation ended with reason {reason!r}")
    if reason == "abort" and not token_ids:
        return Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), "abort", ())
    if flat is None or flat.token_ids != token_ids:
        raise _inconsistent(request, "log-probs are not those of the sampled tokens")
    log_probs = np.array(flat.logprobs, np.float32)
    if not np.isfinite(log_probs).all():
        raise _inconsistent(request, "a log-prob is not finite: the engine's weights or activations overflowed")
    spans = tuple(WeightSpan(_version(span.version), span.start, span.end) for span in output.weight_versions or ())
    if sum(span.end - span.start for span in spans) != len(token_ids):
        raise _inconsistent(request, f"weight versions {spans} do not cover {len(token_ids)} tokens")
    return Completion(np.array(token_ids, np.int32), log_probs, cast(FinishReason, reason), spans)


def check_requests(
    requests: Sequence[Request], sampling: Sampling, n: int, *, max_model_len: int, vocab_size: int
) -> None:
    """Raises RolloutError for what the engine would misunderstand or die of."""
    if sampling.is_greedy and n > 1:
        raise RolloutError(f"{n} greedy samples of a prompt are all the same", fix="use n=1 with temperature 0")
    if len({request.request_id for request in requests}) != len(requests):
        raise RolloutError("two requests have the same id")
    for request in requests:
        prompt = request.prompt_token_ids
        if not len(prompt):
            raise _inconsistent(request, "the prompt is empty")
        if len(prompt) >= max_model_len:
            raise _inconsistent(
                request, f"the prompt has {len(prompt)} tokens and leaves no room in max_model_len={max_model_len}"
            )
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            raise _inconsistent(request, f"a prompt token is outside the vocabulary of {vocab_size}")
        if not 0 <= request.seed < 2**63 - n:
            raise _inconsistent(request, f"seed {request.seed} is outside [0, 2^63 - n)")


def _version(text: str) -> int:
    return int(text) if text.isdigit() else -1


def _inconsistent(request: Request, problem: str) -> RolloutError:
    return RolloutError(problem, where=f"request {request.request_id}")
