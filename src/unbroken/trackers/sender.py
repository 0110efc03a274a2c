"""The thread that sends the metrics of a run to one tracker; nothing else waits for the tracker.

It reads the run's metrics from the first step that the tracker does not have. So each step is sent once, and the unsent
steps of an earlier job are sent first. After an error the thread reports it once, counts it and tries again; the
training does not notice.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from unbroken.records.metrics import MetricsTail, Row
from unbroken.trackers.apart import TrackerError
from unbroken.trackers.named import hide_secrets
from unbroken.trackers.tracker import Ending, TrackedRun, Tracker

# So long it waits after an error; each time twice as long.
_FIRST_WAIT_S: Final = 1.0
_LONGEST_WAIT_S: Final = 60.0
_MOST_ROWS: Final = 1000


@dataclass
class Sender:
    """Sends to one tracker what is due, from ``begin`` to ``close``.

    Attributes:
        start_step: the step that this job resumes from.
        sent: the last step that the tracker has, as far as it is known; -1 if none.
        earlier: the rows of earlier jobs after a step, up to the one that this job resumes from.
        mark: writes down the last step sent.
        report: called with the first error.
        target: the last step that may be sent; None for whatever is written.
    """

    tracker: Tracker
    run: TrackedRun
    tail: MetricsTail
    start_step: int
    sent: int
    earlier: Callable[[int], Sequence[Row]]
    mark: Callable[[int], None]
    report: Callable[[str], None]
    target: int | None = None
    failures: int = 0
    error: str | None = None
    _ending: Ending | None = None
    _wake: threading.Event = field(default_factory=threading.Event)
    _closing: threading.Event = field(default_factory=threading.Event)
    _waiting: deque[Row] = field(default_factory=deque)
    _is_unsure: bool = False

    def begin(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._follow, name=f"tracker {self.tracker.name}", daemon=True)
        self._thread.start()

    def wake(self, target: int | None = None) -> None:
        """Wake the thread to send new steps; in ``committed`` mode up to ``target``."""
        if target is not None:
            self.target = target
        self._wake.set()

    def close(self, ending: Ending, *, until_s: float) -> bool:
        """Send the rest and finish; False if that took longer than until ``until_s`` of the monotonic clock."""
        self._ending = ending
        self._closing.set()
        self._wake.set()
        self._thread.join(max(until_s - time.monotonic(), 0.0))
        return not self._thread.is_alive() and self.error is None

    # ---- the thread ----

    def _follow(self) -> None:
        if not self._try(self._start):
            return
        while True:
            is_last = self._closing.is_set()
            if not self._try(self._send_all):
                break
            if is_last:
                break
            self._wake.wait()
            self._wake.clear()
        behind = self.error
        self._try(self._finish)
        # What kept rows back is not over because the run could be finished.
        self.error = self.error or behind

    def _try(self, action: Callable[[], None]) -> bool:
        """Try an action until it succeeds; False if the job ends before that."""
        wait_s = _FIRST_WAIT_S
        while True:
            is_last = self._closing.is_set()
            try:
                action()
            except Exception as raised:  # noqa: BLE001 - whatever a tracker raises, training continues
                self._note(raised)
            else:
                self.error = None
                return True
            if is_last:
                return False
            self._closing.wait(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _note(self, raised: Exception) -> None:
        self.failures += 1
        self._is_unsure = True
        text = str(raised) if isinstance(raised, TrackerError) else f"{type(raised).__name__}: {raised}"
        self.error = hide_secrets(text.strip().splitlines()[0].rstrip(": "))
        if self.failures == 1:
            self.report(self.error)

    def _start(self) -> None:
        self.tracker.start(self.run)
        shown = self.tracker.last_step()
        if shown is not None:
            # More than was written down if the job was killed in between, less if the tracker lost it.
            self.sent = shown
        if self.sent < self.start_step:
            self._waiting.extend(self.earlier(self.sent))

    def _send_all(self) -> None:
        while True:
            if not self._waiting:
                self._waiting.extend(self.tail.read(up_to=self.target, most=_MOST_ROWS))
            if not self._waiting:
                return
            self._send()

    def _send(self) -> None:
        if self._is_unsure:
            # Of the rows of a failed call some may have arrived.
            shown = self.tracker.last_step()
            self.sent = self.sent if shown is None else max(self.sent, shown)
            self._is_unsure = False
        rows = [self._waiting[at] for at in range(min(len(self._waiting), _MOST_ROWS))]
        if due := [row for row in rows if row.step > self.sent and row.values]:
            self.tracker.log(due)
            self.sent = due[-1].step
        for _ in rows:
            self._waiting.popleft()
        if due:
            self.mark(self.sent)

    def _finish(self) -> None:
        self.tracker.finish(self._ending or "failed")
