"""The roles of a run: actor, critic, reference, rollout."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megarl.config.schema.base import StrictModel
from megarl.config.schema.parallel import LayoutConfig
from megarl.config.schema.train import EngineConfig, LoraConfig, OptimizerConfig


class ModelConfig(StrictModel):
    """The policy's model."""

    path: str
    """Hugging Face directory: config.json, tokenizer files and, unless init is random, safetensors."""
    init: Literal["checkpoint", "random"] = "checkpoint"
    """Start from the directory's weights, or from random ones with the directory's configuration."""


class ActorConfig(StrictModel):
    """The policy under training."""

    layout: LayoutConfig = LayoutConfig()
    """Parallel layout."""
    engine: EngineConfig = EngineConfig()
    """Precision, microbatches, recompute."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer and schedule."""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of the weights; the reference policy is then the model without them."""


class CriticConfig(StrictModel):
    """The value model; used when the advantage estimator needs values."""

    path: str | None = None
    """Hugging Face directory to start from; None starts from the policy's model. The value head starts at zero."""
    layout: LayoutConfig = LayoutConfig()
    """Parallel layout."""
    engine: EngineConfig = EngineConfig()
    """Precision, microbatches, recompute."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
    """Optimizer and schedule."""
    lora: LoraConfig | None = None
    """Train low-rank adapters and the value head instead of the weights."""
    clip_value: float = Field(0.2, gt=0)
    """Values are clipped to within this of the values before the update."""
    warmup_steps: int = Field(0, ge=0)
    """First steps in which only the critic is updated."""
    minibatch_size: int | None = Field(None, ge=1)
    """Responses per critic update; None uses algorithm.minibatch_size."""
    epochs: int = Field(1, ge=1)
    """Passes over the batch in one step."""


class SamplingConfig(StrictModel):
    """How responses are sampled."""

    temperature: float = Field(1.0, ge=0)
    """Softmax temperature; 0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling; below 1 the engine's log-probs are not those of the full softmax."""
    top_k: int = Field(-1, ge=-1)
    """Sample among the k likeliest tokens; -1 among all."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Drop tokens less likely than this fraction of the likeliest."""
    max_tokens: int = Field(1024, ge=1)
    """Longest response in tokens."""
    stop_token_ids: list[int] = Field(default_factory=list)
    """Further tokens that end a response, beside the tokenizer's end-of-sequence token."""


class RolloutConfig(StrictModel):
    """Generation by vLLM engines."""

    replicas: int = Field(1, ge=1)
    """Independent engines over which prompts are spread."""
    tp: int = Field(1, ge=1)
    """Tensor-parallel size of one engine."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of the engines' weights; updates are converted by the sender."""
    samples_per_prompt: int = Field(8, ge=1)
    """Responses per prompt (the group size)."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling in training."""
    max_model_len: int | None = Field(None, ge=1)
    """Longest prompt plus response; None adds data.max_prompt_tokens and sampling.max_tokens."""
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    """Share of GPU memory an engine may take (CUDA)."""
    kv_cache_gib: float = Field(1.0, gt=0)
    """Key-value cache of one engine in GiB (CPU)."""
    max_num_seqs: int = Field(256, ge=1)
    """Most sequences an engine runs at once."""
    enforce_eager: bool = False
    """Run without CUDA graphs and compilation."""
    threads_per_rank: int = Field(1, ge=1)
    """Compute threads of an engine's tensor-parallel rank (CPU)."""


class SyncConfig(StrictModel):
    """Weight updates from the actor to the rollout engines."""

    bucket_mib: int = Field(512, ge=1)
    """Most bytes moved at once, in MiB. Every rank that sends or receives holds two buckets beside its weights."""
    verify: Literal["checksum", "values", "off"] = "checksum"
    """What is compared before an update is committed: checksums of what was sent and of what every engine rank holds;
    with values also log-probs of fixed tokens, as the engines and as the trainer compute them."""
    checksum_every: int = Field(16, ge=1)
    """Of so many groups of 16 rows of whatever travels, checksums cover one, and another in each update. The first
    update and the one after a failure cover all; 1 always covers all, which on CPU makes updates longer."""
    transport: Literal["auto", "network", "host"] = "auto"
    """auto shares memory between trainer and engine ranks of one machine and uses gloo or NCCL else; network always
    uses those; host refuses anything but shared memory."""
    in_flight: Literal["finish", "abort", "continue"] = "finish"
    """Samples under way when an update begins: wait until they finish, abort them, or freeze them and continue under
    the new weights, each token with its version."""
    timeout_s: float = Field(600.0, gt=0)
    """An update that takes longer fails and poisons its version."""
