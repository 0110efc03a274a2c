"""The trackers of one job: starts them, sends them the metrics, and ends them.

The id of a tracker's run is written to the journal before the tracker starts, so that a job killed in between does not
leave a second run behind. After going back to an older checkpoint, the steps differ from those already shown: the run
gets a new id.
"""

import functools
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from unbroken.errors import StorageFailed
from unbroken.files import LOCAL, Files
from unbroken.quoting import amounts
from unbroken.quoting.log import logger
from unbroken.records.layout import Layout
from unbroken.records.metrics import MetricsTail, Row, read_metrics
from unbroken.records.tracker_marks import TrackerMarks, last_marks
from unbroken.trackers.named import without_secrets
from unbroken.trackers.sender import Sender
from unbroken.trackers.tracker import Ending, TrackedRun, Tracker

_log = logger(__name__)
Mode = Literal["live", "committed"]
_ID_BYTES: Final = 4
_LAST_TRY_S: Final = 3.0


class RunTrackers:
    """The trackers of one job, on rank 0.

    Args:
        trackers: what sends, each loaded already.
        layout: the run.
        job: its number.
        step: the step it resumes from.
        ids: the ids that are known already.
        mode: ``committed`` sends the steps that a checkpoint has committed.
        config: values that the trackers show beside the run.
        run_name: what they call it.
        event: writes to the journal; any thread may call it.
        longest_s: how long the end of the job may wait.
    """

    def __init__(
        self,
        trackers: Sequence[Tracker],
        layout: Layout,
        job: int,
        *,
        step: int,
        ids: Mapping[str, str],
        mode: Mode,
        config: Mapping[str, object],
        run_name: str,
        event: Callable[..., None],
        longest_s: Callable[[], float],
        files: Files = LOCAL,
    ) -> None:
        self._event, self._longest_s, self._mode = event, longest_s, mode
        self._is_closed = False
        self.ids = {each.name: ids.get(each.name) or secrets.token_hex(_ID_BYTES) for each in trackers}
        for name, run_id in self.ids.items():
            event("tracker", tracker=name, id=run_id, mode=mode, is_new=name not in ids)
        self._marks = TrackerMarks(layout, job, files)
        sent = _last_marks(layout, [*self.ids.items()], files)
        shown = without_secrets(config)
        self._senders = [
            Sender(
                each,
                TrackedRun(run_id, run_name, Path(layout.run), shown, is_resumed=each.name in ids),
                MetricsTail(layout, job, files),
                step,
                sent.get((each.name, run_id), -1),
                functools.partial(_earlier, layout, job, step, files),
                self._marks.writer(each.name, run_id),
                functools.partial(self._report, each.name),
                target=step if mode == "committed" else None,
            )
            for each in trackers
            if (run_id := self.ids[each.name])
        ]
        for sender in self._senders:
            sender.begin()

    def flushed(self) -> None:
        """Metrics were written."""
        if self._mode == "live":
            for sender in self._senders:
                sender.wake()

    def committed(self, step: int) -> None:
        """A checkpoint was committed."""
        if self._mode == "committed":
            for sender in self._senders:
                sender.wake(step)

    def close(self, ending: Ending) -> None:
        """Send the rest as long as there is time, and finish; the next job sends what is left."""
        until_s = time.monotonic() + self._longest_s()
        for sender in self._senders:
            # All at once: each knows that the end has come before the first is waited for.
            sender.close(ending, until_s=0.0)
        for sender in self._senders:
            # One that fails is given a last try, and no more.
            most_s = until_s if sender.error is None else min(until_s, time.monotonic() + _LAST_TRY_S)
            is_done, name = sender.close(ending, until_s=most_s), sender.tracker.name
            if not is_done:
                at = "nothing was sent" if sender.sent < 0 else f"sent up to step {amounts.count(sender.sent)}"
                _log.warning("tracker %s is behind: %s; the next job sends the rest", name, at)
            values: dict[str, Any] = {"error": sender.error} if sender.error else {}
            self._event("tracker-end", tracker=name, sent=max(sender.sent, 0), failures=sender.failures, **values)
        self._is_closed = True
        self._close_marks()

    def _close_marks(self) -> None:
        try:
            self._marks.close()
        except StorageFailed as refused:
            _log.warning("could not write what was sent to the trackers: %s", refused.message)

    def _report(self, name: str, error: str) -> None:
        if not self._is_closed:
            _log.warning("tracker %s failed: %s; training continues, and it is tried again", name, error)
            self._event("tracker-failed", tracker=name, error=error)


def _last_marks(layout: Layout, wanted: Sequence[tuple[str, str]], files: Files) -> dict[tuple[str, str], int]:
    try:
        return last_marks(layout, wanted, files)
    except StorageFailed as refused:
        _log.warning("could not read what was sent to the trackers: %s", refused.message)
        return {}


def _earlier(layout: Layout, job: int, step: int, files: Files, after: int) -> list[Row]:
    """The metrics of earlier jobs after a step, up to the one that this job resumes from."""
    kept = read_metrics(layout, files).kept
    return [row for at, row in sorted(kept.items()) if after < at <= step and row.job < job]
