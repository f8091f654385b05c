"""The printed plan of an update: its sums agree with the model's and the engines' sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl import cli
from megarl.config.schema import TrainConfig
from megarl.models.tiny import tiny_config
from megarl.planning.sync_plan import plan_sync
from tests.unit.models.test_load_spec import QWEN3_30B_A3B

HOSTS = ["a", "a", "b", "b"]


@pytest.fixture
def model(tmp_path: Path) -> str:
    content = tiny_config("qwen2", tie_word_embeddings=False)
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return str(tmp_path)


def test_bytes_links_and_seconds(model: str):
    run = TrainConfig.model_validate(
        {
            "model": {"path": model},
            "data": {"train": [{"kind": "reasoning_gym", "task": "chain_sum"}]},
            "cluster": {"placement": "split"},
            "actor": {"layout": {"tp": 2, "dp": 2}},
            "rollout": {"replicas": 2, "tp": 2, "dtype": "float32"},
        }
    )
    made = plan_sync(run, actor_hosts=HOSTS, engine_hosts=HOSTS, bandwidth=1e6, local_bandwidth=1e9)
    # Each engine holds the model once, but for the norms, which each of its two ranks holds.
    norms = (4 * 2 + 1) * 128
    assert made.num_bytes == sum(made.sent) == sum(made.received) == 4 * 2 * (made.num_parameters + norms)
    # With a replica of the actor beside each engine nothing crosses hosts.
    assert [(link.source, link.destination) for link in made.links] == [("a", "a"), ("b", "b")]
    assert made.seconds == pytest.approx(max(*made.sent, *made.received) / 1e9)
    assert made.send_balance == pytest.approx(1, abs=0.05)
    assert made.dropped["replica"] > 0 and made.engine_padding == 2 * (320 - 261) * 128 * 2
    assert made.peak_buffer_bytes == max(*made.sent, *made.received)

    apart = plan_sync(run, actor_hosts=HOSTS, engine_hosts=["c"] * 4, bandwidth=1e6, local_bandwidth=1e9)
    assert apart.seconds == pytest.approx(max(*apart.sent, *apart.received) / 1e6)
    assert apart.digest != made.digest  # other senders, chosen without hosts in common


def preset_of(directory: Path, model: str) -> str:
    preset = directory / "mini.yaml"
    preset.write_text(
        f"cluster: {{device: cpu, gpus_per_node: 0}}\nmodel: {{path: {model}}}\n"
        "data:\n  train: [{kind: reasoning_gym, task: chain_sum, seed: 1}]\n"
        "  validation: [{kind: reasoning_gym, task: chain_sum, seed: 2}]\n",
        encoding="utf-8",
    )
    return str(preset)


def test_the_command_prints_it(model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    preset = preset_of(tmp_path, model)
    assert cli.main(["plan", "sync", preset, "rollout.tp=2", "actor.layout.tp=2"]) == 0
    text = capsys.readouterr().out
    assert "node0 -> node0" in text and "predicted" in text
    digest = text.splitlines()[-1].split()[-1]
    assert cli.main(["plan", "sync", preset, "--json", "rollout.tp=2", "actor.layout.tp=2"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["digest"] == digest and content["send_balance"] >= 1
    assert cli.main(["plan", "sync", preset, "rollout.tp=3"]) == 5
    assert "do not divide by an engine's tp=3" in capsys.readouterr().err
    assert cli.main(["plan", "sync", preset, "--bandwidth", "0"]) == 2


def test_an_expert_model_is_planned_at_degrees_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    small = {"num_hidden_layers": 4, "hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8}
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3_30B_A3B, **small}), encoding="utf-8")
    preset = preset_of(tmp_path, str(tmp_path))
    command = ["plan", "sync", preset, "actor.layout.pp=2", "actor.layout.dp=4", "rollout.tp=4", "--json"]
    read = []
    for degrees in (
        ["actor.layout.ep=4"],
        ["actor.layout.ep=4", "--expert-parallel"],
        ["actor.layout.ep=2", "actor.layout.etp=2"],
    ):
        assert cli.main([*command, *degrees]) == 0
        read.append(json.loads(capsys.readouterr().out))
    cut, dealt, _ = (content["num_copies"] for content in read)
    assert cut > dealt and len({content["digest"] for content in read}) == 3
    assert {content["num_bytes"] for content in read} == {read[0]["num_bytes"]}
    assert cli.main([*command, "actor.layout.vpp=2"]) == 0
    assert cli.main([*command, "actor.layout.pipeline='Et|tttL'"]) == 0
    assert cli.main([*command, "actor.layout.pipeline='Et|ttL'"]) == 5
    assert "has 3 layers, the model 4" in capsys.readouterr().err
    assert cli.main([*command, "actor.layout.ep=3"]) == 2
