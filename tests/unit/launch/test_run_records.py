"""What a launcher believes of a run's own records."""

from pathlib import Path
from typing import Any

import pytest

from unbroken.launch.job_files import JobOutcome
from unbroken.launch.run_records import last_job, recorded_outcome, resumable_step, stop_kind
from unbroken.records.journal import Journal
from unbroken.records.layout import Layout
from unbroken.records.lease import Holder, acquire, release

NOW_S = 1_000_000.0

AGAIN: dict[str, Any] = {"class": "again"}


def job(run: Path, status: str | None, exit_code: int = 0) -> int:
    """One job that held a run and ended, with or without an outcome; returns its number."""
    lease = acquire(run, Holder("h", 1, "s"), token="t", now_s=NOW_S)
    if status:
        journal = Journal(Layout(run), lease.number, clock=lambda: NOW_S)
        journal.write("job-end", status=status, exit_code=exit_code, reason="why", **AGAIN)
    release(run, lease, now_s=NOW_S)
    return lease.number


def recorded(run: Path | None, after_job: int | None) -> JobOutcome | None:
    return recorded_outcome(run, after_job=after_job, now_s=NOW_S)


def test_a_later_jobs_outcome_is_believed_and_an_older_one_is_not(tmp_path: Path) -> None:
    assert last_job(tmp_path) == 0
    first = job(tmp_path, "stopped")
    assert recorded(tmp_path, 0) == JobOutcome(str(tmp_path), "stopped", 0, "again", "why")
    assert recorded(tmp_path, first) is None
    second = job(tmp_path, "error", 74)
    assert last_job(tmp_path) == second
    assert recorded(tmp_path, first) == JobOutcome(str(tmp_path), "error", 74, "again", "why")


@pytest.mark.parametrize(("status", "code"), [(None, 0), ("crashed", 137), ("running", 7), ("error", 256)])
def test_what_was_never_reported_is_left_to_the_processes(tmp_path: Path, status: str | None, code: int) -> None:
    job(tmp_path, status, code)
    assert recorded(tmp_path, 0) is None


def test_of_an_unknown_or_unreadable_run_nothing_is_known(tmp_path: Path) -> None:
    assert last_job(None) is None
    assert recorded(None, 0) is None
    assert recorded(tmp_path, None) is None
    assert resumable_step(None) is None
    assert resumable_step(tmp_path) is None
    (tmp_path / "checkpoints").write_text("no directory")
    assert resumable_step(tmp_path) is None


def test_the_reason_of_the_last_stop_is_read_from_that_job_alone(tmp_path: Path) -> None:
    assert stop_kind(None) is None
    assert stop_kind(tmp_path) is None
    first = job(tmp_path, "stopped")
    Journal(Layout(tmp_path), first, clock=lambda: NOW_S).write("stop", step=3, reason="why", by="walltime")
    assert stop_kind(tmp_path) == "walltime"
    job(tmp_path, "stopped")
    assert stop_kind(tmp_path) is None
