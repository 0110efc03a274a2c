"""What a launcher reads in the run's own records: the number of its last job, its outcome, how far it can resume.

The durable outcome is what counts where the job told none, on the nodes that do not hold its first rank. A store that
cannot be read just now is told apart from nothing only by its absence here: the launcher then knows no more than its
processes say.
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
    """The number of the last job that held a run, 0 if none ever did; None if nothing is known of it."""
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
    """The outcome that a job later than ``after_job`` left in its run; an older one says nothing of this launch."""
    if run is None or after_job is None:
        return None
    try:
        found = read_outcome(Layout(run), now_s=now_s, process_of=process_of)
    except StorageFailed:
        return None
    if found is None or found.job is None or found.job <= after_job or found.exit_code >= _EXIT_CODES:
        return None
    if found.status in ("running", "crashed"):
        # What is derived, not told: the processes say it better.
        return None
    return JobOutcome(str(run), found.status, found.exit_code, found.verdict, found.reason)


def stop_kind(run: Path | None) -> str | None:
    """The kind of the reason for which the last job of a run stopped cleanly; None where it tells none."""
    number = last_job(run)
    if run is None or not number:
        return None
    try:
        said = read_history(Layout(run)).last("stop", job=number)
    except StorageFailed:
        return None
    return said.text("by") if said else None


def resumable_step(run: Path | None) -> int | None:
    """The step a run would resume from by a quick look; None if from nothing, or nothing could be seen."""
    if run is None:
        return None
    store = Store(Layout(run).checkpoints)
    try:
        if store.files.find(store.root) is None:
            return None
        found = choose(newest_first(store, scan(store).committed), lambda name: verify(store, name, Level.QUICK))
    except StorageFailed:
        # Then no progress can be seen, which is the careful answer.
        return None
    manifest = found.chosen.manifest if found.chosen else None
    return manifest.step if manifest else None
