"""C sources of megarl as libraries: compiled on first use, kept in the cache. Loads no torch.

Where there is no compiler, or the user's cache cannot be written, callers do the same work in numpy or torch.

Invariants:
1. A library is used only under the digest of the source it was made from, and only if it belongs to this user.
2. A library appears in the cache whole or not at all, however many processes make it at once.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

from megarl.platform import env

logger = logging.getLogger(__name__)

_FLAGS = ("-O3", "-shared", "-fPIC")
_TIMEOUT_S = 60.0


@lru_cache
def compiled(source: Path) -> ctypes.CDLL | None:
    """The library of a C source, None where it cannot be made."""
    try:
        code = source.read_bytes()
        digest = hashlib.sha256(code + platform.machine().encode() + " ".join(_FLAGS).encode()).hexdigest()[:16]
        library = env.cache_directory() / "native" / f"{source.stem}-{digest}.so"
        if not _is_own(library):
            _make(source, library)
        return ctypes.CDLL(str(library))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        logger.warning("%s is not compiled, which makes its work slower: %s", source.name, error)
        return None


def _is_own(library: Path) -> bool:
    """Whether it is there and nobody else could have put it there."""
    try:
        return library.stat().st_uid == os.getuid()
    except FileNotFoundError:
        return False


def _make(source: Path, library: Path) -> None:
    compiler = next(filter(None, map(shutil.which, (env.text("CC", "cc") or "cc", "gcc", "clang"))), None)
    if compiler is None:
        raise RuntimeError("no C compiler found")
    library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=library.parent) as place:
        made = Path(place) / library.name
        words = [compiler, *_FLAGS, "-o", str(made), str(source)]
        result = subprocess.run(words, capture_output=True, text=True, timeout=_TIMEOUT_S)
        if result.returncode:
            lines = [line for line in result.stderr.splitlines() if "error" in line]
            raise RuntimeError(lines[0] if lines else f"{compiler} ended with {result.returncode}")
        os.replace(made, library)
