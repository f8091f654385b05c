"""Whether a model fits a configuration, from ``config.json`` alone."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.schema import SftConfig, TrainConfig
from megarl.config.schema.parallel import LayoutConfig
from megarl.errors import LayoutError
from megarl.models import ModelSpec, load_spec
from megarl.parallel.grid import ParallelLayout


def check_model(config: TrainConfig | SftConfig) -> list[str]:
    """Everything the model does not allow, each line with the key to change.

    Raises:
        ModelError: a model directory cannot be read, or holds an option that megarl cannot represent.
    """
    spec = load_spec(config.model.path)
    problems = [*_training("actor", config.actor.layout, spec), *_positions(config, spec)]
    if isinstance(config, TrainConfig):
        problems += _engine(config.rollout.tp, spec)
        if config.critic is not None:
            critic = load_spec(config.critic.path) if config.critic.path is not None else spec
            problems += _training("critic", config.critic.layout, critic)
            if critic.vocab_size != spec.vocab_size:
                problems.append(
                    f"critic.path: expected the policy's vocabulary of {spec.vocab_size}, since the critic reads the "
                    f"policy's tokens, found {critic.vocab_size}"
                )
    return problems


def _training(role: str, layout: LayoutConfig, spec: ModelSpec) -> Iterator[str]:
    # Key-value heads are whole on a training rank: Megatron-Core 0.16 refuses anything else.
    for what, count in (
        ("attention heads", spec.num_heads),
        ("key-value heads", spec.num_kv_heads),
        ("feed-forward rows", spec.ffn_hidden_size),
    ):
        if count % layout.tp:
            yield f"{role}.layout.tp: expected a divisor of the model's {count} {what}, found {layout.tp}"
    grid = ParallelLayout(
        pp=layout.pp,
        first_stage_layers=layout.num_layers_in_first_stage,
        last_stage_layers=layout.num_layers_in_last_stage,
    )
    try:
        grid.layers_of_stage(spec.num_layers, 0)
    except LayoutError as error:
        yield f"{role}.layout.pp: expected even stages of the model's {spec.num_layers} layers, found {error.problem}"


def _engine(tp: int, spec: ModelSpec) -> Iterator[str]:
    if spec.num_heads % tp:
        yield f"rollout.tp: expected a divisor of the model's {spec.num_heads} attention heads, found {tp}"
    # vLLM copies a key-value head to several ranks where there are fewer heads than ranks.
    if spec.num_kv_heads % tp and tp % spec.num_kv_heads:
        heads = f"the model's {spec.num_kv_heads} key-value heads"
        yield f"rollout.tp: expected a divisor or a multiple of {heads}, found {tp}"
    if spec.ffn_hidden_size % tp:
        yield f"rollout.tp: expected a divisor of the model's {spec.ffn_hidden_size} feed-forward rows, found {tp}"


def _positions(config: TrainConfig | SftConfig, spec: ModelSpec) -> Iterator[str]:
    if isinstance(config, SftConfig):
        key, longest = "data.max_tokens", config.data.max_tokens
    else:
        key = "rollout.max_model_len"
        longest = config.data.max_prompt_tokens + config.rollout.sampling.max_tokens
        if config.rollout.max_model_len is not None:
            longest = config.rollout.max_model_len
    if longest > spec.max_position:
        yield f"{key}: expected at most {spec.max_position}, the model's positions, found {longest}"
