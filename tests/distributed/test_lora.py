"""Low-rank adapters: equal to plain torch on one rank, the same at every layout, and the base stays what it was."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.config.schema.train import ATTENTION_TARGETS, LoraConfig, ScheduleConfig
from megarl.errors import CheckpointError, LayoutError, MegarlError, ModelError
from megarl.models.registry import load_spec
from megarl.models.spec import ModelSpec
from megarl.models.tiny import tiny_config, write_tiny
from megarl.observability.metrics import values
from megarl.parallel.grid import ParallelLayout
from megarl.train.engine import ValueUpdate
from megarl.train.megatron.engine import MegatronEngine
from megarl.train.megatron.model import named_parameters
from megarl.weights.conversion.sources import open_source
from megarl.weights.files.torch_dist import read_torch_dist
from megarl.weights.pieces import assemble, pieces
from tests.distributed.adapters import draw_b, factors
from tests.distributed.engines import MINIBATCHES, make_engine, policy_update, recorded_batch, replica
from tests.distributed.parity import EXPERTS, LATENT, TIED, UNTIED
from tests.distributed.ranks import Rank, RankPool

LORA = LoraConfig(rank=4, alpha=6.0)
ATTENTION = LoraConfig(rank=4, alpha=6.0, targets=list(ATTENTION_TARGETS))


@dataclass(frozen=True)
class Case:
    """A layout and what else may not change the numbers."""

    layout: ParallelLayout
    spec: ModelSpec = TIED
    lora: LoraConfig = LORA
    head: str = "lm"
    cap: int = 1000
    distributed: bool = False
    recompute: str = "none"


def base_weights(engine: MegatronEngine) -> list[Any]:
    """The frozen weights this rank stands for, copied."""
    params = {name: p for name, p in named_parameters(engine._modules).items() if "adapters." not in name}
    return [
        (r, piece.clone()) for r, piece in pieces(engine.regions(), params) if not params[r.local_name].requires_grad
    ]


def log_probs(engine: MegatronEngine, batch: Any) -> Tensor | None:
    found = engine.values(batch) if engine.is_value else (engine.log_probs(batch) or {}).get("log_probs")
    return None if found is None else found.values


def same(one: Tensor | None, other: Tensor | None, layout: ParallelLayout) -> bool:
    """Bit for bit, but for tensor parallelism, under which a model itself gives other last bits from pass to pass."""
    if one is None or other is None:
        return one is other
    return torch.equal(one, other) if layout.tp == 1 else torch.allclose(one, other, rtol=0, atol=1e-5)


def run(rank: Rank, case: Case) -> dict[str, Any]:
    """Two updates of adapters on one recorded batch, and what each step of the way was like."""
    groups = rank.start(case.layout)
    options: dict[str, Any] = {"cap": case.cap, "head": case.head, "recompute": case.recompute}
    base = make_engine(case.spec, groups, trained=False, **options)
    engine = make_engine(case.spec, groups, distributed=case.distributed, lora=case.lora, **options)
    batch, minibatches = replica(recorded_batch(case.spec.vocab_size), groups)
    started = base_weights(engine)
    # A critic's head starts at zero: another number shows more.
    for module in (*base._modules, *engine._modules):
        if case.head == "value" and module.post_process:
            torch.nn.init.ones_(module.output_layer.weight)
    plain = log_probs(base, batch)
    is_base_at_start = same(log_probs(engine, batch), plain, case.layout)
    draw_b(engine)
    gradients: list[Any] = []
    assert engine.optimizer is not None
    step = engine.optimizer.step

    def record() -> Any:
        if not gradients and not case.distributed:
            gradients.extend(factors(engine, lambda parameter: parameter.main_grad))
        return step()

    engine.optimizer.step = record  # type: ignore[method-assign]
    if case.head == "value":
        metrics = engine.update_values(batch, ValueUpdate(clip_value=0.2), minibatches)
    else:
        metrics = engine.update_policy(batch, policy_update(), minibatches)
    changed = log_probs(engine, batch)
    with engine.without_adapters():
        is_base_without = case.head == "value" or same(log_probs(engine, batch), plain, case.layout)
    merged = [(region, piece.clone()) for region, piece in engine.pieces()]
    for module, params in ((m, dict(m.named_parameters())) for m in base._modules):
        for name, parameter in params.items():
            start = f"model{base._modules.index(module)}." if len(base._modules) > 1 else ""
            parameter.data.copy_(engine.parameters()[start + name])
    merged_outputs = log_probs(base, batch)
    ended = base_weights(engine)
    return {
        "metrics": None if metrics is None else values(metrics),
        "gradients": gradients,
        "factors": factors(engine),
        "merged": merged,
        "is_base_at_start": is_base_at_start,
        "is_base_without": is_base_without,
        "is_base_kept": all(torch.equal(a, b) for (_, a), (_, b) in zip(started, ended, strict=True)),
        "has_changed": plain is None or float((changed - plain).abs().max()) > 1e-3,
        "merging_error": 0.0
        if changed is None
        else float((changed - merged_outputs).abs().max() / changed.abs().max().clamp(min=1)),
    }


Outcome = tuple[dict[str, float], dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]


def outcome(ranks: RankPool, case: Case) -> Outcome:
    results = ranks(case.layout.world_size).run(run, case)
    for number, result in enumerate(results):
        for name in ("is_base_at_start", "is_base_without", "is_base_kept", "has_changed"):
            assert result[name], f"{name} is false on rank {number}"
        assert result["merging_error"] < 1e-5, f"rank {number}"
    metrics = next(result["metrics"] for result in results if result["metrics"] is not None)
    gathered = [
        assemble(part for result in results for part in result[name]) for name in ("gradients", "factors", "merged")
    ]
    return metrics, *gathered


_expected: dict[Any, Outcome] = {}


def compare(ranks: RankPool, case: Case) -> None:
    """The case against one rank with one microbatch a minibatch, a plain optimizer and no recomputation."""
    key = (case.spec, case.head, tuple(case.lora.targets))
    if key not in _expected:
        one = Case(ParallelLayout(), case.spec, case.lora, case.head)
        _expected[key] = outcome(ranks, one)
    metrics, *tensors = outcome(ranks, case)
    one_metrics, *one_tensors = _expected[key]
    assert metrics == pytest.approx(one_metrics, rel=1e-4, abs=1e-5)
    for what, found, wanted in zip(("gradient", "factor", "merged weight"), tensors, one_tensors, strict=True):
        if what == "gradient" and case.distributed:
            continue
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            scale = max(1.0, float(tensor.abs().max()))
            torch.testing.assert_close(
                found[name], tensor, rtol=0, atol=1e-5 * scale, msg=lambda m, n=name, w=what: f"{w} of {n}: {m}"
            )
            assert what != "gradient" or tensor.abs().max() > 0, name


CASES = {
    "tp2": Case(ParallelLayout(tp=2)),
    "tp2-sp-pp2-tied": Case(ParallelLayout(tp=2, pp=2, sequence_parallel=True), cap=28),
    "cp2-dp2-sharded": Case(ParallelLayout(cp=2, dp=2), UNTIED, distributed=True, cap=28),
    "vpp2-recompute": Case(ParallelLayout(pp=2, vpp=2), UNTIED, recompute="full"),
    "critic-tp2-sp-dp2": Case(ParallelLayout(tp=2, dp=2, sequence_parallel=True), head="value", cap=28),
}
SLOW = {
    "tp4-sp": Case(ParallelLayout(tp=4, sequence_parallel=True), UNTIED),
    "pp2-dp2-sharded-tied": Case(ParallelLayout(pp=2, dp=2), distributed=True, cap=28),
    "tp2-cp2-sharded": Case(ParallelLayout(tp=2, cp=2), UNTIED, distributed=True),
    "tp2-pp2": Case(ParallelLayout(tp=2, pp=2), UNTIED, cap=28),
    "spelled": Case(ParallelLayout(pp=2, vpp=2, pipeline="Et|t|t|tL"), cap=28),
    "selective-down": Case(
        ParallelLayout(tp=2), UNTIED, LoraConfig(rank=2, targets=["linear_fc2"]), recompute="selective"
    ),
    "critic-pp2": Case(ParallelLayout(pp=2), UNTIED, head="value"),
    "experts": Case(ParallelLayout(tp=2, dp=2, ep=2, sequence_parallel=True), EXPERTS, ATTENTION, cap=28),
}


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_adapters_do_not_depend_on_the_layout(ranks: RankPool, name: str):
    """Gradients, factors and merged weights after two updates; the base before, without and after them."""
    compare(ranks, (CASES | SLOW)[name])


# Plain torch


SETTINGS = {"lr": 1e-2, "weight_decay": 0.1, "clip_grad": 1.0, "eps": 1e-3, "schedule": ScheduleConfig()}


def tune(rank: Rank, layout: ParallelLayout, model_dir: Path, target: Path) -> dict[str, Any]:
    groups = rank.start(layout)
    engine = make_engine(load_spec(model_dir), groups, model_dir=model_dir, lora=LORA, optimizer=SETTINGS)
    draw_b(engine)
    result = {"start": factors(engine)}
    batch, minibatches = replica(recorded_batch(engine.spec.vocab_size), groups)
    metrics = [engine.update_sft(batch, [rows]) for rows in minibatches]
    outputs = engine.log_probs(batch)
    engine.export_hf(target)
    return result | {
        "factors": factors(engine),
        "losses": [values(m)["train/loss"] for m in metrics if m is not None],
        "trainable": [values(m)["train/trainable_parameters"] for m in metrics if m is not None],
        "outputs": outputs and outputs["log_probs"],
    }


class Plain:
    """transformers' model, whose adapted weights are made anew for each pass, under torch's own AdamW."""

    def __init__(self, model_dir: Path, start: dict[str, Tensor]) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self.factors = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
        # An exported model has none.
        trained = list(self.factors.values()) or [torch.zeros(())]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1)

    def weights(self) -> dict[str, Tensor]:
        """The model's with ``W + alpha / rank B A``; A of a fused layer is that of its first weight."""
        found = {}
        for name, weight in self.model.named_parameters():
            if f"{name}.b" in self.factors:
                shared = name.replace("k_proj", "q_proj").replace("v_proj", "q_proj").replace("up_proj", "gate_proj")
                weight = weight + LORA.alpha / LORA.rank * self.factors[f"{name}.b"] @ self.factors[f"{shared}.a"]
            found[name] = weight
        return found

    def log_probs(self, batch: Any, row: int) -> Tensor:
        prompt, response = batch["prompts"][row], batch["responses"][row]
        tokens = torch.cat([prompt, response])[None]
        logits = torch.func.functional_call(self.model, self.weights(), (tokens,)).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(1, response[:, None])[:, 0]

    def update(self, batch: Any, rows: list[int]) -> float:
        masks = [batch["response_mask"][row] for row in rows]
        total = sum(self.log_probs(batch, row)[mask].sum() for row, mask in zip(rows, masks, strict=True) if mask.any())
        loss = -total / sum(int(mask.sum()) for mask in masks)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(self.factors.values()), 1.0)
        self.optimizer.step()
        return float(loss.detach())


@pytest.mark.parametrize(
    "layout", [ParallelLayout(), ParallelLayout(tp=2, pp=2, sequence_parallel=True)], ids=["one", "tp2-sp-pp2"]
)
def test_updates_and_export_equal_plain_torch(ranks: RankPool, tmp_path: Path, layout: ParallelLayout):
    config = tiny_config(num_hidden_layers=2, hidden_size=64, intermediate_size=96, head_dim=16, initializer_range=0.15)
    model_dir = write_weights(tmp_path / "model", config)
    results = ranks(layout.world_size).run(tune, layout, model_dir, tmp_path / "hf")
    start, after = (assemble(part for result in results for part in result[name]) for name in ("start", "factors"))
    plain, batch = Plain(model_dir, start), recorded_batch(load_spec(model_dir).vocab_size)
    losses = [plain.update(batch, rows) for rows in MINIBATCHES]
    reported = next(result for result in results if result["losses"])
    assert reported["losses"] == pytest.approx(losses, rel=1e-5)
    assert after.keys() == plain.factors.keys()
    for name, tensor in plain.factors.items():
        torch.testing.assert_close(after[name], tensor.detach(), rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
        assert (tensor - start[name]).abs().max() > 1e-4
    assert reported["trainable"] == [sum(tensor.numel() for tensor in plain.factors.values())] * 2

    exported = Plain(tmp_path / "hf", {})
    for row in (0, 3):
        with torch.no_grad():
            actual = exported.log_probs(batch, row)
            torch.testing.assert_close(actual, plain.log_probs(batch, row), rtol=0, atol=1e-4)
        torch.testing.assert_close(actual, reported["outputs"][row], rtol=0, atol=1e-4)
    for name, weight in exported.model.state_dict().items():
        is_adapted = f"{name}.b" in plain.factors
        assert torch.equal(weight, plain.model.state_dict()[name]) != is_adapted, name


def write_weights(directory: Path, config: dict[str, Any]) -> Path:
    """A tiny model with weights of transformers' own drawing."""
    from transformers import AutoConfig, AutoModelForCausalLM

    write_tiny(directory, config)
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.float32).save_pretrained(
        directory
    )
    return directory


# Checkpoints


def train_on(rank: Rank, layout: ParallelLayout, directory: Path, *, loads: bool, **options: Any) -> Any:
    """Two steps, a save and two more; or a load and the last two."""
    groups = rank.start(layout)
    engine = make_engine(UNTIED, groups, lora=LORA, **options)
    batch, minibatches = replica(recorded_batch(UNTIED.vocab_size), groups)
    if loads:
        draw_b(engine)  # what is not loaded shows
        engine.load(directory)
    else:
        for _ in range(2):
            engine.update_policy(batch, policy_update(), minibatches)
        engine.save(directory)
    metrics = [engine.update_policy(batch, policy_update(), minibatches) for _ in range(2)]
    return [values(m) for m in metrics if m is not None], factors(engine), base_weights(engine)


def both(results: list[Any]) -> Any:
    metrics = next(m for m, _, _ in results if m)
    return metrics, *(assemble(p for result in results for p in result[place]) for place in (1, 2))


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (ParallelLayout(tp=2, dp=2, sequence_parallel=True), {}),
        pytest.param(ParallelLayout(pp=2), {"dtype": "bfloat16", "distributed": False}, marks=pytest.mark.slow),
        pytest.param(ParallelLayout(), {"dtype": "bfloat16"}, marks=pytest.mark.slow),
    ],
    ids=["tp2-sp-dp2-sharded", "pp2-bf16", "one-bf16-sharded"],
)
def test_a_checkpoint_of_adapters_continues_bit_for_bit(
    ranks: RankPool, tmp_path: Path, layout: ParallelLayout, options: dict[str, Any]
):
    directory = tmp_path / "saved"
    expected = both(ranks(layout.world_size).run(train_on, layout, directory, loads=False, **options))
    found = both(ranks(layout.world_size).run(train_on, layout, directory, loads=True, **options))
    assert found[0] == expected[0]
    for mine, theirs in zip(found[1:], expected[1:], strict=True):
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_a_checkpoint_of_adapters_holds_no_frozen_weight_and_continues_at_another_layout(
    ranks: RankPool, tmp_path: Path
):
    directory, layout = tmp_path / "saved", ParallelLayout(tp=2, sequence_parallel=True)
    expected = both(ranks(2).run(train_on, layout, directory, loads=False))
    keys = {key for key in read_torch_dist(directory).tensors if not key.startswith("rng_state")}
    assert keys and all("adapters." in key for key in keys)
    with pytest.raises(CheckpointError, match="adapters without the weights"):
        open_source(directory, spec=UNTIED)
    found = both(ranks(4).run(train_on, ParallelLayout(pp=2, dp=2), directory, loads=True))
    for mine, theirs in zip(found[1:], expected[1:], strict=True):
        for name, tensor in theirs.items():
            torch.testing.assert_close(mine[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def try_to_load(rank: Rank, directory: Path, lora: LoraConfig | None, seed: int) -> str | None:
    engine = make_engine(UNTIED, rank.start(ParallelLayout()), lora=lora, seed=seed)
    try:
        engine.load(directory)
    except MegarlError as error:
        return str(error)
    return None


def save_fresh(rank: Rank, directory: Path) -> None:
    make_engine(UNTIED, rank.start(ParallelLayout()), lora=LORA).save(directory)


def test_a_checkpoint_of_other_adapters_or_another_base_is_refused(ranks: RankPool, tmp_path: Path):
    ranks(1).run(save_fresh, tmp_path / "saved")
    cases = [
        (LORA, 3, None),
        (LORA.model_copy(update={"rank": 8, "alpha": 1.0}), 3, "alpha 6.0 instead of 1.0, rank 4 instead of 8"),
        (ATTENTION, 3, "targets"),
        (LORA, 4, "other frozen weights"),
        (None, 3, "holds adapters of frozen weights, the run trains whole weights"),
    ]
    for lora, seed, expected in cases:
        (error,) = ranks(1).run(try_to_load, tmp_path / "saved", lora, seed)
        assert (error is None) if expected is None else (expected in str(error)), error


# Refusals


def build(rank: Rank, spec: ModelSpec, layout: ParallelLayout) -> tuple[str, str] | None:
    try:
        make_engine(spec, rank.start(layout), lora=LORA)
    except (ModelError, LayoutError) as error:
        return type(error).__name__, str(error)
    return None


def test_adapters_on_experts_and_stages_without_layers_are_refused(ranks: RankPool):
    (found,) = ranks(1).run(build, EXPERTS, ParallelLayout())
    assert found is not None and found[0] == "ModelError" and "linear_fc1, linear_fc2" in found[1]
    (found,) = ranks(1).run(build, LATENT, ParallelLayout())
    assert found is not None and found[0] == "ModelError" and "latent attention takes no adapters" in found[1]
    layout = ParallelLayout(pp=2, vpp=2, pipeline="Ett|t|t|L")
    for found in ranks(2).run(build, UNTIED, layout):
        assert found is not None and found[0] == "LayoutError" and "stage 1" in found[1]
