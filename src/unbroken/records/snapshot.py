"""The live snapshot of a run, ``.run_state.json``: read for ``status``, believed only as far as the lease agrees.

The field names are those that tools around training already read, so that they keep working. A number that JSON has no
word for is null, with its name in ``loss_text``: a reader that is strict never meets a NaN.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from unbroken.errors import StorageFailed
from unbroken.files import LOCAL, Files
from unbroken.records.layout import Layout
from unbroken.store.fields import as_instant, as_number, as_whole, parsed

STATUSES: Final = ("running", "completed", "stopped", "halted", "error")
WRITE_EVERY_S: Final = 1.0
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
    started_at_s: float | None = None
    learning_rate: float | None = None
    tokens_per_s: float | None = None
    latest_checkpoint: str | None = None
    config_path: str | None = None
    job: int | None = None
    exit_code: int | None = None
    loss_step: int | None = None


class RunStateWriter:
    """Keeps the snapshot of one job fresh, without ever making training wait for the disk.

    Args:
        scratch: a name beside the snapshot that nobody else uses; the job's name is in it.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        scratch: str,
        clock: Callable[[], float],
        every_s: float = WRITE_EVERY_S,
        files: Files = LOCAL,
    ) -> None:
        self._path, self._scratch, self._files = layout.run_state, scratch, files
        self._clock, self._every_s = clock, every_s
        self._written_at_s: float | None = None

    def is_due(self) -> bool:
        """Whether a snapshot would be written now."""
        last_s = self._written_at_s
        # A clock that is set back must not stop the writes.
        return last_s is None or not 0 <= self._clock() - last_s < self._every_s

    def write(self, state: RunState, *, durable: bool = False) -> bool:
        """Replace the snapshot, at most once in ``every_s``; says whether it was written.

        ``durable`` writes at once and waits for the disk: for how a job ended. ``updated_at_s`` is set here.

        Raises:
            StorageFailed: an I/O error.
        """
        now_s = self._clock()
        if not durable and not self.is_due():
            return False
        self._written_at_s = now_s
        # crash here: the old snapshot or the new one.
        self._files.replace(self._path, encode(state, now_s), scratch=self._scratch, durable=durable)
        return True


def encode(state: RunState, updated_at_s: float) -> bytes:
    """The snapshot as it is on disk."""
    loss = state.loss
    body = {
        "status": state.status,
        "pid": state.pid,
        "started_at": _iso(state.started_at_s),
        "updated_at": _iso(updated_at_s),
        "global_step": state.step,
        "max_steps": state.max_steps,
        "loss": _finite(loss),
        "loss_step": state.loss_step,
        "loss_text": None if loss is None or math.isfinite(loss) else repr(float(loss)),
        "learning_rate": _finite(state.learning_rate),
        "tokens_trained": state.tokens,
        "tokens_per_sec": _finite(state.tokens_per_s),
        "error": state.error,
        "latest_checkpoint": state.latest_checkpoint,
        "config_path": state.config_path,
        "job": state.job,
        "exit_code": state.exit_code,
    }
    return (json.dumps(body, allow_nan=False, indent=2) + "\n").encode()


def read_run_state(layout: Layout, files: Files = LOCAL) -> RunState | None:
    """The snapshot, or None if there is none or it cannot be read: it is a convenience, never the truth."""
    try:
        found: Any = parsed(files.read_bytes(layout.run_state, limit_bytes=_LIMIT_BYTES))
    except (ValueError, StorageFailed):
        return None
    if not isinstance(found, dict):
        return None
    status = found.get("status")
    return RunState(
        status=status if status in STATUSES else None,
        pid=as_whole(found.get("pid")),
        step=as_whole(found.get("global_step")),
        max_steps=as_whole(found.get("max_steps")),
        tokens=as_whole(found.get("tokens_trained")),
        loss=_loss(found),
        loss_step=as_whole(found.get("loss_step")),
        error=_text(found.get("error")),
        updated_at_s=_instant(found.get("updated_at")),
        started_at_s=_instant(found.get("started_at")),
        learning_rate=as_number(found.get("learning_rate")),
        tokens_per_s=as_number(found.get("tokens_per_sec")),
        latest_checkpoint=_text(found.get("latest_checkpoint")),
        config_path=_text(found.get("config_path")),
        job=as_whole(found.get("job")),
        exit_code=as_whole(found.get("exit_code")),
    )


def _loss(found: dict[str, Any]) -> float | None:
    named = found.get("loss_text")
    loss = found.get("loss")
    # Other tools write a bare NaN; a loss may also be larger than any duration, as long as a float holds it.
    return float(named) if named in ("nan", "inf", "-inf") else loss if isinstance(loss, float) else as_number(loss)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _iso(at_s: float | None) -> str | None:
    return None if at_s is None else datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds")


def _instant(value: object) -> float | None:
    if isinstance(value, str):
        try:
            instant = datetime.fromisoformat(value)
            return as_instant((instant if instant.tzinfo else instant.replace(tzinfo=UTC)).timestamp())
        except (ValueError, OverflowError):
            return None
    return as_instant(value)
