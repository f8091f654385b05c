"""The CPU as a device, and everything Megatron-Core needs to run on it over gloo.

Megatron-Core names CUDA in its source: buffers on ``torch.cuda.current_device()``, ``device="cuda"``,
``tensor.cuda()``, type strings. ``ADAPTATIONS`` lists what megarl replaces, one entry for each place Megatron-Core
would fail at, with file and line in megatron-core 0.16.1 / 0.19.2. Each has a test in
``tests/distributed/test_cpu_adaptations.py`` that runs Megatron's own operation without it and expects the failure, so
a release that no longer needs an entry says so.

Invariants:
1. ``torch`` itself is left alone. Megatron's modules see a copy of its namespace in which the CUDA device is the CPU;
   where a tensor method names CUDA, a function mode is active for that one call. Nothing slows other torch calls.
2. Applied once per process; applying again does nothing.
3. What an own layer specification can avoid is no adaptation: RMSNorm under sequence parallelism, packed attention and
   latent attention over packs are in the slots of ``train/megatron/layers.py``.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from megarl.errors import SetupError
from megarl.platform import env, gloo
from megarl.platform.cuda_on_cpu import call_with_cpu_tensors_as_cuda, torch_on_cpu
from megarl.platform.device import Introduction, LayerImplementation, MemoryUse, PassMemory
from megarl.platform.host_tensors import with_host_copies
from megarl.platform.live_memory import LiveMemory
from megarl.platform.packages import has_transformer_engine, import_megatron

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Adaptation:
    """One thing Megatron-Core cannot do on CPU, and its replacement.

    Attributes:
        name: short name; tests are found by it.
        reason: what fails and where, as file:line in 0.16.1 / 0.19.2, under ``megatron/core``.
        modules: Megatron modules that get the namespace in which the CUDA device is the CPU.
        replace: further replacements, called after ``modules`` are done.
    """

    name: str
    reason: str
    modules: tuple[str, ...] = ()
    replace: Callable[[], None] | None = field(default=None)

    def apply(self) -> None:
        """Make the replacement in this process."""
        for module in self.modules:
            importlib.import_module(f"megatron.core.{module}").torch = torch_on_cpu()  # type: ignore[attr-defined]
        if self.replace is not None:
            self.replace()


# --- the adaptations ---


def _keep_rng_states_of_the_host() -> None:
    rng = importlib.import_module("megatron.core.tensor_parallel.random")
    rng._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()  # type: ignore[attr-defined]
    rng._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)  # type: ignore[attr-defined]


def _tie_embeddings_in_place() -> None:
    module = importlib.import_module("megatron.core.models.common.language_module.language_module")
    call_with_cpu_tensors_as_cuda(module.LanguageModule, "setup_embeddings_and_output_layer")


def _accept_cpu_parameters() -> None:
    optimizer = importlib.import_module("megatron.core.optimizer.optimizer")
    distributed = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    call_with_cpu_tensors_as_cuda(optimizer.Float16OptimizerWithFloat16Params, "__init__")
    call_with_cpu_tensors_as_cuda(distributed.DistributedOptimizer, "__init__")


def _accept_cpu_gradients() -> None:
    # The optimizer module imported the function by name.
    optimizer = importlib.import_module("megatron.core.optimizer.optimizer")
    call_with_cpu_tensors_as_cuda(optimizer, "clip_grad_by_total_norm_fp32")


def _gather_optimizer_state() -> None:
    distributed = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    call_with_cpu_tensors_as_cuda(distributed.DistributedOptimizer, "get_parameter_state_dp_zero")


def _attend_without_transformer_engine() -> None:
    attention = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    # In 0.16 it says that the import succeeded, which without Transformer Engine gives placeholders.
    found = importlib.import_module("megatron.core.extensions.transformer_engine").HAVE_TE
    attention.HAVE_TE = found  # type: ignore[attr-defined]
    # What it cuts, in pinned memory, is a table made at construction that only fused kernels read.
    yarn = importlib.import_module("megatron.core.models.common.embeddings.yarn_rotary_pos_embedding")
    yarn.get_pos_emb_on_this_cp_rank = lambda table, *_: table  # type: ignore[attr-defined]


def _route_without_transformer_engine() -> None:
    moe = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe, "te_general_gemm"):
        moe.te_general_gemm = None  # type: ignore[attr-defined]


def _exchange_tokens_over_gloo() -> None:
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    # The dispatcher imported the function by name.
    dispatcher.all_to_all = gloo.with_integer_splits(dispatcher.all_to_all)  # type: ignore[attr-defined]


def _gather_unequal_parts() -> None:
    mappings = importlib.import_module("megatron.core.tensor_parallel.mappings")
    mappings._gather_along_first_dim = gloo.with_uneven_gather(mappings._gather_along_first_dim)  # type: ignore[attr-defined]
    mappings._reduce_scatter_along_first_dim = gloo.with_uneven_reduce_scatter(  # type: ignore[attr-defined]
        mappings._reduce_scatter_along_first_dim
    )


def _copy_parameters_within_the_host() -> None:
    hybrid = importlib.import_module("megatron.core.optimizer.cpu_offloading.hybrid_optimizer")
    with_host_copies(hybrid.HybridDeviceOptimizer)
    if not has_transformer_engine():
        config = importlib.import_module("megatron.core.optimizer.optimizer_config")
        config.is_te_min_version = lambda *_, **__: False  # type: ignore[attr-defined]


ADAPTATIONS: tuple[Adaptation, ...] = (
    Adaptation(
        name="tensor-parallel-buffers",
        reason="gather and scatter buffers on torch.cuda.current_device(): "
        "tensor_parallel/mappings.py:91,141,148,181 / 95,145,152,185; tensor_parallel/layers.py:552 / 647; "
        "tensor_parallel/utils.py:70,91",
        modules=("tensor_parallel.mappings", "tensor_parallel.layers", "tensor_parallel.utils"),
    ),
    Adaptation(
        name="memory-buffer",
        reason="the buffer sequence parallelism gathers into is on torch.cuda.current_device(): utils.py:631 / 715",
        modules=("utils",),
    ),
    Adaptation(
        name="rng-states",
        reason="named generator states are CUDA's: tensor_parallel/random.py:55,66,83-114,235-238,422 / "
        "118,129,146-177,303-306,490; activation recompute saves them at :440 / :508",
        modules=("tensor_parallel.random",),
        replace=_keep_rng_states_of_the_host,
    ),
    Adaptation(
        name="rotary-frequencies",
        reason="inverse frequencies are moved to torch.cuda.current_device() at the first forward: "
        "models/common/embeddings/rotary_pos_embedding.py:162",
        modules=("models.common.embeddings.rotary_pos_embedding",),
    ),
    Adaptation(
        name="latent-attention",
        reason="YaRN's frequencies are made on torch.cuda.current_device(), and a part of their table in pinned memory "
        "under context parallelism: models/common/embeddings/yarn_rotary_pos_embedding.py:76,122,126,186; whether the "
        "output layer is one of Transformer Engine's is asked without it too: "
        "transformer/multi_latent_attention.py:184 / -",
        modules=("models.common.embeddings.yarn_rotary_pos_embedding",),
        replace=_attend_without_transformer_engine,
    ),
    Adaptation(
        name="tied-embeddings",
        reason="with pipeline stages the last stage's copy is made by weight.data.cuda(): "
        "models/common/language_module/language_module.py:244 / 307",
        replace=_tie_embeddings_in_place,
    ),
    Adaptation(
        name="gradient-buffers",
        reason="parameter and gradient buffers on torch.cuda.current_device(): "
        "distributed/param_and_grad_buffer.py:783,800,806 / 1162,1180,1186; current_stream() in every gradient "
        "reduction: - / 632",
        modules=("distributed.param_and_grad_buffer",),
    ),
    Adaptation(
        name="optimizer-scalars",
        reason='overflow flags, loss scales and norms with device="cuda": optimizer/optimizer.py:473,481,485,907 / '
        "690,698,702,1249; optimizer/clip_grads.py:90,103,115,174,207 / 96,108,112,180,231; "
        "optimizer/grad_scaler.py:15 / 20; optimizer/distrib_optimizer.py:791,1077 / 998,1362",
        modules=(
            "optimizer.optimizer",
            "optimizer.clip_grads",
            "optimizer.grad_scaler",
            "optimizer.distrib_optimizer",
        ),
    ),
    Adaptation(
        name="optimizer-parameter-types",
        reason="parameters must be of type 'torch.cuda.FloatTensor' or a 16-bit one: optimizer/optimizer.py:671,690 / "
        "1009,1028; optimizer/distrib_optimizer.py:361,420,582 / 401,466,758",
        replace=_accept_cpu_parameters,
    ),
    Adaptation(
        name="optimizer-gradient-types",
        reason="gradients must be of type 'torch.cuda.FloatTensor' when clipped: optimizer/clip_grads.py:167 / 174",
        replace=_accept_cpu_gradients,
    ),
    Adaptation(
        name="optimizer-state-gathering",
        reason="checkpoints of the distributed optimizer gather its state with tensor.cuda(): "
        "optimizer/distrib_optimizer.py:1089 / 1374",
        replace=_gather_optimizer_state,
    ),
    Adaptation(
        name="optimizer-on-host",
        reason="the optimizer on the CPU makes CUDA streams and pinned copies, of parameters on a GPU only: "
        "optimizer/cpu_offloading/hybrid_optimizer.py:217,256,273 in both; its configuration compares the version of "
        "Transformer Engine, which may be missing: optimizer/optimizer_config.py:383 / -",
        modules=("optimizer.cpu_offloading.hybrid_optimizer",),
        replace=_copy_parameters_within_the_host,
    ),
    Adaptation(
        name="pipeline-buffers",
        reason="receive buffers and shape messages on torch.cuda.current_device(), synchronize() after them: "
        "pipeline_parallel/p2p_communication.py:190-242,313,321,398 / 211-263,334,342,419",
        modules=("pipeline_parallel.p2p_communication",),
    ),
    Adaptation(
        name="schedule-counters",
        reason='token counters with device="cuda" in every schedule: '
        "pipeline_parallel/schedules.py:596,983,2138 / 749,1121,2292",
        modules=("pipeline_parallel.schedules",),
    ),
    Adaptation(
        name="expert-router",
        reason="the router moves its weight to torch.cuda.current_device() in every pass, its counters too: "
        "transformer/moe/router.py:90,169,178 / 98,184,193; it asks for a name that is undefined without Transformer "
        "Engine: transformer/moe/moe_utils.py:1192 / -",
        modules=("transformer.moe.router",),
        replace=_route_without_transformer_engine,
    ),
    Adaptation(
        name="expert-dispatch",
        reason="the all-to-all dispatcher makes a CUDA stream, and leaves split sizes as tensors where gloo takes "
        "integers: transformer/moe/token_dispatcher.py:445,666,810 / 469,698,857",
        modules=("transformer.moe.token_dispatcher",),
        replace=_exchange_tokens_over_gloo,
    ),
    Adaptation(
        name="expert-tensor-parallel",
        reason="with expert tensor parallelism ranks gather and scatter unequal numbers of tokens, which gloo refuses: "
        "tensor_parallel/mappings.py:150,193 / 154,197",
        replace=_gather_unequal_parts,
    ),
    Adaptation(
        name="checkpoint-writing",
        reason="torch.cuda.synchronize() before files are written and failure counts on current_device(): "
        "dist_checkpointing/strategies/filesystem_async.py:230 / 248; state_dict_saver.py:204,252",
        modules=(
            "dist_checkpointing.strategies.filesystem_async",
            "dist_checkpointing.strategies.state_dict_saver",
            "dist_checkpointing.strategies.async_utils",
            "dist_checkpointing.strategies.fully_parallel",
        ),
    ),
)

_applied: set[str] = set()


def adapt_megatron(*, without: Iterable[str] = ()) -> None:
    """Import Megatron-Core and apply the adaptations that this process has not applied yet.

    Args:
        without: names to leave out; for the tests that show an adaptation is still needed.

    Raises:
        SetupError: Megatron-Core is missing, or a package beside it breaks it.
    """
    # Megatron-Core warns at every layer's first forward where it is not set; on CPU it means nothing.
    env.set_defaults({"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    import_megatron()
    skipped = frozenset(without)
    for adaptation in ADAPTATIONS:
        if adaptation.name not in skipped and adaptation.name not in _applied:
            adaptation.apply()
            _applied.add(adaptation.name)


# --- the device ---


class CpuDevice:
    """The host's cores, with gloo between processes."""

    name = "cpu"
    collective_backend = "gloo"
    layer_implementation: LayerImplementation = "local"
    watching_is_free = False

    @property
    def torch_device(self) -> torch.device:
        return _CPU

    def bind(self, local_rank: int) -> None:
        """Nothing to bind: the operating system places processes on cores."""

    def process_group_options(self, timeout: timedelta) -> dict[str, Any]:
        return {"backend": self.collective_backend, "timeout": timeout}

    def prepare_megatron(self) -> None:
        adapt_megatron()

    def check_fp8(self, recipe: str) -> None:
        """Raises SetupError: Transformer Engine multiplies on GPUs only."""
        raise SetupError(
            "FP8 needs a GPU with Transformer Engine", where="device cpu", fix="set engine.fp8=null, or use device cuda"
        )

    def synchronize(self) -> None:
        """Nothing is queued."""

    def now(self) -> float:
        """Seconds of a monotonic clock."""
        return time.perf_counter()

    def introduce(self) -> Introduction:
        """No fused kernels but Adam's."""
        return Introduction("cpu", ("Megatron-Core's local layers", "megarl's attention", "torch's AdamW"))

    def memory(self) -> MemoryUse:
        """Resident memory of the process; torch does not count host tensors. The peak is the process's, ever."""
        status = _proc_bytes("/proc/self/status")
        resident, peak = status.get("VmRSS", 0), status.get("VmHWM", 0)
        return MemoryUse(resident, peak, resident, _proc_bytes("/proc/meminfo").get("MemTotal", 0))

    @contextmanager
    def watch_pass(self, held_bytes: int) -> Iterator[PassMemory]:
        """Counts every tensor that an operation makes, in Python: a pass takes longer meanwhile."""
        measured = PassMemory(held_bytes)
        with LiveMemory() as counted:
            yield measured
        measured.working_bytes = counted.peak_bytes

    def empty_cache(self) -> None:
        """The allocator returns memory by itself."""

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def rng_state(self) -> dict[str, torch.Tensor]:
        return {"host": torch.get_rng_state()}

    def set_rng_state(self, state: dict[str, torch.Tensor]) -> None:
        torch.set_rng_state(state["host"])


def _proc_bytes(path: str) -> dict[str, int]:
    """The ``Key: value kB`` lines of a /proc file in bytes; empty where there is no such file."""
    try:
        with open(path, encoding="ascii") as lines:
            rows = [line.split() for line in lines]
    except OSError:
        return {}
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3 and row[2] == "kB"}
