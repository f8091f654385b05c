"""PyPI's unrelated apex is refused by name; NVIDIA's is let through."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.errors import SetupError
from megarl.platform import packages


def make_apex(root: Path, *parts: str) -> None:
    for part in ("", *parts):
        folder = root / "apex" / part
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").touch()


def test_an_unrelated_apex_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_apex(tmp_path, "lib")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SetupError, match=r"unrelated package.*pip uninstall apex"):
        packages.check_optional_packages()


def test_nvidias_apex_and_no_apex_are_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages.check_optional_packages()
    make_apex(tmp_path, "multi_tensor_apply", "optimizers")
    monkeypatch.syspath_prepend(tmp_path)
    packages.check_optional_packages()


def test_a_resiliency_package_that_breaks_megatron_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"nvidia-resiliency-ext": "0.4.1", "megatron-core": "0.19.2"}
    monkeypatch.setattr(packages, "_version", versions.get)
    with pytest.raises(SetupError, match=r"nvidia-resiliency-ext 0.4.1 breaks"):
        packages.check_optional_packages()
    versions["nvidia-resiliency-ext"] = "0.5.0"
    packages.check_optional_packages()
