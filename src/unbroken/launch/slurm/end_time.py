"""The walltime limit of a SLURM job, polled from ``squeue`` in a thread.

SLURM before 23.02 does not set ``SLURM_JOB_END_TIME``, and no version notifies a job of a changed limit. The thread
keeps a slow controller from delaying a step; without an answer the job relies on SLURM's signal before the limit.
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from unbroken.launch.slurm import controller
from unbroken.quoting import amounts
from unbroken.quoting.log import logger
from unbroken.records.deadline import runtime_variable
from unbroken.records.stop import StopSources

LONGEST_S: Final = 300.0
SHORTEST_S: Final = 15.0
_log = logger(__name__)


def is_polled(max_runtime_s: float | None, environ: Mapping[str, str]) -> bool:
    """Whether to poll squeue: inside a SLURM job without another runtime limit."""
    return max_runtime_s is None and bool(environ.get("SLURM_JOB_ID")) and runtime_variable(environ) is None


def pause_s(left_s: float | None) -> float:
    """The pause before the next poll: half of the time left, so that an extension is noticed before the end."""
    return LONGEST_S if left_s is None else min(LONGEST_S, max(SHORTEST_S, left_s / 2))


class EndTime:
    """Polls until ``end``; calls ``on_change`` in its thread whenever the end time changes.

    Args:
        question: returns the end in seconds since 1970, None for never, or a text with the error.
        on_change: gets the new deadline; None removes it.
        known_s: the deadline from the environment, if any; then the first poll can wait.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        question: Callable[[], float | str | None],
        on_change: Callable[[float | None], None],
        *,
        known_s: float | None,
        clock: Callable[[], float],
        pause: Callable[[float | None], float] = pause_s,
    ) -> None:
        self._question, self._on_change, self._clock, self._pause = question, on_change, clock, pause
        self._known_s = known_s
        self._complaint: str | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="unbroken-end-time", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """RunCommand no more; a question that is out is not waited for."""
        self._over.set()

    def _poll(self) -> None:
        if self._known_s is not None:
            self._over.wait(self._pause(self._known_s - self._clock()))
        while not self._over.is_set():
            answer = self._question()
            if self._over.is_set():
                return
            self._take(answer)
            left_s = None if self._known_s is None else self._known_s - self._clock()
            self._over.wait(SHORTEST_S if isinstance(answer, str) else self._pause(left_s))

    def _take(self, answer: float | str | None) -> None:
        if isinstance(answer, str):
            self._complain(f"walltime limit unknown: {answer}; trying again")
            return
        if answer is not None and (late_s := self._clock() - answer) >= 0:
            # The job still runs, so the clocks differ; SLURM's signal still comes in time.
            self._complain(
                f"by the clock of this machine the walltime limit was {amounts.duration(late_s)} ago, but the job runs:"
                " the clock differs from SLURM's; relying on SLURM's signal"
            )
            answer = None
        else:
            self._complaint = None
        if answer != self._known_s:
            self._known_s = answer
            self._on_change(answer)

    def _complain(self, complaint: str) -> None:
        # Once until the next answer: a controller that is down for a day must not fill the log.
        if self._complaint is None:
            _log.warning("%s", complaint)
        self._complaint = complaint


class EndTimeRecord(Protocol):
    """Writes one event to the journal."""

    def __call__(self, kind: str, /, **fields: object) -> None:
        """Write one event."""


def follow_end_time(
    max_runtime_s: float | None, environ: Mapping[str, str], stops: StopSources, record: EndTimeRecord
) -> EndTime | None:
    """Keep the deadline of a SLURM job current until ``stops`` end; None if another runtime limit is set."""
    if not is_polled(max_runtime_s, environ):
        return None

    def on_change(at_s: float | None) -> None:
        stops.move_deadline(at_s)
        record("deadline", at_s=at_s, source="squeue")
        left = "none" if at_s is None else f"in {amounts.duration(at_s - time.time())}"
        _log.info("walltime limit %s (from squeue)", left)

    watch = EndTime(lambda: controller.end_time(environ), on_change, known_s=stops.deadline_s, clock=time.time)
    stops.end_with(watch.end)
    return watch
