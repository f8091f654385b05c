"""Who may import whom (docs: CONTRIBUTING.md, "Layers" and "Doors")."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture.source import LAYERS, PACKAGE, dotted_uses, imports, modules, package_of, relative

# A library's name -> the files that may import it.
DOORS = {
    "megatron": ("train/megatron/", "platform/"),
    "apex": ("train/megatron/", "platform/"),
    "transformer_engine": ("train/megatron/", "platform/"),
    "vllm": ("rollout/vllm/",),
    "ray": ("controller/",),
    "hydra": ("config/load.py",),
    "omegaconf": ("config/load.py",),
    "megatron.core.parallel_state": ("train/megatron/bootstrap.py",),
    "torch.cuda": ("platform/",),
}

# A use that is no import -> the files that may contain it.
USES = {
    "torch.cuda": ("platform/",),
    "os.environ": ("platform/env.py",),
    "os.getenv": ("platform/env.py",),
    "os.putenv": ("platform/env.py",),
    "print": ("cli.py",),
}


def is_in(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def violations_of_layers(path: Path) -> list[str]:
    here = package_of(path)
    found = []
    for item in imports(path):
        parts = item.dotted.split(".")
        if parts[0] != "megarl" or len(parts) < 2 or parts[1] == "__version__":
            continue
        there = parts[1]
        if there == here or path.name == "__main__.py":
            continue
        if there not in LAYERS:
            found.append(f"{relative(path)}:{item.line} imports {item.dotted}, which is in no layer")
        elif here is not None and LAYERS[there] >= LAYERS[here]:
            found.append(f"{relative(path)}:{item.line} (layer {LAYERS[here]}) imports {there} (layer {LAYERS[there]})")
    return found


def violations_of_doors(path: Path) -> list[str]:
    here = relative(path)
    found = set()
    for name, doors in DOORS.items():
        if not here.startswith(doors):
            found |= {(item.line, item.dotted) for item in imports(path) if is_in(item.dotted, name)}
    for name, doors in USES.items():
        if not here.startswith(doors):
            found |= {(line, name) for dotted, line in dotted_uses(path) if is_in(dotted, name)}
    return [f"{here}:{line} uses {dotted}" for line, dotted in sorted(found)]


def test_every_module_belongs_to_a_layer():
    names = {package_of(path) for path in modules()} - {None, "__main__"}
    assert names <= set(LAYERS)


@pytest.mark.parametrize("path", modules(), ids=relative)
def test_a_module_imports_lower_layers_or_its_own_package(path):
    assert violations_of_layers(path) == []


@pytest.mark.parametrize("path", modules(), ids=relative)
def test_a_library_is_used_behind_its_door(path):
    assert violations_of_doors(path) == []


@pytest.mark.parametrize(
    "path", [path for path in modules() if LAYERS.get(package_of(path) or "", 9) <= 3], ids=relative
)
def test_layers_0_to_3_take_values_not_configuration(path):
    if package_of(path) == "config":
        return
    assert [item.dotted for item in imports(path) if is_in(item.dotted, "megarl.config")] == []


class TestTheTestsThemselves:
    """Each rule catches what it is for."""

    @pytest.fixture
    def module(self, monkeypatch, tmp_path):
        monkeypatch.setattr("tests.architecture.source.PACKAGE", tmp_path)

        def write(name: str, text: str) -> Path:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return path

        return write

    @pytest.mark.parametrize(
        "text",
        [
            "def f():\n    from megarl.train import engine",
            "import megarl.data.batch",
            "from megarl import rewards",
            "from ..train import engine",
            "import importlib\nimportlib.import_module('megarl.controller')",
        ],
        ids=["inside a function", "sibling", "from the root", "relative", "dynamic"],
    )
    def test_an_import_upwards_or_sideways_is_found(self, module, text):
        assert violations_of_layers(module("algorithms/kl.py", text))

    @pytest.mark.parametrize(
        "text",
        ["from megarl.errors import DataError", "from megarl.algorithms import kl", "from . import kl", "import os"],
    )
    def test_an_import_downwards_is_not(self, module, text):
        assert violations_of_layers(module("algorithms/registry.py", text)) == []

    @pytest.mark.parametrize(
        "text",
        [
            "import vllm",
            "from megatron.core import parallel_state",
            "import torch\ntorch.cuda.synchronize()",
            "from torch import cuda",
            "import os\nos.environ['A']",
            "print(1)",
        ],
    )
    def test_a_use_past_the_door_is_found(self, module, text):
        assert violations_of_doors(module("weights/sync.py", text))


def test_the_package_is_where_these_tests_look():
    assert (PACKAGE / "errors.py").is_file()
