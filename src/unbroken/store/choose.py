"""Which checkpoint to resume from: the newest usable one, why each newer one was skipped, and the quarantine.

A damaged checkpoint is moved to ``quarantine/`` with its reason, never deleted: a later version may read more of it.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from unbroken.errors import NoUsableCheckpoint, OtherFramework
from unbroken.store.check import Level, Verdict, verify
from unbroken.store.directory import Store
from unbroken.store.foreign import import_from_store
from unbroken.store.manifest import Manifest
from unbroken.store.names import QUARANTINE, REASON, SEALED, scratch
from unbroken.store.scan import newest_first, outline_quietly, scan

_SCHEMA: Final = "unbroken.quarantine/1"


def quarantine(store: Store, name: str, reasons: tuple[str, ...], *, job: str, at_ns: int) -> str:
    """Move a checkpoint into ``quarantine/``, its reason file first; returns the name it has there.

    In an object store, where nothing can be moved, the reason file alone keeps it from being chosen.

    Raises:
        StorageFailed: I/O error; the checkpoint is where it was.
    """
    directory = store.path(QUARANTINE)
    store.files.make_directory(directory, durable=True)
    copy, aside = 1, name
    # Asked by name: after a disk went bad there may be thousands, and a list of all of them for each takes minutes.
    while store.files.can_rename and store.files.find(directory / aside) is not None:
        copy += 1
        aside = f"{name}~{copy}"
    reason = {"schema": _SCHEMA, "name": name, "reasons": list(reasons), "job": job, "at_ns": at_ns}
    # crash here: a reason without its checkpoint, which the next attempt replaces.
    store.files.replace(
        directory / f"{aside}{REASON}",
        (json.dumps(reason, sort_keys=True, indent=1) + "\n").encode(),
        scratch=scratch(job, "reason"),
    )
    if not store.files.can_rename:
        return name
    # crash here: the checkpoint is in one place or the other, unchanged.
    store.files.publish(store.path(name), directory / aside)
    return aside


@dataclass(frozen=True)
class SkippedCheckpoint:
    """A checkpoint that was skipped; ``moved_to`` is where it is now, if it was moved."""

    verdict: Verdict
    moved_to: str | None = None

    @property
    def name(self) -> str:
        """The name it was found under."""
        return self.verdict.name

    @property
    def reason(self) -> str:
        """The first finding, and how many more there are."""
        first, *more = map(str, self.verdict.findings)
        return f"{first} (and {len(more)} more)" if more else first


@dataclass(frozen=True)
class Choice:
    """The checkpoint to resume from, with the verdict on it, and the newer ones that were skipped."""

    chosen: Verdict | None
    skipped: tuple[SkippedCheckpoint, ...] = ()

    def required(self, store: Store) -> Verdict:
        """The chosen one; an error where there is none.

        Raises:
            NoUsableCheckpoint: there is none.
        """
        if self.chosen is None:
            reasons = tuple((over.name, over.reason) for over in self.skipped)
            importing = import_from_store(store.root, store.files)
            raise NoUsableCheckpoint(store=store.root, skipped=reasons, importing=importing)
        return self.chosen


def choose(names_newest_first: Iterable[str], judge: Callable[[str], Verdict]) -> Choice:
    """The first that ``judge`` finds sound; older ones are not read."""
    passed: list[SkippedCheckpoint] = []
    for name in names_newest_first:
        verdict = judge(name)
        if verdict.is_sound:
            return Choice(verdict, tuple(passed))
        if not verdict.is_removed:
            passed.append(SkippedCheckpoint(verdict))
    return Choice(None, tuple(passed))


def resume_point(store: Store, level: Level, *, job: str, at_ns: int) -> Choice:
    """The newest usable checkpoint of a store; each damaged one that is newer is quarantined.

    One of a newer format, or one that could not be read just now, is skipped and stays where it is: it is not known to
    be damaged. Only the job that holds the run calls this.

    Raises:
        StorageFailed: I/O error.
    """
    found = choose(newest_first(store, scan(store).committed), lambda name: verify(store, name, level))
    passed = []
    for over in found.skipped:
        if over.verdict.is_damaged:
            reasons = tuple(map(str, over.verdict.findings))
            aside = quarantine(store, over.name, reasons, job=job, at_ns=at_ns)
            over = SkippedCheckpoint(over.verdict, f"{QUARANTINE}/{aside}")
        passed.append(over)
    return Choice(found.chosen, tuple(passed))


def require_origin(store: Store, run: Path, origin: str) -> None:
    """Pass if the newest checkpoint of a run was saved by what opens it now, or the run has none.

    Raises:
        OtherFramework: it was saved by something else.
        StorageFailed: I/O error.
    """
    for name in newest_first(store, scan(store).committed):
        manifest = outline_quietly(store, name)
        if manifest is not None:
            require_saved_by(origin, run, name, manifest)
            return


def require_saved_by(origin: str, run: Path, name: str, manifest: Manifest) -> None:
    """Pass if a checkpoint was saved by ``origin``; of a folder that was sealed, its files decide.

    Raises:
        OtherFramework: it was saved by something else.
    """
    if manifest.kind != SEALED and manifest.origin != origin:
        raise OtherFramework(run=run, newest=name, made_with=manifest.origin, opened_with=origin)
