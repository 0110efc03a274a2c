"""What follows a job under SLURM: pure decisions over the run's records."""

from dataclasses import dataclass
from typing import Final

from unbroken.quoting import amounts
from unbroken.records.journal import History
from unbroken.records.outcome import EXIT_HELD, Outcome
from unbroken.records.process import Placement, placements

NO_PROGRESS_JOBS: Final = 3
# A job in too small a window commits nothing and dumps: the next one makes a checkpoint of that.
_BROUGHT: Final = ("commit", "emergency-resume")
_EXIT_UNKNOWN: Final = 1


@dataclass(frozen=True)
class Step:
    """How the step of a job ended: its exit code, and whether SLURM had asked it to."""

    code: int
    was_warned: bool


@dataclass(frozen=True)
class Requeue:
    """Queue the job again, because of this; ``in_vain`` counts the starts in a row that never took their run."""

    reason: str
    in_vain: int = 0


@dataclass(frozen=True)
class Leave:
    """Queue nothing; the job ends with this code, because of this."""

    exit_code: int
    reason: str


def before_start(outcome: Outcome | None, *, is_link: bool) -> Leave | None:
    """Whether a job is to start nothing, from how the one before it ended; None lets it start.

    Who submits a job says by it that he has looked; a link of a chain, or a job that was queued again, says nothing.
    """
    if outcome is None:
        return None
    if outcome.verdict == "held":
        return Leave(EXIT_HELD, f"another job is at work: {outcome.reason}")
    if not is_link or outcome.verdict == "again":
        return None
    if outcome.verdict == "done":
        return Leave(0, "the run is complete; there is nothing left to do")
    return Leave(_code(outcome), f"a person must look at the run before it goes on: {outcome.status}: {outcome.reason}")


def after_end(
    outcome: Outcome | None, step: Step, *, job_before: int, history: History, in_vain: int = 1
) -> Requeue | Leave:
    """What follows: the class of the outcome decides, and only ``again`` queues a job again.

    ``job_before`` is the last job of the run before this one started: an outcome that is no newer is not its own. Then
    ``in_vain`` counts: so many starts in a row, with this one, never came as far as their run.
    """
    if outcome is None or outcome.job is None or outcome.job <= job_before:
        if step.was_warned and in_vain < NO_PROGRESS_JOBS:
            return Requeue("its time was over before it took its run", in_vain)
        if step.was_warned:
            remedy = "give it more --time, or see what it waits for"
            return Leave(step.code or _EXIT_UNKNOWN, f"{in_vain} starts in a row never took their run; {remedy}")
        return Leave(step.code or _EXIT_UNKNOWN, f"it ended with exit code {step.code} and never took its run")
    if outcome.verdict == "done":
        return Leave(0, f"the run is complete: {outcome.reason}")
    if outcome.verdict != "again":
        return Leave(_code(outcome), f"a person must look at it: {outcome.status}: {outcome.reason}")
    stop = history.last("stop", job=outcome.job)
    if not step.was_warned and outcome.status == "stopped" and stop is not None and stop.text("by") == "flag":
        return Leave(outcome.exit_code, "somebody asked it to stop; submit it again when it is to go on")
    if (stalled := stalled_jobs(history)) >= NO_PROGRESS_JOBS:
        return Leave(_code(outcome), _in_vain(history, stalled, outcome))
    return Requeue(f"{outcome.status}: {outcome.reason}")


def starts_in_vain(history: History, placed: Placement | None, told: int) -> int:
    """How many starts in a row, with this one, are not in the run's journal; ``told`` is what those before it counted.

    A job that is queued again keeps its number and counts its starts; a follower has a number of its own and is told.
    """
    requeues = 0 if placed is None else placed.requeues
    taken = [each.requeues for _, each in placements(history.events) if placed is not None and each.id == placed.id]
    return requeues - max(taken) if taken else told + requeues + 1


def stalled_jobs(history: History) -> int:
    """How many jobs in a row, up to the last, have brought the run no checkpoint: by a commit, or out of dumps."""
    count = 0
    for job in reversed(history.jobs):
        if any(history.last(kind, job=job) is not None for kind in _BROUGHT):
            break
        count += 1
    return count


def _in_vain(history: History, stalled: int, outcome: Outcome) -> str:
    resumed = history.last("resume", job=outcome.job)
    step = resumed.whole("step") if resumed is not None else None
    where = "" if step is None else f"; the run still stands at step {amounts.count(step)}"
    return f"{stalled} jobs in a row have committed nothing{where}: {outcome.status}: {outcome.reason}"


def _code(outcome: Outcome) -> int:
    return outcome.exit_code or _EXIT_UNKNOWN
