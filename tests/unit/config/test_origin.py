from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.config.load import configs_dir, load_sft, load_train
from megarl.config.origin import Loaded, Origin, Origins, load_resolved, resolved_yaml, write_resolved
from megarl.config.schema import TrainConfig
from megarl.errors import ConfigError, SetupError

AWKWARD = [
    "data.system_prompt='line\\\\n: # \\'quoted\\' yes'",
    "run.name=on-1",
    "rollout.sampling.stop_token_ids=[1,2]",
    "data.train.0.options={pattern: '\\${x}', deep: {a: [true, null, 1e-5, '1e5']}}",
    "actor.optimizer.lr=3e-7",
]


def test_every_value_has_the_origin_that_set_it(train_yaml: str):
    origins = load_train(train_yaml, ["run.steps=7", "data.train.0.size=5", "actor.layout={tp: 2}"]).origins
    assert str(origins.of("run.name")) == f"{train_yaml}:3"
    assert str(origins.of("run.steps")) == "command line: run.steps=7"
    assert str(origins.of("run.seed")) == "default"
    assert str(origins.of("data.train.0.task")) == f"{train_yaml}:12"
    assert str(origins.of("data.train.0.size")) == "command line: data.train.0.size=5"
    assert str(origins.of("data.train.0.weight")) == "default"
    assert str(origins.of("data.train.1.answer_column")) == f"{train_yaml}:14"
    assert str(origins.of("actor.layout.tp")) == "command line: actor.layout={tp: 2}"
    assert str(origins.of("actor.layout.pp")) == "default"


def test_later_files_and_lists_replace_earlier_ones(tmp_path: Path, train_yaml: str):
    path = tmp_path / "child.yaml"
    path.write_text(
        "defaults: [mini, _self_]\ndata:\n  train: [{kind: reasoning_gym, task: countdown}]\nrun: {steps: 2}\n",
        encoding="utf-8",
    )
    origins = load_train(str(path)).origins
    assert str(origins.of("data.train.0.task")) == f"{path}:3"
    assert str(origins.of("data.train.0.seed")) == "default"  # line 12 of mini.yaml set it in a list that is gone
    assert str(origins.of("run.steps")) == f"{path}:4"
    assert str(origins.of("run.name")) == f"{train_yaml}:3"


def test_removed_keys_go_back_to_the_default(train_yaml: str):
    loaded = load_train(train_yaml, ["~rollout"])
    assert loaded.config.rollout.samples_per_prompt == 8
    assert str(loaded.origins.of("rollout.samples_per_prompt")) == "default"


def test_anchors_and_merge_keys_have_lines(tmp_path: Path, train_yaml: str):
    path = tmp_path / "merged.yaml"
    path.write_text(
        "defaults: [mini, _self_]\nactor: {engine: &e {dtype: float32, recompute: full}}\n"
        "algorithm: {advantage: {kind: gae}}\ncritic:\n  engine:\n    <<: *e\n    recompute: none\n",
        encoding="utf-8",
    )
    loaded = load_train(str(path))
    assert loaded.config.critic is not None and loaded.config.critic.engine.dtype == "float32"
    assert loaded.config.critic.engine.recompute == "none"
    assert str(loaded.origins.of("critic.engine.dtype")) == f"{path}:2"
    assert str(loaded.origins.of("critic.engine.recompute")) == f"{path}:7"


def test_origins_as_data():
    origins = Origins()
    origins.put_value("a", {"b": [1, {"c": 2}]}, Origin("one", 1))
    assert str(origins.of("a.b.1.c")) == "one"
    origins.put_value("a", {"d": 3}, Origin("two", 2))
    assert (str(origins.of("a.b.0")), str(origins.of("a.d"))) == ("one", "two")
    origins.put_value("a", None, Origin("three", 3))
    assert str(origins.of("a.b.0")) == "three"


@pytest.mark.parametrize("name", ["grpo_tiny", "ppo_7b", "grpo_70b", "sft_tiny"])
def test_resolved_json_loads_back_equal(tmp_path: Path, name: str):
    loaded = load_sft(name) if name.startswith("sft") else load_train(name, ["run.steps=33"])
    write_resolved(loaded, tmp_path / "run")
    again = load_resolved(tmp_path / "run" / "resolved.json")
    assert again == loaded
    assert type(again.config) is type(loaded.config)


def test_resolved_yaml_is_a_configuration_with_origins(tmp_path: Path, train_yaml: str):
    loaded = load_train(train_yaml, AWKWARD)
    write_resolved(loaded, tmp_path / "run")
    again = load_train(str(tmp_path / "run" / "resolved.yaml"))
    assert again.config == loaded.config
    lines = (tmp_path / "run" / "resolved.yaml").read_text(encoding="utf-8").splitlines()
    assert f"  steps: 4  # {train_yaml}:4" in lines
    assert "  seed: 1  # default" in lines
    assert "  name: on-1  # command line: run.name=on-1" in lines


@pytest.mark.parametrize("path", sorted(configs_dir().glob("*.yaml")), ids=lambda path: path.stem)
def test_every_preset_survives_its_resolved_yaml(tmp_path: Path, path: Path):
    resolved = tmp_path / "resolved.yaml"
    if path.stem.startswith("sft"):
        loaded_sft = load_sft(path.stem)
        resolved.write_text(resolved_yaml(loaded_sft), encoding="utf-8")
        assert load_sft(str(resolved)).config == loaded_sft.config
    else:
        loaded = load_train(path.stem)
        resolved.write_text(resolved_yaml(loaded), encoding="utf-8")
        assert load_train(str(resolved)).config == loaded.config


def test_writing_leaves_no_partial_file_and_replaces(tmp_path: Path, train_yaml: str):
    write_resolved(load_train(train_yaml), tmp_path / "run")
    write_resolved(load_train(train_yaml, ["run.steps=9"]), tmp_path / "run")
    assert sorted(os.listdir(tmp_path / "run")) == ["resolved.json", "resolved.yaml"]
    again = load_resolved(tmp_path / "run" / "resolved.json")
    assert again.config.run.steps == 9


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, train_yaml: str, monkeypatch: pytest.MonkeyPatch):
    write_resolved(load_train(train_yaml), tmp_path / "run")
    before = (tmp_path / "run" / "resolved.json").read_text(encoding="utf-8")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SetupError, match="No space left"):
        write_resolved(load_train(train_yaml, ["run.steps=9"]), tmp_path / "run")
    assert (tmp_path / "run" / "resolved.json").read_text(encoding="utf-8") == before
    assert sorted(os.listdir(tmp_path / "run")) == ["resolved.json", "resolved.yaml"]


def test_a_run_directory_that_cannot_exist(tmp_path: Path, train_yaml: str):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(SetupError, match=r"run\.dir"):
        write_resolved(load_train(train_yaml), tmp_path / "file" / "run")


@pytest.mark.parametrize("text", ["", "[]", '{"config": {}}'])
def test_a_file_that_is_no_resolved_configuration(tmp_path: Path, text: str):
    path = tmp_path / "resolved.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"resolved\.json"):
        load_resolved(path)


def test_resolved_json_is_plain_data_for_programs(tmp_path: Path, train_yaml: str):
    loaded: Loaded[TrainConfig] = load_train(train_yaml, ["run.steps=9"])
    write_resolved(loaded, tmp_path)
    document = json.loads((tmp_path / "resolved.json").read_text(encoding="utf-8"))
    assert document["config"]["run"]["steps"] == 9
    assert document["origins"]["run.steps"][0] == "command line: run.steps=9"
    assert (document["command"], document["overrides"]) == ("train", ["run.steps=9"])


def test_the_configuration_needs_no_torch(train_yaml: str):
    code = (
        "import sys\n"
        "import megarl.cli, megarl.config.explain, megarl.config.load, megarl.planning.doctor\n"
        f"megarl.config.load.load_train({train_yaml!r})\n"
        "megarl.config.explain.explain('actor.layout.tp')\n"
        "loaded = {'torch', 'ray', 'vllm', 'megatron', 'transformers', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {sorted(loaded)}' if loaded else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
