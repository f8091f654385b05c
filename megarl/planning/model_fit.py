"""Whether the model divides into the layouts and its sequences fit, from ``config.json`` alone."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.schema import SftConfig, TrainConfig
from megarl.config.schema.parallel import LayoutConfig
from megarl.config.schema.roles import ActorConfig, CriticConfig
from megarl.config.schema.train import ATTENTION_TARGETS
from megarl.errors import LayoutError
from megarl.models import ModelSpec, load_spec
from megarl.parallel.grid import ParallelLayout, pipeline_stages
from megarl.planning.finding import Finding

MOST_VOCABULARY_PADDING = 0.1
"""Padding rows of the vocabulary, as a share of the model's, above which they are worth a remark."""


def check_model(config: TrainConfig | SftConfig) -> list[Finding]:
    """Everything the model does not allow.

    Raises:
        ModelError: a model directory cannot be read, or holds an option that megarl cannot represent.
    """
    spec = load_spec(config.model.path)
    critic = config.critic if isinstance(config, TrainConfig) else None
    critic_spec = spec if critic is None or critic.path is None else load_spec(critic.path)
    return check_specs(config, spec, critic_spec)


def check_specs(config: TrainConfig | SftConfig, spec: ModelSpec, critic_spec: ModelSpec) -> list[Finding]:
    """The same for specs that have been read; ``critic_spec`` is the policy's where the critic starts from it."""
    findings = [*_training("actor", config.actor, spec, config.cluster.device), *_positions(config, spec)]
    findings += _overlap(config, {"actor": spec, "critic": critic_spec})
    if isinstance(config, TrainConfig):
        findings += _engine(config.rollout.tp, spec)
        if strange := [token for token in config.rollout.sampling.stop_token_ids if not 0 <= token < spec.vocab_size]:
            key = "rollout.sampling.stop_token_ids"
            expected = f"tokens of the model's vocabulary of {spec.vocab_size}"
            findings.append(_model(key, expected, ", ".join(map(str, strange)), "give ids of the model's tokenizer"))
        if config.critic is not None:
            findings += _training("critic", config.critic, critic_spec, config.cluster.device)
            if critic_spec.vocab_size != spec.vocab_size:
                expected = f"the policy's vocabulary of {spec.vocab_size}, since the critic reads the policy's tokens"
                fix = "choose a critic of the policy's family, or remove critic.path to start from the policy"
                findings.append(_model("critic.path", expected, critic_spec.vocab_size, fix))
    return findings


def trained(config: TrainConfig | SftConfig) -> Iterator[tuple[str, ActorConfig | CriticConfig]]:
    """The roles under training by name."""
    yield "actor", config.actor
    if isinstance(config, TrainConfig) and config.critic is not None:
        yield "critic", config.critic


def _model(key: str, expected: str, found: object, fix: str) -> Finding:
    return Finding("model", key, f"expected {expected}, found {found}", fix)


def _training(role: str, config: ActorConfig | CriticConfig, spec: ModelSpec, device: str) -> Iterator[Finding]:
    layout = config.layout
    if spec.not_trained is not None:
        key = "model.path" if role == "actor" else f"{role}.path"
        fix = "use another model; `megarl plan sync` and the converters take this one"
        yield _model(key, f"a model that megarl trains, which {spec.not_trained} is not yet", spec.family, fix)
    if device == "cuda" and spec.not_trained_on_gpu is not None:
        key = "model.path" if role == "actor" else f"{role}.path"
        expected = f"a model that megarl trains on GPU, which {spec.not_trained_on_gpu} is not"
        fix = "use a model whose queries have a latent (DeepSeek-V3's form), or set cluster.device=cpu"
        yield _model(key, expected, spec.family, fix)
    # Key-value heads are whole on a training rank: Megatron-Core 0.16 refuses anything else.
    sizes = spec.split_rows
    if spec.mla is not None and device == "cpu":
        sizes |= spec.mla.split_rows
    allowed = [tp for tp in range(1, spec.num_kv_heads + 1) if all(size % tp == 0 for size in sizes.values())]
    key = f"{role}.layout.tp"
    for what, count in sizes.items():
        if count % layout.tp:
            yield _model(key, f"a divisor of the model's {count} {what}", layout.tp, f"set {key} to {_one_of(allowed)}")
    yield from _stages(role, layout, spec)
    yield from _experts(role, layout, spec)
    if spec.moe is None and config.engine.moe_aux_loss_coef:
        key = f"{role}.engine.moe_aux_loss_coef"
        yield _model(key, f"0 for {spec.family}, which has no experts", config.engine.moe_aux_loss_coef, f"set {key}=0")
    has_bias = spec.moe is not None and spec.moe.expert_bias
    if config.engine.moe_bias_update_rate and not has_bias:
        key = f"{role}.engine.moe_bias_update_rate"
        expected = f"0 for {spec.family}, which has no bias that chooses experts"
        yield _model(key, expected, config.engine.moe_bias_update_rate, f"set {key}=0")
    yield from _adapters(role, config, spec)
    padded = ParallelLayout(tp=layout.tp).padded_vocab_size(spec.vocab_size)
    if padded > (1 + MOST_VOCABULARY_PADDING) * spec.vocab_size:
        problem = f"the vocabulary of {spec.vocab_size} is padded to {padded} rows for tp={layout.tp}"
        yield Finding("model", key, problem, f"a smaller {key} pads less", level="warning")


def _adapters(role: str, config: ActorConfig | CriticConfig, spec: ModelSpec) -> Iterator[Finding]:
    """Experts take none, and every stage needs one."""
    if config.lora is None:
        return
    if spec.mla is not None:
        key = f"{role}.lora"
        yield _model(key, f"null for {spec.family}, whose latent attention takes no adapters", "set", f"set {key}=null")
        return
    others = [target for target in config.lora.targets if target not in ATTENTION_TARGETS]
    if spec.moe is not None and others:
        key, allowed = f"{role}.lora.targets", ",".join(ATTENTION_TARGETS)
        yield _model(
            key, f"{allowed} for {spec.family}, whose experts take none", ",".join(others), f"{key}=[{allowed}]"
        )
    layout = config.layout
    if layout.pipeline is not None and 0 in pipeline_stages(layout.pipeline, layout.pp * layout.vpp):
        key = f"{role}.layout.pipeline"
        yield _model(
            key, "a layer in every stage, to train its adapters", layout.pipeline, f"give every stage of {key} a t"
        )


def _overlap(config: TrainConfig | SftConfig, specs: dict[str, ModelSpec]) -> Iterator[Finding]:
    """Experts on CPU run one by one: one without tokens gets no gradient, and its bucket is never reduced."""
    for role, part in trained(config):
        if part.optimizer.overlap_grad_reduce and config.cluster.device == "cpu" and specs[role].moe is not None:
            key = f"{role}.optimizer.overlap_grad_reduce"
            yield _model(key, "false for experts on CPU, which may get no gradient", "true", f"set {key}=false")


def _stages(role: str, layout: LayoutConfig, spec: ModelSpec) -> Iterator[Finding]:
    try:
        shape = ParallelLayout(
            pp=layout.pp,
            vpp=layout.vpp,
            pipeline=layout.pipeline,
            first_stage_layers=layout.num_layers_in_first_stage,
            last_stage_layers=layout.num_layers_in_last_stage,
        )
        shape.layers_of_stage(spec.num_layers, 0)
    except LayoutError as error:
        if layout.pipeline is not None or layout.vpp > 1:
            key = f"{role}.layout.{'pipeline' if layout.pipeline is not None else 'vpp'}"
            fix = f"spell the model's {spec.num_layers} layers, or choose pp and vpp whose product divides them"
            yield _model(key, f"stages of the model's {spec.num_layers} layers", error.problem, fix)
            return
        divisors = [pp for pp in range(1, min(spec.num_layers, 64) + 1) if spec.num_layers % pp == 0]
        fix = f"set {role}.layout.pp to {_one_of(divisors)}, or give first and last stage their own number of layers"
        yield _model(f"{role}.layout.pp", f"even stages of the model's {spec.num_layers} layers", error.problem, fix)


def _experts(role: str, layout: LayoutConfig, spec: ModelSpec) -> Iterator[Finding]:
    key = f"{role}.layout"
    if spec.moe is None:
        for axis in ("ep", "etp"):
            if (degree := getattr(layout, axis)) > 1:
                expected = f"1 for {spec.family}, which has no experts"
                yield _model(f"{key}.{axis}", expected, degree, f"set {key}.{axis} to 1")
        return
    if layout.tp > 1 and not layout.sequence_parallel:
        expected = "true for experts with tensor parallelism"
        yield _model(f"{key}.sequence_parallel", expected, "false", f"set {key}.sequence_parallel=true")
    for axis, what, size in (
        ("ep", "experts of a layer", spec.moe.num_experts),
        ("etp", "rows of an expert", spec.moe.ffn_hidden_size),
    ):
        if size % (degree := getattr(layout, axis)):
            fix = f"set {key}.{axis} to {_one_of([d for d in range(1, min(size, 64) + 1) if size % d == 0])}"
            yield _model(f"{key}.{axis}", f"a divisor of the model's {size} {what}", degree, fix)


def _engine(tp: int, spec: ModelSpec) -> Iterator[Finding]:
    # vLLM copies a key-value head to several ranks where there are fewer heads than ranks.
    rows = spec.ffn_hidden_size if spec.moe is None else spec.moe.ffn_hidden_size
    allowed = [
        degree
        for degree in range(1, spec.num_heads + 1)
        if spec.num_heads % degree == 0
        and rows % degree == 0
        and (spec.num_kv_heads % degree == 0 or degree % spec.num_kv_heads == 0)
    ]
    fix = f"set rollout.tp to {_one_of(allowed)}"
    if spec.num_heads % tp:
        yield _model("rollout.tp", f"a divisor of the model's {spec.num_heads} attention heads", tp, fix)
    if spec.num_kv_heads % tp and tp % spec.num_kv_heads:
        expected = f"a divisor or a multiple of the model's {spec.num_kv_heads} key-value heads"
        yield _model("rollout.tp", expected, tp, fix)
    if rows % tp:
        what = "feed-forward rows" if spec.moe is None else "rows of an expert"
        yield _model("rollout.tp", f"a divisor of the model's {rows} {what}", tp, fix)


def _positions(config: TrainConfig | SftConfig, spec: ModelSpec) -> Iterator[Finding]:
    key, longest = longest_sequence(config)
    if longest > spec.max_position:
        shorter = f"shorten prompts and responses to {spec.max_position} tokens together"
        if isinstance(config, SftConfig):
            shorter = f"set {key} to {spec.max_position} at most"
        fix = f"{shorter}, or use a model with more positions"
        yield _model(key, f"at most {spec.max_position}, the model's positions", longest, fix)


def longest_sequence(config: TrainConfig | SftConfig) -> tuple[str, int]:
    """The key that bounds a sequence, and its longest length in tokens."""
    if isinstance(config, SftConfig):
        return "data.max_tokens", config.data.max_tokens
    if config.rollout.max_model_len is not None:
        return "rollout.max_model_len", config.rollout.max_model_len
    return "rollout.max_model_len", config.data.max_prompt_tokens + config.rollout.sampling.max_tokens


def _one_of(values: list[int]) -> str:
    return f"one of {', '.join(map(str, values))}" if len(values) > 1 else str(values[0])
