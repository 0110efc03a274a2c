"""The deadline of a job whose environment does not tell it, or whose limit is moved while it runs.

A thread of its own asks ``squeue``, so that a slow controller never holds up a step: an answer that comes late sets the
deadline late, none at all leaves the job to SLURM's warning. SLURM before 23.02 does not set ``SLURM_JOB_END_TIME``,
and no version tells a job that an administrator has given it more time.
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from unbroken.launch.slurm import commands
from unbroken.quoting import amounts
from unbroken.quoting.log import logger
from unbroken.records.deadline import runtime_variable
from unbroken.records.stop import StopSources

LONGEST_S: Final = 300.0
SHORTEST_S: Final = 15.0
_log = logger(__name__)


def is_asked(max_runtime_s: float | None, environ: Mapping[str, str]) -> bool:
    """Whether squeue is to be asked: inside a job of SLURM whose limit nobody set otherwise."""
    return max_runtime_s is None and bool(environ.get("SLURM_JOB_ID")) and runtime_variable(environ) is None


def pause_s(left_s: float | None) -> float:
    """How long until the next question: half of what is left, so that time that was added is noticed before the end."""
    return LONGEST_S if left_s is None else min(LONGEST_S, max(SHORTEST_S, left_s / 2))


class EndTime:
    """Asks until it is told to end; ``told`` is called, in its thread, whenever the answer is another than before.

    Args:
        question: gives the end in seconds since 1970, None for never, or a text that says why there is no answer.
        told: takes the new deadline; None takes one back.
        known_s: the deadline that the environment told, if it did; then the first question can wait.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        question: Callable[[], float | str | None],
        told: Callable[[float | None], None],
        *,
        known_s: float | None,
        clock: Callable[[], float],
        pause: Callable[[float | None], float] = pause_s,
    ) -> None:
        self._question, self._told, self._clock, self._pause = question, told, clock, pause
        self._known_s = known_s
        self._complaint: str | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask_on, name="unbroken-end-time", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """RunCommand no more; a question that is out is not waited for."""
        self._over.set()

    def _ask_on(self) -> None:
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
            self._complain(f"the end of this job is not known: {answer}; it is asked again")
            return
        if answer is not None and (late_s := self._clock() - answer) >= 0:
            # SLURM has not ended the job, so it is the clocks that differ: its warning still comes.
            self._complain(
                f"by this machine's clock the job was to end {amounts.duration(late_s)} ago, and it runs: the clock"
                " differs from SLURM's; the job goes by SLURM's warning alone"
            )
            answer = None
        else:
            self._complaint = None
        if answer != self._known_s:
            self._known_s = answer
            self._told(answer)

    def _complain(self, complaint: str) -> None:
        # Once, until an answer comes: a controller that is down for a day fills no log.
        if self._complaint is None:
            _log.warning("%s", complaint)
        self._complaint = complaint


class Record(Protocol):
    """How a fact is written into the journal."""

    def __call__(self, kind: str, /, **facts: object) -> None:
        """Write one fact."""


def follow_end_time(
    max_runtime_s: float | None, environ: Mapping[str, str], stops: StopSources, record: Record
) -> EndTime | None:
    """Keep the deadline of a job of SLURM what SLURM says, until ``stops`` end; None where it is told otherwise."""
    if not is_asked(max_runtime_s, environ):
        return None

    def told(at_s: float | None) -> None:
        stops.move_deadline(at_s)
        record("deadline", at_s=at_s, source="squeue")
        left = "never" if at_s is None else f"in {amounts.duration(at_s - time.time())}"
        _log.info("squeue says that SLURM ends this job %s", left)

    watch = EndTime(lambda: commands.end_time(environ), told, known_s=stops.deadline_s, clock=time.time)
    stops.end_with(watch.end)
    return watch
