"""The training side of a role: precision, optimizer, microbatches."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megarl.config.schema.base import StrictModel


class ScheduleConfig(StrictModel):
    """Learning rate over optimizer steps."""

    kind: Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"] = "constant"
    """After the warm-up: constant; linear or cosine decay to min_lr; peak * sqrt(warm-up / step); or stable at the peak
    until a linear cooldown at the end (warm-up, stable, decay)."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps over which the rate rises linearly from zero."""
    decay_steps: int | None = Field(None, ge=1)
    """Optimizer steps at which the decay reaches min_lr; null is the last one of the run."""
    cooldown_steps: int | None = Field(None, ge=1)
    """Last of the decay_steps, over which wsd falls to min_lr; null is a tenth of those after the warm-up."""
    min_lr: float = Field(0.0, ge=0)
    """Rate at the end of the decay and after it; the least of inverse_sqrt."""


StateDtype = Literal["float32", "bfloat16", "float16"]
STATE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


class OptimizerConfig(StrictModel):
    """How a gradient becomes an update."""

    kind: Literal["adam", "sgd", "muon"] = "adam"
    """adam with decoupled weight decay; sgd with momentum, its weight decay part of the gradient; muon, which
    orthogonalizes the updates of hidden matrices and leaves the rest to adam (Python 3.12 with emerging-optimizers)."""
    lr: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay of matrices; norms and biases have none."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Adam's first moment decay."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Adam's second moment decay."""
    eps: float = Field(1e-8, gt=0)
    """Adam's epsilon."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of sgd and muon."""
    clip_grad: float = Field(1.0, ge=0)
    """Largest global gradient norm; 0 does not clip."""
    max_skipped_steps: int = Field(10, ge=0)
    """Updates that may be skipped in a row because their gradient is not finite; one more ends the run, with the names
    of the tensors it was found in."""
    distributed: bool = True
    """Shard optimizer state over data-parallel ranks (Megatron's distributed optimizer; adam only)."""
    overlap_grad_reduce: bool = False
    """Reduce gradients over data-parallel ranks in buckets while the last microbatch's backward pass still runs."""
    overlap_param_gather: bool = False
    """Gather the weights of an update from data-parallel ranks in buckets while the next pass runs; needs
    distributed and overlap_grad_reduce."""
    cpu_offload_fraction: float = Field(0.0, ge=0, le=1)
    """Share of a rank's optimizer state, with the float32 copies of its weights, that lies in host memory and is
    updated by the host's cores (Megatron's HybridDeviceOptimizer; adam, distributed)."""
    overlap_cpu_offload: bool = False
    """Copy gradients to the host, and updated weights back, while it updates others."""
    precision_aware: bool = False
    """Transformer Engine's Adam keeps of float32 weights what bfloat16 ones lack, 16 bits, and moments in the dtypes
    below (adam, distributed; GPU)."""
    exp_avg_dtype: StateDtype = "float32"
    """Dtype of Adam's first moment with precision_aware."""
    exp_avg_sq_dtype: StateDtype = "float32"
    """Dtype of Adam's second moment with precision_aware."""
    main_params_dtype: Literal["float32", "float16"] = "float32"
    """Dtype in which precision_aware keeps the weights that are updated."""
    main_grads_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which gradients of bfloat16 weights are accumulated and reduced; bfloat16 needs precision_aware or
    cpu_offload_fraction."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning-rate schedule."""

    @property
    def num_moments(self) -> int:
        """Numbers of state per parameter beside its float32 copy; muon, with one or two, counts as two."""
        if self.kind == "sgd":
            return 1 if self.momentum > 0 else 0
        return 2

    @property
    def moment_bytes(self) -> int:
        """Bytes of a parameter's moments where the device updates it."""
        if self.precision_aware:
            return STATE_BYTES[self.exp_avg_dtype] + STATE_BYTES[self.exp_avg_sq_dtype]
        return STATE_BYTES["float32"] * self.num_moments


LoraTarget = Literal["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
ATTENTION_TARGETS: tuple[LoraTarget, ...] = ("linear_qkv", "linear_proj")
"""Targets that every layer has; the others are experts where a layer is a mixture of them."""
COLUMN_PARALLEL_TARGETS: tuple[LoraTarget, ...] = ("linear_qkv", "linear_fc1")
"""Targets whose rows tensor-parallel ranks share out; of the others it is the columns."""


class LoraConfig(StrictModel):
    """Low-rank adapters (arXiv:2106.09685): the model's weights are frozen and (alpha / rank) B A is trained beside."""

    rank: int = Field(16, ge=1)
    """Rows of A and columns of B. A is drawn (Kaiming uniform), B starts at zero."""
    alpha: float = Field(32.0, gt=0)
    """The product is scaled by alpha / rank."""
    targets: list[LoraTarget] = Field(default=["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"], min_length=1)
    """Linear layers with an adapter, by Megatron's names: linear_qkv is q_proj, k_proj and v_proj, which share their A,
    linear_proj o_proj, linear_fc1 gate_proj and up_proj, linear_fc2 down_proj. Experts take none."""


class EngineConfig(StrictModel):
    """How one Megatron model is held and run."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of weights and activations. Gradients are accumulated and reduced in float32 either way, unless
    optimizer.main_grads_dtype says otherwise."""
    fp8: Literal["e4m3", "hybrid"] | None = None
    """Multiply in FP8 in the layers (Transformer Engine): e4m3 in both directions, or hybrid with e5m2 for gradients.
    Weights stay bfloat16, so exports, updates and checkpoints are as without; the head multiplies in bfloat16."""
    fp8_recipe: Literal["blockwise", "tensorwise", "mxfp8"] = "blockwise"
    """What shares a scale: blocks of 128 tokens or features (Hopper and later), whole tensors, or blocks of 32 (mxfp8,
    Blackwell). Block scales do not depend on what else is in a microbatch, in the forward pass."""
    microbatch_tokens: int = Field(16384, ge=1)
    """Most tokens (prompt and response) of one microbatch on one data-parallel rank, never exceeded, in training."""
    inference_microbatch_tokens: int | None = Field(None, ge=1)
    """The same for passes without gradients: log-probs, values, and the evaluation of supervised fine-tuning; None uses
    microbatch_tokens."""
    logits_chunk_tokens: int = Field(1024, ge=1)
    """Tokens whose float32 logits are held at once when log-probs and entropy are computed."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recompute: none, core attention only, or whole layers."""
    share_prompts: bool | None = None
    """Compute a prompt once for all samples of it in a microbatch: the same log-probs and gradients for less work. null
    does where the core attention can: on CPU without context parallelism; true is refused elsewhere."""
    moe_aux_loss_coef: float = Field(0.0, ge=0)
    """Coefficient of the load-balancing loss of a mixture of experts in training: each sequence's, which is 1 where all
    experts get as many tokens, averaged over the minibatch's sequences and summed over layers."""
    moe_bias_update_rate: float = Field(0.0, ge=0)
    """By how much an update raises the bias of experts with fewer tokens than the mean, and lowers that of those with
    more (DeepSeek-V3, GLM-4.5), padding not counted; 0 leaves biases as they are."""
    offload: bool = False
    """Move the role's weights, gradients and optimizer state to host memory while colocated engines sample, and let the
    engines sleep while training runs (GPU). The reference policy moves with the actor."""

    @property
    def fp8_multiple(self) -> int:
        """Sides of every matrix that is multiplied in FP8 are multiples of it; 1 without FP8.

        Megatron-Core's ``get_fp8_align_size`` (fp8_utils.py): 16 for the kernels, 32 for the blocks of mxfp8.
        """
        if self.fp8 is None:
            return 1
        return 32 if self.fp8_recipe == "mxfp8" else 16
