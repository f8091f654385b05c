"""What is committed names no machine, no package host and no secret, and stays small."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.architecture.source import ROOT

# Written in pieces so that this file passes its own test.
PATTERNS = {
    "an absolute path of one machine": re.compile(
        r"(?<![\w.$}/~-])/(?:ro" + r"ot|ho" + r"me|wo" + r"rk|Us" + r"ers)/\w"
    ),
    "a package host": re.compile(
        r"\b(?:files\.python"
        + r"hosted|py"
        + r"pi\.org|pypi\.nvi"
        + r"dia|download\.py"
        + r"torch|registry\.np"
        + r"mjs"
        r"|deb\.deb" + r"ian|index\.crates|proxy\.gol" + r"ang)",
    ),
    "a private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE " + r"KEY"),
    "a token": re.compile(
        r"\b(?:gh[pousr]_[A-Za-z0-9]{30,}|hf_[A-Za-z0-9]{30,}|AKIA[A-Z0-9]{16}|sk-[A-Za-z0-9_-]{32,})"
    ),
}
MAX_BYTES = 1 << 20


def tracked() -> list[Path]:
    """Files git tracks or would add."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: nothing is tracked")
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True, timeout=60,
    ).stdout  # fmt: skip
    return [path for name in listing.decode().split("\0") if name and (path := ROOT / name).is_file()]


def findings(text: str) -> list[str]:
    return [what for what, pattern in PATTERNS.items() if pattern.search(text)]


def test_no_machine_no_host_no_secret():
    found = {}
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if what := findings(text):
            found[str(path.relative_to(ROOT))] = what
    assert found == {}


def test_files_stay_small():
    assert [str(path.relative_to(ROOT)) for path in tracked() if path.stat().st_size > MAX_BYTES] == []


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("cd /ro" + "ot/megarl", True),
        ("path = '/ho" + "me/someone/x'", True),
        ("$HOME/megarl /scratch/models /path/to/model", False),
        ("https://py" + "pi.org/simple", True),
        ("hf_" + "a" * 34, True),
        ("the home/work balance", False),
    ],
)
def test_the_patterns_find_what_they_are_for(text, is_found):
    assert bool(findings(text)) == is_found
