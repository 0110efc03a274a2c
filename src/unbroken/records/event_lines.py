"""The events of a job for programs: one JSON object a line, as ``unbroken train --json`` prints them.

A log line that is an event carries its values in ``extra=event(...)``; a handler prints those and skips all others. So
text for people and events for programs come from the same place. NaN and infinities are null: they are no JSON.
"""

import json
import logging
import math
from datetime import UTC, datetime
from typing import Any, Final, TextIO

SCHEMA: Final = "unbroken.train/1"
_ATTRIBUTE: Final = "unbroken_event"


def event(name: str, /, **values: Any) -> dict[str, Any]:  # noqa: ANN401 -- JSON is any
    """What a log call takes as ``extra``, so that its line is an event too."""
    return {_ATTRIBUTE: {"event": name, **values}}


class EventLines(logging.Handler):
    """Writes each event to a stream; a closed reader does not end the training."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(logging.DEBUG)
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line, if the record is an event."""
        values = getattr(record, _ATTRIBUTE, None)
        if values is None:
            return
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        body = {"schema": SCHEMA, **{name: _plain(value) for name, value in values.items()}, "at": at}
        try:
            self._stream.write(json.dumps(body, allow_nan=False, default=str) + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 -- logging's own name
        """Drop a line that cannot be written: the job continues."""


def _plain(value: Any) -> Any:  # noqa: ANN401 -- JSON is any
    return None if isinstance(value, float) and not math.isfinite(value) else value
