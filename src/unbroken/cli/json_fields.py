"""The JSON fields of checkpoints, manifests and verification results, the same in all commands."""

import math
from datetime import UTC, datetime
from typing import Any

from unbroken.records.summary import StoreLine
from unbroken.store.check import Verdict
from unbroken.store.manifest import Manifest


def iso_time(saved_at_ns: int | None) -> str | None:
    """A time as ISO 8601 in UTC; None for None."""
    if saved_at_ns is None:
        return None
    try:
        return datetime.fromtimestamp(saved_at_ns / 1e9, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        # Out of the calendar's range: a clock that wrong must not hide the other fields.
        return None


def listing_fields(line: StoreLine) -> dict[str, Any]:
    """One line of ``ls``."""
    return {
        "name": line.name,
        "state": line.state,
        "step": line.step,
        "kind": line.kind,
        "saved_at": iso_time(line.saved_at_ns),
        "bytes": line.size_bytes,
        "parts": line.parts,
        "kept_because": list(line.kept_because),
        "note": line.note,
    }


def number(value: float) -> float | str:
    """A metric; NaN and infinities as text, since JSON has no such numbers."""
    return value if math.isfinite(value) else str(value)


def manifest_fields(name: str, manifest: Manifest) -> dict[str, Any]:
    """All fields of a manifest."""
    return {
        "name": name,
        "id": manifest.id,
        "step": manifest.step,
        "kind": manifest.kind,
        "saved_at": iso_time(manifest.saved_at_ns),
        "job": manifest.job,
        "origin": manifest.origin,
        "bytes": manifest.size_bytes,
        "fingerprint": manifest.fingerprint,
        "metrics": {metric: number(value) for metric, value in manifest.metrics.items()},
        "parts": [
            {"name": part.name, "bytes": part.size_bytes, "digest": part.digest.whole} for part in manifest.parts
        ],
        "tensors": {
            tensor: {"dtype": found.dtype, "shape": list(found.shape), "digest": found.digest}
            for tensor, found in manifest.tensors.items()
        },
        "metadata": dict(manifest.metadata),
    }


def verification_fields(verdict: Verdict) -> dict[str, Any]:
    """The result of verifying one checkpoint."""
    return {
        "name": verdict.name,
        "step": verdict.manifest.step if verdict.manifest else None,
        "level": verdict.level.value,
        "is_sound": verdict.is_sound,
        "checked_bytes": verdict.checked_bytes,
        "foreign": list(verdict.foreign),
        "findings": [
            {"part": f.part, "problem": f.problem, "cause": f.cause.value, "start": f.start, "end": f.end}
            for f in verdict.findings
        ],
    }
