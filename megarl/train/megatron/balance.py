"""How evenly tokens are spread over experts: measured at every update, and improved by loss or bias if asked for.

The loss is that of each sequence (DeepSeek-V3, arXiv:2412.19437, equations 17 to 20; Megatron-Core's
``seq_aux_loss``), averaged over the sequences of the global minibatch. Megatron-Core's ``aux_loss`` is that of whatever
shares a microbatch, and would change gradients with the token cap and the layout; its ``seq_aux_loss`` takes no packed
sequences.

The bias is moved by a fixed step towards an even load after each update (arXiv:2412.19437, 2.1.2; arXiv:2408.15664).
Megatron-Core's own rule, ``get_updated_expert_bias``, is the same, but counts padding, and recomputed layers twice.

Invariants:
1. Loss, gradients, load and biases do not depend on how a minibatch is cut into microbatches and over ranks.
2. Padding and dummies count nowhere. A prompt that several rows share counts once for each.
3. Passes without gradients, and the first forward of a recomputed layer, neither measure nor add a loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import MoEAuxLossAutoScaler, TopKRouter
from torch import Tensor, nn

from megarl.config.schema.train import EngineConfig
from megarl.errors import ModelError
from megarl.models.spec import ModelSpec
from megarl.observability.metrics import Max, Mean, Metrics
from megarl.parallel.groups import ParallelGroups
from megarl.train.megatron.microbatch import Microbatch


@dataclass(frozen=True, slots=True)
class RoutedTokens:
    """Which of a router's tokens belong to which row of a microbatch.

    Args:
        tokens: [k] int64 tokens among those that this rank's routers see; one that rows share stands once for each.
        rows: [k] int64 row of each, from 0.
        num_rows: rows of the microbatch.
    """

    tokens: Tensor
    rows: Tensor
    num_rows: int

    def per_row(self, values: Tensor) -> Tensor:
        """Sums [rows, E] over each row's tokens of values [n, E], float32."""
        sums = torch.zeros(self.num_rows, values.shape[1], dtype=torch.float32, device=values.device)
        return sums.index_add(0, self.rows, values.float().index_select(0, self.tokens))


def routed_tokens(microbatch: Microbatch, *, tp_rank: int = 0, tp_size: int = 1) -> RoutedTokens:
    """The tokens of a microbatch that this rank routes: of its ``tp_size`` equal stretches, the one at ``tp_rank``."""
    tokens = microbatch.token_of_place
    if tokens is None:
        tokens = torch.arange(len(microbatch.row_of_place), device=microbatch.row_of_place.device)
    size = microbatch.tokens.shape[1] // tp_size
    tokens = tokens - tp_rank * size
    is_mine = (microbatch.row_of_place >= 0) & (tokens >= 0) & (tokens < size)
    return RoutedTokens(tokens[is_mine], microbatch.row_of_place[is_mine], len(microbatch.rows))


def expert_balance(
    role: str, chunks: Sequence[nn.Module], spec: ModelSpec, groups: ParallelGroups, engine: EngineConfig
) -> ExpertBalance | None:
    """Of a trained model; None without experts. Raises ModelError where the configuration asks for what it has not."""
    moe = spec.moe
    wanted = {
        "moe_aux_loss_coef": ("experts", moe is not None),
        "moe_bias_update_rate": ("bias that chooses experts", moe is not None and moe.expert_bias),
    }
    for key, (what, is_there) in wanted.items():
        if (value := getattr(engine, key)) and not is_there:
            raise ModelError(f"{key}={value}, but the model has no {what}", where=f"{role}.engine", fix=f"set {key}=0")
    if moe is None:
        return None
    return ExpertBalance(chunks, spec, groups, coef=engine.moe_aux_loss_coef, bias_rate=engine.moe_bias_update_rate)


class ExpertBalance:
    """Load and auxiliary loss of all expert layers of one rank's chunks, from hooks on layers and routers.

    Hooks, because both releases of Megatron-Core build the router inside the layer, each in its own way.

    Args:
        chunks: bare model chunks.
        spec: a model with experts.
        groups: of this rank.
        coef: of the auxiliary loss; 0 leaves it out.
        bias_rate: step of the biases that choose experts; 0 leaves them as they are.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        spec: ModelSpec,
        groups: ParallelGroups,
        *,
        coef: float = 0.0,
        bias_rate: float = 0.0,
    ) -> None:
        if spec.moe is None:
            raise AssertionError("a dense model has no experts to balance")
        self.groups = groups
        self.coef = coef
        self.layers = [layer for layer in range(spec.num_layers) if spec.has_experts(layer)]
        self._score, self._top_k = spec.moe.score, spec.moe.top_k
        self._bias_rate = bias_rate
        self._routers: list[TopKRouter] = []
        self._num_sequences = 0
        device = next(chunks[0].parameters()).device
        # Per layer: tokens of each expert, then the sum of the sequences' losses.
        self._totals = torch.zeros(spec.num_layers, spec.moe.num_experts + 1, dtype=torch.float64, device=device)
        for layer in (module for chunk in chunks for module in chunk.modules()):
            router = getattr(getattr(layer, "mlp", None), "router", None)
            if isinstance(router, TopKRouter):
                self._watch(layer, router)

    def _watch(self, layer: nn.Module, router: TopKRouter) -> None:
        routed: list[RoutedTokens | None] = [None]

        def read_sequences(_: nn.Module, __: Any, options: dict[str, Any]) -> None:
            # A recomputed layer is called again with the packing parameters of its own microbatch.
            routed[0] = getattr(options.get("packed_seq_params"), "routed", None)

        def balance(module: TopKRouter, arguments: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> Any:
            if routed[0] is None or not routed[0].num_rows or not module.training or not torch.is_grad_enabled():
                return output
            probs, routing_map = output
            return self._balance(module, arguments[0], probs, routing_map, routed[0]), routing_map

        self._routers.append(router)
        layer.register_forward_pre_hook(read_sequences, with_kwargs=True)
        router.register_forward_hook(balance)

    def _balance(
        self, router: TopKRouter, hidden: Tensor, probs: Tensor, routing_map: Tensor, routed: RoutedTokens
    ) -> Tensor:
        totals = self._totals[router.layer_number - 1]
        counts = routed.per_row(routing_map)
        totals[:-1] += counts.sum(0)
        if not self.coef:
            return probs
        logits = router.gating(hidden).flatten(0, -2).float()
        scores = logits.softmax(-1) if self._score == "softmax" else logits.sigmoid()
        scores = routed.per_row(scores / scores.sum(-1, keepdim=True))
        # A sequence's tokens may be on several ranks: each adds its tokens' scores, times the counts of all.
        dist.all_reduce(counts, group=self.groups.tp)
        dist.all_reduce(counts, group=self.groups.cp)
        lengths = counts.sum(1) / self._top_k
        loss = ((counts * scores).sum(1) * (counts.shape[1] / self._top_k) / lengths.square()).sum()
        totals[-1] += loss.detach()
        balanced: Tensor = MoEAuxLossAutoScaler.apply(probs, loss * (self.coef / self._num_sequences))
        return balanced

    def begin(self, num_sequences: int) -> None:
        """Start a minibatch of so many sequences, counted over all replicas."""
        self._num_sequences = num_sequences
        self._totals.zero_()

    @torch.no_grad()
    def move_biases(self) -> None:
        """After an update: towards an even load of the minibatch that ``metrics`` has counted over all ranks."""
        if not self._bias_rate:
            return
        for router in self._routers:
            loads = self._totals[router.layer_number - 1, :-1]
            router.expert_bias += self._bias_rate * torch.sign(loads.mean() - loads).to(router.expert_bias)

    def metrics(self, prefix: str) -> Metrics:
        """Of the minibatch, over all ranks; collective over all of the model's ranks, and equal on them."""
        for group in (self.groups.tp, self.groups.cp, self.groups.dp, self.groups.pp):
            dist.all_reduce(self._totals, group=group)
        totals = self._totals[self.layers].cpu()
        loads, losses = totals[:, :-1], totals[:, -1]
        if not self._num_sequences:
            return {}
        ratios = (loads.max(1).values / loads.mean(1)).tolist()
        metrics: Metrics = {f"{prefix}/expert_load_max": Max(max(ratios))}
        for layer, ratio in zip(self.layers, ratios, strict=True):
            metrics[f"{prefix}/expert_load/layer_{layer}"] = Mean(ratio, 1.0)
        if self.coef:
            metrics[f"{prefix}/moe_aux_loss"] = Mean(float(losses.mean()) / self._num_sequences, 1.0)
        return metrics
