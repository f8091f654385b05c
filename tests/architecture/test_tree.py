"""Sizes, names and documents of the tree."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.architecture.source import LAYERS, PACKAGE, ROOT, modules, relative, tree_of

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 80
MAX_README_LINES = 60
NAMELESS = {"utils", "util", "common", "helpers", "helper", "misc"}

PACKAGES = sorted(name for name in LAYERS if (PACKAGE / name).is_dir())
SOURCES = [
    path
    for folder in ("megarl", "tests", "tools", "benchmarks", "scripts")
    if (ROOT / folder).is_dir()
    for path in modules(ROOT / folder)
]


def in_checkout(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", SOURCES, ids=in_checkout)
def test_a_file_can_be_read_in_one_sitting(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_FILE_LINES


@pytest.mark.parametrize("path", modules(), ids=relative)
def test_a_function_fits_on_a_page(path):
    long = {
        node.name: size
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (size := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert long == {}


@pytest.mark.parametrize("path", SOURCES, ids=in_checkout)
def test_a_module_is_named_after_what_it_holds(path):
    assert not NAMELESS & {part.removesuffix(".py") for part in path.relative_to(ROOT).parts}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_explains_itself(name):
    readme = PACKAGE / name / "README.md"
    assert readme.is_file()
    assert 3 <= len(readme.read_text(encoding="utf-8").splitlines()) <= MAX_README_LINES


@pytest.mark.parametrize("path", [path for path in modules() if path.name == "__init__.py"], ids=relative)
def test_a_package_has_a_docstring(path):
    assert ast.get_docstring(tree_of(path))


def test_every_folder_of_tests_is_a_package():
    """Else two test modules of one basename collide."""
    folders = {path.parent for path in modules(ROOT / "tests")}
    assert [in_checkout(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


def test_warnings_are_errors():
    import tomllib

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert settings["filterwarnings"][0] == "error"
