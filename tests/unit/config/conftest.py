"""A complete small configuration in a file of its own, so that tests do not depend on the presets' numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

TRAIN = """\
# A test configuration
run:
  name: mini
  steps: 4
cluster:
  device: cpu
  gpus_per_node: 0
model:
  path: models/${run.name}
data:
  train:
    - {kind: reasoning_gym, task: chain_sum, seed: 1}
    - path: prompts.jsonl
      answer_column: answer
  validation:
    - kind: reasoning_gym
      task: chain_sum
      seed: 2
  prompts_per_step: 4
reward: {kind: math_verify}
rollout: {samples_per_prompt: 2}
"""

SFT = """\
# A test configuration of SFT
run: {name: mini_sft}
cluster:
  device: cpu
  gpus_per_node: 0
model: {path: models/mini}
data:
  train:
    - {kind: reasoning_gym, task: chain_sum}
"""


@pytest.fixture
def train_yaml(tmp_path: Path) -> str:
    path = tmp_path / "mini.yaml"
    path.write_text(TRAIN, encoding="utf-8")
    return str(path)


@pytest.fixture
def sft_yaml(tmp_path: Path) -> str:
    path = tmp_path / "mini_sft.yaml"
    path.write_text(SFT, encoding="utf-8")
    return str(path)
