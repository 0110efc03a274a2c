"""The records of a run under every crash: what was promised is there, and a torn line never breaks reading.

Each action is killed before and during each of its operations, or refused at each, and then the power is cut.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from unbroken.disk import Disk
from unbroken.errors import StorageError
from unbroken.files import Files
from unbroken.records.journal import Journal, read_history
from unbroken.records.layout import Layout
from unbroken.records.leftovers import sweep_scratch
from unbroken.records.metrics import MetricsWriter, read_metrics
from unbroken.records.outcome import Outcome, conclude, derive, record_outcome
from unbroken.records.snapshot import RunState, RunStateWriter, read_run_state
from unbroken.records.stop import StopReason, clear_requests, end_requests, read_request, request_stop
from unbroken.store.names import scratch
from unbroken.testing import (
    ERRORS,
    FaultyDisk,
    Ignore,
    Kill,
    MemoryDisk,
    Trial,
    always,
    crash_points,
    crash_states,
)

LAYOUT = Layout(Path("/run"))
FAULTS = (Kill("before"), Kill("during"), Kill("after"), *ERRORS)
STEPS = range(1, 5)
LEFT = (scratch("j0001_a", "state"), scratch("j0001_b", "state"))
KEPT = (scratch("j0002_a", "state"), ".scratch-mine")


def _clock() -> float:
    return 1_700_000_000.0


def fresh() -> MemoryDisk:
    """A run with a journal of an earlier job, a snapshot and a request."""
    disk = MemoryDisk([LAYOUT.run])
    files = Files(disk)
    Journal(LAYOUT, 1, clock=_clock, files=files).write("commit", step=0)
    RunStateWriter(LAYOUT, scratch=".s", clock=_clock, files=files).write(RunState("running", job=1), durable=True)
    request_stop(LAYOUT, job=1, by="x", scratch=".s", files=files)
    for name in (*LEFT, *KEPT):
        files.write_new(LAYOUT.run / name, [b"half"])
    disk.sync_all()
    return disk


Action = Callable[[Disk], object]


def commits(disk: Disk) -> object:
    """Facts that promise something, and others between them; the promises that were given."""
    journal = Journal(LAYOUT, 2, clock=_clock, files=Files(disk))
    promised: list[int] = []
    for step in STEPS:
        journal.write("save", step=step)
        journal.write("commit", step=step)
        promised.append(step)
    journal.close()
    return promised


def metrics(disk: Disk) -> object:
    """Steps handed to the kernel, made durable before a commit."""
    writer = MetricsWriter(LAYOUT, 2, start=0, files=Files(disk))
    for step in STEPS:
        writer.write(step, {"loss": step / 3})
    writer.flush(durable=True)
    writer.close()
    return None


def ends(disk: Disk) -> object:
    """A job that ends in words."""
    files = Files(disk)
    clear_requests(LAYOUT, job=2, files=files)
    writer = RunStateWriter(LAYOUT, scratch=".s", clock=_clock, files=files)
    writer.write(RunState("running", job=2))

    def write_state(outcome: Outcome) -> None:
        writer.write(RunState(outcome.status, job=outcome.job, exit_code=outcome.exit_code), durable=True)

    outcome = conclude(StopReason("done"), step=4, job=2)
    request_stop(LAYOUT, job=2, by="x", scratch=".r", files=files)
    record_outcome(outcome, Journal(LAYOUT, 2, clock=_clock, files=files), write_state)
    end_requests(LAYOUT, files)
    return outcome


def sweeps(disk: Disk) -> object:
    """A job that clears away what dead jobs have left beside the records."""
    sweep_scratch(LAYOUT, holder=2, now_s=_clock(), files=Files(disk))
    return None


ACTIONS: tuple[Action, ...] = (commits, metrics, ends, sweeps)


def _found_after(trial: Trial[MemoryDisk]) -> list[Files]:
    found = [trial.disk, *(disk for _, disk in crash_states(trial.disk))]
    return [Files(disk) for disk in found]


def _steps_of_commits(files: Files) -> list[int | None]:
    return [fact.whole("step") for fact in read_history(LAYOUT, files).of_kind("commit") if fact.job == 2]


@pytest.mark.promise("X7", "U17")
def test_a_sweep_of_scratch_files_that_was_cut_short_is_finished_by_the_next_one() -> None:
    for trial in crash_points(fresh, sweeps, FAULTS):
        for files in _found_after(trial):
            sweeps(files.disk)
            names = {node.name for node in files.list_directory(LAYOUT.run)}
            assert names >= set(KEPT) and not names & set(LEFT), str(trial)
            assert read_run_state(LAYOUT, files) is not None and read_history(LAYOUT, files).events


@pytest.mark.promise("X7")
def test_commits_that_were_journalled_survive_every_crash_and_no_torn_line_breaks_reading() -> None:
    looked = torn = 0
    for trial in crash_points(fresh, commits, FAULTS):
        for files in _found_after(trial):
            history = read_history(LAYOUT, files)
            steps = _steps_of_commits(files)
            assert steps == list(STEPS)[: len(steps)], str(trial)
            assert history.events[0].job == 1, "the facts of the job before are intact"
            if trial.is_finished:
                assert steps == list(STEPS), str(trial)
            torn += history.torn
            looked += 1
    assert looked > 50 and torn > 0


def test_each_event_that_promised_something_is_there_from_the_moment_write_returned() -> None:
    for stop_after in range(1, 5):
        disk = fresh()
        journal = Journal(LAYOUT, 2, clock=_clock, files=Files(disk))
        for step in range(1, stop_after + 1):
            journal.write("commit", step=step)
        for _, found in crash_states(disk):
            assert _steps_of_commits(Files(found)) == list(range(1, stop_after + 1))


@pytest.mark.parametrize("sync", ["sync_file", "sync_directory"])
def test_a_forgotten_sync_of_the_journal_does_not_go_unnoticed(sync: str) -> None:
    disk = fresh()
    commits(FaultyDisk(disk, always(sync, Ignore())))
    assert any(_steps_of_commits(Files(found)) != list(STEPS) for _, found in crash_states(disk))


@pytest.mark.promise("X7")
def test_after_every_crash_the_next_job_reads_and_adds_to_the_metrics() -> None:
    for trial in crash_points(fresh, metrics, FAULTS):
        for files in _found_after(trial):
            before = read_metrics(LAYOUT, files)
            assert all(row.values == {"loss": row.step / 3} for row in before.kept.values()), str(trial)
            if trial.is_finished:
                assert list(before.kept) == list(STEPS), str(trial)
            writer = MetricsWriter(LAYOUT, 3, start=0, files=files)
            for step in STEPS:
                writer.write(step, {"loss": step / 3})
            after = read_metrics(LAYOUT, files)
            assert after.recomputed.agreeing == after.recomputed.compared == len(before.kept), str(trial)
            assert list(after.kept) == list(STEPS)


@pytest.mark.promise("G10", "X7")
def test_after_every_crash_a_job_has_ended_with_a_reason_or_has_crashed() -> None:
    seen = set[str]()
    for trial in crash_points(fresh, ends, FAULTS):
        for files in _found_after(trial):
            found = derive(None, read_history(LAYOUT, files), read_run_state(LAYOUT, files), is_live=False)
            seen.add(found.status if found else "none")
            read_request(LAYOUT, files)
            if trial.is_finished:
                assert found is not None and (found.status, found.job) == ("completed", 2), str(trial)
    assert seen == {"crashed", "completed"}


def test_an_io_error_raises_an_error_of_ours_only() -> None:
    for action in ACTIONS:
        for trial in crash_points(fresh, action, ERRORS):
            assert trial.raised is None or isinstance(trial.raised, StorageError), str(trial)
