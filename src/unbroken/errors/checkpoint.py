"""Errors of checkpoints and of the storage they are on: missing, damaged, torn, full, not permitted."""

import errno
import os
from pathlib import Path
from typing import Final

from unbroken.errors.tree import CheckpointError, Each, Help, StorageError, UsageError, quoted
from unbroken.quoting import amounts

_TOUCHED: Final = "your objects were partly overwritten: do not continue training with them"
_NOT_ALLOWED: Final = frozenset(map(os.strerror, (errno.EACCES, errno.EPERM)))
_READ_ONLY: Final = os.strerror(errno.EROFS)
# By the origin that their manifests state.
_FRAMEWORKS: Final = {
    "accelerate": "Accelerate",
    "deepspeed": "DeepSpeed",
    "lightning": "Lightning",
    "torch-dcp": "DCP",
    "transformers": "Transformers",
    "unbroken": "unbroken.Run",
}


def nearest_folder(path: Path) -> Path:
    """The nearest folder above a path that exists, for help lines that look into it."""
    return next((above for above in path.parents if os.access(above, os.F_OK)), path.parent)


# ---- a checkpoint that cannot be used ----


class TornCheckpoint(CheckpointError):
    """A directory with parts that was never committed."""

    kind = "torn-checkpoint"
    path: Path
    parts: int
    size_bytes: int
    HEADLINE = "{path.name} was never committed"
    AT = "{path}  ({parts:n part}, {size_bytes:size})"
    SO = "it cannot be resumed from; the next sweep removes it once its job is gone"
    HELP = (Help("unbroken ls {path.parent:sh}", "list the usable checkpoints"),)


class DamagedCheckpoint(CheckpointError):
    """A committed checkpoint whose bytes are not the bytes that were written."""

    kind = "damaged-checkpoint"
    path: Path
    findings: tuple[str, ...]
    # Whether it was found during a load: then the caller's objects hold part of it.
    is_half_loaded: bool = False
    HEADLINE = "{path.name} is damaged in {findings:n place}"
    DETAILS = Each("findings")
    HELP = (
        Help("unbroken verify {path:sh} --full", "verify all checksums again"),
        Help("unbroken explain {kind}", "how this happens and what to do"),
    )

    def so(self) -> str | None:
        return f"it is not used; {_TOUCHED if self.is_half_loaded else 'a resume takes the next older one'}"


class ManifestDamaged(CheckpointError):
    """A manifest that is not what a commit wrote."""

    kind = "manifest-damaged"
    path: Path
    complaint: str
    HEADLINE = "the manifest is damaged: {complaint}"
    SO = "this checkpoint cannot be verified without it, so it is not used"
    HELP = (Help("unbroken ls {path.parent.parent:sh}", "list the usable checkpoints"),)


class RecordDamaged(CheckpointError):
    """The record of a rewind cannot be read."""

    kind = "record-damaged"
    path: Path
    complaint: str
    HEADLINE = "the record of a rewind cannot be read: {complaint}"
    SO = "it may list abandoned checkpoints, so no checkpoint is chosen without it"
    HELP = (Help("mv {path:sh} {aside:sh}", "if no checkpoint in checkpoints/ was abandoned"),)

    @property
    def aside(self) -> Path:
        """Where the record is moved to."""
        return self.path.with_name(f"{self.path.name}.bad")


class FormatUnknown(CheckpointError):
    """A manifest written by a newer unbroken, or with a digest this one does not know."""

    kind = "format-unknown"
    path: Path
    found: str
    known: tuple[str, ...]
    HEADLINE = "this version cannot read the checkpoint format {found}"
    SO = "this version reads {known:list}; the checkpoint was not changed"
    HELP = (Help("pip install --upgrade unbroken", "install a version that reads newer formats"),)


class UnsafeName(CheckpointError):
    """A name that leads out of the checkpoint's own directory."""

    kind = "unsafe-name"
    name: str
    reason: str
    path: Path | None = None
    HEADLINE = "unsafe part name {name!r}: {reason}"
    SO = "a checkpoint may only name files inside its own directory; nothing was opened"


class NoUsableCheckpoint(CheckpointError):
    """Nothing to resume from where a checkpoint was required."""

    kind = "no-usable-checkpoint"
    exit_code = 5
    store: Path
    skipped: tuple[tuple[str, str], ...] = ()
    # The command that imports what is there, if another tool wrote it.
    importing: str | None = None
    AT = "{store}"
    DETAILS = Each("skipped", "{0}: {1}", most=4)

    def headline(self) -> str:
        if not self.skipped and self.importing is not None:
            return "no checkpoint of unbroken found; another tool has written checkpoints here"
        if not self.skipped:
            return "no checkpoint found"
        if len(self.skipped) == 1:
            return "the only checkpoint is not usable"
        return f"none of {len(self.skipped):,} checkpoints is usable"

    def so(self) -> str | None:
        if not self.skipped:
            return None
        return (
            "the run does not start over by itself; to start from step 0: unbroken train --resume scratch --force, "
            "or Settings(resume='scratch', force=True) in a script"
        )

    def help(self) -> tuple[Help, ...]:
        verified = Help(f"unbroken verify {quoted(self.store)} --full", "list every damaged part")
        if self.skipped:
            return (verified,)
        if self.importing is not None:
            return (Help(self.importing, "make a new run of a checkpoint of another tool"),)
        # Usually nothing was saved yet, and no part can be damaged.
        run = self.store.parent if self.store.name == "checkpoints" else self.store
        return Help(f"unbroken status {quoted(run)}", "show the run's progress and how its last job ended"), verified


class SealedDiffers(CheckpointError):
    """A folder was sealed before and its bytes have changed since."""

    kind = "sealed-differs"
    path: Path
    findings: tuple[str, ...]
    HEADLINE = "this folder has changed since it was sealed"
    SO = "the seal was not changed; if the change is wanted, remove manifest.json and seal again"
    DETAILS = Each("findings")
    HELP = (Help("unbroken verify {path:sh} --full", "list the byte ranges that differ"),)


class CopyDiffers(CheckpointError):
    """A copy is not what was copied."""

    kind = "copy-differs"
    path: Path
    findings: tuple[str, ...]
    HEADLINE = "the copy differs from its original in {findings:n place}"
    SO = "the copy was removed; the original is intact"
    DETAILS = Each("findings", most=4)
    HELP = (Help("df -h {path:sh}", "check for free space on that storage"),)


class WeightsOnly(UsageError):
    """A folder that a framework cannot resume from: it holds weights, and not the state of the training."""

    kind = "weights-only"
    path: Path
    missing: tuple[str, ...]
    HEADLINE = "this folder holds weights and no training state: {missing:list} missing"
    SO = "no training can be resumed from it; from_pretrained starts a new one with its weights"
    HELP = (Help("unbroken explain {kind}", "which folders can be resumed from"),)


class StartsOver(UsageError):
    """A framework's loop that would start before the run's own checkpoints, and write over them."""

    kind = "starts-over"
    store: Path
    step: int
    newest: str
    HEADLINE = "the training starts at step {step:,}, but the run already has {newest}"
    AT = "{store}"
    SO = "nothing was changed; continue from the newest checkpoint, or train into another directory"
    HELP = (
        Help("unbroken ls {store:sh}", "list the checkpoints"),
        Help("unbroken explain {kind}", "how to continue from the newest"),
    )


class OtherFramework(UsageError):
    """A run whose checkpoints were saved with another framework than the one that opens it."""

    kind = "other-framework"
    run: Path
    newest: str
    made_with: str
    opened_with: str
    AT = "{run}"
    SO = "neither reads the checkpoints of the other; nothing was changed. Give this job a directory of its own"
    HELP = (
        Help("unbroken ls {run:sh}", "list the checkpoints"),
        Help("unbroken explain {kind}", "how to continue with the other framework"),
    )

    def headline(self) -> str:
        made, opened = (_FRAMEWORKS.get(each, each) for each in (self.made_with, self.opened_with))
        return f"this run was made with {made} ({self.newest}), and this job opens it with {opened}"


class NotAllRanks(UsageError):
    """A call that all ranks of a framework make together, made by some of them."""

    kind = "not-all-ranks"
    call: str
    rank: int
    missing: tuple[int, ...]
    seconds: float
    AT = "waited {seconds:,.0f} s on rank {rank}"
    SO = "nothing was written or loaded; the framework itself would wait forever"
    HELP = (Help("unbroken explain {kind}", "how to call it on every rank"),)

    def headline(self) -> str:
        shown = ", ".join(map(str, self.missing[:8])) + (", ..." if len(self.missing) > 8 else "")
        return f"rank {self.rank} called {self.call}, and rank {shown} did not"


class CannotSeal(UsageError):
    """A folder that cannot become a checkpoint as it is."""

    kind = "cannot-seal"
    path: Path
    reason: str
    remedy: Help | None = None
    HEADLINE = "this folder cannot be sealed: {reason}"
    SO = "nothing was written"

    def help(self) -> tuple[Help, ...]:
        return (self.remedy,) if self.remedy else ()


# ---- a state that cannot be saved ----


class TensorUnsupported(UsageError):
    """A tensor that a checkpoint cannot hold, or on which the ranks do not agree."""

    kind = "tensor-unsupported"
    name: str
    reason: str
    rank: int | None = None
    HEADLINE = "the tensor '{name}' cannot be saved: {reason}"
    SO = "nothing was written; a checkpoint without it could not be resumed from"
    HELP = (Help("unbroken explain {kind}", "which tensors can be saved, and what to pass to Run instead"),)

    def at(self) -> str | None:
        return None if self.rank is None else f"rank {self.rank}"


class NoEmergencyArea(UsageError):
    """An emergency save was requested and no directory for it is configured."""

    kind = "no-emergency-area"
    HEADLINE = "an emergency save needs a directory, and emergency_dir is not set"
    SO = "nothing was saved; the last commit is intact"
    HELP = (Help("unbroken explain training.emergency_dir", "what it is for and how to set it"),)


class NeedsPeers(UsageError):
    """The state of an item can only be read with a collective, and an emergency save runs without one."""

    kind = "needs-peers"
    item: str
    type_name: str
    HEADLINE = "'{item}' is a {type_name}: reading its state needs a collective on all ranks"
    SO = "an emergency save cannot wait for ranks that may be gone; ordinary saves are not affected"
    HELP = (Help("unbroken explain {kind}", "what can be saved without the other ranks"),)


# ---- storage ----


class StorageFailed(StorageError):
    """The operating system returned an error for a file operation."""

    kind = "storage-failed"
    operation: str
    path: Path
    cause: str
    # Whether it happened during a load: then the caller's objects hold part of the checkpoint.
    is_half_loaded: bool = False
    # Whether the file belongs to a cache that can be in any other folder.
    is_cache: bool = False
    HEADLINE = "could not {operation}: {cause}"

    @property
    def is_missing(self) -> bool:
        """Whether there is nothing at the path."""
        return isinstance(self.__cause__, FileNotFoundError)

    def so(self) -> str | None:
        if self.is_cache:
            return "the cache of plans cannot be written here; set data.cache_dir to another folder"
        intact = "earlier commits are intact"
        return f"{intact}; {_TOUCHED}" if self.is_half_loaded else intact

    def help(self) -> tuple[Help, ...]:
        nearest = quoted(nearest_folder(self.path))
        if self.cause in _NOT_ALLOWED:
            found = Help(f"ls -ld {nearest}", "check the permissions")
        elif self.cause == _READ_ONLY:
            found = Help(f"findmnt -T {nearest}", "check how it is mounted")
        else:
            found = Help(f"df -h {nearest}", "check for free space")
        elsewhere = Help("unbroken explain data.cache_dir", "how to put the cache in another folder")
        return (elsewhere, found) if self.is_cache else (found,)


class EvidenceMissing(StorageError):
    """A commit was requested and not all parts are on disk as reported."""

    kind = "evidence-missing"
    path: Path
    missing: tuple[str, ...]
    HEADLINE = "the checkpoint was not committed: {missing:n part} missing or incomplete"
    SO = "the last commit is intact; training can continue and save again"
    DETAILS = Each("missing")


class NoRoom(StorageError):
    """The disk cannot hold the next save and the reserve."""

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
            return self.filled(
                "disk full: the save needs {needed_bytes:size} and a reserve of {reserve_bytes:size}, "
                "{free_bytes:size} free"
            )
        free = amounts.plural(self.free_inodes or 0, "inode")
        return self.filled(
            f"disk full: the save needs {{needed_inodes:n file}} and a reserve of {{reserve_inodes:,}}, {free} free"
        )

    def so(self) -> str | None:
        if not self.prunable:
            return "nothing was written, the last commit is intact; pruning would free nothing"
        more = ", …" if len(self.prunable) > 3 else ""
        return (
            f"nothing was written, the last commit is intact; pruning would free "
            f"{amounts.size(self.prunable_bytes)} ({', '.join(self.prunable[:3])}{more})"
        )

    def help(self) -> tuple[Help, ...]:
        if not self.prunable:
            return (Help(f"df -h {quoted(self.path)}", "check for free space"),)
        return (Help(f"unbroken prune {quoted(self.path)} --dry-run", "show what would be removed"),)


class NoMemory(StorageError):
    """The host memory for the copies of a save could not be allocated."""

    kind = "no-memory"
    needed_bytes: int | None
    cause: str
    AT = "{cause:.120}"
    SO = "nothing was written, the last commit is intact; the next save tries again"
    HELP = (Help("free -h", "on that node: how much memory is left"),)

    def headline(self) -> str:
        needed = "" if self.needed_bytes is None else f" ({amounts.size(self.needed_bytes)})"
        return f"out of host memory for the copies of the save{needed}"
