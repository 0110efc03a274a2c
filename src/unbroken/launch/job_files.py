"""The small files by which a job tells its launcher how it ended, and which steps it has completed.

The launcher names the first one in the environment. The second stands beside it: metrics are read from the device now
and then and the live snapshot is written once a second, so after a kill neither says which step was being computed. A
line of some bytes in the launcher's own temporary directory does, for microseconds.
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
    """How a job ended, in its own words; a job that has only begun says ``running``, so that its run is known."""

    run: str
    status: str
    exit_code: int
    outcome_class: str
    reason: str

    @property
    def has_ended(self) -> bool:
        """Whether the job came as far as saying how it ended."""
        return self.status != "running"


def write_outcome(path: Path, outcome: JobOutcome, *, files: Files = LOCAL) -> None:
    """Tell the launcher how the job stands, in one instant; the last word counts.

    Raises:
        StorageFailed: the system refused; what was told before still stands.
    """
    # A run directory may have any bytes in its name, so the text stays ASCII with escapes.
    facts = {
        "schema": SCHEMA,
        "run": outcome.run,
        "status": outcome.status,
        "exit_code": outcome.exit_code,
        "class": outcome.outcome_class,
        "reason": outcome.reason,
    }
    files.replace(path, json.dumps(facts).encode("ascii"), scratch=f".{path.name}.{os.getpid()}")


def read_outcome(path: Path, *, files: Files = LOCAL) -> JobOutcome | None:
    """What the job told, or None if it told nothing.

    Raises:
        RecordDamaged: something stands there that is no outcome.
        StorageFailed: the system refused.
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
        raise RecordDamaged(path=path, complaint="it is no JSON") from complaint
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
    """A directory of the launcher's own below ``root``; ``token`` is what nobody can guess.

    Raises:
        StorageFailed: the system refused.
    """
    place = root / f"unbroken-{token}"
    # Others on this machine may look at a temporary directory; only this user may write into ours.
    before = os.umask(0o077)
    try:
        # crash here: an empty directory among the temporary ones, which nobody looks at again.
        files.make_directory(place)
    finally:
        os.umask(before)
    return place


# ---- completed steps ----

_TAIL_BYTES: Final = 256


def steps_path(outcome: Path) -> Path:
    """Where the steps stand: beside the outcome of the same job."""
    return outcome.with_name(f"{outcome.name}.steps")


class StepsWriter:
    """Tells each completed step; what storage refuses is not told."""

    def __init__(self, path: Path, files: Files = LOCAL) -> None:
        self._appender = files.appending(path)
        self._is_refused = False
        # Another job of the same launcher may have been killed inside its last line.
        self._before = "\n"

    def write(self, step: int) -> None:
        """Tell one step."""
        if self._is_refused:
            return
        try:
            # crash here: the last line may be cut, and a reader passes it by.
            self._appender.append(f"{self._before}{step}\n".encode())
            self._before = ""
        except StorageFailed:
            # A full temporary directory costs the name of a step, never the training, and is not asked again.
            self._is_refused = True

    def close(self) -> None:
        """Give the file back."""
        self._is_refused = True
        with contextlib.suppress(StorageFailed):
            self._appender.close()


def last_step(path: Path, *, files: Files = LOCAL) -> int | None:
    """The last step that was told whole; None where none was, or nothing can be read."""
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
