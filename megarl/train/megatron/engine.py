"""One rank of a Megatron-Core model: builds it, and hands each call to the file that does it.

Reading order: ``model`` (what the model is), ``microbatch`` (rows -> packs), ``forward`` (packs -> outputs through the
pipeline), ``heads`` (hidden states -> log-probs), ``objectives`` (outputs -> loss), ``step`` (updates), ``checkpoint``.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.config.schema.train import EngineConfig, LoraConfig, OptimizerConfig
from megarl.data.balance import SequenceCost
from megarl.data.batch import Batch, Ragged
from megarl.errors import TrainError
from megarl.models.rules import VALUE_HEAD
from megarl.models.spec import ModelSpec
from megarl.observability.metrics import Last, Metrics
from megarl.parallel.groups import ParallelGroups
from megarl.platform.device import Device
from megarl.train.engine import Moved, PolicyUpdate, StateSummary, ValueUpdate
from megarl.train.megatron import acceleration, checkpoint, export, offload, step
from megarl.train.megatron import microbatch as mb
from megarl.train.megatron.attention import shares_prompts
from megarl.train.megatron.balance import expert_balance
from megarl.train.megatron.checkpoint_writer import HostCopy
from megarl.train.megatron.experts import are_grouped
from megarl.train.megatron.forward import (
    HeadOptions,
    ModelParts,
    TokenOutputs,
    configure_schedule,
    forward_only,
)
from megarl.train.megatron.initialize import random_weights
from megarl.train.megatron.lora import Adapters
from megarl.train.megatron.model import build_model, named_weights
from megarl.train.megatron.objectives import Objective, PolicyObjective, SftObjective, ValueObjective
from megarl.train.megatron.optimizer import Optimizer
from megarl.train.megatron.reduction import reducing
from megarl.weights.check import detect_naming
from megarl.weights.files.safetensors_reader import SafetensorsReader, check_model, load_into
from megarl.weights.layout import megatron_regions
from megarl.weights.pieces import fill, pieces
from megarl.weights.region import Region

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_OPTIONAL_COLUMNS = ("old_log_probs", "rollout_log_probs", "importance_weights")


class MegatronEngine:
    """A model of one role, on one rank (``train.engine.TrainEngine``). Collective: all ranks construct and call alike.

    Args:
        role: actor, critic or reference; names it in errors and metrics.
        spec: the model.
        model_dir: Hugging Face directory with its weights; None draws random ones from the seed.
        groups: this rank's groups, from ``bootstrap.start``.
        device: where it computes.
        engine: precision and microbatches.
        optimizer: None for a model that is not trained.
        head: ``lm`` for a policy, ``value`` for a critic, whose head starts at zero unless the directory has one.
        seed: of random weights.
        total_updates: planned optimizer updates, for decaying schedules without decay_steps.
        lora: adapters to train instead of the weights; they are drawn from the seed.
        source_dir: Hugging Face directory whose configuration and tokenizer an export copies; None is ``model_dir``.

    Raises:
        LayoutError, ModelError: the model, its weights and the layout do not fit together.
    """

    def __init__(
        self,
        role: str,
        spec: ModelSpec,
        model_dir: Path | None,
        groups: ParallelGroups,
        device: Device,
        engine: EngineConfig,
        optimizer: OptimizerConfig | None,
        *,
        head: Literal["lm", "value"] = "lm",
        seed: int = 1,
        total_updates: int | None = None,
        source_dir: Path | None = None,
        lora: LoraConfig | None = None,
    ) -> None:
        self.role = role
        self.spec = spec
        self.groups = groups
        self.device = device
        self.config = engine
        self.is_value = head == "value"
        self._source_dir = model_dir if source_dir is None else source_dir
        self._dtype = _DTYPES[engine.dtype]
        self._modules = build_model(
            spec,
            groups,
            device=device,
            dtype=self._dtype,
            head=head,
            recompute=engine.recompute,
            options=acceleration.options(engine, spec, groups.layout, device),
        )
        params = named_weights(self._modules)
        self._naming = detect_naming(params)
        self._grouped_experts = are_grouped(params)
        # Before the optimizer is made: with bfloat16 it copies the weights.
        self._fill_weights(params, model_dir, seed)
        self._adapters = None if lora is None else Adapters(self._modules, spec, groups, lora, seed)
        configure_schedule(self._modules[0].config)
        self._chunks: list[torch.nn.Module] = list(self._modules)
        self.optimizer: Optimizer | None = None
        if optimizer is not None:
            self._chunks = reducing(self._modules, optimizer)
            self.optimizer = Optimizer(
                self._chunks,
                optimizer,
                dtype=self._dtype,
                total_updates=total_updates,
                tensors=self._tensor_names(),
            )
        balance = None if optimizer is None else expert_balance(role, self._modules, spec, groups, engine)
        self._save: checkpoint.Save | None = None
        self._host_copy: HostCopy | None = None
        self._offloader = offload.Offloader(self._chunks, self.optimizer, device)
        self._parts = ModelParts(
            chunks=self._chunks,
            module=self._modules[-1],
            vocab_size=spec.vocab_size,
            chunk_tokens=engine.logits_chunk_tokens,
            is_value=self.is_value,
            sequence_parallel=groups.layout.sequence_parallel,
            tp_group=groups.tp,
            cp_group=groups.cp,
            pp_size=groups.layout.pp,
            device=device.torch_device,
            cost=SequenceCost(*spec.sequence_cost(value_head=self.is_value)),
            token_unit=engine.fp8_multiple,
            quantizing=acceleration.quantizing_modules(self._modules),
            shares_prompts=shares_prompts(
                engine.share_prompts, own_attention=device.layer_implementation == "local", cp=groups.layout.cp
            ),
            balance=balance,
            gathers_weights=optimizer is not None and optimizer.overlap_param_gather,
        )

    # -- passes without gradients ------------------------------------------------------------------------------------

    def log_probs(
        self, batch: Batch, *, temperature: float = 1.0, with_entropy: bool = False, with_sum_pi_squared: bool = False
    ) -> dict[str, Ragged] | None:
        """``log_probs``, and if asked ``entropy`` and ``sum_pi_squared``, of every response token, float32 on the CPU.

        They are those of the current weights.
        """
        head = HeadOptions(temperature=temperature, with_entropy=with_entropy, with_sum_pi_squared=with_sum_pi_squared)
        wanted = {"log_probs": True, "entropy": with_entropy, "sum_pi_squared": with_sum_pi_squared}
        return self._per_token(batch, head, [name for name, is_wanted in wanted.items() if is_wanted])

    def values(self, batch: Batch) -> Ragged | None:
        """Value before every response token, float32 on the CPU."""
        result = self._per_token(batch, HeadOptions(), ("values",))
        return None if result is None else result["values"]

    @property
    def _inference_cap(self) -> int:
        cap = self.config.inference_microbatch_tokens
        return self.config.microbatch_tokens if cap is None else cap

    def _per_token(self, batch: Batch, head: HeadOptions, names: Sequence[str]) -> dict[str, Ragged] | None:
        self._require_onload()
        rows = batch.response_lengths.nonzero().flatten().tolist()
        (plan,) = self._parts.plan(batch, [rows], self._inference_cap, self.groups.dp)
        microbatches = [self._parts.pack(batch, members) for members in plan]

        def read(outputs: TokenOutputs, _: mb.Microbatch) -> list[Tensor]:
            return [getattr(outputs, name) for name in names]

        results = forward_only(self._parts, microbatches, read, head)
        if not self.groups.reports:
            return None
        columns = zip(*results, strict=True) if results else [()] * len(names)
        return {
            name: mb.by_row(column, microbatches, batch.response_lengths)
            for name, column in zip(names, columns, strict=True)
        }

    # -- updates -----------------------------------------------------------------------------------------------------

    def update_policy(self, batch: Batch, update: PolicyUpdate, minibatches: Sequence[Sequence[int]]) -> Metrics | None:
        """One optimizer update per minibatch (rows of ``batch`` on this replica), in order."""
        optional = [name for name in _OPTIONAL_COLUMNS if name in batch]
        return self._update(batch, minibatches, PolicyObjective(update, optional, self._sum_over_dp))

    def update_values(self, batch: Batch, update: ValueUpdate, minibatches: Sequence[Sequence[int]]) -> Metrics | None:
        """One critic update per minibatch."""
        return self._update(batch, minibatches, ValueObjective(update))

    def update_sft(self, batch: Batch, minibatches: Sequence[Sequence[int]] | None = None) -> Metrics | None:
        """One update per minibatch (default: all rows) on the cross-entropy of tokens under ``response_mask``."""
        rows = [range(len(batch))] if minibatches is None else minibatches
        return self._update(batch, rows, SftObjective(), prefix="train")

    def eval_sft(self, batch: Batch) -> Metrics | None:
        """The same loss without an update."""
        return step.evaluate(self._context("val", is_evaluation=True), batch, SftObjective())

    def _update(
        self, batch: Batch, minibatches: Sequence[Sequence[int]], objective: Objective, prefix: str | None = None
    ) -> Metrics | None:
        context = self._context(prefix)
        metrics = step.update(context, batch, minibatches, objective)
        if metrics is None or self._adapters is None:
            return metrics
        return {**metrics, f"{context.prefix}/trainable_parameters": Last(self._adapters.num_trained)}

    def _context(self, prefix: str | None = None, *, is_evaluation: bool = False) -> step.StepContext:
        """For an update, which needs the optimizer, or an evaluation; metrics start with the prefix, or the role."""
        self._require_onload()
        if not is_evaluation and self.optimizer is None:
            raise TrainError("this model has no optimizer", where=f"{self.role} rank {self.groups.rank}")
        return step.StepContext(
            parts=self._parts,
            optimizer=self.optimizer,
            groups=self.groups,
            cap=self._inference_cap if is_evaluation else self.config.microbatch_tokens,
            prefix=self.role if prefix is None else prefix,
        )

    def _sum_over_dp(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor, group=self.groups.dp)
        return tensor

    # -- weights -----------------------------------------------------------------------------------------------------

    def gather_weights(self) -> None:
        """Make the parameters whole where an update has left that to the next pass; else nothing.

        Collective over data-parallel ranks: all ranks call it, before any of them reads ``parameters``.
        """
        self._require_onload()
        if self.optimizer is not None:
            self.optimizer.gather_weights()

    def parameters(self) -> Mapping[str, Tensor]:
        """This rank's parameters by Megatron's name, adapters merged into copies of the weights; no collective.

        Raises:
            TrainError: they are in host memory, or an update has left them on the ranks that computed them; then
                ``gather_weights`` comes first, on all ranks.
        """
        self._require_onload()
        if self.optimizer is not None and self.optimizer.has_parts_only:
            raise TrainError(
                "the weights of the last update are not gathered (optimizer.overlap_param_gather)",
                where=f"{self.role} rank {self.groups.rank}",
                fix="call gather_weights on all ranks first",
            )
        return named_weights(self._modules) if self._adapters is None else self._adapters.merged()

    def without_adapters(self) -> AbstractContextManager[None]:
        """Within it the model is the one its adapters were put on."""
        return nullcontext() if self._adapters is None else self._adapters.off()

    def regions(self) -> list[Region]:
        """Where this rank's parameters lie in canonical tensors."""
        return megatron_regions(
            self.spec,
            self.groups.layout,
            self.groups.coordinate,
            value_head=self.is_value,
            naming=self._naming,
            grouped_experts=self._grouped_experts,
        )

    def _tensor_names(self) -> dict[str, list[str]]:
        """Canonical tensors in each parameter, by its name."""
        names: dict[str, list[str]] = {}
        for region in self.regions():
            names.setdefault(region.local_name, []).append(region.tensor)
        return names

    def pieces(self) -> Iterator[tuple[Region, Tensor]]:
        """The regions this rank stands for, with views of its parameters. Raises what ``parameters`` raises."""
        return pieces(self.regions(), self.parameters())

    def _fill_weights(self, params: Mapping[str, Tensor], model_dir: Path | None, seed: int) -> None:
        if model_dir is None:
            fill(self.regions(), params, random_weights(self.spec, seed=seed))
            return
        with SafetensorsReader(model_dir) as reader:
            check_model(reader, self.spec, value_head=self.is_value, new_value_head=True)
            new_head = {VALUE_HEAD: torch.zeros(1, self.spec.hidden_size)} if self.is_value else None
            load_into(self.regions(), reader, params, fresh=new_head)

    def export_hf(self, directory: Path) -> None:
        """Write the model as a Hugging Face directory; collective."""
        self.gather_weights()
        export.export_hf(
            Path(directory),
            self.spec,
            self.groups,
            self.pieces(),
            dtype=self._dtype,
            value_head=self.is_value,
            copy_from=self._source_dir,
        )

    # -- state -------------------------------------------------------------------------------------------------------

    def save(
        self, directory: Path, counters: Mapping[str, Any] | None = None, *, background: bool = False
    ) -> dict[str, float]:
        """Write weights, optimizer, schedule and random state into an empty directory; collective.

        With ``background`` this returns when they are copied, and ``finish_save`` must follow before the next save.

        Returns:
            this rank's seconds by part of the save, of those parts that are done.
        """
        self.gather_weights()
        if self._save is not None:
            raise TrainError(
                "a save is under way", where=f"{self.role} rank {self.groups.rank}", fix="finish_save first"
            )
        if background and self._host_copy is None:
            self._host_copy = HostCopy(pinned=self.device.name == "cuda")
        save = checkpoint.begin(
            Path(directory),
            self._modules,
            self.optimizer,
            self._rng_state(),
            self.groups.layout,
            dp_group=self.groups.dp_cp,
            counters={} if counters is None else counters,
            adapters=None if self._adapters is None else self._adapters.describe(self.regions()),
            host=self._host_copy if background else None,
            synchronize=self.device.synchronize,
        )
        if not background:
            return save.finish()
        self._save = save
        return dict(save.file.seconds)

    @property
    def save_is_written(self) -> bool:
        """Whether ``finish_save`` would not have to wait for this rank's file."""
        return self._save is None or self._save.is_written

    def finish_save(self) -> dict[str, float]:
        """Complete a save in the background; collective. Returns this rank's seconds by part of the save."""
        if self._save is None:
            raise TrainError("no save is under way", where=f"{self.role} rank {self.groups.rank}")
        save, self._save = self._save, None
        return save.finish()

    def load(self, directory: Path, *, fresh: Collection[str] = ()) -> dict[str, Any]:
        """Continue from ``save``; returns the counters given to it; collective.

        ``fresh`` names parts to leave as they are: optimizer, scheduler, rng.
        """
        self.gather_weights()
        counters, rng_state = checkpoint.load(
            Path(directory),
            self._modules,
            self.optimizer,
            self.groups.layout,
            dp_group=self.groups.dp_cp,
            adapters=None if self._adapters is None else self._adapters.describe(self.regions()),
            fresh=fresh,
        )
        if rng_state is not None:
            self._set_rng_state(rng_state)
        return counters

    def _rng_state(self) -> dict[str, Any]:
        """Every generator of this process: torch's of host and device, Megatron's, Python's and NumPy's."""
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
        return {
            "device": self.device.rng_state(),
            "tracker": get_cuda_rng_tracker().get_states(),
            "python": random.getstate(),
            "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss),
        }

    def _set_rng_state(self, state: Mapping[str, Any]) -> None:
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        self.device.set_rng_state(state["device"])
        get_cuda_rng_tracker().set_states(state["tracker"])
        random.setstate(state["python"])
        kind, keys, position, has_gauss, gauss = state["numpy"]
        np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))

    def offload(self) -> Moved:
        """Move weights, gathered, and optimizer state to host memory if that is not the device; collective."""
        if not self._offloader.is_offloaded:
            self.gather_weights()
        return self._offloader.offload() if self.device.name != "cpu" else Moved()

    def onload(self) -> Moved:
        """Bring them back."""
        return self._offloader.onload()

    def _require_onload(self) -> None:
        if self._offloader.is_offloaded:
            raise TrainError(
                "the weights are in host memory", where=f"{self.role} rank {self.groups.rank}", fix="call onload first"
            )

    def state_summary(self) -> StateSummary:
        """Bytes this rank holds on its device."""
        weights = offload.unique_storages(offload.weight_tensors(self._chunks))
        gradients = offload.unique_storages(offload.gradient_tensors(self._chunks))
        states: dict[int, torch.UntypedStorage] = {}
        on_host: dict[int, torch.UntypedStorage] = {}
        if self.optimizer is not None:
            states = offload.unique_storages(offload.optimizer_tensors(self.optimizer))
            on_host = offload.unique_storages(offload.host_tensors(self.optimizer))
        own_states = {address: storage for address, storage in states.items() if address not in weights}
        return StateSummary(
            weights_bytes=offload.total_bytes(weights),
            gradients_bytes=offload.total_bytes(gradients),
            optimizer_bytes=offload.total_bytes(own_states),
            host_bytes=offload.total_bytes(on_host),
        )
