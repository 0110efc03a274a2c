"""A drill: how a job is made to run elsewhere, save more often, stop at a step or fail, without touching its script.

A drill is a JSON file whose path is in the environment variable ``UNBROKEN_DRILL``. Without the variable nothing of
it is loaded. A drill that cannot be read is an error: a job that ignored it would write into the real run.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from unbroken.errors import DrillUnreadable, StorageFailed
from unbroken.files import LOCAL, Files
from unbroken.store.fields import MOST_RANKS, Malformed, Table, parsed
from unbroken.store.names import PERIODIC, SHUTDOWN, scratch

ENVIRONMENT: Final = "UNBROKEN_DRILL"
# Where a fault can strike, in the order a step's edge meets them; each is reached once a save, but for the last two.
PHASES: Final[Mapping[str, str]] = {
    "edge": "the edge of a step, before anything is written",
    "begin": "a save has made its directory",
    "parts": "a part is being written",
    "manifest": "the manifest is being written",
    "rename": "all is durable, and not yet committed",
    "committed": "the rename is done, and nothing that follows it",
    "latest": "the link `latest` is about to be swapped",
    "sweep": "an old checkpoint is no longer one, and its files are still there",
    "journal": "an event is being written",
    "metrics": "metrics are being written",
}
ACTIONS: Final[Mapping[str, str]] = {
    "kill": "SIGKILL to the process itself",
    "enospc": "the disk is full",
    "eio": "the disk answers with an error",
    "delay": "the disk is slow, from then on",
}
_SCHEMA: Final = "unbroken.drill/1"
_LIMIT_BYTES: Final = 1 << 20
_LONGEST_S: Final = 86_400.0


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong in a job.

    Attributes:
        at: a phase, one of ``PHASES``.
        do: what happens, one of ``ACTIONS``.
        when: at which time this rank reaches the phase in this job, from 1.
        rank: which rank fails; None for every rank.
        seconds: how long each write takes more, for ``delay``; how long after the edge of a step, for ``kill`` there.
    """

    at: str
    do: str
    when: int = 1
    rank: int | None = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        """Reject what could never happen."""
        if self.at not in PHASES:
            raise ValueError(f"there is no phase {self.at!r}; there are {', '.join(PHASES)}")
        if self.do not in ACTIONS:
            raise ValueError(f"there is no fault {self.do!r}; there are {', '.join(ACTIONS)}")
        if not 0 <= self.seconds <= _LONGEST_S:
            raise ValueError(f"a fault takes from 0 to {_LONGEST_S:,.0f} seconds, not {self.seconds}")
        if self.when < 1:
            raise ValueError(f"a phase is reached for the first time, not for time {self.when}")
        if self.at == "edge" and self.do in ("enospc", "eio"):
            raise ValueError(f"nothing is written at the edge itself, so there is no {self.do} there")

    def __str__(self) -> str:
        where = "" if self.rank == 0 else " on every rank" if self.rank is None else f" on rank {self.rank}"
        return f"{self.do} at {self.at}{'' if self.when == 1 else f', time {self.when}'}{where}"


@dataclass(frozen=True)
class Drill:
    """What a drilled job does differently than its script says.

    Attributes:
        directory: where the run really writes; None for where the script says.
        save_steps: steps between two checkpoints; None for what the script says.
        stop_at: save and stop at the edge of this step.
        stops_as: the kind of that save; periodic where the script would have continued.
        faults: what goes wrong.
        marks: a folder in which each fault leaves a mark when it strikes; None for no marks.
    """

    directory: Path | None = None
    save_steps: int | None = None
    stop_at: int | None = None
    stops_as: str = SHUTDOWN
    faults: tuple[Fault, ...] = ()
    marks: Path | None = None

    def __str__(self) -> str:
        said = [f"it writes into {self.directory}"] if self.directory is not None else []
        said += [f"saves every {self.save_steps:,} steps"] if self.save_steps is not None else []
        said += [f"stops at step {self.stop_at:,}"] if self.stop_at is not None else []
        return ", ".join([*said, *map(str, self.faults)]) or "no difference to a real job"

    def as_json(self) -> dict[str, Any]:
        """The drill as values of JSON."""
        paths = {"directory": self.directory, "marks": self.marks}
        return {**asdict(self), **{name: None if path is None else str(path) for name, path in paths.items()}}

    def struck(self, files: Files = LOCAL) -> tuple[Fault, ...]:
        """The faults that left their marks: what is planned and never met has done nothing.

        Raises:
            StorageFailed: an I/O error.
        """
        marks = self.marks
        if marks is None:
            return ()
        return tuple(each for at, each in enumerate(self.faults) if files.find(marks / mark_of(at)) is not None)


def mark_of(number: int) -> str:
    """The name of the mark that a drill's fault leaves, by its place among the faults."""
    return f"struck-{number}"


def write_drill(path: Path, drill: Drill, files: Files = LOCAL) -> None:
    """Write a drill for the jobs that are started with its path in ``UNBROKEN_DRILL``.

    Raises:
        StorageFailed: an I/O error.
    """
    text = json.dumps({"schema": _SCHEMA, **drill.as_json()}, indent=2) + "\n"
    # crash here: the drill before or this one; the job that was to follow it was never started.
    files.replace(path, text.encode(), scratch=scratch("drill", path.name))


def read_drill(environ: Mapping[str, str], files: Files = LOCAL) -> Drill | None:
    """The drill that this job is to follow; None for a real job.

    Raises:
        DrillUnreadable: the variable is set, and what it names is not there, damaged, or of another version.
    """
    given = environ.get(ENVIRONMENT)
    if given is None:
        return None
    path = Path(given)
    try:
        return _decoded(parsed(files.read_bytes(path, limit_bytes=_LIMIT_BYTES)))
    except StorageFailed as refused:
        raise DrillUnreadable(path=path, reason=f"it cannot be read ({refused.cause})") from refused
    except (Malformed, ValueError) as wrong:
        raise DrillUnreadable(path=path, reason=" ".join(str(wrong).split())) from wrong


def _decoded(value: object) -> Drill:
    table = Table(value, "the drill")
    table.one_of("schema", (_SCHEMA,))
    table.only({"schema", *(each.name for each in fields(Drill))})
    directory, marks = table.optional_text("directory"), table.optional_text("marks")
    return Drill(
        directory=None if directory is None else Path(directory),
        marks=None if marks is None else Path(marks),
        save_steps=_counted(table, "save_steps"),
        stop_at=_counted(table, "stop_at"),
        stops_as=table.one_of("stops_as", (PERIODIC, SHUTDOWN)),
        faults=tuple(_fault(row) for row in table.rows("faults")),
    )


def _counted(table: Table, key: str) -> int | None:
    """A number of steps from 1, or None where it is null."""
    if not table.has_value(key):
        return None
    if (found := table.whole(key)) < 1:
        raise Malformed(f"{key!r} in the drill counts from 1")
    return found


def _fault(row: Table) -> Fault:
    row.only({each.name for each in fields(Fault)})
    rank = row.whole("rank", below=MOST_RANKS) if row.has_value("rank") else None
    return Fault(row.text("at"), row.text("do"), row.whole("when"), rank, row.number("seconds"))
