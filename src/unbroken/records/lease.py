"""The lease of a run: one job holds it at a time, renews it while it lives, and releases it at its end."""

import json
import re
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Final

from unbroken.disk import NodeKind
from unbroken.errors import LeaseLost, RunGone, RunHeld, StorageFailed
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
# No lease has a longer one; one that says so was damaged or tampered with, and would be watched for ever.
_MOST_TTL_S: Final = 3600.0
# A guess for display tolerates clocks that differ by this much.
_SKEW_S: Final = 300.0


class Standing(Enum):
    """What is known of a lease's holder."""

    ALIVE = "alive"
    GONE = "gone"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Holder:
    """Who a job is: host, process, and when that process started, since process numbers are used again.

    ``scope`` is where the process number counts: one PID namespace of one machine. None in records of older versions
    and where the system does not tell; then nothing can be concluded from a process number.
    """

    host: str
    pid: int
    process_started: str
    scope: str | None = None


ProcessOf = Callable[[Holder], str | None]
"""The start of a holder's process, "" if it is gone, None if it cannot be seen from here."""


@dataclass(frozen=True)
class Lease:
    """One job's hold on a run; ``number`` is the job's number and its fence, ``renewals`` counts its renewals."""

    number: int
    token: str
    holder: Holder
    taken_at_s: float
    renewed_at_s: float
    ttl_s: float = DEFAULT_TTL_S
    is_released: bool = False
    renewals: int = 0

    @property
    def job(self) -> str:
        """How the job is named inside file names."""
        return f"j{self.number:04}_{self.token}"

    def standing(self, process_of: ProcessOf | None = None) -> Standing:
        """What is known without watching; a released lease counts as gone."""
        if self.is_released:
            return Standing.GONE
        started = process_of(self.holder) if process_of else None
        if started is None:
            return Standing.UNKNOWN
        return Standing.ALIVE if started == self.holder.process_started else Standing.GONE

    def seems_live(self, *, now_s: float, process_of: ProcessOf | None = None) -> bool:
        """A guess for display only: where nothing is known, by the holder's own clock. Nothing is decided by it."""
        standing = self.standing(process_of)
        if standing is Standing.UNKNOWN:
            return now_s - self.renewed_at_s < self.ttl_s + _SKEW_S
        return standing is Standing.ALIVE

    def describe(self) -> str:
        """The holder in words."""
        if self.token == _UNKNOWN:
            return f"job {self.number} on an unknown host (its lease is damaged)"
        return f"job {self.number} on {self.holder.host}, process {self.holder.pid}"


def read_current(run: Path, files: Files = LOCAL) -> Lease | None:
    """The lease with the highest number, live or not; None if the run was never held.

    A lease that cannot be read counts as held by an unknown job since it was written, never as free.

    Raises:
        StorageFailed: an I/O error.
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
    process_of: ProcessOf | None = None,
    expired: Lease | None = None,
    files: Files = LOCAL,
) -> Lease:
    """Take the run if its holder is known to be gone; ``expired`` is a lease that was watched and not renewed.

    Raises:
        RunHeld: a job holds it that is not known to be gone, or another contender was quicker.
        StorageFailed: an I/O error.
    """
    files.make_directory(run / DIRECTORY, durable=True)
    current = read_current(run, files)
    if current is not None and current != expired:
        standing = current.standing(process_of)
        if standing is not Standing.GONE:
            is_alive = standing is Standing.ALIVE
            raise RunHeld(path=run, holder=current.describe(), proof="process" if is_alive else "unknown")
    number = 1 if current is None else current.number + 1
    lease = Lease(number, token, holder, taken_at_s=now_s, renewed_at_s=now_s, ttl_s=ttl_s)
    # crash here: the run is free, or held by a process that is gone and taken over at the next start; where the file
    # system has no hard links, also by an empty lease, which the next start watches.
    if not files.create_once(_path(run, number), _encode(lease), scratch=scratch(lease.job, "lease")):
        winner = read_current(run, files)
        raise RunHeld(path=run, holder=winner.describe() if winner else "another job", proof="contest")
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
    """Renew the lease.

    Raises:
        LeaseLost: another job has the run.
        RunGone: the run directory is not there any more.
        StorageFailed: an I/O error.
    """
    require_held(run, lease, files)
    renewed = replace(lease, renewed_at_s=now_s, renewals=lease.renewals + 1)
    _write(run, renewed, by=lease.job, files=files)
    return renewed


def release(run: Path, lease: Lease, *, now_s: float, files: Files = LOCAL) -> None:
    """Release the run, so that the next job need not wait.

    Raises:
        LeaseLost: another job has the run.
        RunGone: the run directory is not there any more.
        StorageFailed: an I/O error.
    """
    require_held(run, lease, files)
    released = replace(lease, renewed_at_s=now_s, renewals=lease.renewals + 1, is_released=True)
    _write(run, released, by=lease.job, files=files)


def release_expired(run: Path, expired: Lease, *, by: str, files: Files = LOCAL) -> None:
    """Mark as released a lease that was watched and not renewed, or whose process is gone; ``by`` names the writer.

    Its number stays: a holder that wakes up after all continues to renew it, unless another job has taken the run.

    Raises:
        RunHeld: the lease has changed since.
        StorageFailed: an I/O error.
    """
    current = read_current(run, files)
    if current != expired:
        raise RunHeld(path=run, holder=(current or expired).describe(), proof="renewed")
    _write(run, replace(expired, is_released=True), by=f"j{expired.number:04}_{by}", files=files)


def _write(run: Path, lease: Lease, *, by: str, files: Files) -> None:
    # crash here: the lease as it was, and a scratch file that the next job removes.
    files.replace(_path(run, lease.number), _encode(lease), scratch=scratch(by, "lease"))


def require_held(run: Path, lease: Lease, files: Files = LOCAL) -> None:
    """Pass if no later job has taken the run: the fence, checked last before a commit.

    Raises:
        LeaseLost: another job has the run.
        RunGone: the run directory is not there any more.
        StorageFailed: an I/O error.
    """
    numbers = _numbers(run, files)
    if not numbers or numbers[-1] < lease.number:
        raise RunGone(path=run, job=lease.number, is_there=files.find(run) is not None)
    if numbers[-1] != lease.number:
        raise LeaseLost(path=run, mine=lease.number, current=numbers[-1])


def is_present(run: Path, lease: Lease, files: Files = LOCAL) -> bool:
    """Whether the lease file itself is still there: one look, cheap enough for every second.

    Raises:
        StorageFailed: an I/O error.
    """
    return files.find(_path(run, lease.number)) is not None


def _numbers(run: Path, files: Files) -> list[int]:
    directory = run / DIRECTORY
    nodes = files.list_present(directory)
    names = (node.name for node in nodes if node.kind is NodeKind.FILE and _FILE.fullmatch(node.name))
    return sorted(int(name.removesuffix(".json")) for name in names)


def _path(run: Path, number: int) -> Path:
    return run / DIRECTORY / f"{number:06}.json"


def _encode(lease: Lease) -> bytes:
    return (json.dumps({"schema": _SCHEMA, **asdict(lease)}, sort_keys=True) + "\n").encode()


def _read(run: Path, number: int, files: Files) -> Lease:
    path = _path(run, number)
    try:
        return _decoded(number, Table(parsed(files.read_bytes(path, limit_bytes=_LIMIT_BYTES)), "lease"))
    except (ValueError, Malformed):
        # Whoever rewrites it changes its time, so that watching works for a damaged lease too.
        found = files.find(path)
        written_s = found.modified_ns / 1e9 if found else 0.0
        return Lease(number, _UNKNOWN, Holder("an unknown host", 0, "?"), written_s, written_s)


def _decoded(number: int, body: Table) -> Lease:
    body.one_of("schema", (_SCHEMA,))
    holder = Table(body.table("holder"), "lease.holder")
    ttl_s = body.number("ttl_s")
    if not 0 < ttl_s <= _MOST_TTL_S:
        raise Malformed("the time to live of the lease is out of range")
    return Lease(
        number=number,
        token=body.text("token"),
        holder=Holder(
            holder.text("host"),
            holder.whole("pid"),
            holder.text("process_started"),
            # Leases of older versions have neither a scope nor a count of renewals.
            scope=holder.optional_text("scope") if "scope" in holder else None,
        ),
        taken_at_s=body.instant("taken_at_s"),
        renewed_at_s=body.instant("renewed_at_s"),
        ttl_s=ttl_s,
        is_released=body.flag("is_released"),
        renewals=body.whole("renewals") if "renewals" in body else 0,
    )


def number_of(job: str) -> int | None:
    """The number of a job, from its name in file names; None if it is no job's name."""
    number = job.partition("_")[0].removeprefix("j")
    return int(number) if job.startswith("j") and number.isdigit() else None


def draft_judge(run: Path, *, is_live: Callable[[Lease], bool], files: Files = LOCAL) -> Callable[[str], bool]:
    """Who may still be writing, by the name a job has in file names.

    Only the current holder can be; every job before it is fenced off. Where no job ever took the run,
    nothing is known, and every job counts as alive. ``is_live`` is called at most once, and only if it matters: it may
    have to watch the lease.

    Raises:
        StorageFailed: an I/O error.
    """
    current = read_current(run, files)
    if current is None:
        return lambda job: True
    # The name of a job whose lease cannot be read is known but for the number.
    prefix = f"j{current.number:04}_" if current.token == _UNKNOWN else current.job
    answers: list[bool] = []

    def judge(job: str) -> bool:
        if job != prefix and not (current.token == _UNKNOWN and job.startswith(prefix)):
            return False
        if not answers:
            answers.append(is_live(current))
        return answers[0]

    return judge


# ---- renewing it, in a thread ----

_LOOK_S: Final = 1.0


class Renewal:
    """Keeps one lease alive; ``lost`` says if another job has taken the run, or the run directory is gone."""

    def __init__(self, run: Path, lease: Lease, *, clock: Callable[[], float], files: Files = LOCAL) -> None:
        self._run_directory = run
        self._lease = lease
        self._clock = clock
        self._files = files
        self._ended = threading.Event()
        self.lost: LeaseLost | RunGone | None = None
        # A daemon: a loop that hangs at its end must not be kept alive, and looking alive, by its own lease.
        self._thread = threading.Thread(target=self._renew, name="unbroken-lease", daemon=True)
        self._thread.start()

    def _renew(self) -> None:
        every_s = self._lease.ttl_s / 4
        look_s = min(_LOOK_S, every_s)
        waited_s = 0.0
        while not self._ended.wait(look_s):
            waited_s += look_s
            try:
                # A run that was moved or deleted is noticed within a second, not at the next renewal.
                if waited_s < every_s and is_present(self._run_directory, self._lease, self._files):
                    continue
                waited_s = 0.0
                self._lease = renew(self._run_directory, self._lease, now_s=self._clock(), files=self._files)
            except (LeaseLost, RunGone) as lost:
                self.lost = lost
                return
            except StorageFailed:
                # A hiccup of the storage: three more tries fit into the time to live.
                continue

    def end(self) -> None:
        """Stop renewing and release the run, unless another job has it already or it is gone.

        Raises:
            StorageFailed: an I/O error; the next job then watches the lease until it counts as expired.
        """
        self._ended.set()
        self._thread.join()
        if self.lost is None:
            try:
                release(self._run_directory, self._lease, now_s=self._clock(), files=self._files)
            except (LeaseLost, RunGone) as lost:
                self.lost = lost
