"""Who holds a run: at most one job, proven by a file only one can create.

A job takes a run by creating the lease with the next number in ``.lease/``; creating is exclusive, so of two contenders
one wins, and the number is a fence: whoever finds a higher one than his own has been taken for dead and commits nothing
more. The holder renews its lease; one that has not been renewed for its time to live is dead, and on the holder's own
host a process that is gone is dead at once.
"""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from unbroken.disk import NodeKind
from unbroken.errors import LeaseLost, RunHeld
from unbroken.files import LOCAL, Files
from unbroken.store.fields import Malformed, Table, parsed
from unbroken.store.names import scratch, scratch_owner

DIRECTORY: Final = ".lease"
DEFAULT_TTL_S: Final = 60.0
_SCHEMA: Final = "unbroken.lease/1"
_LIMIT_BYTES: Final = 1 << 16
_KEPT_OLD_LEASES: Final = 4
_UNKNOWN: Final = "unknown"
_FILE: Final = re.compile(r"[0-9]{6,18}\.json")


@dataclass(frozen=True)
class Holder:
    """Who a job is: the host, the process, and when that process began, since process numbers are used again."""

    host: str
    pid: int
    process_started: str


@dataclass(frozen=True)
class Lease:
    """One job's hold on a run; ``number`` is the job's number and its fence."""

    number: int
    token: str
    holder: Holder
    taken_at_s: float
    renewed_at_s: float
    ttl_s: float = DEFAULT_TTL_S
    is_released: bool = False

    @property
    def job(self) -> str:
        """How the job is named inside file names."""
        return f"j{self.number:04}_{self.token}"

    def is_live(self, *, now_s: float, process_of: Callable[[str, int], str | None] | None = None) -> bool:
        """Whether its job may still be writing.

        ``process_of(host, pid)`` gives the start of a process on this host, "" if there is none, or None where it
        cannot know (another host): then the clock decides.
        """
        if self.is_released:
            return False
        started = process_of(self.holder.host, self.holder.pid) if process_of else None
        if started is not None:
            return started == self.holder.process_started
        return now_s - self.renewed_at_s < self.ttl_s

    def describe(self) -> str:
        """The holder in words."""
        if self.token == _UNKNOWN:
            return f"job {self.number} on an unknown host (its lease is damaged)"
        return f"job {self.number} on {self.holder.host}, process {self.holder.pid}"


def read_current(run: Path, files: Files = LOCAL) -> Lease | None:
    """The lease with the highest number, live or not; None if the run was never held.

    A lease that cannot be read counts as held by somebody unknown since it was written, never as free.

    Raises:
        StorageFailed: the system refused.
    """
    numbers = _numbers(run, files)
    return _read(run, numbers[-1], files) if numbers else None


def acquire(
    run: Path,
    holder: Holder,
    *,
    token: str,
    now_s: float,
    ttl_s: float = DEFAULT_TTL_S,
    process_of: Callable[[str, int], str | None] | None = None,
    files: Files = LOCAL,
) -> Lease:
    """Take the run.

    Raises:
        RunHeld: a live job holds it, or another contender was quicker.
        StorageFailed: the system refused.
    """
    files.make_directory(run / DIRECTORY, durable=True)
    current = read_current(run, files)
    if current is not None and current.is_live(now_s=now_s, process_of=process_of):
        raise RunHeld(path=run, holder=current.describe(), age_s=now_s - current.renewed_at_s)
    number = 1 if current is None else current.number + 1
    lease = Lease(number, token, holder, taken_at_s=now_s, renewed_at_s=now_s, ttl_s=ttl_s)
    # crash here: the run is free, or held by a process that is gone and taken over at the next start.
    if not files.create_once(_path(run, number), _encode(lease), scratch=scratch(lease.job, "lease")):
        winner = read_current(run, files)
        raise RunHeld(path=run, holder=winner.describe() if winner else "another contender", age_s=0.0)
    _tidy(run, lease, files)
    return lease


def _tidy(run: Path, lease: Lease, files: Files) -> None:
    for old in _numbers(run, files)[: -1 - _KEPT_OLD_LEASES]:
        files.remove_file(_path(run, old))
    for node in files.list_directory(run / DIRECTORY):
        # A contender for our own number may still be writing; one for a lower number has lost, alive or not.
        owner = scratch_owner(node.name)
        if owner is not None and (number_of(owner) or lease.number) < lease.number:
            files.remove_file(run / DIRECTORY / node.name)


def renew(run: Path, lease: Lease, *, now_s: float, files: Files = LOCAL) -> Lease:
    """Give a sign of life.

    Raises:
        LeaseLost: another job has the run.
        StorageFailed: the system refused.
    """
    require_held(run, lease, files)
    renewed = replace(lease, renewed_at_s=now_s)
    files.replace(_path(run, lease.number), _encode(renewed), scratch=scratch(lease.job, "lease"))
    return renewed


def release(run: Path, lease: Lease, *, now_s: float, files: Files = LOCAL) -> None:
    """Let the run go, so that the next job need not wait.

    Raises:
        LeaseLost: another job has the run.
        StorageFailed: the system refused.
    """
    require_held(run, lease, files)
    released = replace(lease, renewed_at_s=now_s, is_released=True)
    files.replace(_path(run, lease.number), _encode(released), scratch=scratch(lease.job, "lease"))


def require_held(run: Path, lease: Lease, files: Files = LOCAL) -> None:
    """Pass if no later job has taken the run: the fence a commit asks last.

    Raises:
        LeaseLost: another job has the run.
        StorageFailed: the system refused.
    """
    numbers = _numbers(run, files)
    if not numbers or numbers[-1] != lease.number:
        raise LeaseLost(path=run, mine=lease.number, current=numbers[-1] if numbers else 0)


def _numbers(run: Path, files: Files) -> list[int]:
    directory = run / DIRECTORY
    if files.find(directory) is None:
        return []
    nodes = files.list_directory(directory)
    names = (node.name for node in nodes if node.kind is NodeKind.FILE and _FILE.fullmatch(node.name))
    return sorted(int(name.removesuffix(".json")) for name in names)


def _path(run: Path, number: int) -> Path:
    return run / DIRECTORY / f"{number:06}.json"


def _encode(lease: Lease) -> bytes:
    return (json.dumps({"schema": _SCHEMA, **asdict(lease)}, sort_keys=True) + "\n").encode()


def _read(run: Path, number: int, files: Files) -> Lease:
    path = _path(run, number)
    try:
        body = Table(parsed(files.read_bytes(path, limit_bytes=_LIMIT_BYTES)), "lease")
        body.one_of("schema", (_SCHEMA,))
        holder = Table(body.table("holder"), "lease.holder")
        return Lease(
            number=number,
            token=body.text("token"),
            holder=Holder(holder.text("host"), holder.whole("pid"), holder.text("process_started")),
            taken_at_s=body.instant("taken_at_s"),
            renewed_at_s=body.instant("renewed_at_s"),
            ttl_s=body.number("ttl_s"),
            is_released=body.flag("is_released"),
        )
    except (ValueError, Malformed):
        found = files.find(path)
        written_s = found.modified_ns / 1e9 if found else 0.0
        return Lease(number, _UNKNOWN, Holder("an unknown host", 0, "?"), written_s, written_s)


def number_of(job: str) -> int | None:
    """The number of a job, from its name in file names; None if it is no job's name."""
    number = job.partition("_")[0].removeprefix("j")
    return int(number) if job.startswith("j") and number.isdigit() else None


def draft_judge(
    run: Path,
    *,
    now_s: float,
    process_of: Callable[[str, int], str | None] | None = None,
    files: Files = LOCAL,
) -> Callable[[str], bool]:
    """Who may still be writing, by the name a job has in file names.

    Only the current holder can be; every job before it is fenced off. Where no job ever took the run, nobody proved to
    be alive or dead, and everybody counts as alive.

    Raises:
        StorageFailed: the system refused.
    """
    current = read_current(run, files)
    if current is None:
        return lambda job: True
    if not current.is_live(now_s=now_s, process_of=process_of):
        return lambda job: False
    if current.token == _UNKNOWN:
        # Its lease cannot be read, so what its drafts are called is not known either, but for the number.
        return lambda job: job.startswith(f"j{current.number:04}_")
    return lambda job: job == current.job
