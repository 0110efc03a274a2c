"""How often to save: pure functions of what was measured. Owns no clock and saves nothing.

``Auto`` follows Young and Daly: work lost to failures and time spent on saves add up to the least when a save comes
every sqrt(2 x mean time between failures x cost of a save). Its three numbers come from the run itself.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from unbroken.records.journal import Event

# Before a run has failed at all, it is taken to fail once a day: one failure and a day are added to its history.
_PRIOR_S: Final = 86_400.0
FIRST_SAVE_S: Final = 60.0


@dataclass(frozen=True)
class Timings:
    """What is known at the edge of a step.

    Attributes:
        steps: steps since the last save, or since the job began.
        elapsed_s: seconds since then.
        step_s: what a step takes; None before it was measured.
        cost_s: loop time that a save costs; None before one was measured.
        write_s: how long a save takes from its first copy to its commit, in the background.
        mean_time_between_failures_s: from the journal.
    """

    steps: int
    elapsed_s: float
    step_s: float | None = None
    cost_s: float | None = None
    write_s: float = 0.0
    mean_time_between_failures_s: float = _PRIOR_S


@dataclass(frozen=True)
class Every:
    """A save every so many steps, counted from step 0, so that a resumed run saves at the same steps."""

    steps: int

    def is_due_at(self, step: int) -> bool:
        """Whether this very step is saved."""
        return step > 0 and step % self.steps == 0

    def describe(self, pace: Timings) -> str:
        """The cadence in words."""
        return f"every {self.steps:,} steps" if self.steps != 1 else "every step"


@dataclass(frozen=True)
class Auto:
    """An interval computed from the measured cost of a save and the rate of failures.

    The first save of a job comes early, to learn what one costs.
    """

    least_s: float = 30.0
    most_s: float = 3_600.0
    first_s: float = FIRST_SAVE_S

    def interval_s(self, pace: Timings) -> float:
        """Seconds between saves."""
        if pace.cost_s is None:
            return self.first_s
        daly = daly_interval_s(pace.cost_s, pace.mean_time_between_failures_s)
        # A save that has not been written yet is not begun again: at most half of the time goes to writing.
        return max(min(max(daly, self.least_s), self.most_s), 2 * pace.write_s)

    def describe(self, pace: Timings) -> str:
        """The cadence in words."""
        if pace.cost_s is None:
            return f"auto (first after {self.first_s:g} s)"
        interval_s = self.interval_s(pace)
        steps = "" if pace.step_s is None else f", {interval_steps(interval_s, pace.step_s):,} steps"
        return f"auto (every {interval_s:.0f} s{steps})"


def is_due_by_time(interval_s: float, *, steps: int, elapsed_s: float, step_s: float | None) -> bool:
    """Whether to save at this step's edge, the last one before the interval is over; not without a step in between."""
    return steps > 0 and elapsed_s + (step_s or 0.0) > interval_s


def daly_interval_s(cost_s: float, mean_time_between_failures_s: float) -> float:
    """The time between saves that loses least, after Young and Daly."""
    return math.sqrt(2 * mean_time_between_failures_s * max(cost_s, 0.0))


def interval_steps(interval_s: float, step_s: float) -> int:
    """How many whole steps fit between two saves; at least one."""
    return max(1, math.floor(interval_s / step_s)) if step_s > 0 else 1


def mean_time_between_failures_s(events: Sequence[Event]) -> float:
    """From the journal: the hours all jobs ran, by the number of jobs that ended without saying how.

    The last job is running and has not failed.
    """
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    ended: set[int] = set()
    for event in events:
        if event.at_s is not None:
            first.setdefault(event.job, event.at_s)
            last[event.job] = event.at_s
        if event.kind == "job-end" and event.text("status") in ("completed", "stopped", "halted"):
            ended.add(event.job)
    ran_s = sum(max(0.0, last[job] - first[job]) for job in first)
    failed = len(first.keys() - ended - {max(first, default=0)})
    return (ran_s + _PRIOR_S) / (failed + 1)
