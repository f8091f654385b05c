"""Operations against a hand count and against torch's counter on a real model; speeds from them."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megarl.controller.speed import UPDATE_FACTOR, PhaseWork, forward_flops, peak_of, speed, update_flops
from megarl.models import spec_from_config
from megarl.models.tiny import tiny_config
from megarl.planning.gpus import GPUS

CONFIG = tiny_config(hidden_size=64, intermediate_size=96, head_dim=16)


def test_forward_operations_are_those_of_a_hand_count():
    spec = spec_from_config(CONFIG)
    queries, keys = spec.num_heads * 16, spec.num_kv_heads * 16
    layer = 2 * (64 * queries + 2 * 64 * keys + queries * 64 + 3 * 64 * 96)
    # Scores and weighted values: two operations for each of the attended positions, on average half the sequence.
    attention = [2 * 2 * queries * length * length / 2 for length in (5, 12)]
    head = 2 * 64 * spec.vocab_size
    expected = (5 + 12) * (spec.num_layers * layer + head) + spec.num_layers * sum(attention)
    assert forward_flops(spec, torch.tensor([5, 12])) == expected
    assert forward_flops(spec, torch.tensor([5, 12]), value_head=True) == expected - 17 * (head - 2 * 64)


def test_operations_are_what_torch_counts():
    from transformers import AutoConfig, AutoModelForCausalLM

    spec, length = spec_from_config(CONFIG), 24
    config = AutoConfig.for_model(**CONFIG)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    tokens = torch.arange(length)[None]
    with FlopCounterMode(display=False) as forward:
        logits = model(tokens).logits
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    # Eager attention computes what the causal mask then hides.
    _, per_token_squared = spec.sequence_cost()
    hidden = per_token_squared * length**2
    expected = forward_flops(spec, torch.tensor([length])) + hidden
    assert forward.get_total_flops() == pytest.approx(expected, rel=0.01)  # rotary frequencies are a product too
    assert forward.get_total_flops() + backward.get_total_flops() == pytest.approx(UPDATE_FACTOR * expected, rel=0.01)
    with_weights = update_flops(spec, torch.tensor([length])) + UPDATE_FACTOR * hidden
    assert with_weights == pytest.approx(UPDATE_FACTOR * expected)
    frozen = update_flops(spec, torch.tensor([length]), is_frozen=True) + UPDATE_FACTOR * hidden
    assert forward.get_total_flops() + frozen_backward(model, tokens) == pytest.approx(frozen, rel=0.01)


def frozen_backward(model: torch.nn.Module, tokens: torch.Tensor) -> int:
    """Operations of the backward pass to the embedded tokens where no weight gets a gradient."""
    model.requires_grad_(False)
    embedded = model.get_input_embeddings()(tokens).requires_grad_()
    logits = model(inputs_embeds=embedded).logits
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    return backward.get_total_flops()


def test_speed_is_work_over_seconds_and_ranks():
    work = {"update_actor": PhaseWork(8e12, 4), "values": PhaseWork(1e12, 2)}
    assert speed(work, {"update_actor": 0.5, "rollout": 3.0}, None) == {"perf/tflops/update_actor": 4.0}
    both = speed(work, {"update_actor": 0.5, "values": 0.0}, 16e12)
    assert both == {"perf/tflops/update_actor": 4.0, "perf/mfu/update_actor": 0.25}


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA H200", "h200"),
    ],
)
def test_a_device_is_known_by_its_name(device: str, kind: str):
    assert peak_of(device, {name: gpu.peak_flops for name, gpu in GPUS.items()}) == GPUS[kind].peak_flops


def test_another_device_has_no_known_peak():
    assert peak_of("cpu", {"h100": 1.0}) is None
    assert peak_of("NVIDIA H1000", {"h100": 1.0}) is None
