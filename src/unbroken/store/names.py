"""The names inside a store, and which names a manifest may use. Pure text; touches no disk.

A store is one directory. Checkpoints are called ``checkpoint-1000``, ``checkpoint-2734-shutdown`` or ``final``;
a second save of the same step gets ``.2`` behind it. What is unfinished (drafts, trash, scratch files) begins with a
dot and ends in a mark, ``~`` and a checksum of the name before it: something no user types, and the evidence that it is
ours before anything is removed. Every other name that carries no manifest is foreign and never touched, ``.trash-x``
and ``.tmp-a-3-1`` included. Versions before the mark wrote the names without it; those are taken for ours only where
the job in them has the form that a lease gives. The last section has the names of hosts, as dumps and leases use them.
"""

import re
import zlib
from dataclasses import dataclass
from typing import Final

from unbroken.errors import UnsafeName

MANIFEST: Final = "manifest.json"
LATEST: Final = "latest"
# The folder of a run that holds its checkpoints: what has one inside is a run, never a checkpoint.
CHECKPOINTS: Final = "checkpoints"
# In a run whose framework saves its checkpoints beside the records, not in a folder of their own.
CHECKPOINTS_HERE: Final = ".checkpoints_here"
# The records that stand beside the checkpoints then.
RUN_RECORDS: Final = (CHECKPOINTS_HERE, ".lease", ".run_state.json", ".shutdown_requested", "journal", "metrics")
# Parts that no other tool writes: what holds one of them was a checkpoint of ours.
OWN_PARTS: Final = ("state/index.json", "ranks/rank-00000.json")
QUARANTINE: Final = "quarantine"
# Behind the name of a checkpoint there: the file with the reason.
REASON: Final = ".reason.json"
ABANDONED: Final = "abandoned"
PINS: Final = ".pins"
REWINDS: Final = ".rewinds"
MIRROR: Final = ".mirror"
# In a mirror: which checkpoint a name belongs to, from before its first part to after its removal.
CLAIMS: Final = f"{MIRROR}/claims"
DRAFT_PREFIX: Final = ".tmp-"
TRASH_PREFIX: Final = ".trash-"
SCRATCH_PREFIX: Final = ".scratch-"

# What saved a checkpoint, where it was no framework.
OWN: Final = "unbroken"
PERIODIC: Final = "periodic"
SHUTDOWN: Final = "shutdown"
FINAL: Final = "final"
SEALED: Final = "sealed"
# What one rank alone writes in an emergency; only outside the run's own store.
EMERGENCY: Final = "emergency"
KINDS: Final = (PERIODIC, SHUTDOWN, FINAL, SEALED, EMERGENCY)

_CHECKPOINT: Final = re.compile(
    r"checkpoint-(?P<step>0|[1-9][0-9]{0,18})(?P<shutdown>-shutdown)?(?:\.(?P<copy>[1-9][0-9]*))?"
)
_FINAL: Final = re.compile(r"final(?:\.(?P<copy>[1-9][0-9]*))?")
_DRAFT: Final = re.compile(r"\.tmp-(?P<job>[0-9A-Za-z_]{1,64})-(?P<step>[0-9]{1,19})-(?P<attempt>[0-9]{1,18})")
_SCRATCH: Final = re.compile(re.escape(SCRATCH_PREFIX) + r"(?P<owner>[0-9A-Za-z_]+)-.+", re.DOTALL)
_MARK: Final = re.compile(r"(?P<stem>.+)~(?P<mark>[0-9a-f]{8})", re.DOTALL)
# A job as its lease names it inside file names; no person calls a file so.
_LEASED_JOB: Final = re.compile(r"j[0-9]{4,18}_[0-9a-z]+")
# Of the name of a checkpoint in the trash; with prefix and mark it stays within what a file system takes.
_LONGEST_TRASHED_BYTES: Final = 200
# Short enough that a name or an id with a job in it stays within every limit.
_JOB: Final = re.compile(r"[0-9A-Za-z_]{1,64}")
_STEP_IN_NAME: Final = re.compile(
    r"(?:^|[^0-9])(?:step|global_step|checkpoint|iter|iteration)[-_=]?0*([0-9]{1,18})(?![0-9])"
)

_LONGEST_NAME: Final = 1024


@dataclass(frozen=True)
class DraftName:
    """The fields in the name of an unfinished checkpoint: job, step and attempt.

    ``is_marked`` is False for a draft that an earlier version left behind.
    """

    job: str
    step: int
    attempt: int
    is_marked: bool = True

    def __str__(self) -> str:
        stem = f"{DRAFT_PREFIX}{self.job}-{self.step}-{self.attempt}"
        return _marked(stem) if self.is_marked else stem


def scratch_draft(job: str) -> DraftName:
    """What stands for the scratch files of a job where drafts are judged; attempts of drafts count from 1."""
    return DraftName(job, 0, 0)


@dataclass(frozen=True)
class Begun:
    """A checkpoint that is being written, as ranks tell each other of it: its step, and the name of its place."""

    step: int
    place: str


def checkpoint_name(step: int, kind: str, copy: int = 1) -> str:
    """The final name of a checkpoint; ``copy`` counts the saves of one step."""
    stem = "final" if kind == FINAL else f"checkpoint-{step}" + ("-shutdown" if kind == SHUTDOWN else "")
    return stem if copy == 1 else f"{stem}.{copy}"


def step_of(name: str) -> int | None:
    """The step a name of ours states; None for ``final`` and for every name that is not ours."""
    found = _CHECKPOINT.fullmatch(name)
    return int(found["step"]) if found else None


def is_checkpoint_name(name: str) -> bool:
    """Whether a name is one that a commit of ours gives."""
    return bool(_CHECKPOINT.fullmatch(name) or _FINAL.fullmatch(name))


def step_in_name(name: str) -> int | None:
    """The step that another tool's folder name states: ``global_step500``, ``step_500``, ``epoch=1-step=500``."""
    found = _STEP_IN_NAME.findall(name)
    return int(found[-1]) if found else None


def parse_draft(name: str) -> DraftName | None:
    """The fields in the name of an unfinished checkpoint; None if it is not such a name, or not ours."""
    stem = _unmarked(name)
    found = _DRAFT.fullmatch(stem or name)
    if found is None or (stem is None and not is_leased(found["job"])):
        return None
    return DraftName(found["job"], int(found["step"]), int(found["attempt"]), is_marked=stem is not None)


def trash_name(name: str) -> str:
    """The name of a checkpoint while it is being removed."""
    kept = name.encode("utf-8", "surrogateescape")[:_LONGEST_TRASHED_BYTES].decode("utf-8", "ignore")
    return _marked(f"{TRASH_PREFIX}{kept}")


def is_trash(name: str) -> bool:
    """Whether a name is one that a sweep of ours has given."""
    stem = _unmarked(name)
    return stem is not None and stem.startswith(TRASH_PREFIX)


def trashed_before_marks(name: str) -> bool:
    """Whether a sweep of an earlier version gives a checkpoint this name; so may a user."""
    return name.startswith(TRASH_PREFIX) and is_checkpoint_name(name.removeprefix(TRASH_PREFIX))


def scratch(owner: str, purpose: str) -> str:
    """A name beside a file being replaced; ``owner`` is the job that writes, by which a sweep knows the leftover."""
    return _marked(f"{SCRATCH_PREFIX}{owner}-{purpose}")


def scratch_owner(name: str) -> str | None:
    """The job or command that a scratch file belongs to; None if it is none of ours."""
    stem = _unmarked(name)
    found = _SCRATCH.fullmatch(stem or name)
    if found is None or (stem is None and not is_leased(found["owner"])):
        return None
    return found["owner"]


def is_leased(job: str) -> bool:
    """Whether a job is called as a lease calls it; commands, which hold no lease, are called otherwise."""
    return _LEASED_JOB.fullmatch(job) is not None


def _marked(stem: str) -> str:
    return f"{stem}~{zlib.crc32(f'unbroken {stem}'.encode('utf-8', 'surrogateescape')):08x}"


def _unmarked(name: str) -> str | None:
    """The name without its mark; None if it has none, or one that does not fit."""
    found = _MARK.fullmatch(name)
    return found["stem"] if found and _marked(found["stem"]) == name else None


def is_job(text: str) -> bool:
    """Whether a text can be the job in a name."""
    return _JOB.fullmatch(text) is not None


def require_safe(name: str) -> str:
    """A part's name, if it can only lead to a file inside the checkpoint's own directory.

    Raises:
        UnsafeName: it is absolute, climbs, hides a special character, or is the manifest's own name.
    """
    reason = _refusal(name)
    if reason:
        raise UnsafeName(name=name[:200], reason=reason)
    return name


def _refusal(name: str) -> str | None:
    if not name or len(name) > _LONGEST_NAME:
        return "it is empty or longer than 1,024 characters"
    if name.startswith("/"):
        return "it is an absolute path"
    if "\\" in name or not name.isprintable():
        return "it holds a backslash or a character that cannot be printed"
    pieces = name.split("/")
    if "" in pieces or "." in pieces or ".." in pieces:
        return "it climbs out of the directory or has an empty piece"
    if max(len(piece.encode("utf-8", "surrogatepass")) for piece in pieces) > 255:
        return "one of its pieces is longer than 255 bytes"
    return "it is the manifest's own name" if name == MANIFEST else None


# ---- hosts ----


def host_of(machine: str, boot: str | None) -> str:
    """A host as records name it."""
    return machine if boot is None else f"{machine}/{boot}"


def machine_of(host: str) -> str:
    """The machine of a host, without its boot: the name that users know."""
    return host.partition("/")[0]


def boot_of(host: str) -> str | None:
    """Which boot of its machine a host is; None if that is not known."""
    _, known, boot = host.partition("/")
    return boot if known else None


def same_host(one: str, other: str) -> bool:
    """Whether two hosts are one machine, whatever boot of it."""
    return machine_of(one) == machine_of(other)
