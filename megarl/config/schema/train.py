"""The training side of a role: precision, optimizer, microbatches."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megarl.config.schema.base import StrictModel


class ScheduleConfig(StrictModel):
    """Learning rate over optimizer steps."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    """Decay after the warm-up."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps over which the rate rises linearly from zero."""
    decay_steps: int | None = Field(None, ge=1)
    """Optimizer steps at which the decay reaches min_lr; null is the last one of the run."""
    min_lr: float = Field(0.0, ge=0)
    """Rate at the end of the decay and after it."""


class OptimizerConfig(StrictModel):
    """Adam with decoupled weight decay."""

    lr: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Adam's first moment decay."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Adam's second moment decay."""
    eps: float = Field(1e-8, gt=0)
    """Adam's epsilon."""
    clip_grad: float = Field(1.0, ge=0)
    """Largest global gradient norm; 0 does not clip."""
    distributed: bool = True
    """Shard optimizer state over data-parallel ranks (Megatron's distributed optimizer)."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning-rate schedule."""


class EngineConfig(StrictModel):
    """How one Megatron model is held and run."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of weights and activations. Gradients are accumulated and reduced in float32 either way."""
    microbatch_tokens: int = Field(16384, ge=1)
    """Most tokens (prompt and response) of one microbatch on one data-parallel rank, never exceeded, in training."""
    inference_microbatch_tokens: int | None = Field(None, ge=1)
    """The same for log-prob and value passes without gradients; None uses microbatch_tokens."""
    logits_chunk_tokens: int = Field(1024, ge=1)
    """Tokens whose float32 logits are held at once when log-probs and entropy are computed."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recompute: none, core attention only, or whole layers."""
    offload: bool = False
    """Move weights, gradients and optimizer state to host memory between phases (colocated roles on GPU)."""
