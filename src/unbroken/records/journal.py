"""The journal: what happened to a run, fact by fact, one file a job, only ever added to.

Facts that promise something to whoever reads them later are durable before ``write`` returns; the others become so with
the next of these. What a crash cuts is at most the last line, which readers count and pass by.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from unbroken.files import LOCAL, Files
from unbroken.records.jsonl import LineWriter, Torn, job_file, jobs_in, plain, read_lines
from unbroken.records.layout import Layout
from unbroken.store.fields import as_instant, as_number, as_whole
from unbroken.store.old_names import updated_event

# What a fact of each kind says; a reader meets kinds it does not know and passes them by.
KINDS: Final[Mapping[str, str]] = {
    "job-start": "a job took the run: world, versions, processes, deadline, placement",
    "drill": "the job is no real one: where it was made to write, stop or fail",
    "resume": "the checkpoint and step it goes on from",
    "checkpoint-skipped": "a newer checkpoint it did not resume from, and why",
    "accept": "a difference that a person accepted by name",
    "hyperparameters": "values that the script constructs otherwise than when the run began, and which are used",
    "audit": "live state that nobody handed over",
    "config": "fields in which this job differs from what the run was started with",
    "step-skipped": "a step whose loss or gradient was no number, and which moved no weight",
    "overflowed": "a step whose gradient overflowed in fp16: it moved no weight and halved the loss scale",
    "save": "a save began, or was skipped",
    "save-failed": "a save that storage refused; training went on",
    "commit": "a checkpoint began to exist: name, step, seconds, bytes",
    "mirror": "a checkpoint stands in a second store",
    "recomputed": "how many lost steps were computed again, and how many agree",
    "mismatch": "a step computed twice gave different bits",
    "deadline": "when the scheduler will end the job, where it told so after the start",
    "emergency-save": "the first rank has dumped what it holds to local disk: step, seconds, host, path",
    "emergency-mirror": "a copy of its dump was read back, byte for byte, where every host sees it",
    "emergency-failed": "a dump, or the copy of one, that was refused",
    "emergency-resume": "the checkpoint that was made of the dumps of all ranks",
    "emergency-sweep": "dumps that a later commit made useless, removed",
    "grace-too-short": "the grace window was too short to save anything",
    "stop": "why the job is ending",
    "job-end": "how it ended",
}
DURABLE: Final = frozenset(
    {"job-start", "accept", "hyperparameters", "commit", "mirror", "mismatch", "job-end"}
    | {"emergency-save", "emergency-mirror", "emergency-resume"}
)
_KIND: Final = re.compile(r"[a-z]+(-[a-z]+)*")
_OWN: Final = frozenset({"at", "kind"})


@dataclass(frozen=True)
class Fact:
    """One fact of one job; ``values`` is what its kind says beside the instant."""

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
    """All facts of a run, job by job; ``torn`` counts the lines that a crash cut."""

    facts: tuple[Fact, ...] = ()
    torn: int = 0

    def of_kind(self, *kinds: str) -> list[Fact]:
        """The facts of these kinds, in order."""
        return [fact for fact in self.facts if fact.kind in kinds]

    def last(self, kind: str, *, job: int | None = None) -> Fact | None:
        """The last fact of a kind, of one job if asked."""
        found = (fact for fact in reversed(self.facts) if fact.kind == kind and job in (None, fact.job))
        return next(found, None)

    @property
    def jobs(self) -> tuple[int, ...]:
        """The jobs that said anything, in order."""
        return tuple(dict.fromkeys(fact.job for fact in self.facts))


class Journal:
    """The journal of one job; any thread may write to it. ``makes_run`` is False for a job that holds the run."""

    def __init__(
        self, layout: Layout, job: int, *, clock: Callable[[], float], makes_run: bool = True, files: Files = LOCAL
    ) -> None:
        self.job = job
        self._clock = clock
        self._lines = LineWriter(job_file(layout.journal, job), files, within=None if makes_run else layout.run)

    def write(self, kind: str, /, *, durable: bool | None = None, **facts: object) -> None:
        """Add one fact; ``durable`` overrules what its kind asks for.

        Raises:
            StorageFailed: the system refused; the fact may be there or not.
            ValueError: the kind is no name, or a fact has a name of the journal's own.
            TypeError: a fact is no value of JSON.
        """
        if not _KIND.fullmatch(kind) or _OWN & facts.keys():
            raise ValueError(f"no fact of the journal: {kind!r} with {', '.join(facts)}")
        instant = datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="milliseconds")
        line = {"at": instant, "kind": kind, **plain(facts)}
        self._lines.write([line], durable=kind in DURABLE if durable is None else durable)

    def close(self) -> None:
        """Give the file back.

        Raises:
            StorageFailed: the system refused.
        """
        self._lines.close()


def read_history(layout: Layout, files: Files = LOCAL) -> History:
    """Everything the jobs of a run have said, in order, and how many lines were torn.

    Raises:
        StorageFailed: the system refused.
    """
    torn, facts = Torn(), list[Fact]()
    for job in jobs_in(layout.journal, files):
        for line in read_lines(job_file(layout.journal, job), torn, files):
            kind = line.pop("kind", None)
            at = line.pop("at", None)
            if isinstance(kind, str):
                kind, values = updated_event(kind, line)
                facts.append(Fact(job, kind, _seconds(at), values))
            else:
                torn.lines += 1
    return History(tuple(facts), torn.lines)


def read_journal(layout: Layout, files: Files = LOCAL) -> list[Fact]:
    """Everything the jobs of a run have said, in order.

    Raises:
        StorageFailed: the system refused.
    """
    return list(read_history(layout, files).facts)


def _seconds(at: object) -> float | None:
    try:
        instant = datetime.fromisoformat(at) if isinstance(at, str) else None
        return as_instant(instant.timestamp()) if instant is not None and instant.tzinfo is not None else None
    except (ValueError, OverflowError):
        return None
