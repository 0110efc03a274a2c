"""The records of a run as a launcher reads them: last job number, outcome, stop reason, resumable step.

On nodes without rank 0 the job writes no outcome file, so the durable outcome in the run directory counts. If storage
cannot be read, all functions return None and the launcher decides by exit codes alone.
"""

from pathlib import Path
from typing import Final

from unbroken.errors import StorageFailed
from unbroken.launch.job_files import JobOutcome
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout
from unbroken.records.lease import ProcessOf, read_current
from unbroken.records.outcome import read_outcome
from unbroken.store.check import Level, verify
from unbroken.store.choose import choose
from unbroken.store.directory import Store
from unbroken.store.scan import newest_first, scan

_EXIT_CODES: Final = 256


def last_job(run: Path | None) -> int | None:
    """The number of the last job that held a run, 0 if none did; None if unknown."""
    if run is None:
        return None
    try:
        lease = read_current(run)
    except StorageFailed:
        return None
    return lease.number if lease else 0


def recorded_outcome(
    run: Path | None,
    *,
    after_job: int | None,
    now_s: float,
    process_of: ProcessOf | None = None,
) -> JobOutcome | None:
    """The outcome of a job later than ``after_job``; an older one does not belong to this launch."""
    if run is None or after_job is None:
        return None
    try:
        found = read_outcome(Layout(run), now_s=now_s, process_of=process_of)
    except StorageFailed:
        return None
    if found is None or found.job is None or found.job <= after_job or found.exit_code >= _EXIT_CODES:
        return None
    if found.status in ("running", "crashed"):
        # Derived from the lease, not reported: exit codes are more precise.
        return None
    return JobOutcome(str(run), found.status, found.exit_code, found.verdict, found.reason)


def stop_kind(run: Path | None) -> str | None:
    """The kind of the reason why the last job stopped cleanly; None if there is none."""
    number = last_job(run)
    if run is None or not number:
        return None
    try:
        said = read_history(Layout(run)).last("stop", job=number)
    except StorageFailed:
        return None
    return said.text("by") if said else None


def resumable_step(run: Path | None) -> int | None:
    """The step a run would resume from, by a quick check; None if from none, or unknown."""
    if run is None:
        return None
    store = Store(Layout(run).checkpoints)
    try:
        if store.files.find(store.root) is None:
            return None
        found = choose(newest_first(store, scan(store).committed), lambda name: verify(store, name, Level.QUICK))
    except StorageFailed:
        # Counts as no progress, which is the cautious answer.
        return None
    manifest = found.chosen.manifest if found.chosen else None
    return manifest.step if manifest else None
