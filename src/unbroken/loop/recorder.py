"""All records that one job writes: journal, metrics, live snapshot, outcome.

Rank 0 records; on the others a silent recorder takes the same calls and does nothing, so that the loop reads the same
on every rank. A record that cannot be written is logged and never ends a run: the checkpoints are in the store.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from unbroken.errors import StorageFailed, UnbrokenError
from unbroken.launch import job_files
from unbroken.quoting.log import logger
from unbroken.records.journal import History, Journal, read_history
from unbroken.records.layout import Layout
from unbroken.records.lease import Holder, Lease
from unbroken.records.metrics import MOST_WAITING, MetricsWriter, Mismatch, Recheck, lost_values
from unbroken.records.outcome import Outcome, record_outcome
from unbroken.records.process import process_of
from unbroken.records.snapshot import RunState, RunStateWriter
from unbroken.store.names import scratch
from unbroken.trackers.following import RunTrackers
from unbroken.trackers.tracker import Ending

_log = logger(__name__)
# torchrun ends all workers as soon as one has failed.
_REPORTED_WITHIN_S = 5.0
# So many steps that were computed twice and differ are journalled one by one.
MOST_MISMATCHES: Final = 100

Number = int | float
_ENDINGS: Final[Mapping[str, Ending]] = {"completed": "completed", "stopped": "stopped"}


class _LoggedNotRaised:
    """Logs that a record could not be written; a class, because a generator takes longer than most of the records."""

    __slots__ = ("_run", "_what")

    def __init__(self, what: str, run: Path | None = None) -> None:
        self._what, self._run = what, run

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, refused: BaseException | None, traceback: object) -> bool:
        if not isinstance(refused, StorageFailed):
            return False
        # A run that is gone is logged once, by the lease.
        level = logging.WARNING if self._run is None or self._run.exists() else logging.DEBUG
        _log.log(level, "could not write %s: %s (%s)", self._what, refused.message, refused.at())
        return True


class SilentRecorder:
    """The recorder of the ranks that do not record; ``first`` is the one that does, where it is known."""

    def __init__(self, first: Holder | None = None) -> None:
        self._first = first

    def history(self) -> History:
        """Empty: rank 0 alone reads the journal."""
        return History((), 0)

    def event(self, kind: str, /, **values: object) -> None:
        """Nothing."""

    def begin_metrics(self, start: int, *, is_comparable: bool, settings: str | None = None) -> None:
        """Nothing."""

    def metrics(self, step: int, values: Mapping[str, Number]) -> None:
        """Record the metrics of one step."""
        self.metrics_of([(step, values)])

    def metrics_of(self, rows: Sequence[tuple[int, Mapping[str, Number]]]) -> None:
        """Nothing."""

    def flush(self, *, durable: bool) -> None:
        """Nothing."""

    def follow(self, trackers: RunTrackers) -> None:
        """Nothing: only rank 0 has trackers."""

    def committed(self, step: int) -> None:
        """Nothing."""

    @property
    def tracker_ids(self) -> Mapping[str, str]:
        """None: only rank 0 has trackers."""
        return {}

    def snapshot(self, **changes: object) -> None:
        """Nothing."""

    def reached(self, step: int) -> None:
        """Nothing."""

    def end(self, outcome: Outcome, *, waits: bool = True) -> None:
        """Let rank 0 report to the launcher first: torchrun ends it as soon as this one has ended with an error.

        A rank whose own error the first one can only notice by its end does not wait (``waits``).
        """
        place = os.environ.get(job_files.ENVIRONMENT)
        if place is None or outcome.exit_code == 0 or not waits:
            return
        until = time.monotonic() + _REPORTED_WITHIN_S
        # A rank 0 that is gone reports nothing.
        while time.monotonic() < until and not _is_reported(Path(place)) and not _is_gone(self._first):
            time.sleep(0.05)


class Recorder(SilentRecorder):
    """The recorder of rank 0."""

    def __init__(self, layout: Layout, lease: Lease, *, clock: Callable[[], float]) -> None:
        super().__init__(lease.holder)
        self._layout = layout
        self._number = lease.number
        self._journal = Journal(layout, lease.number, clock=clock, makes_run=False)
        self._snapshots = RunStateWriter(layout, scratch=scratch(lease.job, "state"), clock=clock)
        self._state = RunState(status="running", pid=lease.holder.pid, started_at_s=lease.taken_at_s, job=lease.number)
        self._changes: dict[str, Any] = {}
        self._metrics: MetricsWriter | None = None
        self._recheck: Recheck | None = None
        self._trackers: RunTrackers | None = None
        self._launcher = os.environ.get(job_files.ENVIRONMENT)
        self._steps = job_files.StepsWriter(job_files.steps_path(Path(self._launcher))) if self._launcher else None
        self._report(Outcome("running", 0, "held"))

    def history(self) -> History:
        """What this and earlier jobs wrote.

        Raises:
            StorageFailed: an I/O error.
        """
        return read_history(self._layout)

    def event(self, kind: str, /, **values: object) -> None:
        """Write one event to the journal."""
        with self._logged_not_raised("the journal"):
            self._journal.write(kind, durable=None, **values)

    def begin_metrics(self, start: int, *, is_comparable: bool, settings: str | None = None) -> None:
        """Start the metrics of this job, after the step it resumes from; ``settings`` is what it computes under."""
        with self._logged_not_raised("the metrics of earlier jobs"):
            self._metrics = MetricsWriter(
                self._layout,
                self._number,
                start=start,
                is_comparable=is_comparable,
                settings=settings,
                makes_run=False,
                # Whoever reads metrics flushes after the last of them.
                every=MOST_WAITING,
            )
            if is_comparable:
                self._recheck = lost_values(self._layout, job=self._number, start=start, settings=settings)

    def metrics_of(self, rows: Sequence[tuple[int, Mapping[str, Number]]]) -> None:
        """Write the metrics of steps, and compare them with those of an earlier job for the same steps."""
        if self._metrics is not None:
            with self._logged_not_raised("the metrics"):
                self._metrics.write_rows(rows)
        for step, values in rows if self._recheck is not None else ():
            self._compare(step, values)

    def _compare(self, step: int, values: Mapping[str, Number]) -> None:
        if self._recheck is None:
            return
        mismatch = self._recheck.check(step, values)
        if mismatch is not None:
            self._record_mismatch(mismatch, len(self._recheck.mismatches))
        if self._recheck.is_done:
            self._record_recheck()
            self._recheck = None

    def _record_mismatch(self, mismatch: Mismatch, number: int) -> None:
        # Each is synced, and after the first difference every later step differs too: the first ones are enough, and
        # all are counted.
        if number == 1:
            _log.error("%s", mismatch.sentence())
        if number <= MOST_MISMATCHES:
            self.event("mismatch", **mismatch.as_json())

    def _record_recheck(self) -> None:
        """Journal how many of the steps that were computed twice agree."""
        if self._recheck is None or not (sentence := self._recheck.result.sentence()):
            return
        _log.info("%s", sentence)
        self.event("recomputed", **self._recheck.as_json())

    def flush(self, *, durable: bool) -> None:
        """Write the metrics to the kernel, or wait until they survive a power cut."""
        if self._metrics is not None:
            with self._logged_not_raised("the metrics"):
                self._metrics.flush(durable=durable)
        if self._trackers is not None:
            self._trackers.flushed()

    def follow(self, trackers: RunTrackers) -> None:
        """Let trackers follow the metrics, to the end of the job."""
        self._trackers = trackers

    def committed(self, step: int) -> None:
        """A checkpoint of this step was committed: the trackers may show what led to it."""
        if self._trackers is not None:
            self._trackers.committed(step)

    @property
    def tracker_ids(self) -> Mapping[str, str]:
        """The ids of the runs that the trackers show, by tracker."""
        return {} if self._trackers is None else self._trackers.ids

    def snapshot(self, **changes: object) -> None:
        """Update the live snapshot, and the launcher's step file."""
        self._changes.update(changes)
        step = changes.get("step")
        if self._steps is not None and isinstance(step, int):
            self._steps.write(step)
        self._write_where_due()

    def reached(self, step: int) -> None:
        """The same for the number of a step alone; called at every edge."""
        self._changes["step"] = step
        if self._steps is not None:
            self._steps.write(step)
        if self._snapshots.is_due():
            self._write_where_due()

    def _write_where_due(self) -> None:
        if self._snapshots.is_due():
            with self._logged_not_raised("the live snapshot"):
                self._snapshots.write(self._now())

    def _now(self) -> RunState:
        """The state with all changes so far, which come at every step and are written once in a while."""
        self._state = replace(self._state, **self._changes)
        self._changes.clear()
        return self._state

    def end(self, outcome: Outcome, *, waits: bool = True) -> None:
        """Write how the job ended: journal, snapshot, launcher's file."""
        self._record_recheck()
        with self._logged_not_raised("the metrics"):
            if self._metrics is not None:
                self._metrics.close()

        def write_state(ended: Outcome) -> None:
            error = ended.reason if ended.status in ("error", "halted") else None
            # A job that halts or fails inside an edge has not recorded the step of that edge yet.
            now = self._now()
            step = now.step if ended.step is None else ended.step
            state = replace(now, status=ended.status, step=step, error=error, exit_code=ended.exit_code)
            self._snapshots.write(state, durable=True)

        with self._logged_not_raised("the outcome"):
            record_outcome(outcome, self._journal, write_state)
        if self._steps is not None:
            self._steps.close()
        self._report(outcome)
        if self._trackers is not None:
            # After the outcome, which must not wait for them.
            self._trackers.close(_ENDINGS.get(outcome.status, "failed"))
        with self._logged_not_raised("the journal"):
            self._journal.close()

    def _logged_not_raised(self, what: str) -> _LoggedNotRaised:
        return _LoggedNotRaised(what, self._layout.run)

    def _report(self, outcome: Outcome) -> None:
        if self._launcher:
            record = job_files.JobOutcome(
                str(self._layout.run), outcome.status, outcome.exit_code, outcome.verdict, outcome.reason
            )
            with _LoggedNotRaised("the launcher's file"):
                job_files.write_outcome(Path(self._launcher), record)


def report_refusal_to_launcher(run: Path, outcome: Outcome) -> None:
    """Report to the launcher why a job did not start; nothing is written into a run that another job holds."""
    place = os.environ.get(job_files.ENVIRONMENT)
    if place:
        record = job_files.JobOutcome(str(run), outcome.status, outcome.exit_code, outcome.verdict, outcome.reason)
        with _LoggedNotRaised("the launcher's file"):
            job_files.write_outcome(Path(place), record)


def _is_gone(process: Holder | None) -> bool:
    """Whether a process has ended, as far as can be seen from this machine."""
    return process is not None and process_of(process) not in (None, process.process_started)


def _is_reported(place: Path) -> bool:
    try:
        record = job_files.read_job_outcome(place)
    except UnbrokenError:
        return False
    return record is not None and record.has_ended
