"""The small file by which a job tells its launcher how it ended.

torchrun turns every worker's exit code into 1, so the job's first rank writes its outcome here and the launcher reads
it after the processes are gone. The file is replaced in one instant: a reader finds the whole outcome or none.
It is a message between two living processes; what outlives them is in the run's own records.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from unbroken.disk import NodeKind
from unbroken.errors import RecordDamaged
from unbroken.files import LOCAL, Files
from unbroken.store.fields import Malformed, Table, parsed

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


def write(path: Path, outcome: JobOutcome, *, files: Files = LOCAL) -> None:
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


def read(path: Path, *, files: Files = LOCAL) -> JobOutcome | None:
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


def make_place(root: Path, token: str, *, files: Files = LOCAL) -> Path:
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
