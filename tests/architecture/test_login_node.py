"""A login node has no torch: what checks and plans a run must import without it, and without the other heavy parts."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.architecture.source import PACKAGE, ROOT

HEAVY = ("torch", "megatron", "vllm", "ray", "transformers", "transformer_engine")
LIGHT = ("megarl", "megarl.errors", "megarl.config", "megarl.models", "megarl.planning", "megarl.launch", "megarl.cli")

BLOCKED_IMPORT = """
import importlib, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {heavy!r}:
            raise ImportError(f"a login node has no {{name}}")
sys.meta_path.insert(0, Block())
for name in {names!r}:
    importlib.import_module(name)
"""


def import_blocked(names: tuple[str, ...]) -> subprocess.CompletedProcess:
    code = BLOCKED_IMPORT.format(heavy=HEAVY, names=names)
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)


COMMANDS = """
from megarl import cli
for words in (["doctor", "grpo_70b"], ["plan", "--published"]):
    code = cli.main(words)
    assert code in (0, 5), (words, code)
"""


def exists(name: str) -> bool:
    path = PACKAGE.joinpath(*name.split(".")[1:])
    return path.is_dir() or path.with_suffix(".py").is_file()


@pytest.mark.parametrize("name", LIGHT)
def test_imports_without_torch(name):
    if not exists(name):
        pytest.fail(f"{name} does not exist")
    result = import_blocked((name,))
    assert result.returncode == 0, result.stderr


def test_the_block_blocks():
    result = import_blocked(("torch",))
    assert result.returncode != 0
    assert "a login node has no torch" in result.stderr


def test_the_commands_for_a_login_node_run_without_torch():
    code = BLOCKED_IMPORT.format(heavy=HEAVY, names=()) + COMMANDS
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    assert "doctor: grpo_70b: " in result.stdout and "mean absolute error" in result.stdout
