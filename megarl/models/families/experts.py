"""The weight rules of expert layers, in Megatron-Core's names and those that checkpoints use.

Names were read from megatron-core 0.16.1 and 0.19.2 (``core/transformer/moe``) and from checkpoints that transformers
saves: one tensor a matrix and expert, though transformers 5 holds them stacked in memory. A layer of experts keeps its
norm apart in both naming schemes.
"""

from __future__ import annotations

from megarl.models.families.dense import H, M
from megarl.models.rules import ROUTING_BIAS, Replicate, Rule, Split, Stack, Tensor


def expert_rules(
    module: str = "mlp", *, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[Rule, ...]:
    """Norm, router and routed experts under a module of this name."""
    expert = H + module + ".experts.{expert}."
    return (
        Rule(
            M + "pre_mlp_layernorm.weight",
            (Tensor(H + "post_attention_layernorm.weight", ("hidden",)),),
            Replicate(),
            "layer",
            when=("expert_layer",),
        ),
        Rule(
            M + "mlp.router.weight",
            (Tensor(H + module + ".gate.weight", ("experts", "hidden")),),
            Replicate(),
            "layer",
            when=("expert_layer",),
        ),
        Rule(
            M + "mlp.router.expert_bias",
            (Tensor(H + module + ROUTING_BIAS, ("experts",)),),
            Replicate(),
            "layer",
            when=("expert_bias",),
        ),
        Rule(
            M + "mlp.experts.local_experts.{expert}.linear_fc1.weight",
            (
                Tensor(expert + gate + ".weight", ("expert_ffn", "hidden")),
                Tensor(expert + up + ".weight", ("expert_ffn", "hidden")),
            ),
            Stack(),
            "layer",
            when=("expert_layer",),
            grouped=M + "mlp.experts.linear_fc1.weight{expert}",
        ),
        Rule(
            M + "mlp.experts.local_experts.{expert}.linear_fc2.weight",
            (Tensor(expert + down + ".weight", ("hidden", "expert_ffn")),),
            Split(1),
            "layer",
            when=("expert_layer",),
            grouped=M + "mlp.experts.linear_fc2.weight{expert}",
        ),
    )


def shared_expert_rules(module: str) -> tuple[Rule, ...]:
    """The experts that every token visits, one wide module of this name, and their gate."""
    return (
        Rule(
            M + "mlp.shared_experts.linear_fc1.weight",
            (
                Tensor(H + module + ".gate_proj.weight", ("shared_ffn", "hidden")),
                Tensor(H + module + ".up_proj.weight", ("shared_ffn", "hidden")),
            ),
            Stack(),
            "layer",
            when=("shared_experts",),
        ),
        Rule(
            M + "mlp.shared_experts.linear_fc2.weight",
            (Tensor(H + module + ".down_proj.weight", ("hidden", "shared_ffn")),),
            Split(1),
            "layer",
            when=("shared_experts",),
        ),
        Rule(
            M + "mlp.shared_experts.gate_weight",
            (Tensor(H + module + "_gate.weight", ("one", "hidden")),),
            Replicate(),
            "layer",
            when=("shared_gate",),
        ),
    )
