"""The doctor on broken configurations: each is found with its fix, and several are reported in one run."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from megarl import cli
from megarl.config.load import load_train
from megarl.planning.doctor import Diagnosis, Surroundings, diagnose
from megarl.planning.finding import errors
from megarl.planning.placement import Nodes, memory_of_slurm
from tests.unit.planning.models import QWEN2, write_checkpoint, write_model, write_safetensors, write_tokenizer

CONFIG = """\
run: {name: sound, dir: ROOT/run, steps: 10}
cluster: {device: cuda, num_nodes: 1, gpus_per_node: 8}
model: {path: ROOT/model}
data:
  train: [{path: ROOT/train.jsonl, answer_column: answer}]
  validation: [{path: ROOT/test.jsonl, answer_column: answer}]
  prompts_per_step: 16
  max_prompt_tokens: 256
reward: {kind: math_verify}
actor:
  layout: {tp: 2, dp: 4}
  engine: {microbatch_tokens: 4096}
rollout: {replicas: 4, tp: 2, samples_per_prompt: 4, sampling: {max_tokens: 512}}
"""


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    """A configuration without an error, and all it names."""
    write_model(tmp_path / "model")
    for name, text in (("train", "1 + 1"), ("test", "2 + 2")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": text, "answer": "2"}) + "\n", encoding="utf-8")
    (tmp_path / "sound.yaml").write_text(CONFIG.replace("ROOT", str(tmp_path)), encoding="utf-8")
    return tmp_path


def examine(root: Path, *overrides: str, around: Surroundings | None = None) -> Diagnosis:
    return diagnose(str(root / "sound.yaml"), list(overrides), around=around)


class Broken(NamedTuple):
    """What is wrong and what must be said about it."""

    key: str
    problem: str
    fix: str
    overrides: tuple[str, ...] = ()
    damage: Callable[[Path], object] = lambda root: None
    around: Surroundings | None = None


def config_with(**changes: object) -> Callable[[Path], object]:
    def damage(root: Path) -> None:
        (root / "model" / "config.json").write_text(json.dumps({**QWEN2, **changes}), encoding="utf-8")

    return damage


def without(name: str) -> Callable[[Path], object]:
    return lambda root: (root / name).unlink()


def text(name: str, content: str) -> Callable[[Path], object]:
    return lambda root: (root / name).write_text(content, encoding="utf-8")


def critic(*overrides: str) -> tuple[str, ...]:
    return ("algorithm.advantage.kind=gae", "+critic={}", *overrides)


BROKEN = {
    # configuration
    "unknown key": Broken("actor.layout.tpp", "unknown key", "write actor.layout.tp", ("actor.layout.tpp=2",)),
    "wrong type": Broken("run.steps", "expected integer >= 1", "set run.steps to an integer", ("run.steps=many",)),
    "out of bounds": Broken("rollout.tp", "found 0", "set rollout.tp to", ("rollout.tp=0",)),
    "no override": Broken("command line", "not an override", "write key=value", ("rollout.tp",)),
    "a group of one": Broken(
        "rollout.samples_per_prompt", "samples_per_prompt >= 2",
        "change rollout.samples_per_prompt or algorithm.advantage.kind to get", ("rollout.samples_per_prompt=1",)
    ),
    "a critic too many": Broken("critic", "no critic for grpo", "~critic", ("+critic={}",)),
    "a minibatch that does not divide": Broken(
        "algorithm.minibatch_size", "a divisor of the 64 responses",
        "data.prompts_per_step or rollout.samples_per_prompt to get", ("algorithm.minibatch_size=10",)
    ),
    "a microbatch below the longest sequence": Broken(
        "actor.engine.microbatch_tokens", "at least 768", "to get at least 768", ("actor.engine.microbatch_tokens=700",)
    ),
    "too few GPUs": Broken("cluster.num_nodes", "at least 16 GPUs", "change cluster.num_nodes, cluster.gpus_per_node,",
        ("actor.layout.dp=8",)),
    "an engine across nodes": Broken(
        "rollout.tp",
        "engines that do not straddle nodes",
        "change rollout.tp, rollout.replicas or cluster.gpus_per_node to get",
        ("rollout.tp=8", "rollout.replicas=2", "cluster.gpus_per_node=4", "cluster.num_nodes=4"),
    ),
    # model
    "heads": Broken(
        "actor.layout.tp", "8 attention heads, found 3", "set actor.layout.tp to one of 1, 2, 4", ("actor.layout.tp=3",)
    ),
    "key-value heads": Broken(
        "actor.layout.tp", "4 key-value heads, found 8", "one of 1, 2, 4", ("actor.layout.tp=8", "actor.layout.dp=1")
    ),
    "feed-forward rows": Broken(
        "actor.layout.tp", "130 feed-forward rows, found 4", "one of 1, 2",
        ("actor.layout.tp=4", "actor.layout.dp=2"), config_with(intermediate_size=130),
    ),
    "layers": Broken(
        "actor.layout.pp", "4 layers", "one of 1, 2, 4", ("actor.layout.pp=3", "actor.layout.dp=1", "actor.layout.tp=2")
    ),
    "uneven stages that do not add up": Broken(
        "actor.layout.pp", "4 layers", "one of 1, 2, 4",
        ("actor.layout.pp=2", "actor.layout.dp=2", "actor.layout.num_layers_in_first_stage=4"),
    ),
    "heads of an engine": Broken(
        "rollout.tp", "8 attention heads, found 6", "one of 1, 2, 4, 8",
        ("rollout.tp=6", "rollout.replicas=1", "cluster.gpus_per_node=12"),
    ),
    "heads of a critic": Broken(
        "critic.layout.tp", "found 8", "set critic.layout.tp to one of 1, 2, 4", critic("+critic.layout.tp=8")
    ),
    "FP8 of another GPU": Broken(
        "actor.engine.fp8_recipe", "H100 cannot multiply in FP8 with mxfp8", "one of blockwise, tensorwise",
        ("actor.engine.fp8=e4m3", "actor.engine.fp8_recipe=mxfp8"),
    ),
    "a GPU without FP8": Broken(
        "actor.engine.fp8_recipe", "A100 cannot multiply in FP8", "set actor.engine.fp8=null",
        ("actor.engine.fp8=e4m3",), around=Surroundings(gpu="a100"),
    ),
    "rows that FP8 does not take": Broken(
        "critic.engine.fp8", "multiple of 16 feed-forward rows on a rank, found 130", "critic.engine.fp8=null",
        critic("critic.engine.fp8=e4m3"), config_with(intermediate_size=130),
    ),
    "positions": Broken("rollout.max_model_len", "at most 2048", "shorten", ("rollout.sampling.max_tokens=2000",)),
    "another vocabulary of the critic": Broken(
        "critic.path", "vocabulary of 512", "policy's family", critic("critic.path=CRITIC"),
        lambda root: write_model(root / "critic", vocab_size=640),
    ),
    "no such model": Broken("model.path", "there is no directory nowhere", "hf download", ("model.path=nowhere",)),
    "no model in the directory": Broken(
        "model.path", "No such file", "has a config.json", (), without("model/config.json")
    ),
    "a model that another program wrote half": Broken(
        "model.path", "no JSON", "config.json from the model's page", (), text("model/config.json", '{"model')
    ),
    "quantized by its configuration": Broken(
        "model.path", "quantization_config is", "unquantized", (), config_with(quantization_config={"bits": 4})
    ),
    "a stop token of another model": Broken(
        "rollout.sampling.stop_token_ids", "vocabulary of 512, found 600", "ids of the model's tokenizer",
        ("rollout.sampling.stop_token_ids=[2,600]",),
    ),
    "another family": Broken(
        "model.path", "none of the families", "known family", (), config_with(model_type="gpt2")
    ),
    # placement
    "fewer nodes than stated": Broken(
        "cluster.num_nodes", "expected the 2 nodes", "--nodes=1", around=Surroundings(Nodes(2, 8, "job 7"))
    ),
    "fewer GPUs than stated": Broken(
        "cluster.gpus_per_node", "at most the 4 GPUs", "--gpus-per-node=8", around=Surroundings(Nodes(1, 4, "job 7"))
    ),
    # checkpoint
    "no weights": Broken(
        "model.path", "neither model.safetensors", "model.init=random", (), without("model/model.safetensors")
    ),
    "pickled weights": Broken(
        "model.path", "pickled", "safe_serialization", (),
        lambda root: (root / "model/model.safetensors").rename(root / "model/pytorch_model.bin"),
    ),
    "a missing shard": Broken(
        "model.path", "1 of 1 weight files are missing: a.safetensors", "download", (),
        text("model/model.safetensors.index.json", json.dumps({"weight_map": {"x": "a.safetensors"}})),
    ),
    "truncated weights": Broken(
        "model.safetensors", "truncated", "copy the file again", (),
        lambda root: os.truncate(root / "model/model.safetensors", 9000),
    ),
    "weights of another model": Broken(
        "model.path", "absent", "fetch", (),
        lambda root: write_safetensors(root / "model/model.safetensors", {"model.norm.weight": (64,)}),
    ),
    "another shape": Broken(
        "model.path", "have another shape", "weights of one model", (), config_with(intermediate_size=256)
    ),
    "no tokenizer": Broken(
        "model.path", "no tokenizer", "copy tokenizer.json", (),
        lambda root: [(root / "model" / n).unlink() for n in ("tokenizer.json", "tokenizer_config.json")],
    ),
    "a tokenizer of another model": Broken(
        "model.path", "token ids up to 599", "tokenizer of this model", (),
        lambda root: write_tokenizer(root / "model", vocab_size=600),
    ),
    "no chat template": Broken(
        "data.apply_chat_template", "no chat template", "data.apply_chat_template=false", (),
        lambda root: write_tokenizer(root / "model", vocab_size=500, template=False),
    ),
    "no checkpoint to go on from": Broken(
        "run.resume", "no checkpoint directory", "auto, never or a checkpoint", ("run.resume=runs/x/step_5",)
    ),
    "half a checkpoint to go on from": Broken(
        "run.resume", "no manifest.json", "written to its end", ("run.resume=CRITIC",),
        lambda root: (root / "critic").mkdir(),
    ),
    "a run that may not go on": Broken(
        "run.resume", "holds checkpoints already", "run.resume=auto", ("run.resume=never",),
        lambda root: write_checkpoint(root / "run", step=5),
    ),
    # data and reward
    "no sources": Broken("data.train", "list of {kind: file, path: ...}", "to a list", ("data.train=prompts.jsonl",)),
    "no data": Broken("data.train.0.path", "there is no file", ".jsonl or .parquet", (), without("train.jsonl")),
    "another kind of file": Broken("data.train.0.path", "is no .jsonl", "convert", ("data.train.0.path=CONFIG",)),
    "a broken file": Broken("data.train.0.path", "cannot be read", "one JSON object", (), text("train.jsonl", "{")),
    "a broken line": Broken(
        "data.train.0.path", "line 3: Expecting", "one JSON object a line", (),
        text("train.jsonl", '{"prompt": "1", "answer": "1"}\n\n{"prompt":\n'),
    ),
    "a list among objects": Broken(
        "data.train.0.path", "line 2 is no JSON object", "one JSON object a line", (),
        text("train.jsonl", '{"prompt": "1", "answer": "1"}\n[1]\n'),
    ),
    "no parquet": Broken(
        "data.train.0.path", "cannot be read", "write the file again", ("data.train.0.path=REWARD.parquet",),
        text("reward.py.parquet", "no"),
    ),
    "no critic where one is named": Broken(
        "critic.path", "there is no directory", "hf download", critic("critic.path=CRITIC")
    ),
    "no such column": Broken(
        "data.train.0.prompt_column", "there are answer, question", "to one of them", (),
        text("train.jsonl", '{"question": "1", "answer": "1"}\n'),
    ),
    "no reward file": Broken(
        "reward.path", "there is no file", "path/to/file.py:function",
        ("reward.kind=function", "reward.path=nowhere.py:score"),
    ),
    "no reward function": Broken(
        "reward.path", "defines no 'score'", "name one of its functions",
        ("reward.kind=function", "reward.path=REWARD:score"), text("reward.py", "def judge(): ..."),
    ),
    # memory
    "too much for the device": Broken(
        "actor.engine.microbatch_tokens", "phase update_actor needs", "lower actor.engine.microbatch_tokens",
        ("actor.engine.microbatch_tokens=50000000", "data.prompts_per_step=64000"),
    ),
    "both on the device at once": Broken(
        "rollout.gpu_memory_utilization", "phase rollout needs", "offload", ("rollout.gpu_memory_utilization=1.0",)
    ),
    "a cache too small": Broken(
        "rollout.gpu_memory_utilization", "an engine's cache holds 0 tokens", "raise rollout.gpu_memory_utilization",
        ("rollout.gpu_memory_utilization=0.01",),
    ),
    "a host too small": Broken(
        "host memory", "processes need", "more nodes",
        ("actor.engine.offload=true",), config_with(hidden_size=4096, intermediate_size=16384),
        Surroundings(host_bytes=2**30),
    ),
    # disk and setup
    "a run directory that is a file": Broken("run.dir", "is a file", "another run.dir", ("run.dir=CONFIG",)),
    "a tracker that is not there": Broken(
        "logging.wandb_project", "lacks wandb", "logging.wandb_project=null", ("logging.wandb_project=mine",),
        around=Surroundings(in_job=True),
    ),
    "an unknown container": Broken(
        "MEGARL_ENV", "expected apptainer:IMAGE", "correct", around=Surroundings(settings={"MEGARL_ENV": "docker:x"})
    ),
    "no image": Broken(
        "MEGARL_ENV", "there is no image", "all nodes see",
        around=Surroundings(settings={"MEGARL_ENV": "pyxis:/nowhere.sqsh"}),
    ),
}  # fmt: skip


def overrides_of(broken: Broken, root: Path) -> list[str]:
    places = {"CRITIC": root / "critic", "CONFIG": root / "sound.yaml", "REWARD": root / "reward.py"}
    texts = list(broken.overrides)
    for name, path in places.items():
        texts = [one.replace(name, str(path)) for one in texts]
    return texts


def test_a_sound_configuration_has_no_errors(sound: Path):
    started = time.monotonic()
    diagnosis = examine(sound, around=Surroundings(host_bytes=512 * 2**30))
    assert not errors(diagnosis.findings) and not diagnosis.unchecked, diagnosis.text()
    assert diagnosis.exit_code == 0
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_found_with_its_fix(sound: Path, name: str):
    broken = BROKEN[name]
    broken.damage(sound)
    diagnosis = examine(sound, *overrides_of(broken, sound), around=broken.around)
    found = [
        finding
        for finding in errors(diagnosis.findings)
        if broken.key in finding.key and broken.problem in finding.problem and broken.fix in finding.fix
    ]
    assert len(found) == 1, diagnosis.text()
    assert diagnosis.exit_code != 0


COMBINED = (
    "a group of one",
    "a minibatch that does not divide",
    "layers",
    "positions",
    "fewer GPUs than stated",
    "truncated weights",
    "a tokenizer of another model",
    "no such column",
    "no reward function",
    "a run directory that is a file",
)


def test_several_are_all_reported_in_one_run(sound: Path):
    overrides: list[str] = []
    for name in COMBINED:
        BROKEN[name].damage(sound)
        overrides += overrides_of(BROKEN[name], sound)
    diagnosis = examine(sound, *overrides, around=BROKEN["fewer GPUs than stated"].around)
    for name in COMBINED:
        broken = BROKEN[name]
        assert any(
            broken.key in finding.key and broken.problem.split(" of the")[0] in finding.problem
            for finding in errors(diagnosis.findings)
        ), f"{name} is not in\n{diagnosis.text()}"


def test_every_finding_of_them_says_what_to_change(sound: Path):
    overrides: list[str] = []
    for name in COMBINED:
        BROKEN[name].damage(sound)
        overrides += overrides_of(BROKEN[name], sound)
    findings = examine(sound, *overrides, around=BROKEN["fewer GPUs than stated"].around).findings
    assert len(findings) >= len(COMBINED) and all(finding.fix.strip() for finding in findings)


def test_what_a_run_expects_of_itself_is_kept_with_its_seconds(sound: Path):
    config = load_train(str(sound / "sound.yaml"), []).config
    seconds = cli._forecast(config)["seconds"]
    assert {"rollout", "update_actor", "weight_sync"} < set(seconds)
    assert seconds["step"] == pytest.approx(sum(seconds.values()) - seconds["step"])
    assert "seconds" not in cli._forecast(
        config.model_copy(update={"cluster": config.cluster.model_copy(update={"device": "cpu"})})
    )


def test_what_depends_on_a_broken_key_is_not_reported_again(sound: Path):
    diagnosis = examine(sound, "actor.layout.tp=none")
    assert [finding.key for finding in errors(diagnosis.findings)] == ["actor.layout.tp"]


def test_what_only_slows_a_run_is_not_said_of_a_default_that_stands_for_a_broken_value(sound: Path):
    found = examine(sound, "actor.layout.tp=2.0").findings  # with one tensor-parallel rank half of the GPUs are idle
    assert [finding.key for finding in found if finding.area != "setup"] == ["actor.layout.tp"]


def test_a_tokenizer_with_half_of_the_vocabulary_is_a_warning(sound: Path):
    write_tokenizer(sound / "model", vocab_size=256)
    (found,) = [finding for finding in examine(sound).findings if finding.area == "checkpoint"]
    assert found.level == "warning" and "has 256 tokens, the model a vocabulary of 512" in found.problem


def test_a_model_that_is_not_here_is_judged_by_its_name_where_it_is_known(sound: Path):
    diagnosis = examine(
        sound, "model.path=models/Llama-3.3-70B-Instruct", "actor.layout.tp=3", "actor.engine.offload=true"
    )
    keys = [finding.key.partition("=")[0] for finding in errors(diagnosis.findings)]
    assert {"model.path", "actor.layout.tp"} <= set(keys)
    assert not [finding for finding in diagnosis.findings if "tokenizer" in finding.problem]
    assert diagnosis.unchecked[0].startswith("model.path: weights and tokenizer; its numbers are those")
    memory = examine(sound, "model.path=models/Llama-3.3-70B-Instruct").findings
    assert "memory" in [finding.area for finding in memory]


def test_without_the_critic_the_policy_is_judged_nevertheless(sound: Path):
    diagnosis = examine(sound, *critic("critic.path=nowhere"), "actor.layout.tp=3")
    keys = [finding.key.partition("=")[0] for finding in errors(diagnosis.findings)]
    assert "critic.path" in keys and "actor.layout.tp" in keys
    assert any("critic.path: its weights" in text for text in diagnosis.unchecked)


def test_what_is_assumed_of_processes_refuses_no_job(sound: Path):
    found = examine(sound, around=Surroundings(host_bytes=2**30)).findings
    assert [finding.level for finding in found if finding.key == "host memory"] == ["warning"]


def test_a_job_knows_the_memory_of_its_node():
    assert memory_of_slurm({}) is None
    whole = memory_of_slurm({"SLURM_JOB_ID": "7"})
    assert whole is not None and whole == memory_of_slurm({"SLURM_JOB_ID": "7", "SLURM_MEM_PER_NODE": "0"})
    assert memory_of_slurm({"SLURM_JOB_ID": "7", "SLURM_MEM_PER_NODE": "512"}) == 2**29
    assert memory_of_slurm({"SLURM_JOB_ID": "7", "SLURM_MEM_PER_NODE": "999999999"}) == whole


def test_what_cannot_be_checked_is_named(sound: Path):
    shutil.rmtree(sound / "model")
    diagnosis = examine(sound)
    assert [finding.key.partition("=")[0] for finding in errors(diagnosis.findings)] == ["model.path"]
    assert "disk" in diagnosis.unchecked[0]


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("rollout.replicas", ("rollout.replicas=2",)),
        ("actor.layout.dp", ("actor.layout.dp=2",)),
        ("actor.layout.pp", ("actor.layout.pp=2", "actor.layout.dp=2", "algorithm.minibatch_size=4")),
        ("algorithm.minibatch_size", ("algorithm.minibatch_size=4", "actor.layout.tp=1", "actor.layout.dp=3")),
        (
            "actor.layout.tp",
            ("actor.layout.tp=4", "actor.layout.dp=3", "cluster.gpus_per_node=6", "cluster.num_nodes=2"),
        ),
    ],
)
def test_what_only_slows_a_run_is_a_warning(sound: Path, key: str, overrides: tuple[str, ...]):
    diagnosis = examine(sound, *overrides)
    assert key in [finding.key for finding in diagnosis.findings if finding.level == "warning"], diagnosis.text()
    assert diagnosis.exit_code == 0


def test_the_command_prints_json_and_ends_with_the_code(sound: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["doctor", str(sound / "sound.yaml"), "actor.layout.pp=3", "--json"]) == 2
    report = json.loads(capsys.readouterr().out)
    assert report["exit_code"] == 2
    assert {"area", "key", "problem", "fix", "level"} == set(report["findings"][0])
    assert cli.main(["doctor", str(sound / "sound.yaml"), "data.train.0.path=nowhere.jsonl"]) == 4
    out = capsys.readouterr().out
    assert "fix: give the path" in out and "1 errors" in out
