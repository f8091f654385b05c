"""The receipt of a conversion: what came from where, what it sums up to, and what was left out and why.

``conversion_manifest.json`` lies in the converted directory. Its ``digest`` covers names, shapes, dtypes and checksums
of the canonical tensors, so that two checkpoints in any formats hold the same weights if and only if the digests agree.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from megarl.errors import CheckpointError
from megarl.weights.conversion.copying import Done, Job
from megarl.weights.conversion.source import Source
from megarl.weights.conversion.target import Target
from megarl.weights.plan import Plan

MANIFEST = "conversion_manifest.json"
FORMAT = 1


def digest_of(tensors: Mapping[str, tuple[str, Iterable[int], int]]) -> str:
    """SHA-256 over (dtype, shape, checksum) by name, 64 hexadecimal digits."""
    hasher = hashlib.sha256()
    for name in sorted(tensors):
        dtype, shape, checksum = tensors[name]
        hasher.update(f"{name} {dtype} {list(shape)} {checksum:016x}\n".encode())
    return hasher.hexdigest()


def receipt(
    source: Source,
    target: Target,
    plan: Plan,
    jobs: Iterable[Job],
    done: Mapping[str, Done],
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """The receipt as JSON values."""
    before, after, tensors = {}, {}, {}
    for job in jobs:
        entry = done[job.tensor]
        before[job.tensor] = (job.source_dtype, job.shape, entry.source_checksum)
        after[job.tensor] = (job.dtype, job.shape, entry.checksum)
        tensors[job.tensor] = {
            "dtype": job.dtype,
            "shape": list(job.shape),
            "checksum": f"{entry.checksum:016x}",
            "source_dtype": job.source_dtype,
            "source_checksum": f"{entry.source_checksum:016x}",
        }
    return {
        "format": FORMAT,
        "versions": {name: version(name) for name in ("megarl", "numpy")} | {"python": platform.python_version()},
        "source": {
            "format": source.format,
            **_identity(source),
            "digest": digest_of(before),
            "iteration": source.iteration,
        },
        "target": {"format": target.format, "files": dict(target.sizes), "digest": digest_of(after), **options},
        "model": {"family": source.spec.family, "value_head": source.value_head, "config": source.config},
        "plan": {"digest": plan.digest, "copies": len(plan.copies)},
        "tensors": tensors,
        "dropped": _dropped(source, plan),
    }


def is_receipt_of(content: Mapping[str, Any], source: Source, plan: Plan, options: Mapping[str, Any]) -> bool:
    """Whether a receipt is of this source with files of these sizes and times, by this plan and with these options."""
    held, target = content.get("source", {}), content.get("target", {})
    return bool(
        {name: held.get(name) for name in ("directory", "files", "modified_ns")} == _identity(source)
        and content.get("plan", {}).get("digest") == plan.digest
        and {name: target.get(name) for name in options} == json.loads(json.dumps(dict(options)))
    )


def changed_files(directory: Path, content: Mapping[str, Any]) -> list[str]:
    """What is wrong with the files that a receipt names: missing, or of another size."""
    found = []
    for name, size in content.get("target", {}).get("files", {}).items():
        path = directory / name
        if not path.is_file():
            found.append(f"{name} is missing")
        elif path.stat().st_size != size:
            found.append(f"{name} has {path.stat().st_size} bytes instead of {size}")
    return found


def _identity(source: Source) -> dict[str, Any]:
    found = {str(path.relative_to(source.directory)): path.stat() for path in source.files}
    return {
        "directory": str(source.directory),
        "files": {name: status.st_size for name, status in found.items()},
        "modified_ns": {name: status.st_mtime_ns for name, status in found.items()},
    }


def version(package: str) -> str:
    """Installed version of a package; unknown where megarl runs from a checkout."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def read_receipt(directory: Path) -> dict[str, Any]:
    """A directory's receipt. Raises CheckpointError where there is none or it is broken."""
    path = directory / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"no receipt of a conversion: {error.strerror}",
            where=str(path),
            fix="compare with the source instead (--against)",
        ) from error
    except ValueError as error:
        raise CheckpointError(f"the receipt is no JSON: {error}", where=str(path)) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError("the receipt has another format", where=str(path))
    return content


def _dropped(source: Source, plan: Plan) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = [{"name": name, "reason": reason} for name, reason in source.unused.items()]
    summed: dict[tuple[str, str], int] = {}
    for part in plan.dropped:
        key = (part.local_name, part.reason)
        summed[key] = summed.get(key, 0) + part.num_elements
    entries += [{"name": name, "reason": reason, "elements": count} for (name, reason), count in sorted(summed.items())]
    return entries
