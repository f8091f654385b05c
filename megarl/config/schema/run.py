"""The run itself: name, place, length, checkpoints, what is logged; and the two root configurations."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megarl.config.schema.algorithm import AlgorithmConfig
from megarl.config.schema.base import StrictModel
from megarl.config.schema.data import DataConfig, RewardConfig, SourceConfig
from megarl.config.schema.roles import (
    ActorConfig,
    CriticConfig,
    ModelConfig,
    RolloutConfig,
    SyncConfig,
)


class RunConfig(StrictModel):
    """Identity and length of a run."""

    name: str = "run"
    """Name of the run."""
    dir: str = "runs/${run.name}"
    """Directory of everything the run writes."""
    steps: int = Field(100, ge=1)
    """Controller steps."""
    seed: int = 1
    """Seed of weights, data order, sampling and minibatches."""
    resume: str = "auto"
    """auto continues from the newest complete checkpoint in the run directory if there is one; never refuses a run
    directory that holds one; a path continues from that checkpoint."""
    stop_within_s: float = Field(540.0, gt=0)
    """Seconds from SIGUSR1 within which the run saves and ends; a Slurm script sets it from its own --signal line."""


class HangConfig(StrictModel):
    """What happens to a phase that does not end."""

    factor: float = Field(10.0, gt=1)
    """A phase is overdue at so many times the median of its latest runs, but not before after_s."""
    after_s: float = Field(600.0, gt=0)
    """Seconds before which no phase is overdue."""
    timeout_s: float = Field(7200.0, gt=0)
    """Longest wait for a call on processes of the run; a phase that has not run before is overdue then."""
    action: Literal["end", "report"] = "end"
    """end writes who waits where and ends the run; report writes it and goes on, until timeout_s."""


class ClusterConfig(StrictModel):
    """What the run may use."""

    device: Literal["cpu", "cuda"] = "cuda"
    """cpu runs everything over gloo; cuda over NCCL."""
    num_nodes: int = Field(1, ge=1)
    """Nodes."""
    gpus_per_node: int = Field(8, ge=0)
    """GPUs of a node; 0 on CPU."""
    placement: Literal["colocated", "split"] = "colocated"
    """colocated: rollout engines share the actor's devices in turn; split: they have their own."""
    ray_address: str | None = None
    """Address of a running Ray cluster; None starts one for this run and stops it at the end."""
    collective_timeout_s: float = Field(600.0, gt=0)
    """Time-out of collectives among training ranks, and among the ranks of an engine."""
    start_timeout_s: float = Field(900.0, gt=0)
    """Time for all workers and engines to come up."""
    hang: HangConfig = HangConfig()
    """Phases that do not end."""


class CheckpointConfig(StrictModel):
    """Saving."""

    every_steps: int | None = Field(None, ge=1)
    """Save each so many steps; None saves at the end only."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints kept."""
    keep_every_steps: int | None = Field(None, ge=1)
    """Checkpoints of steps that this divides are kept for good; None keeps the newest only."""
    background: bool = False
    """Wait only until the ranks have copied their state into host memory, and write behind the next steps."""
    at_end: bool = True
    """Save after the last step."""
    export_hf: bool = True
    """Write the trained model as a Hugging Face directory at the end."""
    export_hf_every: int | None = Field(None, ge=1)
    """Write the model under training as well, into exports/, with each so many saves of every_steps."""


class ResumeConfig(StrictModel):
    """Continuing from a checkpoint (run.resume says which)."""

    allow_fresh: list[Literal["optimizer", "scheduler", "rng", "data", "kl", "metrics", "critic"]] = Field(
        default_factory=list
    )
    """Parts that may start afresh where the checkpoint has none, or one that does not fit this run; any other part that
    is missing or superfluous is refused."""


class ValidationConfig(StrictModel):
    """Greedy evaluation on held-out prompts."""

    every_steps: int | None = Field(None, ge=1)
    """Validate each so many steps; None only at the start and the end."""
    at_start: bool = True
    """Validate before the first step."""
    at_end: bool = True
    """Validate after the last step."""
    prompts: int = Field(256, ge=1)
    """Held-out prompts used, the first of the source."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    show_samples: int = Field(3, ge=0)
    """Decoded samples shown with their scores."""


class LoggingConfig(StrictModel):
    """Where numbers go, beside metrics.jsonl in the run directory."""

    console: Literal["auto", "live", "plain", "off"] = "auto"
    """live redraws in a terminal, plain prints lines; auto chooses by the terminal."""
    tensorboard: bool = True
    """Write TensorBoard event files into the run directory."""
    wandb_project: str | None = None
    """Weights & Biases project; None logs nothing there."""
    wandb_timeout_s: float = Field(90.0, gt=0)
    """Longest wait for Weights & Biases at the start, and at the end for what is not uploaded yet."""


class TrainConfig(StrictModel):
    """Root of ``megarl train``."""

    run: RunConfig = RunConfig()
    """Identity and length of the run."""
    cluster: ClusterConfig = ClusterConfig()
    """Devices and nodes."""
    model: ModelConfig
    """The policy's model."""
    data: DataConfig
    """Prompts."""
    reward: RewardConfig = RewardConfig()
    """Scoring."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantages and losses."""
    actor: ActorConfig = ActorConfig()
    """The policy under training."""
    critic: CriticConfig | None = None
    """The value model; required by estimators that need values, refused by the others."""
    rollout: RolloutConfig = RolloutConfig()
    """Generation."""
    sync: SyncConfig = SyncConfig()
    """Weight updates to the rollout engines."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving."""
    resume: ResumeConfig = ResumeConfig()
    """Continuing."""
    validation: ValidationConfig = ValidationConfig()
    """Held-out evaluation."""
    logging: LoggingConfig = LoggingConfig()
    """Where numbers go."""


class SftDataConfig(StrictModel):
    """Chat data of supervised fine-tuning."""

    train: list[SourceConfig] = Field(min_length=1)
    """Training sources. A file row holds chat messages (or a prompt and an answer column); a reasoning-gym task is
    trained on its own answers."""
    validation: list[SourceConfig] = Field(default_factory=list)
    """Held-out sources of the evaluation loss."""
    sequences_per_step: int = Field(128, ge=1)
    """Sequences of one optimizer update over all data-parallel ranks."""
    max_tokens: int = Field(4096, ge=1)
    """Longest sequence."""
    overlong: Literal["error", "drop", "truncate-right"] = "error"
    """What to do with a longer sequence; counted."""
    system_prompt: str | None = None
    """System message put before every conversation."""
    apply_chat_template: bool = True
    """Render conversations with the tokenizer's chat template; false joins prompt and answer as they are."""
    shuffle: bool = True
    """Visit sequences in a seeded random order, another one each epoch."""


class SftConfig(StrictModel):
    """Root of ``megarl sft``."""

    run: RunConfig = RunConfig()
    """Identity and length of the run."""
    cluster: ClusterConfig = ClusterConfig()
    """Devices and nodes."""
    model: ModelConfig
    """The model."""
    data: SftDataConfig
    """Chat data."""
    actor: ActorConfig = ActorConfig()
    """Layout, engine and optimizer of the model."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving."""
    resume: ResumeConfig = ResumeConfig()
    """Continuing."""
    eval_every_steps: int | None = Field(None, ge=1)
    """Evaluation loss each so many steps; None only at the end."""
    logging: LoggingConfig = LoggingConfig()
    """Where numbers go."""
