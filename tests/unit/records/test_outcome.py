"""The table of outcomes: from what ended a job to status, exit code and what to do; and how it is found again."""

import errno
import signal
from pathlib import Path

import pytest

from tests.unit.errors_examples import EXAMPLES
from unbroken import errors
from unbroken.errors import StorageFailed
from unbroken.files import LOCAL, Files
from unbroken.records.journal import Event, History, Journal, read_history
from unbroken.records.layout import Layout
from unbroken.records.lease import Holder, Lease, acquire, release
from unbroken.records.outcome import Outcome, conclude, derive, killed, read_outcome, record_outcome, with_exit_code
from unbroken.records.snapshot import RunState, RunStateWriter
from unbroken.records.stop import StopReason
from unbroken.testing import FaultyDisk, MemoryDisk, Refuse, always

HELD = Lease(4, "a", Holder("h", 1, "s"), 0.0, 0.0)
FREED = Lease(4, "a", Holder("h", 1, "s"), 0.0, 0.0, is_released=True)
STORAGE = StorageFailed(operation="write", path=Path("x"), cause="No space left on device")

# What ended the loop; the status, the exit code and what an orchestrator does.
TABLE = [
    (StopReason("done"), "completed", 0, "done"),
    (StopReason("signal", "SIGTERM"), "stopped", 0, "again"),
    (StopReason("walltime"), "stopped", 0, "again"),
    (StopReason("flag"), "stopped", 0, "again"),
    (StopReason("asked"), "stopped", 0, "again"),
    (errors.Bug(cause="KeyError: 'step'"), "error", 1, "look"),
    (RuntimeError("CUDA error"), "error", 1, "look"),
    (errors.BadUsage(command="unbroken run", complaint="x"), "error", 2, "look"),
    (errors.ConfigUnreadable(path=Path("a"), complaint="x", line=1), "error", 2, "look"),
    (errors.DamagedCheckpoint(path=Path("a"), findings=("x",)), "error", 3, "look"),
    (errors.NoUsableCheckpoint(store=Path("a"), skipped=()), "error", 5, "look"),
    (errors.NotExact(differences=(("torch", "2.11, was 2.13"),)), "halted", 6, "look"),
    (errors.LeaseLost(path=Path("a"), mine=4, current=5), "error", 7, "held"),
    (STORAGE, "error", 74, "again"),
    (errors.RankFailed(rank=3, cause=STORAGE), "error", 74, "again"),
    (KeyboardInterrupt(), "stopped", 130, "again"),
    (SystemExit(0), "stopped", 0, "again"),
    (SystemExit(None), "stopped", 0, "again"),
    (SystemExit(9), "error", 9, "look"),
    (SystemExit("usage: ..."), "error", 1, "look"),
    (SystemExit(256), "error", 1, "look"),
]


@pytest.mark.promise("G10")
@pytest.mark.parametrize(("ending", "status", "code", "verdict"), TABLE, ids=lambda each: repr(each)[:40])
def test_the_table_of_outcomes(ending: StopReason | BaseException, status: str, code: int, verdict: str) -> None:
    found = conclude(ending, step=7, job=4)
    assert (found.status, found.exit_code, found.verdict) == (status, code, verdict)
    assert (found.step, found.job) == (7, 4) and found.reason


@pytest.mark.promise("G10")
def test_exhausted_data_halts_the_run_and_no_job_restarts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors.Bug, "exit_code", errors.DataError.exit_code)
    found = conclude(errors.Bug(cause="a bucket is exhausted"))
    assert (found.status, found.exit_code, found.verdict) == ("halted", 4, "look")


@pytest.mark.promise("G10")
def test_every_error_of_ours_has_its_own_exit_code_as_the_outcome() -> None:
    for error in EXAMPLES:
        found = conclude(error)
        cause = error.cause if isinstance(error, errors.RankFailed) else error
        assert found.exit_code == cause.exit_code and error.kind in found.reason, error.kind
        usual = {74: "again", 7: "held"}.get(cause.exit_code, "look")
        assert found.verdict == ("again" if isinstance(cause, errors.PeerLost) else usual), error.kind


def test_a_clean_stop_has_the_exit_code_that_was_requested_and_nothing_else_has() -> None:
    assert conclude(StopReason("signal"), stopped_exit_code=75).exit_code == 75
    assert conclude(SystemExit(0), stopped_exit_code=75).exit_code == 75
    assert conclude(StopReason("done"), stopped_exit_code=75).exit_code == 0
    assert conclude(KeyboardInterrupt(), stopped_exit_code=75).exit_code == 130
    assert with_exit_code(conclude(StopReason("flag")), 75).exit_code == 75
    assert with_exit_code(conclude(StopReason("done")), 75).exit_code == 0
    assert with_exit_code(conclude(KeyboardInterrupt()), 75).exit_code == 130


def test_a_job_that_was_killed_crashed_with_128_and_the_signal() -> None:
    assert (killed().status, killed().exit_code, killed().verdict) == ("crashed", 137, "again")
    assert killed(signal.SIGSEGV).exit_code == 139 and "SIGSEGV" in killed(signal.SIGSEGV).reason
    assert killed(99).exit_code == 227 and "signal 99" in killed(99).reason


def _ended(job: int, status: str = "completed", code: int = 0, verdict: str = "done") -> Event:
    return Event(job, "job-end", 0.0, {"status": status, "exit_code": code, "class": verdict, "reason": "r", "step": 9})


@pytest.mark.promise("G10", "G11")
@pytest.mark.parametrize(
    ("lease", "facts", "state", "is_live", "found"),
    [
        # A live job holds the run, whatever was said before.
        (HELD, [], None, True, ("running", 7, "held", 4)),
        (HELD, [_ended(3)], RunState("completed"), True, ("running", 7, "held", 4)),
        # It said how it ended and has not released its lease yet.
        (HELD, [_ended(4)], None, True, ("completed", 0, "done", 4)),
        # It is gone without a word: what an earlier job said is not its outcome.
        (HELD, [_ended(3)], None, False, ("crashed", 137, "again", 4)),
        (HELD, [_ended(3)], RunState("completed", job=3), False, ("crashed", 137, "again", 4)),
        (HELD, [], RunState("running", job=4, step=6), False, ("crashed", 137, "again", 4)),
        # It said how it ended; the journal is asked first.
        (FREED, [_ended(4, "stopped", 0, "again")], RunState("running", job=4), False, ("stopped", 0, "again", 4)),
        (HELD, [_ended(4, "error", 74, "again")], None, False, ("error", 74, "again", 4)),
        (FREED, [_ended(4, "halted", 4, "look")], RunState("completed", job=4), False, ("halted", 4, "look", 4)),
        # The journal could not be written, the snapshot could.
        (HELD, [], RunState("error", job=4, exit_code=74), False, ("error", 74, "again", 4)),
        (HELD, [], RunState("halted", job=4), False, ("halted", 4, "look", 4)),
        # A line that is no outcome is none.
        (HELD, [_ended(4, "perfect")], None, False, ("crashed", 137, "again", 4)),
        # A run of a tool that has neither lease nor journal.
        (None, [], RunState("stopped"), False, ("stopped", 0, "again", None)),
        (None, [], RunState("running"), False, ("crashed", 137, "again", None)),
        (None, [_ended(2)], None, False, ("completed", 0, "done", 2)),
        # Nobody trained here.
        (None, [], None, False, None),
        (FREED, [], None, False, None),
    ],
)
def test_the_outcome_is_derived_from_lease_journal_and_snapshot(
    lease: Lease | None,
    facts: list[Event],
    state: RunState | None,
    is_live: bool,
    found: tuple[str, int, str, int | None] | None,
) -> None:
    outcome = derive(lease, History(tuple(facts)), state, is_live=is_live)
    assert (outcome and (outcome.status, outcome.exit_code, outcome.verdict, outcome.job)) == found


def test_an_outcome_is_written_twice_and_read_again(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    lease = acquire(tmp_path, Holder("h", 1, "s"), token="a", now_s=0.0)
    running = read_outcome(layout, now_s=1.0)
    assert running is not None and (running.status, running.exit_code) == ("running", 7)
    outcome = conclude(StopReason("walltime", "30 s left"), step=12, job=lease.number)
    writer = RunStateWriter(layout, scratch=".scratch-a", clock=lambda: 5.0)
    states: list[RunState] = []

    def write_state(ended: Outcome) -> None:
        states.append(RunState(ended.status, step=ended.step, job=ended.job, exit_code=ended.exit_code))
        writer.write(states[-1], durable=True)

    record_outcome(outcome, Journal(layout, lease.number, clock=lambda: 5.0), write_state)
    release(tmp_path, lease, now_s=6.0)
    assert read_outcome(layout, now_s=7.0) == outcome
    for record in (tmp_path / "journal").iterdir():
        record.unlink()
    again = read_outcome(layout, now_s=7.0)
    assert again is not None and (again.status, again.exit_code, again.step) == ("stopped", 0, 12)


def test_each_of_the_two_records_is_tried_though_the_other_is_refused() -> None:
    layout = Layout(Path("/run"))
    outcome = conclude(StopReason("done"), step=1, job=1)
    disk = FaultyDisk(MemoryDisk(["/run"]), always("open_append", Refuse(errno.ENOSPC)))
    states: list[Outcome] = []
    with pytest.raises(StorageFailed):
        record_outcome(outcome, Journal(layout, 1, clock=lambda: 0.0, files=Files(disk)), states.append)
    assert states == [outcome]


def test_a_snapshot_that_is_refused_is_reported_and_the_journal_stands(tmp_path: Path) -> None:
    layout = Layout(tmp_path)

    def refuse(outcome: Outcome) -> None:
        raise STORAGE

    with pytest.raises(StorageFailed):
        record_outcome(conclude(StopReason("done")), Journal(layout, 1, clock=lambda: 0.0, files=LOCAL), refuse)
    assert read_history(layout).last("job-end", job=1) is not None
