"""How long a run will take, how much of it failures will cost, and how many jobs: pure functions of a few numbers.

A model of the first order, as Young and Daly make it: a save comes every so many seconds and holds the loop up for so
long; a failure costs half an interval and the time until training resumes. Owns no clock and reads no run but through
``measured``, which says of each number whether it was measured or assumed.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from unbroken.quoting import amounts
from unbroken.records.deadline import Reserve, learned_reserve
from unbroken.records.interval import Auto, Timings, interval_steps, mean_time_between_failures_s
from unbroken.records.journal import Event
from unbroken.store.fields import MOST_NUMBER, MOST_WHOLE

_RECENT: Final = 16
UNMEASURED_MTBF_S: Final = 86_400.0


@dataclass(frozen=True)
class Numbers:
    """What a plan is made of; None where it is unknown.

    Attributes:
        steps: steps still to be done.
        step_s: what one takes.
        save_s: a save from its first copy to its commit.
        paused_s: how long the loop is paused for it; None means all of ``save_s``.
        mtbf_s: mean time between failures.
        walltime_s: the walltime limit of one job; None without one.
        reserve_s: what a job keeps of that for its last save.
        restart_s: from a failure until training resumes.
    """

    steps: int | None = None
    step_s: float | None = None
    save_s: float | None = None
    paused_s: float | None = None
    mtbf_s: float | None = None
    walltime_s: float | None = None
    reserve_s: float | None = None
    restart_s: float = 0.0


@dataclass(frozen=True)
class RunForecast:
    """What to expect of a run.

    Attributes:
        interval_s: seconds between two saves.
        interval_steps: the same in whole steps.
        lost_per_failure_s: work that a failure throws away, and the time until training resumes.
        failures: how many are to be expected.
        saving_s: time that the loop is paused for saves.
        losing_s: time that failures cost in all.
        training_s: time that the steps themselves take.
        total_s: all of it.
        usable_s: what a job has for this, of its wall time; None without one.
        jobs: how many jobs that takes, those that fail not counted.
        ends_at_s: when the last step is done, in seconds since 1970, if no job waits for its start.
    """

    interval_s: float
    interval_steps: int
    lost_per_failure_s: float
    failures: float
    saving_s: float
    losing_s: float
    training_s: float
    total_s: float
    usable_s: float | None
    jobs: int
    ends_at_s: float

    @property
    def lost_share(self) -> float:
        """The part of the whole time in which no step advances the run."""
        return 1 - self.training_s / self.total_s if self.total_s else 0.0


def problems(numbers: Numbers) -> list[str]:
    """Everything that is missing or wrong for a plan, each by the option that sets it."""
    found = []
    needed = (
        ("--steps", numbers.steps, "the number of steps left is not known"),
        ("--step-time", numbers.step_s, "no step has been timed"),
        ("--save-time", numbers.save_s, "no save has been timed"),
    )
    for option, value, reason in needed:
        if value is None:
            found.append(f"{option} is missing: {reason}")
    for option, value in (
        ("--step-time", numbers.step_s),
        ("--mtbf", numbers.mtbf_s),
        ("--max-runtime", numbers.walltime_s),
    ):
        if value is not None and not (math.isfinite(value) and value > 0):
            found.append(f"{option} must be a finite number of seconds above 0, is {value:g}")
    for option, value in (
        ("--save-time", numbers.save_s),
        ("--walltime-reserve", numbers.reserve_s),
        ("--restart-time", numbers.restart_s),
    ):
        if value is not None and not (math.isfinite(value) and value >= 0):
            found.append(f"{option} must be a finite number of seconds, 0 or more, is {value:g}")
    for option, value in (
        ("--step-time", numbers.step_s),
        ("--save-time", numbers.save_s),
        ("--mtbf", numbers.mtbf_s),
        ("--max-runtime", numbers.walltime_s),
        ("--walltime-reserve", numbers.reserve_s),
        ("--restart-time", numbers.restart_s),
    ):
        if value is not None and math.isfinite(value) and value > MOST_NUMBER:
            found.append(f"{option} is {value:g}: at most {MOST_NUMBER:g} seconds can be planned with")
    if numbers.steps is not None and numbers.steps > MOST_WHOLE:
        found.append("--steps is larger than 2^63 - 1")
    if numbers.steps is not None and numbers.steps < 0:
        found.append(f"--steps is {numbers.steps}: it counts from 0")
    return found or _contradictions(numbers)


def _contradictions(numbers: Numbers) -> list[str]:
    found = []
    interval_s = _interval_s(numbers)
    if (numbers.mtbf_s or UNMEASURED_MTBF_S) <= _lost_per_failure_s(numbers, interval_s):
        each, lost = (amounts.duration(s) for s in (numbers.mtbf_s or 0, _lost_per_failure_s(numbers, interval_s)))
        found.append(f"it would never end: it fails every {each} and each failure costs {lost}")
    if numbers.walltime_s is not None:
        kept_s = _reserve_s(numbers)
        if kept_s >= numbers.walltime_s:
            job, kept = amounts.duration(numbers.walltime_s), amounts.duration(kept_s)
            found.append(f"no job would do a step: it has {job} and keeps {kept} for its last save")
    return found


def make_plan(numbers: Numbers, *, now_s: float, interval_s: float | None = None) -> RunForecast:
    """The plan for numbers that have no problems; ``interval_s`` is another cadence than the one that pays best.

    Raises:
        ValueError: the numbers make no plan; ``problems`` says why.
    """
    if numbers.steps is None or numbers.step_s is None or (found := problems(numbers)):
        raise ValueError("; ".join(found if numbers.steps is not None and numbers.step_s is not None else ["numbers"]))
    interval_s = max(interval_s or _interval_s(numbers), numbers.step_s)
    mtbf_s = numbers.mtbf_s or UNMEASURED_MTBF_S
    training_s = numbers.steps * numbers.step_s
    saving_s = training_s / interval_s * _paused_s(numbers)
    lost_s = _lost_per_failure_s(numbers, interval_s)
    # Failures come in the time that failures cost as well.
    total_s = (training_s + saving_s) / max(1 - lost_s / mtbf_s, 1e-9)
    usable_s = None if numbers.walltime_s is None else numbers.walltime_s - _reserve_s(numbers)
    return RunForecast(
        interval_s=interval_s,
        interval_steps=interval_steps(interval_s, numbers.step_s),
        lost_per_failure_s=lost_s,
        failures=total_s / mtbf_s,
        saving_s=saving_s,
        losing_s=total_s - training_s - saving_s,
        training_s=training_s,
        total_s=total_s,
        usable_s=usable_s,
        jobs=max(1, math.ceil(total_s / usable_s)) if usable_s is not None else 1,
        ends_at_s=now_s + total_s,
    )


def _interval_s(numbers: Numbers) -> float:
    pace = Timings(
        0,
        0.0,
        step_s=numbers.step_s,
        cost_s=_paused_s(numbers),
        write_s=numbers.save_s or 0.0,
        mean_time_between_failures_s=numbers.mtbf_s or UNMEASURED_MTBF_S,
    )
    return Auto().interval_s(pace)


def _paused_s(numbers: Numbers) -> float:
    return numbers.paused_s if numbers.paused_s is not None else numbers.save_s or 0.0


def _lost_per_failure_s(numbers: Numbers, interval_s: float) -> float:
    # Half an interval on average, and a save that was under way counts for nothing.
    return interval_s / 2 + (numbers.save_s or 0.0) + numbers.restart_s


def _reserve_s(numbers: Numbers) -> float:
    if numbers.reserve_s is not None:
        return numbers.reserve_s
    saves = () if numbers.save_s is None else (numbers.save_s,)
    return Reserve(None, saves, (numbers.step_s or 0.0,)).seconds(numbers.walltime_s)


# ---- what a run has measured ----


def measured(events: Sequence[Event]) -> tuple[Numbers, list[str]]:
    """What the journal of a run says, and what had to be assumed because it does not."""
    commits = [event for event in events if event.kind == "commit"][-_RECENT:]
    save_s, paused_s = _median(commits, "seconds"), _median(commits, "paused_s")
    step_s = _step_s(events)
    mtbf_s = mean_time_between_failures_s(events) if events else None
    assumed = []
    if events:
        assumed.append("mean time between failures: one failure a day is added to what the run has lived through")
    reserve = learned_reserve(events)
    reserve_s = reserve.after_step(step_s).seconds() if reserve.saves_s and step_s is not None else None
    return Numbers(None, step_s, save_s, paused_s, mtbf_s, None, reserve_s), assumed


def _median(events: Sequence[Event], name: str) -> float | None:
    found = [value for event in events if (value := event.number(name)) is not None and value >= 0]
    return statistics.median(found) if found else None


def _step_s(events: Sequence[Event]) -> float | None:
    """The time between two saves of one job by the steps between them; saves are written beside training."""
    found: list[float] = []
    last: Event | None = None
    for event in events:
        if event.kind == "job-start":
            last = None
        if event.kind != "save" or event.at_s is None or (step := event.whole("step")) is None:
            continue
        before = last.whole("step") if last is not None else None
        if last is not None and last.at_s is not None and before is not None and step > before:
            found.append(max(0.0, event.at_s - last.at_s) / (step - before))
        last = event
    recent = [value for value in found[-_RECENT:] if value > 0]
    return statistics.median(recent) if recent else None
