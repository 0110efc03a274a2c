"""Errors of a store: bytes that are missing, damaged or not trusted, and storage that gave way."""

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from unbroken.errors.tree import BusyError, CheckpointError, Help, StorageError, quoted
from unbroken.quoting import amounts

_MOST_SHOWN: Final = 4
_TOUCHED: Final = "the objects handed over are no longer as they were; do not train on with them"
_NOT_ALLOWED: Final = frozenset(map(os.strerror, (errno.EACCES, errno.EPERM)))
_READ_ONLY: Final = os.strerror(errno.EROFS)


@dataclass(eq=False, kw_only=True)
class TornCheckpoint(CheckpointError):
    """A directory with parts that was never committed."""

    kind = "torn-checkpoint"
    path: Path
    parts: int
    size_bytes: int

    def headline(self) -> str:
        return f"{self.path.name} was never committed"

    def at(self) -> str | None:
        return f"{self.path}  ({amounts.plural(self.parts, 'part')}, {amounts.size(self.size_bytes)})"

    def so(self) -> str | None:
        return "it cannot be resumed from; the next sweep removes it once its job is gone"

    def help(self) -> tuple[Help, ...]:
        return (Help(f"unbroken ls {quoted(self.path.parent)}", "see which checkpoints are usable"),)


@dataclass(eq=False, kw_only=True)
class DamagedCheckpoint(CheckpointError):
    """A committed checkpoint whose bytes are not the bytes that were written."""

    kind = "damaged-checkpoint"
    path: Path
    findings: tuple[str, ...]
    # Whether it was met while it was loaded: then the caller's objects hold some of it.
    is_half_loaded: bool = False

    def headline(self) -> str:
        return f"{self.path.name} is damaged in {amounts.plural(len(self.findings), 'place')}"

    def at(self) -> str | None:
        return str(self.path)

    def so(self) -> str | None:
        return (
            f"it is not used; {_TOUCHED}"
            if self.is_half_loaded
            else "it is not used; a resume takes the next older one"
        )

    def details(self) -> Iterator[str]:
        yield from self.findings

    def help(self) -> tuple[Help, ...]:
        return (
            Help(f"unbroken verify {quoted(self.path)} --full", "check every byte again"),
            Help(f"unbroken explain {self.kind}", "how this happens and what to do"),
        )


@dataclass(eq=False, kw_only=True)
class ManifestDamaged(CheckpointError):
    """A manifest that is not what a commit wrote."""

    kind = "manifest-damaged"
    path: Path
    complaint: str

    def headline(self) -> str:
        return f"the manifest cannot be trusted: {self.complaint}"

    def at(self) -> str | None:
        return str(self.path)

    def so(self) -> str | None:
        return "none of this checkpoint's bytes can be proven, so it is not used"

    def help(self) -> tuple[Help, ...]:
        return (Help(f"unbroken ls {quoted(self.path.parent.parent)}", "see which checkpoints are usable"),)


@dataclass(eq=False, kw_only=True)
class RecordDamaged(CheckpointError):
    """The record of a rewind that cannot be read."""

    kind = "record-damaged"
    path: Path
    complaint: str

    def headline(self) -> str:
        return f"the record of a rewind cannot be read: {self.complaint}"

    def at(self) -> str | None:
        return str(self.path)

    def so(self) -> str | None:
        return "a checkpoint that was given up could be taken for a good one, so none is chosen"

    def help(self) -> tuple[Help, ...]:
        aside = self.path.with_name(f"{self.path.name}.bad")
        return (Help(f"mv {quoted(self.path)} {quoted(aside)}", "if no checkpoint in checkpoints/ was given up"),)


@dataclass(eq=False, kw_only=True)
class FormatUnknown(CheckpointError):
    """A manifest written by a newer unbroken, or with a digest this one does not know."""

    kind = "format-unknown"
    path: Path
    found: str
    known: tuple[str, ...]

    def headline(self) -> str:
        return f"this checkpoint is of a format this version does not read: {self.found}"

    def at(self) -> str | None:
        return str(self.path)

    def so(self) -> str | None:
        return f"this version reads {', '.join(self.known)}; the checkpoint is left as it is"

    def help(self) -> tuple[Help, ...]:
        return (Help("pip install --upgrade unbroken", "a newer version reads newer formats"),)


@dataclass(eq=False, kw_only=True)
class UnsafeName(CheckpointError):
    """A name that would lead out of the checkpoint's own directory."""

    kind = "unsafe-name"
    name: str
    reason: str
    path: Path | None = None

    def headline(self) -> str:
        return f"the part name {self.name!r} is refused: {self.reason}"

    def at(self) -> str | None:
        return str(self.path) if self.path else None

    def so(self) -> str | None:
        return "a checkpoint may only name files inside its own directory; nothing was opened"


@dataclass(eq=False, kw_only=True)
class NoUsableCheckpoint(CheckpointError):
    """Nothing to resume from where a checkpoint was required."""

    kind = "no-usable-checkpoint"
    exit_code = 5
    store: Path
    passed_over: tuple[tuple[str, str], ...] = ()

    def headline(self) -> str:
        if not self.passed_over:
            return "there is no checkpoint here"
        return f"none of {amounts.plural(len(self.passed_over), 'checkpoint')} can be used"

    def at(self) -> str | None:
        return str(self.store)

    def so(self) -> str | None:
        if not self.passed_over:
            return None
        return (
            "nothing begins anew unasked; unbroken train does with --resume scratch --force, "
            "a script with Settings(resume='scratch', force=True)"
        )

    def details(self) -> Iterator[str]:
        for name, reason in self.passed_over[:_MOST_SHOWN]:
            yield f"{name}: {reason}"

    def help(self) -> tuple[Help, ...]:
        verified = Help(f"unbroken verify {quoted(self.store)} --full", "name every bad part")
        if self.passed_over:
            return (verified,)
        # Mostly nothing was saved yet, and there is no part to be bad.
        run = self.store.parent if self.store.name == "checkpoints" else self.store
        return Help(f"unbroken status {quoted(run)}", "how far the run is, and how its last job ended"), verified


@dataclass(eq=False, kw_only=True)
class SealedDiffers(CheckpointError):
    """A folder was sealed before and its bytes have changed since."""

    kind = "sealed-differs"
    path: Path
    findings: tuple[str, ...]

    def headline(self) -> str:
        return "this folder was sealed before, and its bytes have changed since"

    def at(self) -> str | None:
        return str(self.path)

    def so(self) -> str | None:
        return "the seal is left as it is; if the change is wanted, remove manifest.json and seal again"

    def details(self) -> Iterator[str]:
        yield from self.findings

    def help(self) -> tuple[Help, ...]:
        return (Help(f"unbroken verify {quoted(self.path)} --full", "name every byte range"),)


@dataclass(eq=False, kw_only=True)
class StorageFailed(StorageError):
    """The operating system refused an operation on a file."""

    kind = "storage-failed"
    operation: str
    path: Path
    cause: str
    # Whether it refused while a checkpoint was loaded: then the caller's objects hold some of it.
    is_half_loaded: bool = False
    # Whether it refused to keep what can be kept in any other folder.
    is_cache: bool = False

    def headline(self) -> str:
        return f"storage refused to {self.operation}: {self.cause}"

    def at(self) -> str | None:
        return str(self.path)

    def so(self) -> str | None:
        if self.is_cache:
            return "the cache of plans cannot be kept here; data.cache_dir names another folder for it"
        intact = "what was committed before is intact"
        return f"{intact}; {_TOUCHED}" if self.is_half_loaded else intact

    def help(self) -> tuple[Help, ...]:
        # What could not be made is not there to be looked at: the nearest folder that is there can be.
        nearest = next((above for above in self.path.parents if os.access(above, os.F_OK)), self.path.parent)
        if self.cause in _NOT_ALLOWED:
            found = Help(f"ls -ld {quoted(nearest)}", "see who may do that there")
        elif self.cause == _READ_ONLY:
            found = Help(f"findmnt -T {quoted(nearest)}", "see how it is mounted")
        else:
            found = Help(f"df -h {quoted(nearest)}", "see whether the disk is full")
        elsewhere = Help("unbroken explain data.cache_dir", "keep the cache in another folder")
        return (elsewhere, found) if self.is_cache else (found,)


@dataclass(eq=False, kw_only=True)
class EvidenceMissing(StorageError):
    """A commit was asked for and the parts on disk do not bear it out."""

    kind = "evidence-missing"
    path: Path
    missing: tuple[str, ...]

    def headline(self) -> str:
        return f"the checkpoint is not committed: {amounts.plural(len(self.missing), 'part')} not proven"

    def at(self) -> str | None:
        return str(self.path)

    def so(self) -> str | None:
        return "the last commit is intact; training can go on and save again"

    def details(self) -> Iterator[str]:
        yield from self.missing


@dataclass(eq=False, kw_only=True)
class NoRoom(StorageError):
    """The disk cannot hold the coming save and the reserve beside it."""

    kind = "no-room"
    path: Path
    needed_bytes: int
    reserve_bytes: int
    free_bytes: int
    needed_inodes: int
    reserve_inodes: int
    free_inodes: int | None
    prunable_bytes: int
    prunable: tuple[str, ...] = ()

    def headline(self) -> str:
        if self.free_bytes < self.needed_bytes + self.reserve_bytes:
            return (
                f"disk full: the save needs {amounts.size(self.needed_bytes)}, {amounts.size(self.free_bytes)} free, "
                f"of which {amounts.size(self.reserve_bytes)} is kept as a reserve"
            )
        return (
            f"disk full: the save needs {amounts.plural(self.needed_inodes, 'file')}, "
            f"{amounts.plural(self.free_inodes or 0, 'inode')} free, "
            f"of which {amounts.count(self.reserve_inodes)} are kept as a reserve"
        )

    def at(self) -> str | None:
        return str(self.path)

    def so(self) -> str | None:
        if not self.prunable:
            return "nothing was written, the last commit is intact; pruning would free nothing"
        return (
            f"nothing was written, the last commit is intact; pruning would free "
            f"{amounts.size(self.prunable_bytes)} ({', '.join(self.prunable[:3])}"
            f"{', …' if len(self.prunable) > 3 else ''})"
        )

    def help(self) -> tuple[Help, ...]:
        if not self.prunable:
            return (Help(f"df -h {quoted(self.path)}", "see what else fills it"),)
        return (Help(f"unbroken prune {quoted(self.path)} --dry-run", "show what would be removed"),)


@dataclass(eq=False, kw_only=True)
class NoMemory(StorageError):
    """The memory that a save needs for its copies could not be had."""

    kind = "no-memory"
    needed_bytes: int | None
    cause: str

    def headline(self) -> str:
        needed = "" if self.needed_bytes is None else f" of {amounts.size(self.needed_bytes)}"
        return f"there is no memory for the save's copies{needed}"

    def at(self) -> str | None:
        return self.cause[:120]

    def so(self) -> str | None:
        return "nothing was written, the last commit is intact; the next save tries again"

    def help(self) -> tuple[Help, ...]:
        return (Help("free -h", "on that node: what is left, and who has the rest"),)


@dataclass(eq=False, kw_only=True)
class RunHeld(BusyError):
    """Another live job holds the run."""

    kind = "run-held"
    path: Path
    holder: str
    # How that is known: its process is seen here, it renewed its lease while it was watched, it was quicker just now,
    # or not at all.
    proof: Literal["process", "renewed", "contest", "unknown"]
    watched_s: float = 0.0

    def headline(self) -> str:
        is_known = self.proof != "unknown"
        return f"another {'live ' if is_known else ''}job holds this run: {self.holder}"

    def at(self) -> str | None:
        return str(self.path)

    def so(self) -> str | None:
        known = {
            "process": "its process is running on this machine",
            "renewed": f"it renewed its lease while it was watched ({amounts.duration(self.watched_s)})",
            "contest": "it took the run at the same moment",
            "unknown": "whether it is alive cannot be seen from here",
        }[self.proof]
        return f"{known}; two jobs on one run would overwrite each other"

    def help(self) -> tuple[Help, ...]:
        shown = Help(f"unbroken status {quoted(self.path)}", "see what it is doing")
        if self.proof != "unknown":
            return (shown,)
        return shown, Help(
            f"unbroken release {quoted(self.path)}", "watch its lease, and release it if nobody renews it"
        )


@dataclass(eq=False, kw_only=True)
class RunGone(CheckpointError):
    """The run directory was moved or deleted while a job was training."""

    kind = "run-gone"
    exit_code = 5
    path: Path
    job: int
    # Whether something stands at the path: then only the job's lease is missing.
    is_there: bool = False

    def headline(self) -> str:
        if self.is_there:
            return f"the lease of job {self.job} was removed from the run directory while it was training"
        return f"the run directory was moved or deleted while job {self.job} was training"

    def at(self) -> str | None:
        return str(self.path)

    def so(self) -> str | None:
        if self.is_there:
            return "nothing more is saved: whether another job uses this directory cannot be known"
        return (
            "nothing more can be saved, and what was committed there went with it; if it was moved, move it back:"
            " started as it is, the run would begin at step 0"
        )

    def help(self) -> tuple[Help, ...]:
        nearest = next((above for above in self.path.parents if os.access(above, os.F_OK)), self.path.parent)
        place = self.path if self.is_there else nearest
        return (Help(f"ls -la {quoted(place)}", "see what is there"),)


@dataclass(eq=False, kw_only=True)
class LeaseLost(BusyError):
    """This job was taken for dead and another one has the run now."""

    kind = "lease-lost"
    path: Path
    mine: int
    current: int

    def headline(self) -> str:
        return f"job {self.mine} no longer holds this run; job {self.current} does"

    def at(self) -> str | None:
        return str(self.path)

    def so(self) -> str | None:
        return "nothing more is committed by this job, so the two cannot mix"

    def help(self) -> tuple[Help, ...]:
        return (Help(f"unbroken status {quoted(self.path)}", "see the job that holds it"),)
