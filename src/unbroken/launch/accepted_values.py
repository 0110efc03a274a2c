"""``accepted.json``: the values of a run that a person changed by ``--accept`` after it was started.

``config.json`` keeps what the run was started with; together the two say with which values its next job continues,
whatever the config file says by then. Each change keeps the job and the step at which it was made. The record is
replaced in one instant and proves itself by a digest.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from unbroken.errors import ConfigUnreadable
from unbroken.files import LOCAL, Files
from unbroken.run.layout import Layout
from unbroken.store.envelope import opened, sealed
from unbroken.store.fields import Malformed, Table
from unbroken.store.names import scratch

_FORMAT: Final = "unbroken.accepted/1"
_LIMIT_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class AcceptedValue:
    """One field that was changed: both values in plain JSON form, and the job and step from which the new one holds."""

    field: str
    was: Any
    now: Any
    job: int
    step: int


def values_of(history: Iterable[AcceptedValue]) -> dict[str, Any]:
    """The value of each field that was ever changed, as it is now."""
    return {change.field: change.now for change in history}


def read_accepted(layout: Layout, files: Files = LOCAL) -> tuple[AcceptedValue, ...]:
    """All changes, oldest first; none where there is no record.

    Raises:
        ConfigUnreadable: the record is damaged, or was changed after it was written.
        StorageFailed: the system refused.
    """
    path = layout.accepted
    if files.find(path) is None:
        return ()
    found = opened(files.read_bytes(path, limit_bytes=_LIMIT_BYTES))
    if found is None or not found.is_proven or found.form != _FORMAT:
        raise ConfigUnreadable(path=path, complaint=f"it is no {_FORMAT} record, or was changed after it was written")
    try:
        rows = Table(json.loads(found.body), path.name).rows("changes")
        return tuple(_decoded(row) for row in rows)
    except (ValueError, RecursionError, Malformed) as wrong:
        raise ConfigUnreadable(path=path, complaint=" ".join(str(wrong).split())[:120]) from wrong


def write_accepted(layout: Layout, history: Sequence[AcceptedValue], files: Files = LOCAL) -> None:
    """Replace the record.

    Raises:
        StorageFailed: the system refused; the old record is intact.
    """
    # ASCII, as in config.json: a path that is no UTF-8 is made of lone surrogates.
    body = json.dumps({"changes": [asdict(change) for change in history]}, sort_keys=True, allow_nan=False).encode()
    # crash here: the old record or the new one; no step has been computed with the new values yet.
    files.replace(layout.accepted, sealed(body, _FORMAT), scratch=scratch("trainer", "accepted"))


def _decoded(row: Table) -> AcceptedValue:
    was, now = row.any("was"), row.any("now")
    return AcceptedValue(row.text("field"), was, now, row.whole("job"), row.whole("step"))
