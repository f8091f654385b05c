"""Rules between keys: each a function with a name, all of them evaluated, every breach reported.

A rule gets the validated configuration and yields a ``Breach`` for each way it is broken: the keys involved and what
was expected of them. Values and origins are looked up by key, so a message cannot disagree with the configuration.
``algorithm_rules.py`` and ``optimizer_rules.py`` have those of these sections. What needs the model's own numbers
(heads, layers) is ``planning/doctor.py``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

from megarl.config.algorithm_rules import ALGORITHM_RULES
from megarl.config.breach import AnyConfig, Breach
from megarl.config.optimizer_rules import OPTIMIZER_RULES, trained
from megarl.config.schema import SftConfig, TrainConfig
from megarl.config.schema.data import FileSource, GymSource
from megarl.config.schema.train import EngineConfig
from megarl.errors import LayoutError
from megarl.parallel.grid import pipeline_stages


def check_rules(config: AnyConfig) -> Iterator[Breach]:
    """All breaches of all rules that apply to this kind of configuration."""
    if isinstance(config, TrainConfig):
        for train_rule in TRAIN_RULES:
            yield from _named(train_rule.__name__, train_rule(config))
    else:
        for sft_rule in SFT_RULES:
            yield from _named(sft_rule.__name__, sft_rule(config))
    for rule in COMMON_RULES:
        yield from _named(rule.__name__, rule(config))


def _named(name: str, breaches: Iterator[Breach]) -> Iterator[Breach]:
    return (Breach(breach.keys, breach.expected, name) for breach in breaches)


# Rules of every run


def sequence_parallel_needs_tp(config: AnyConfig) -> Iterator[Breach]:
    """Sequence parallelism splits over tensor-parallel ranks; with one there is nothing to split."""
    for role, part in trained(config):
        if part.layout.sequence_parallel and part.layout.tp == 1:
            yield Breach((f"{role}.layout.sequence_parallel", f"{role}.layout.tp"), "tp > 1 with sequence_parallel")


def experts_divide_a_stage(config: AnyConfig) -> Iterator[Breach]:
    """Experts are shared out over the ranks of a pipeline stage, in groups of ep * etp."""
    for role, part in trained(config):
        layout = part.layout
        ranks = layout.world_size // layout.pp
        if ranks % (layout.ep * layout.etp):
            keys = tuple(f"{role}.layout.{axis}" for axis in ("ep", "etp", "tp", "cp", "dp"))
            yield Breach(keys, f"ep * etp dividing the {ranks} ranks of a pipeline stage")


def uneven_stages_need_pipeline(config: AnyConfig) -> Iterator[Breach]:
    """Layers of a first or last stage mean something with two stages or more."""
    for role, part in trained(config):
        for name in ("num_layers_in_first_stage", "num_layers_in_last_stage"):
            if getattr(part.layout, name) is not None and part.layout.pp == 1:
                yield Breach((f"{role}.layout.{name}", f"{role}.layout.pp"), "pp > 1 with uneven stages")


def virtual_stages_need_pipeline(config: AnyConfig) -> Iterator[Breach]:
    """Virtual stages take turns on pipeline stages, of which there are two or more."""
    for role, part in trained(config):
        if part.layout.vpp > 1 and part.layout.pp == 1:
            yield Breach((f"{role}.layout.vpp", f"{role}.layout.pp"), "pp > 1 with vpp > 1")


def spelled_pipeline_is_whole(config: AnyConfig) -> Iterator[Breach]:
    """A spelled pipeline has a stage for each of pp * vpp, and is the only word on their layers."""
    for role, part in trained(config):
        layout, key = part.layout, f"{role}.layout.pipeline"
        if layout.pipeline is None:
            continue
        for name in ("num_layers_in_first_stage", "num_layers_in_last_stage"):
            if getattr(layout, name) is not None:
                yield Breach((key, f"{role}.layout.{name}"), "either a spelled pipeline or uneven outer stages")
        try:
            pipeline_stages(layout.pipeline, layout.pp * layout.vpp)
        except LayoutError as error:
            yield Breach(
                (key, f"{role}.layout.pp", f"{role}.layout.vpp"), f"stages as in Et|(tt|)*2tL ({error.problem})"
            )


def adapters_are_on_layers_once(config: AnyConfig) -> Iterator[Breach]:
    """A second adapter on a layer would be one of a higher rank."""
    for role, part in trained(config):
        if part.lora is not None and len(set(part.lora.targets)) < len(part.lora.targets):
            yield Breach((f"{role}.lora.targets",), "each layer once")


def adapters_train_by_element(config: AnyConfig) -> Iterator[Breach]:
    """Muon orthogonalizes the update of a whole matrix, which a factor of a change is not."""
    for role, part in trained(config):
        if part.lora is not None and part.optimizer.kind == "muon":
            yield Breach((f"{role}.optimizer.kind", f"{role}.lora"), "adam or sgd with adapters")


def adapters_multiply_like_their_base(config: AnyConfig) -> Iterator[Breach]:
    """Frozen weights under FP8 have not been tried with Transformer Engine."""
    for role, part in trained(config):
        if part.lora is not None and part.engine.fp8 is not None:
            yield Breach((f"{role}.engine.fp8", f"{role}.lora"), "no FP8 with adapters")


def adapters_leave_biases(config: AnyConfig) -> Iterator[Breach]:
    """Biases that choose experts are the base's, which the reference policy shares."""
    for role, part in trained(config):
        if part.lora is not None and part.engine.moe_bias_update_rate:
            yield Breach((f"{role}.engine.moe_bias_update_rate", f"{role}.lora"), "0 with adapters")


def microbatch_holds_longest_sequence(config: AnyConfig) -> Iterator[Breach]:
    """The cap of a microbatch is never exceeded, so the longest sequence must fit into it, with its padding."""
    longest, lengths = _longest(config)
    for role, part in trained(config):
        layout, engine = part.layout, part.engine
        ranks = layout.cp * (layout.tp if layout.sequence_parallel else 1)
        multiple = math.lcm(2 * layout.cp if layout.cp > 1 else 1, ranks * engine.fp8_multiple)
        needed = -(-longest // multiple) * multiple
        why = [f"{role}.layout.cp"] if layout.cp > 1 else []
        why += [f"{role}.layout.sequence_parallel"] if layout.sequence_parallel else []
        why += [f"{role}.engine.fp8"] if engine.fp8 is not None else []
        for name in ("microbatch_tokens", "inference_microbatch_tokens"):
            cap = getattr(engine, name)
            if cap is not None and cap < needed:
                padded = f" padded to a multiple of {multiple}" if why else ""
                yield Breach(
                    (f"{role}.engine.{name}", *lengths, *why), f"at least {needed}, the longest sequence{padded}"
                )


def fp8_multiplies_bfloat16(config: AnyConfig) -> Iterator[Breach]:
    """Transformer Engine's FP8 runs on GPUs, between bfloat16 weights and activations."""
    for role, part in trained(config):
        if part.engine.fp8 is None:
            continue
        if config.cluster.device == "cpu":
            yield Breach((f"{role}.engine.fp8", "cluster.device"), "null on device cpu")
        if part.engine.dtype != "bfloat16":
            yield Breach((f"{role}.engine.fp8", f"{role}.engine.dtype"), "dtype bfloat16 with FP8")


def shared_prompts_need_our_attention(config: AnyConfig) -> Iterator[Breach]:
    """Transformer Engine takes sequences one after another; context-parallel ranks share out the tokens of each."""
    for role, part in trained(config):
        if not part.engine.share_prompts:
            continue
        if config.cluster.device == "cuda":
            yield Breach((f"{role}.engine.share_prompts", "cluster.device"), "null or false on device cuda")
        if part.layout.cp > 1:
            yield Breach((f"{role}.engine.share_prompts", f"{role}.layout.cp"), "null or false with cp > 1")


def _longest(config: AnyConfig) -> tuple[int, tuple[str, ...]]:
    if isinstance(config, SftConfig):
        return config.data.max_tokens, ("data.max_tokens",)
    longest = config.data.max_prompt_tokens + config.rollout.sampling.max_tokens
    return longest, ("data.max_prompt_tokens", "rollout.sampling.max_tokens")


def device_has_its_gpus(config: AnyConfig) -> Iterator[Breach]:
    """A run on CPU uses no GPU; a run on CUDA needs one at least."""
    if (config.cluster.device == "cpu") != (config.cluster.gpus_per_node == 0):
        expected = "gpus_per_node = 0 on device cpu and >= 1 on cuda"
        yield Breach(("cluster.gpus_per_node", "cluster.device"), expected)


def roles_fit_the_cluster(config: AnyConfig) -> Iterator[Breach]:
    """Colocated roles take turns on the same GPUs; split, rollout engines stand beside the training roles."""
    cluster = config.cluster
    if cluster.device == "cpu" or cluster.gpus_per_node == 0:
        return
    sizes = {f"{role}.layout": part.layout.world_size for role, part in trained(config)}
    train = max(sizes.values())
    engines = config.rollout.replicas * config.rollout.tp if isinstance(config, TrainConfig) else 0
    needed = max(train, engines) if cluster.placement == "colocated" else train + engines
    available = cluster.num_nodes * cluster.gpus_per_node
    if needed > available:
        keys = ["cluster.num_nodes", "cluster.gpus_per_node"]
        keys += [f"{layout}.{axis}" for layout in sizes for axis in ("tp", "pp", "cp", "dp")]
        keys += ["rollout.replicas", "rollout.tp"] if engines else []
        described = ", ".join(f"{layout.removesuffix('.layout')} {size}" for layout, size in sizes.items())
        described += f", rollout {engines}" if engines else ""
        yield Breach(tuple(keys), f"at least {needed} GPUs ({cluster.placement}: {described}) and not {available}")


def held_out_is_held_out(config: AnyConfig) -> Iterator[Breach]:
    """A validation source that repeats a training source measures memory."""
    for v, held_out in enumerate(config.data.validation):
        for t, source in enumerate(config.data.train):
            if isinstance(held_out, FileSource) and isinstance(source, FileSource) and held_out.path == source.path:
                yield Breach((f"data.validation.{v}.path", f"data.train.{t}.path"), "another file than in training")
            if isinstance(held_out, GymSource) and isinstance(source, GymSource) and _same_prompts(held_out, source):
                keys = (f"data.validation.{v}.seed", f"data.train.{t}.seed")
                yield Breach(keys, f"another seed than in training for {held_out.task}")


def _same_prompts(one: GymSource, other: GymSource) -> bool:
    return (one.task, one.seed, one.options) == (other.task, other.seed, other.options)


# Rules of RL training


def minibatch_divides_batch(config: TrainConfig) -> Iterator[Breach]:
    """Every update of a step sees as many responses as the others."""
    batch = config.data.prompts_per_step * config.rollout.samples_per_prompt
    for key, size in _minibatches(config):
        if size is not None and batch % size:
            keys = (key, "data.prompts_per_step", "rollout.samples_per_prompt")
            yield Breach(keys, f"a divisor of the {batch} responses of a step")


def minibatch_feeds_every_rank(config: TrainConfig) -> Iterator[Breach]:
    """Every data-parallel rank gets a response in every update."""
    batch = config.data.prompts_per_step * config.rollout.samples_per_prompt
    sizes = dict(_minibatches(config))
    for role, part in trained(config):
        key = "critic.minibatch_size" if role == "critic" else "algorithm.minibatch_size"
        size = sizes.get(key)
        if size is None and role == "critic":
            key, size = "algorithm.minibatch_size", sizes["algorithm.minibatch_size"]
        if (batch if size is None else size) < part.layout.dp:
            keys = (key, f"{role}.layout.dp", "data.prompts_per_step", "rollout.samples_per_prompt")
            yield Breach(keys, "at least as many responses per update as data-parallel ranks")


def _minibatches(config: TrainConfig) -> Iterator[tuple[str, int | None]]:
    yield "algorithm.minibatch_size", config.algorithm.minibatch_size
    if config.critic is not None:
        yield "critic.minibatch_size", config.critic.minibatch_size


def training_samples(config: TrainConfig) -> Iterator[Breach]:
    """Greedy responses have no log-prob to train on and are the same for a whole group."""
    if config.rollout.sampling.temperature == 0:
        yield Breach(("rollout.sampling.temperature",), "> 0 in training (validation.temperature=0 is greedy)")


def model_len_holds_longest_sequence(config: TrainConfig) -> Iterator[Breach]:
    """An engine must be able to finish the longest response to the longest prompt."""
    longest, keys = _longest(config)
    if config.rollout.max_model_len is not None and config.rollout.max_model_len < longest:
        yield Breach(("rollout.max_model_len", *keys), f"at least {longest}")


def engine_fits_a_node(config: TrainConfig) -> Iterator[Breach]:
    """Tensor-parallel ranks of an engine stay inside one node."""
    cluster, rollout = config.cluster, config.rollout
    if cluster.device == "cpu" or cluster.gpus_per_node == 0:
        return
    first = 0
    if cluster.placement == "split":
        train = max(part.layout.world_size for _, part in trained(config))
        first = -(-train // rollout.tp) * rollout.tp
    starts = range(first, first + rollout.replicas * rollout.tp, rollout.tp)
    if any(s // cluster.gpus_per_node != (s + rollout.tp - 1) // cluster.gpus_per_node for s in starts):
        keys = ("rollout.tp", "rollout.replicas", "cluster.gpus_per_node")
        yield Breach(keys, "engines that do not straddle nodes (rollout.tp dividing gpus_per_node)")


def validation_needs_data(config: TrainConfig) -> Iterator[Breach]:
    """Validation runs on held-out prompts only."""
    when = config.validation
    on = [f"validation.{n}" for n in ("at_start", "at_end", "every_steps") if getattr(when, n)]
    if on and not config.data.validation:
        yield Breach(("data.validation", *on), "held-out sources, or validation switched off")


def reward_is_complete(config: TrainConfig) -> Iterator[Breach]:
    """Each kind of reward has what it needs, and a pattern compiles."""
    reward = config.reward
    if reward.kind == "function" and (reward.path is None or ":" not in reward.path):
        yield Breach(("reward.path", "reward.kind"), "package.module:function or path/to/file.py:function")
    if reward.kind == "regex" and reward.pattern is None:
        yield Breach(("reward.pattern", "reward.kind"), "a pattern for kind regex")
    if reward.pattern is not None:
        try:
            re.compile(reward.pattern)
        except re.error as error:
            yield Breach(("reward.pattern",), f"a regular expression that compiles ({error})")


def reward_finds_its_answer(config: TrainConfig) -> Iterator[Breach]:
    """reasoning_gym scores its own tasks; math_verify compares with an answer."""
    for part in ("train", "validation"):
        for index, source in enumerate(getattr(config.data, part)):
            key = f"data.{part}.{index}"
            if not isinstance(source, FileSource):
                continue
            if config.reward.kind == "reasoning_gym":
                yield Breach(("reward.kind", f"{key}.kind"), "reasoning_gym sources only, or another reward for files")
            if config.reward.kind == "math_verify" and source.answer_column is None:
                yield Breach((f"{key}.answer_column", "reward.kind"), "the column with the answer for math_verify")


def frozen_samples_leave_the_engine_busy(config: TrainConfig) -> Iterator[Breach]:
    """While samples wait for new weights an engine computes nothing, log-probs for a comparison neither."""
    if config.sync.in_flight == "continue" and config.sync.verify == "values":
        yield Breach(("sync.in_flight", "sync.verify"), "finish or abort with sync.verify=values")


def warmup_ends(config: TrainConfig) -> Iterator[Breach]:
    """A critic warm-up as long as the run would never train the actor."""
    if config.critic is not None and config.critic.warmup_steps >= config.run.steps:
        yield Breach(("critic.warmup_steps", "run.steps"), "fewer warm-up steps than steps")


def critic_has_no_logits(config: TrainConfig) -> Iterator[Breach]:
    """A critic's head has one output, which is not computed in chunks."""
    if config.critic is not None and config.critic.engine.logits_chunk_tokens != EngineConfig().logits_chunk_tokens:
        yield Breach(("critic.engine.logits_chunk_tokens",), "nothing: a critic has no logits (actor.engine has)")


# Rules of supervised fine-tuning


def sequences_feed_every_rank(config: SftConfig) -> Iterator[Breach]:
    """Every data-parallel rank gets a sequence in every update."""
    if config.data.sequences_per_step < config.actor.layout.dp:
        yield Breach(("data.sequences_per_step", "actor.layout.dp"), "at least one sequence per data-parallel rank")


def nothing_shares_its_devices(config: SftConfig) -> Iterator[Breach]:
    """Supervised fine-tuning has no engines that training could make room for or stand beside."""
    if config.actor.engine.offload:
        yield Breach(("actor.engine.offload",), "false: no engines share the devices of supervised fine-tuning")
    if config.cluster.placement == "split":
        yield Breach(("cluster.placement",), "colocated: supervised fine-tuning has no engines to place elsewhere")


def evaluation_needs_data(config: SftConfig) -> Iterator[Breach]:
    """The evaluation loss needs held-out sequences."""
    if config.eval_every_steps is not None and not config.data.validation:
        yield Breach(("data.validation", "eval_every_steps"), "held-out sources with eval_every_steps")


COMMON_RULES: tuple[Callable[[AnyConfig], Iterator[Breach]], ...] = (
    sequence_parallel_needs_tp,
    experts_divide_a_stage,
    uneven_stages_need_pipeline,
    virtual_stages_need_pipeline,
    spelled_pipeline_is_whole,
    *OPTIMIZER_RULES,
    adapters_are_on_layers_once,
    adapters_train_by_element,
    adapters_multiply_like_their_base,
    adapters_leave_biases,
    microbatch_holds_longest_sequence,
    fp8_multiplies_bfloat16,
    shared_prompts_need_our_attention,
    device_has_its_gpus,
    roles_fit_the_cluster,
    held_out_is_held_out,
)
TRAIN_RULES: tuple[Callable[[TrainConfig], Iterator[Breach]], ...] = (
    *ALGORITHM_RULES,
    minibatch_divides_batch,
    minibatch_feeds_every_rank,
    training_samples,
    model_len_holds_longest_sequence,
    engine_fits_a_node,
    validation_needs_data,
    reward_is_complete,
    reward_finds_its_answer,
    frozen_samples_leave_the_engine_busy,
    warmup_ends,
    critic_has_no_logits,
)
SFT_RULES: tuple[Callable[[SftConfig], Iterator[Breach]], ...] = (
    sequences_feed_every_rank,
    evaluation_needs_data,
    nothing_shares_its_devices,
)
