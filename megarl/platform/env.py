"""The one reader of ``os.environ``, and the environment of the processes that megarl starts.

Invariants:
1. No other module of megarl touches ``os.environ``.
2. Libraries that read variables at import (OpenMP, NCCL, vLLM, tokenizers) get them from the parent through
   ``worker_environment``: setting them later has no effect.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from megarl.errors import SetupError


def text(name: str, default: str | None = None) -> str | None:
    """Value of a variable; an empty one counts as unset."""
    return os.environ.get(name) or default


def required(name: str, *, fix: str) -> str:
    """Value of a variable that must be set. Raises SetupError."""
    value = text(name)
    if value is None:
        raise SetupError(f"environment variable {name} is not set", fix=fix)
    return value


def integer(name: str, default: int | None = None) -> int | None:
    """Integer value of a variable. Raises SetupError for anything else."""
    value = text(name)
    if value is None:
        return default
    try:
        return int(value)
    except ValueError:
        raise SetupError(f"environment variable {name}={value!r} is not an integer", fix=f"unset {name}") from None


def flag(name: str) -> bool:
    """Whether a variable is set to 1, true, yes or on."""
    return (text(name) or "").lower() in {"1", "true", "yes", "on"}


def path(name: str, default: Path | None = None) -> Path | None:
    """Path value of a variable, with ``~`` expanded."""
    value = text(name)
    return default if value is None else Path(value).expanduser()


def cache_directory() -> Path:
    """Where megarl keeps what can be made again: ``MEGARL_CACHE``, else ``megarl`` in the user's cache directory."""
    given = path("MEGARL_CACHE")
    if given is not None:
        return given
    base = path("XDG_CACHE_HOME")
    return (Path.home() / ".cache" if base is None else base) / "megarl"


def with_prefix(prefix: str) -> dict[str, str]:
    """All variables whose name starts with ``prefix``, such as SLURM_."""
    return {name: value for name, value in os.environ.items() if name.startswith(prefix)}


def copy() -> dict[str, str]:
    """A copy of the whole environment, for a child process."""
    return dict(os.environ)


def update(variables: Mapping[str, str]) -> None:
    """Set variables for this process and the children it starts from now on."""
    os.environ.update(variables)


def restore(variables: Mapping[str, str | None]) -> None:
    """Set variables to earlier values; None unsets."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def set_defaults(variables: Mapping[str, str]) -> None:
    """Set those variables that the user has not set."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def worker_environment(device: str, threads: int) -> dict[str, str]:
    """Variables of a process that trains, scores or samples.

    Args:
        device: ``cpu`` or ``cuda``.
        threads: compute threads of the process.
    """
    count = str(threads)
    variables = {
        # Spinning OpenMP threads starve the other ranks of a small machine: a plain clone ran ten times slower.
        "OMP_WAIT_POLICY": "passive",
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HYDRA_FULL_ERROR": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if device == "cuda":
        variables |= _CUDA
    return variables


def rollout_environment(device: str, threads: int) -> dict[str, str]:
    """Variables of a process that runs a vLLM engine; ``worker_environment`` and vLLM's own."""
    variables = worker_environment(device, threads) | {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CONFIGURE_LOGGING": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if device == "cpu":
        variables |= {
            # Tensor parallelism inside one NUMA node fails at start when vLLM binds threads itself.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            # Together with enforce_eager it skips a warm-up of seconds.
            "VLLM_CPU_CI_ENV": "1",
        }
    return variables


_CUDA = {
    # One hardware queue, so that kernels start in the order Megatron enqueued them (its tensor-parallel overlap).
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    # vLLM sets it in its workers; a communicator between trainer and engine needs the same value at both ends.
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    # A failed or timed-out collective ends the process, and leaves a record of what each rank was waiting for.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
    "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
}
