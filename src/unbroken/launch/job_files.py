"""Two small files from a job to its launcher: the outcome of the job, and the steps it has completed.

The launcher passes the path of the outcome file in the environment; the steps file is beside it. After a kill neither
metrics (copied from the device every few steps) nor the snapshot (written once a second) tell which step was being
computed; the steps file does, one short line per step in the launcher's temporary directory.
"""

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from unbroken.disk import NodeKind
from unbroken.errors import RecordDamaged, StorageFailed
from unbroken.files import LOCAL, Files
from unbroken.store.fields import Malformed, Table, parsed

# ---- the outcome ----

ENVIRONMENT: Final = "UNBROKEN_OUTCOME_FILE"
LAUNCHER: Final = "UNBROKEN_LAUNCHER_PID"
SCHEMA: Final = "unbroken.outcome/1"
STATUSES: Final = ("running", "completed", "stopped", "halted", "error", "crashed")
CLASSES: Final = ("done", "again", "look", "held")
_LIMIT_BYTES: Final = 1 << 20
_EXIT_CODES: Final = 256


@dataclass(frozen=True)
class JobOutcome:
    """How a job ended, as it reports itself; ``running`` at its start, so that the launcher knows its run.

    ``run`` is empty if the script ended before it opened one.
    """

    run: str
    status: str
    exit_code: int
    outcome_class: str
    reason: str

    @property
    def has_ended(self) -> bool:
        """Whether the job reported how it ended."""
        return self.status != "running"


def write_outcome(path: Path, outcome: JobOutcome, *, files: Files = LOCAL) -> None:
    """Write the outcome file, atomically; a later call replaces it.

    Raises:
        StorageFailed: it could not be written; the file before is intact.
    """
    # ASCII with escapes: the name of a run directory may be any bytes.
    fields = {
        "schema": SCHEMA,
        "run": outcome.run,
        "status": outcome.status,
        "exit_code": outcome.exit_code,
        "class": outcome.outcome_class,
        "reason": outcome.reason,
    }
    files.replace(path, json.dumps(fields).encode("ascii"), scratch=f".{path.name}.{os.getpid()}")


def read_job_outcome(path: Path, *, files: Files = LOCAL) -> JobOutcome | None:
    """The outcome that the job reported, None if it reported none.

    Raises:
        RecordDamaged: the file is not an outcome.
        StorageFailed: it could not be read.
    """
    found = files.find(path)
    if found is None:
        return None
    if found.kind is not NodeKind.FILE:
        raise RecordDamaged(path=path, complaint="it is not a regular file")
    try:
        content: Any = parsed(files.read_bytes(path, limit_bytes=_LIMIT_BYTES))
        return _decoded(Table(content, "the outcome"))
    except ValueError as complaint:
        raise RecordDamaged(path=path, complaint="it is not JSON") from complaint
    except Malformed as complaint:
        raise RecordDamaged(path=path, complaint=str(complaint)) from complaint


def _decoded(table: Table) -> JobOutcome:
    table.one_of("schema", (SCHEMA,))
    return JobOutcome(
        run=table.text("run"),
        status=table.one_of("status", STATUSES),
        exit_code=table.whole("exit_code", below=_EXIT_CODES),
        outcome_class=table.one_of("class", CLASSES),
        reason=table.text("reason"),
    )


def make_outcome_path(root: Path, token: str, *, files: Files = LOCAL) -> Path:
    """A private directory of the launcher below ``root``; ``token`` must be unguessable.

    Raises:
        StorageFailed: it could not be created.
    """
    place = root / f"unbroken-{token}"
    # The parent may be writable by everyone; only this user may write here.
    before = os.umask(0o077)
    try:
        # crash here: an empty temporary directory, never used again.
        files.make_directory(place)
    finally:
        os.umask(before)
    return place


# ---- completed steps ----

_TAIL_BYTES: Final = 256


def steps_path(outcome: Path) -> Path:
    """The path of the steps file: beside the outcome of the same job."""
    return outcome.with_name(f"{outcome.name}.steps")


class StepsWriter:
    """Appends each completed step; stops at the first storage error."""

    def __init__(self, path: Path, files: Files = LOCAL) -> None:
        self._appender = files.appending(path)
        self._is_closed = False
        # An earlier job of the same launcher may have been killed in the middle of a line.
        self._before = "\n"

    def write(self, step: int) -> None:
        """Append one step."""
        if self._is_closed:
            return
        try:
            # crash here: the last line may be cut; the reader skips it.
            self._appender.append(f"{self._before}{step}\n".encode())
            self._before = ""
        except StorageFailed:
            # A full temporary directory loses the step number, never the training; it is not tried again.
            self._is_closed = True

    def close(self) -> None:
        """Close the file."""
        self._is_closed = True
        with contextlib.suppress(StorageFailed):
            self._appender.close()


def last_step(path: Path, *, files: Files = LOCAL) -> int | None:
    """The last complete step number; None if there is none or the file cannot be read."""
    try:
        found = files.find(path)
        if found is None:
            return None
        buffer = bytearray(min(found.size_bytes, _TAIL_BYTES))
        with files.reading(path) as source:
            taken = source.fill(max(0, found.size_bytes - len(buffer)), memoryview(buffer)) if buffer else 0
    except StorageFailed:
        return None
    whole = bytes(buffer[:taken]).split(b"\n")[:-1]
    return next((int(line) for line in reversed(whole) if line.isdigit()), None)
