"""The package's source as the architecture tests see it: files, their layer, and every import in them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megarl"

# A module imports lower layers or its own package. The number is the layer.
LAYERS = {
    "errors": 0,
    "platform": 1, "parallel": 1, "observability": 1,
    "config": 2, "models": 2, "data": 2, "algorithms": 2,
    "weights": 3, "rewards": 3,
    "train": 4, "rollout": 4,
    "controller": 5, "planning": 5,
    "launch": 6,
    "cli": 7,
}  # fmt: skip


@dataclass(frozen=True)
class Import:
    """One imported name: ``import a.b`` and ``from a.b import c`` (module ``a.b``, name ``c``)."""

    module: str
    name: str | None
    line: int

    @property
    def dotted(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


def modules(root: Path = PACKAGE) -> list[Path]:
    return sorted(path for path in root.rglob("*.py") if "__pycache__" not in path.parts)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def relative(path: Path) -> str:
    """Path inside the package with forward slashes, such as ``train/megatron/step.py``."""
    return path.relative_to(PACKAGE).as_posix()


def package_of(path: Path) -> str | None:
    """Direct child of ``megarl`` the file belongs to; None for ``megarl/__init__.py`` itself."""
    part = relative(path).split("/")[0].removesuffix(".py")
    return None if part == "__init__" else part


def imports(path: Path) -> Iterator[Import]:
    """Every import of a file, at module level and inside functions."""
    inside = ("megarl", *relative(path).split("/")[:-1])
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, None, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                module = ".".join([*inside[: len(inside) - node.level + 1], *([module] if module else [])])
            yield from (Import(module, alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and _is_dynamic_import(node):
            yield Import(str(node.args[0].value), None, node.lineno)  # type: ignore[attr-defined]


def _is_dynamic_import(node: ast.Call) -> bool:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
    return name in ("import_module", "__import__") and bool(node.args) and isinstance(node.args[0], ast.Constant)


def dotted_uses(path: Path) -> Iterator[tuple[str, int]]:
    """Dotted names a file uses (``torch.cuda.synchronize``, ``os.environ``) and bare calls (``print``), with lines."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute):
            parts = [node.attr]
            value = node.value
            while isinstance(value, ast.Attribute):
                parts.append(value.attr)
                value = value.value
            if isinstance(value, ast.Name):
                yield ".".join([value.id, *reversed(parts)]), node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id, node.lineno
