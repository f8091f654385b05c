"""How a failed weight update is told. Loads no torch."""

from __future__ import annotations

from megarl.errors import SyncError


def sync_failure(who: str, phase: str, tensor: str | None, cause: str) -> SyncError:
    """The error every failed update ends in: who failed, in which phase, at which tensor, why."""
    at = "" if tensor is None else f" at {tensor}"
    return SyncError(
        f"weight update failed on {who} in phase {phase}{at}: {cause}",
        fix="the logs of that rank have more; the next update starts from scratch",
    )
