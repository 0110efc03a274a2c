"""The journal: what happened to a run, event by event, one file a job, only ever added to.

Events that promise something to a later reader are durable before ``write`` returns; the others become so with the next
of these. A crash cuts at most the last line, which readers count and skip.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from unbroken.files import LOCAL, Files
from unbroken.records.jsonl import LineWriter, TornLines, job_file, jobs_in, plain, read_lines
from unbroken.records.layout import Layout
from unbroken.store.fields import as_instant, as_number, as_whole
from unbroken.store.old_names import updated_event

# What an event of each kind says; a reader skips kinds that it does not know.
KINDS: Final[Mapping[str, str]] = {
    "job-start": "a job took the run: world, versions, processes, deadline, placement",
    "drill": "the job is a drill: where it was made to write, stop or fail",
    "resume": "the checkpoint and step it resumes from",
    "checkpoint-skipped": "a newer checkpoint it did not resume from, and why",
    "accept": "a difference that was accepted by name",
    "hyperparameters": "values that the script constructs differently than at the start of the run, and which are used",
    "audit": "live state that was not passed to the run",
    "config": "fields in which this job differs from what the run was started with",
    "step-skipped": "a step whose loss or gradient was NaN or infinite; it changed no weight",
    "overflowed": "a step whose gradient overflowed in fp16: it changed no weight and halved the loss scale",
    "first-step": "how long the job took from its launch to the end of its first step, and each part of that",
    "save": "a save started",
    "save-failed": "a save that failed; training continued",
    "commit": "a checkpoint was committed: name, step, seconds, bytes",
    "file-written": "a framework wrote a file that no resume starts from: path, step, size, inode",
    "mirror": "a checkpoint was verified in a mirror: name, step, bytes, seconds",
    "mirror-failed": "a checkpoint could not be mirrored; it is tried again and kept until then",
    "mirror-fetch": "a checkpoint, or the damaged parts of one, was brought back from a mirror",
    "mirror-skipped": "a copy of a checkpoint in a mirror is damaged and was not used",
    "tracker": "the run that a tracker shows this one as: tracker, id, mode",
    "tracker-failed": "a tracker failed for the first time in this job; training continued",
    "tracker-end": "the last step that a tracker was sent, and how often it failed",
    "recomputed": "how many lost steps were computed again, and how many agree",
    "mismatch": "a step computed twice gave different bits",
    "deadline": "when the scheduler will end the job, where that became known after the start",
    "emergency-save": "rank 0 dumped its state to local disk: step, seconds, host, path",
    "emergency-copy": "a copy of its dump on shared storage was verified byte for byte",
    "emergency-failed": "a dump, or the copy of one, that failed",
    "emergency-resume": "the checkpoint that was made of the dumps of all ranks",
    "emergency-sweep": "dumps removed because a later commit made them useless",
    "grace-too-short": "the grace window was too short to save anything",
    "stop": "why the job is ending",
    "job-end": "how it ended",
}
DURABLE: Final = frozenset(
    {"job-start", "accept", "hyperparameters", "commit", "file-written", "mirror", "mismatch", "tracker", "job-end"}
    | {"emergency-save", "emergency-copy", "emergency-resume"}
)
_KIND: Final = re.compile(r"[a-z]+(-[a-z]+)*")
_OWN: Final = frozenset({"at", "kind"})


@dataclass(frozen=True)
class Event:
    """One event of one job; ``values`` is what its kind says beside the instant."""

    job: int
    kind: str
    at_s: float | None
    values: Mapping[str, Any] = field(default_factory=dict)

    def whole(self, name: str) -> int | None:
        """A whole number from 0, or None where there is none."""
        return as_whole(self.values.get(name))

    def number(self, name: str) -> float | None:
        """A number, or None where there is none."""
        return as_number(self.values.get(name))

    def instant(self, name: str) -> float | None:
        """Seconds since 1970, or None where there is no such number."""
        return as_instant(self.values.get(name))

    def text(self, name: str) -> str | None:
        """A text, or None where there is none."""
        value = self.values.get(name)
        return value if isinstance(value, str) else None


@dataclass(frozen=True)
class History:
    """All events of a run, job by job; ``torn`` counts the lines that a crash cut."""

    events: tuple[Event, ...] = ()
    torn: int = 0

    def of_kind(self, *kinds: str) -> list[Event]:
        """The events of these kinds, in order."""
        return [event for event in self.events if event.kind in kinds]

    def last(self, kind: str, *, job: int | None = None) -> Event | None:
        """The last event of a kind, of one job if asked."""
        found = (event for event in reversed(self.events) if event.kind == kind and job in (None, event.job))
        return next(found, None)

    @property
    def jobs(self) -> tuple[int, ...]:
        """The jobs that wrote anything, in order."""
        return tuple(dict.fromkeys(event.job for event in self.events))


class Journal:
    """The journal of one job; any thread may write to it. ``makes_run`` is False for a job that holds the run."""

    def __init__(
        self, layout: Layout, job: int, *, clock: Callable[[], float], makes_run: bool = True, files: Files = LOCAL
    ) -> None:
        self.job = job
        self._clock = clock
        self._lines = LineWriter(job_file(layout.journal, job), files, within=None if makes_run else layout.run)

    def write(self, kind: str, /, *, durable: bool | None = None, **values: object) -> None:
        """Add one event; ``durable`` overrides the default of its kind.

        Raises:
            StorageFailed: an I/O error; the event may be there or not.
            ValueError: the kind is no name, or a value has a name of the journal's own.
            TypeError: a value is not JSON.
        """
        if not _KIND.fullmatch(kind) or _OWN & values.keys():
            raise ValueError(f"no event of the journal: {kind!r} with {', '.join(values)}")
        instant = datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="milliseconds")
        line = {"at": instant, "kind": kind, **plain(values)}
        self._lines.write([line], durable=kind in DURABLE if durable is None else durable)

    def close(self) -> None:
        """Give the file back.

        Raises:
            StorageFailed: an I/O error.
        """
        self._lines.close()


def read_history(layout: Layout, files: Files = LOCAL) -> History:
    """Everything the jobs of a run have written, in order, and how many lines were torn.

    Raises:
        StorageFailed: an I/O error.
    """
    torn, events = TornLines(), list[Event]()
    for job in jobs_in(layout.journal, files):
        for line in read_lines(job_file(layout.journal, job), torn, files):
            kind = line.pop("kind", None)
            at = line.pop("at", None)
            if isinstance(kind, str):
                kind, values = updated_event(kind, line)
                events.append(Event(job, kind, _seconds(at), values))
            else:
                torn.lines += 1
    return History(tuple(events), torn.lines)


def read_journal(layout: Layout, files: Files = LOCAL) -> list[Event]:
    """Everything the jobs of a run have written, in order.

    Raises:
        StorageFailed: an I/O error.
    """
    return list(read_history(layout, files).events)


def _seconds(at: object) -> float | None:
    try:
        instant = datetime.fromisoformat(at) if isinstance(at, str) else None
        return as_instant(instant.timestamp()) if instant is not None and instant.tzinfo is not None else None
    except (ValueError, OverflowError):
        return None
