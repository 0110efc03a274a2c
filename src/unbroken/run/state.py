"""The live snapshot of a run, ``.run_state.json``: read for ``status``, believed only as far as the lease agrees."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from unbroken.errors import StorageFailed
from unbroken.files import LOCAL, Files
from unbroken.run.layout import Layout

STATUSES: Final = ("running", "completed", "stopped", "halted", "error")
_LIMIT_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class RunState:
    """What the last job wrote about itself; a field it did not write, or wrote wrongly, is None."""

    status: str | None = None
    pid: int | None = None
    step: int | None = None
    max_steps: int | None = None
    tokens: int | None = None
    loss: float | None = None
    error: str | None = None
    updated_at_s: float | None = None


def read_run_state(layout: Layout, files: Files = LOCAL) -> RunState | None:
    """The snapshot, or None if there is none or it cannot be read: it is a convenience, never the truth.

    The field names are those that tools around training already read, so that they keep working.
    """
    try:
        found: Any = json.loads(files.read_bytes(layout.run_state, limit_bytes=_LIMIT_BYTES))
    except (ValueError, RecursionError, StorageFailed):
        return None
    if not isinstance(found, dict):
        return None
    status = found.get("status")
    return RunState(
        status=status if status in STATUSES else None,
        pid=_whole(found.get("pid")),
        step=_whole(found.get("global_step")),
        max_steps=_whole(found.get("max_steps")),
        tokens=_whole(found.get("tokens_trained")),
        loss=_number(found.get("loss")),
        error=found["error"] if isinstance(found.get("error"), str) else None,
        updated_at_s=_instant(found.get("updated_at")),
    )


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _number(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _instant(value: object) -> float | None:
    if isinstance(value, str):
        try:
            instant = datetime.fromisoformat(value)
        except ValueError:
            return None
        return (instant if instant.tzinfo else instant.replace(tzinfo=UTC)).timestamp()
    return _number(value)
