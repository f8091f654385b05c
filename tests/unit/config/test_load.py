from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.load import Preset, configs_dir, group_presets, load_sft, load_train, presets
from megarl.config.schema import SftConfig, TrainConfig
from megarl.config.schema.data import FileSource, GymSource
from megarl.errors import ConfigError


def violations(preset: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_train(preset, overrides)
    return list(caught.value.violations)


@pytest.mark.parametrize("path", sorted(configs_dir().glob("*.yaml")), ids=lambda path: path.stem)
def test_every_preset_binds_and_says_what_it_is(path: Path):
    preset = next(p for p in presets() if p.path == path)
    assert len(preset.description) > 20
    if preset.command == "sft":
        assert isinstance(load_sft(preset.name).config, SftConfig)
    else:
        assert isinstance(load_train(preset.name).config, TrainConfig)


def test_the_presets_of_the_readme_exist():
    wanted = {"sft_tiny", "grpo_tiny", "ppo_tiny", "grpo_smollm2", "grpo_7b", "ppo_7b"}
    wanted |= {"grpo_70b", "ppo_70b", "sft_70b", "grpo_235b_moe"}
    assert wanted <= {preset.name for preset in presets()}


ALGORITHMS = {
    "ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline",
    "remax", "opo", "gmpo", "sapo", "clip_cov", "kl_cov",
}  # fmt: skip


def test_the_algorithms_by_name_are_there():
    assert {preset.name for preset in group_presets("algorithm")} == ALGORITHMS


@pytest.mark.parametrize("preset", group_presets("algorithm"), ids=lambda preset: preset.name)
def test_an_algorithm_binds_over_a_run_preset_and_flags_go_before_it(preset: Preset):
    assert len(preset.description) > 20
    for base, flags in (("grpo_7b", []), ("ppo_tiny", ["~critic"])):
        loaded = load_train(base, [f"algorithm={preset.name}", *(flags if preset.name != "ppo" else [])])
        kind = loaded.origins.of("algorithm.policy_loss.kind")
        assert str(kind).startswith(f"configs/algorithm/{preset.name}.yaml:")
        # Nothing that makes an algorithm what it is is left to the preset below.
        for key in ("advantage.kind", "policy_loss.aggregation", "kl.where", "old_log_probs"):
            assert "configs/algorithm/" in str(loaded.origins.of(f"algorithm.{key}")), key
    flagged = load_train(
        "grpo_tiny", ["algorithm.kl.estimator=k2", f"algorithm={preset.name}", "algorithm.kl.where=loss"]
    )
    assert flagged.config.algorithm.kl.estimator == "k2"  # wherever it stands on the command line


def test_a_file_of_ones_own_may_choose_an_algorithm(tmp_path: Path):
    own = tmp_path / "own.yaml"
    own.write_text("defaults: [grpo_tiny, {algorithm: dapo}, _self_]\nalgorithm: {epochs: 2}\n")
    config = load_train(str(own)).config.algorithm
    assert (config.policy_loss.clip_high, config.epochs) == (0.28, 2)
    config = load_train(str(own), ["algorithm=gspo", "algorithm.epochs=3"]).config.algorithm
    assert (config.policy_loss.kind, config.epochs) == ("gspo", 3)


def test_ppo_by_name_brings_a_critic_like_the_actor():
    config = load_train("grpo_7b", ["algorithm=ppo"]).config
    assert config.critic is not None
    assert (config.critic.layout, config.critic.engine) == (config.actor.layout, config.actor.engine)


def test_a_wrong_algorithm_gets_a_suggestion_and_a_section_is_no_name():
    with pytest.raises(ConfigError, match=r"no preset algorithm=dappo .* did you mean dapo\?"):
        load_train("grpo_tiny", ["algorithm=dappo"])
    assert load_train("grpo_tiny", ["algorithm={epochs: 3}"]).config.algorithm.epochs == 3


@pytest.mark.parametrize("name", ["grpo_7b", "ppo_7b", "grpo_70b", "ppo_70b", "grpo_235b_moe"])
def test_gpu_presets_use_every_gpu_they_ask_for(name: str):
    config = load_train(name).config
    gpus = config.cluster.num_nodes * config.cluster.gpus_per_node
    engines = config.rollout.replicas * config.rollout.tp
    if config.cluster.placement == "split":
        assert config.actor.layout.world_size + engines == gpus
    else:
        assert config.actor.layout.world_size == engines == gpus


def test_values_have_the_schema_types(train_yaml: str):
    config = load_train(train_yaml, ["actor.optimizer.lr=1e-4", "rollout.sampling.stop_token_ids=[3,5]"]).config
    assert config.actor.optimizer.lr == 1e-4
    assert config.rollout.sampling.stop_token_ids == [3, 5]
    assert isinstance(config.data.train[0], GymSource) and isinstance(config.data.train[1], FileSource)
    assert config.data.train[1].path == "prompts.jsonl"


def test_interpolation_reads_yaml_flags_and_defaults(train_yaml: str):
    config = load_train(train_yaml).config
    assert (config.model.path, config.run.dir) == ("models/mini", "runs/mini")
    config = load_train(train_yaml, ["run.name=other", "data.max_prompt_tokens=${rollout.sampling.max_tokens}"]).config
    assert (config.model.path, config.run.dir) == ("models/other", "runs/other")
    assert config.data.max_prompt_tokens == config.rollout.sampling.max_tokens


def test_overrides_in_hydras_grammar(train_yaml: str):
    overrides = [
        "run.steps=7",  # in the file
        "run.seed=3",  # not in the file
        "+checkpoint.keep=5",
        "++checkpoint.at_end=false",
        "~reward",
        "~data.prompts_per_step",
        "data.train=[{kind: reasoning_gym, task: countdown, options: {a: 1, b: [2]}}]",
        "data.validation.0.size=9",
        "actor.layout={tp: 2, pp: 1}",
        "data.system_prompt='say \"x, y\" = z'",
    ]
    config = load_train(train_yaml, overrides).config
    assert (config.run.steps, config.run.seed, config.checkpoint.keep, config.checkpoint.at_end) == (7, 3, 5, False)
    assert config.reward.kind == "reasoning_gym" and config.data.prompts_per_step == 128
    source = config.data.train[0]
    assert isinstance(source, GymSource) and source.options == {"a": 1, "b": [2]}
    held_out = config.data.validation[0]
    assert isinstance(held_out, GymSource) and (held_out.size, held_out.seed) == (9, 2)
    assert config.actor.layout.tp == 2
    assert config.data.system_prompt == 'say "x, y" = z'


def test_a_section_given_in_part_keeps_its_parents_defaults(train_yaml: str):
    overrides = ["algorithm.advantage.kind=gae", "critic.optimizer.weight_decay=0.1"]
    critic = load_train(train_yaml, overrides).config.critic
    assert critic is not None
    assert (critic.optimizer.lr, critic.optimizer.weight_decay) == (1e-5, 0.1)


def test_a_correction_preset_goes_below_given_values_and_above_defaults(train_yaml: str):
    overrides = ["algorithm.correction.preset=decoupled_token_icepop", "algorithm.correction.upper=4"]
    loaded = load_train(train_yaml, overrides)
    correction = loaded.config.algorithm.correction
    assert (correction.weights, correction.lower, correction.upper) == ("token", 0.5, 4)
    where = "algorithm.correction.preset, command line: algorithm.correction.preset=decoupled_token_icepop"
    assert str(loaded.origins.of("algorithm.correction.lower")) == where
    assert str(loaded.origins.of("algorithm.correction.upper")) == "command line: algorithm.correction.upper=4"
    assert str(loaded.origins.of("algorithm.correction.normalize")) == "default"


def test_a_correction_preset_may_imply_another_section(train_yaml: str):
    algorithm = load_train(train_yaml, ["algorithm.correction.preset=bypass_pg_is"]).config.algorithm
    assert (algorithm.old_log_probs, algorithm.policy_loss.kind) == ("bypass", "reinforce")
    found = violations(train_yaml, "algorithm.correction.preset=bypass_pg_is", "algorithm.policy_loss.kind=ppo")
    assert found[0].startswith(
        "algorithm: correction.preset=bypass_pg_is means policy_loss.kind=reinforce, found ppo ("
    )


def test_all_violations_are_reported_at_once(train_yaml: str):
    found = violations(
        train_yaml,
        "run.stepz=7",
        "lr=3",
        "data.train.0.size=many",
        "data.train.1.kind=csv",
        "data.validation.0.task=null",
        "actor.layout.tp=0",
        "cluster.device=gpu",
        "run.dir=${run.nam}",
        "logging=3",
        "rollout.sampling.stop_token_ids=[1,a]",
        "algorithm.minibatch_size=3",
        "algorithm.kl.coef=0.5",
    )
    keys = [line.partition(":")[0] for line in found]
    assert sorted(keys) == sorted(
        [
            "run.dir", "run.stepz", "lr", "data.train.0.size", "data.train.1.kind", "data.validation.0.task",
            "actor.layout.tp", "cluster.device", "logging", "rollout.sampling.stop_token_ids.1",
            "algorithm.minibatch_size", "algorithm.kl.coef",
        ]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("run.stepz=7", "run.stepz: unknown key; did you mean run.steps? (command line: run.stepz=7)"),
        ("optimiser=7", "optimiser: unknown key; known here: run, cluster, model"),
        ("actor.lr=1", "actor.lr: unknown key; did you mean actor.optimizer.lr or critic.optimizer.lr?"),
        ("run.steps=0", "run.steps: expected integer >= 1, found 0 (command line: run.steps=0)"),
        ("run.steps=true", "run.steps: expected integer >= 1, found true"),
        ("run.steps=2.5", "run.steps: expected integer >= 1, found 2.5"),
        ("run.steps='\"4\"'", "run.steps: expected integer >= 1, found"),
        ("run.name=7", "run.name: expected string, found 7; for the text quote it twice"),
        ("checkpoint.at_end=1", "checkpoint.at_end: expected true or false, found 1"),
        ("cluster.device=gpu", "cluster.device: expected one of cpu, cuda, found 'gpu'"),
        ("actor.optimizer.lr=nan", "actor.optimizer.lr: expected number > 0, found nan"),
        ("actor=3", "actor: expected {layout: ..., engine: ..., ...}, found 3"),
        (
            "data.train=[]",
            "data.train: expected list of {kind: file, path: ...} or {kind: reasoning_gym, task: ...} length >= 1",
        ),
        ("data.train.0.kind=csv", "data.train.0.kind: expected one of file, reasoning_gym, found 'csv'"),
        ("model.path=???", "model.path: required"),
        ("run.dir=${nowhere}", "run.dir: Interpolation key 'nowhere' not found (command line: run.dir=${nowhere})"),
        ("model={}", None),
    ],
)
def test_a_violation_names_key_expectation_finding_and_origin(train_yaml: str, override: str, expected: str | None):
    if expected is None:  # an empty mapping merges with the file's section
        assert load_train(train_yaml, [override]).config.model.path == "models/mini"
        return
    assert expected in violations(train_yaml, override)[0]
    assert len(violations(train_yaml, override)) == 1


def test_a_violation_in_a_file_names_its_line(tmp_path: Path, train_yaml: str):
    path = Path(train_yaml)
    path.write_text(path.read_text(encoding="utf-8").replace("steps: 4", "stebs: 4"), encoding="utf-8")
    assert violations(train_yaml) == [f"run.stebs: unknown key; did you mean run.steps? ({path}:4)"]


def test_a_required_key_that_is_missing_points_to_its_section(train_yaml: str):
    path = Path(train_yaml)
    path.write_text(path.read_text(encoding="utf-8").replace("task: chain_sum", "tusk: chain_sum"), encoding="utf-8")
    found = violations(train_yaml)
    assert f"data.train.0.task: required (string) but not set ({path}:12); is tusk meant for it?" in found
    assert f"data.train.0.tusk: unknown key; did you mean data.train.0.task? ({path}:12)" in found


def test_rules_stay_silent_about_a_key_that_is_already_broken(train_yaml: str):
    found = violations(train_yaml, "actor.layout.tp=zwei", "actor.layout.sequence_parallel=true")
    assert found == ["actor.layout.tp: expected integer >= 1, found 'zwei' (command line: actor.layout.tp=zwei)"]


def test_a_users_file_may_build_on_a_preset(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "defaults: [grpo_7b, _self_]\nrun: {name: mine}\nactor: {optimizer: {lr: 2e-6}}\n", encoding="utf-8"
    )
    loaded = load_train(str(path), ["run.steps=9"])
    assert loaded.config.cluster.gpus_per_node == 8 and loaded.config.run.name == "mine"
    assert loaded.config.actor.optimizer.lr == 2e-6
    assert str(loaded.origins.of("actor.optimizer.lr")) == f"{path}:3"
    assert "configs/grpo_7b.yaml:" in str(loaded.origins.of("actor.layout.tp"))


def test_config_groups_of_a_users_directory(tmp_path: Path, train_yaml: str):
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "two.yaml").write_text("layout: {tp: 2}\n", encoding="utf-8")
    (tmp_path / "actor" / "four.yaml").write_text("layout:\n  tp: 4\n", encoding="utf-8")
    path = tmp_path / "grouped.yaml"
    path.write_text("defaults: [mini, actor: two, _self_]\n", encoding="utf-8")
    assert load_train(str(path)).config.actor.layout.tp == 2
    loaded = load_train(str(path), ["actor=four"])
    assert loaded.config.actor.layout.tp == 4
    assert str(loaded.origins.of("actor.layout.tp")).endswith("actor/four.yaml:2")


@pytest.mark.parametrize(
    ("preset", "message"),
    [
        ("grpo_tyny", "did you mean grpo_tiny?"),
        ("nowhere/x.yaml", "no configuration file nowhere/x.yaml"),
        ("./x.yml", "ends in .yaml"),
    ],
)
def test_a_preset_that_does_not_exist(preset: str, message: str):
    with pytest.raises(ConfigError, match=r".") as caught:
        load_train(preset)
    assert message in str(caught.value)


def test_broken_yaml_names_file_and_line(tmp_path: Path):
    path = tmp_path / "broken.yaml"
    path.write_text("run:\n  name: x\n  - y\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_train(str(path))
    assert f"{path}:3" in str(caught.value)


def test_a_key_written_twice_is_refused(train_yaml: str):
    path = Path(train_yaml)
    path.write_text(path.read_text(encoding="utf-8") + "run: {name: again}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="duplicate key run"):
        load_train(train_yaml)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.steps", "run.steps: not an override"),
        ("run.name='open", "not an override"),
        ("run.steps=1,2", "for a list write run.steps=[a,b]"),
        ("hydra.run.dir=x", "Hydra's own settings are not used"),
        ("~data.train.0", "give the whole list"),
    ],
)
def test_an_override_that_cannot_be_read(train_yaml: str, override: str, message: str):
    found = violations(train_yaml, override, "also wrong")
    assert message in found[0] and "also wrong" in found[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"- a\n- b\n", "must be a DictConfig"),
        (b"\xff\xfe", "codec can't decode"),
        (b"", "model: required ({path: ...}) but not set\n"),
        (b"defaults: [nope, _self_]\n", "Could not load 'nope'"),
        (b"run: &a {name: *b}\n", "undefined alias"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, text: bytes, message: str):
    path = tmp_path / "wrong.yaml"
    path.write_bytes(text)
    with pytest.raises(ConfigError) as caught:
        load_train(str(path))
    assert message in f"{caught.value}\n" and "wrong.yaml" in str(caught.value)


@pytest.mark.parametrize(
    "override",
    [
        "data.train.7.task=x",
        "data.train.x=3",
        "+run.name=x",
        "a@b=c",
        "x/y=z",
        "++=3",
        "~data",
        "run=null",
        "model=foo",
    ],
)
def test_an_override_that_does_not_apply_is_a_configuration_error(train_yaml: str, override: str):
    with pytest.raises(ConfigError):
        load_train(train_yaml, [override])


def test_a_value_below_a_scalar_names_the_flag(train_yaml: str):
    flag = "actor.layout.tp.x=3"
    assert violations(train_yaml, flag) == [
        f"actor.layout.tp: expected integer >= 1, found {{'x': 3}} (command line: {flag})"
    ]


def test_files_with_awkward_names(tmp_path: Path, train_yaml: str):
    directory = tmp_path / "it's a = dir"
    directory.mkdir()
    path = directory / "my-run.v2.yaml"
    path.write_bytes(Path(train_yaml).read_bytes())
    assert load_train(str(path)).config.run.name == "mini"


def test_deleting_what_nothing_set_is_an_error(train_yaml: str):
    with pytest.raises(ConfigError, match=r"run\.seed"):
        load_train(train_yaml, ["~run.seed"])


def test_sft_has_its_own_root(sft_yaml: str, train_yaml: str):
    assert load_sft(sft_yaml, ["data.sequences_per_step=3"]).config.data.sequences_per_step == 3
    with pytest.raises(ConfigError, match=r"rollout: unknown key"):
        load_sft(train_yaml)


def test_loading_leaves_no_global_state_behind(train_yaml: str):
    from hydra.core.global_hydra import GlobalHydra

    load_train(train_yaml)
    assert not GlobalHydra.instance().is_initialized()
