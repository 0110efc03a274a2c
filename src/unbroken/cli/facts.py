"""How the records of a store look in JSON, in one place for all commands."""

import math
from datetime import UTC, datetime
from typing import Any

from unbroken.records.summary import Line
from unbroken.store.check import Verdict
from unbroken.store.manifest import Manifest


def instant(saved_at_ns: int | None) -> str | None:
    """An instant as ISO 8601 in UTC; None where there is none."""
    if saved_at_ns is None:
        return None
    try:
        return datetime.fromtimestamp(saved_at_ns / 1e9, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        # No calendar reaches that far; a clock that was that wrong must not hide the rest.
        return None


def line_facts(line: Line) -> dict[str, Any]:
    """One line of ``ls``."""
    return {
        "name": line.name,
        "state": line.state,
        "step": line.step,
        "kind": line.kind,
        "saved_at": instant(line.saved_at_ns),
        "bytes": line.size_bytes,
        "parts": line.parts,
        "kept_because": list(line.kept_because),
        "note": line.note,
    }


def number(value: float) -> float | str:
    """A metric; what is no number in JSON is its name."""
    return value if math.isfinite(value) else str(value)


def manifest_facts(name: str, manifest: Manifest) -> dict[str, Any]:
    """All that a manifest says."""
    return {
        "name": name,
        "id": manifest.id,
        "step": manifest.step,
        "kind": manifest.kind,
        "saved_at": instant(manifest.saved_at_ns),
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


def verdict_facts(verdict: Verdict) -> dict[str, Any]:
    """What a verification found."""
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
